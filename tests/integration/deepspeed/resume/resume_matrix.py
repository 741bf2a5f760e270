"""The resume matrix: every source converted for every target, loaded by real DeepSpeed, and compared.

1. `cells` says which source is written for which target, natively or as a universal checkpoint.
2. `convert_all` writes the destinations with `ucp.convert`.
3. `load_all` starts one process group per number of ranks (`resume_worker.py`), each loading many destinations.
4. `judge` compares what DeepSpeed then holds, and the losses of its next steps, with the source's truth.
5. `matrix_table` and `other_table` print the verdicts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import safe_open

import ucp
from tests.integration.deepspeed.resume.resume_sources import OTHERS, SAME, SOURCES, TARGETS, Source, Target

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One conversion and load."""

    source: Source
    target: Target
    universal: bool
    live: bool = False
    """Whether nothing is written, and `ucp.load_into` fills the engine from the source."""
    mended: bool = True
    """Whether what a universal load in stage 3 leaves wrong is put right after it, as the page tells users to do."""
    original: bool = False
    """Whether nothing is converted: DeepSpeed resumes its own files, on this machine, as a measure for the others."""

    @property
    def name(self) -> str:
        kind = "original" if self.original else "live" if self.live else "universal" if self.universal else "native"
        as_loaded = "" if self.mended else "-as-loaded"
        return f"{self.source.name}-to-z{self.target.stage}-dp{self.target.ranks}-{kind}{as_loaded}"

    @property
    def destination(self) -> str:
        """Folder of what is loaded; one universal directory serves all targets."""
        return f"{self.source.name}-universal" if self.universal else self.name

    @property
    def fails(self) -> bool:
        """Whether this is beyond DeepSpeed."""
        return self.universal and (self.target.stage == 0 or self.target in self.source.universal_fails)

    @property
    def unmanaged(self) -> bool:
        """Whether DeepSpeed restores no frozen parameters here, and the script has to."""
        return self.universal or self.source.truth["case"]["exclude_frozen"]


def cells() -> tuple[Cell, ...]:
    """All cells, DeepSpeed's own resumes, and one more: stage 3 as DeepSpeed leaves it after a universal load."""
    every = [
        Cell(source=source, target=target, universal=universal)
        for source in SOURCES
        for target in source.targets
        for universal in (False, True)
    ]
    for source in OTHERS:
        every += [Cell(source=source, target=target, universal=False) for target in source.targets]
        loads = (*source.universal, *source.universal_fails)
        every += [Cell(source=source, target=target, universal=True) for target in loads]
    named = {cell.source.name: cell.source for cell in every}
    every += [Cell(source=named[name], target=target, universal=False, original=True) for name, target in SAME.items()]
    return (*every, Cell(source=named["z3-dp4-fp32"], target=Target(3, 4), universal=True, mended=False))


def convert_all(wanted: Iterable[Cell], root: Path) -> dict[str, ucp.ConvertReport]:
    """Write every destination once."""
    reports: dict[str, ucp.ConvertReport] = {}
    for cell in wanted:
        if cell.original or cell.destination in reports:
            continue
        to = "deepspeed-universal" if cell.universal else "deepspeed"
        topology = None if cell.universal else ucp.Topology(dp=cell.target.ranks, zero=cell.target.stage)
        source = cell.source.folder / "checkpoint"
        reports[cell.destination] = ucp.convert(source, root / cell.destination, to=to, topology=topology)
    return reports


def load_all(wanted: Iterable[Cell], root: Path, results: Path) -> None:
    """Load every destination with DeepSpeed; `results` gets a folder per cell.

    Stage 3 comes last in a process: it replaces `torch.nn.functional.linear` for good, by one that rounds otherwise.
    """
    ordered = sorted(wanted, key=lambda cell: (cell.target.ranks, cell.target.stage))
    for ranks, group in groupby(ordered, key=lambda cell: cell.target.ranks):
        jobs = results / f"jobs-{ranks}.json"
        jobs.parent.mkdir(parents=True, exist_ok=True)
        jobs.write_text(json.dumps([_job(cell, root, results) for cell in group]))
        _launch(ranks, jobs)


def _job(cell: Cell, root: Path, results: Path) -> dict[str, object]:
    case: dict[str, object] = {"stage": cell.target.stage, "ranks": cell.target.ranks}
    if cell.source.config is not None:
        case["config"] = cell.source.config
    if cell.target.stage == 0:
        case["config"] = {}  # without ZeRO there are no options of it, and no separate gradient type
    return {
        "base": cell.source.name,
        "case": case,
        "checkpoint": str(cell.source.folder / "checkpoint" if cell.live or cell.original else root / cell.destination),
        "live": cell.live,
        "universal": cell.universal,
        "mended": cell.universal and cell.target.stage == 3 and cell.mended,
        "unmanaged_from": str(cell.source.folder / "truth.safetensors") if cell.unmanaged else None,
        "out": str(results / cell.name),
    }


def _launch(ranks: int, jobs: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    minutes = "5"  # without it a rank that fails alone holds up the others for half an hour
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": minutes}
    command = [*launcher, str(_HERE / "resume_worker.py"), str(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-4000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a cell."""

    cell: Cell
    error: str = ""
    """What DeepSpeed said, when it refused."""
    compared: int = 0
    """Tensors compared bit for bit."""
    differing: tuple[str, ...] = ()
    """Those that differ."""
    not_restored: tuple[str, ...] = ()
    """Frozen parameters and buffers that the load left as the model was built."""
    settings: tuple[str, ...] = ()
    """Differences of groups (parameters, hyper-parameters, steps), loss scale and client state."""
    loss_gap: float = float("nan")
    """Largest relative difference of the losses of the next steps from the uninterrupted run's."""
    losses: tuple[float, ...] = ()
    """The losses of the next steps."""
    lrs_equal: bool = False
    """Whether the learning rates of the next steps are the uninterrupted run's."""
    step_before: float = 0.0
    """Step count of the source's optimizer; 0 when it does not count."""
    step_expected: float = 0.0
    """What it should be after the next steps."""
    step_after: float = 0.0
    """What it was."""


def judge(cell: Cell, results: Path) -> Verdict:
    """Compare what DeepSpeed held after the load, and what it did then, with the truth of the source."""
    folder = results / cell.name
    if (folder / "error.json").exists():
        said = json.loads((folder / "error.json").read_text())
        return Verdict(cell=cell, error=f"{said['type']}: {said['message']}")
    loaded = json.loads((folder / "truth.json").read_text())
    truth = cell.source.truth
    differing = list(_differing(cell.source, folder, empty=truth["empty"]))
    unmanaged = {f"{name}/module" for name in (*truth["frozen"], *truth["buffers"])} if cell.unmanaged else set()
    before = max(group["step"] or 0 for group in truth["groups"])
    return Verdict(
        cell=cell,
        compared=len(_keys(folder, truth["empty"])),
        differing=tuple(name for name in differing if name not in unmanaged),
        not_restored=tuple(name for name in differing if name in unmanaged),
        settings=tuple(_setting_differences(cell, truth, loaded)),
        loss_gap=max(_gap(a, b) for a, b in zip(truth["losses_after"], loaded["losses_after"], strict=True)),
        losses=tuple(loaded["losses_after"]),
        lrs_equal=truth["lrs_after"] == loaded["lrs_after"],
        step_before=before,
        step_expected=before + len(truth["losses_after"]) if before else 0,
        step_after=loaded["step_after"] or 0,
    )


def _gap(wanted: float, found: float) -> float:
    return abs(found - wanted) / abs(wanted)


def _keys(folder: Path, empty: Sequence[str]) -> set[str]:
    """Tensors of a truth; parameters without elements have optimizer states in stage 0 only."""
    with safe_open(folder / "truth.safetensors", "pt") as file:
        names = list(file.keys())
    return {key for key in names if key.endswith("/module") or key.rpartition("/")[0] not in empty}


def _differing(source: Source, found: Path, *, empty: Sequence[str]) -> Iterator[str]:
    keys = _keys(source.folder, empty)
    alone = keys ^ _keys(found, empty)
    yield from sorted(key for key in alone if not source.unseen or key.rpartition("/")[2] != source.unseen)
    with safe_open(source.folder / "truth.safetensors", "pt") as a, safe_open(found / "truth.safetensors", "pt") as b:
        for key in sorted(keys & _keys(found, empty)):
            left, right = a.get_tensor(key), b.get_tensor(key)
            same = left.shape == right.shape and left.dtype == right.dtype
            if not same or _bits(left) != _bits(right):
                yield key


def _bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _setting_differences(cell: Cell, truth: dict[str, Any], loaded: dict[str, Any]) -> Iterator[str]:
    if len(truth["groups"]) != len(loaded["groups"]):
        yield f"{len(truth['groups'])} groups became {len(loaded['groups'])}"
        return
    for number, (wanted, found) in enumerate(zip(truth["groups"], loaded["groups"], strict=True)):
        for side in (wanted, found):
            side["names"] = sorted(name for name in side["names"] if name not in truth["empty"])
        for key in ("names", "step"):
            if wanted[key] != found[key]:
                yield f"group {number}: {key} {wanted[key]} became {found[key]}"
        for key, before in wanted["hyperparameters"].items():
            after = found["hyperparameters"].get(key)
            if before != after:
                yield f"group {number}: {key} {before} became {after}"
    if cell.source.dtype == "fp16" and truth["loss_scale"] != loaded["loss_scale"]:
        yield f"loss scale {truth['loss_scale']} became {loaded['loss_scale']}"
    lost = truth["client_state"].keys() - set(loaded["client_state_keys"])
    if lost:
        yield f"client state lacks {sorted(lost)}"


def matrix_table(verdicts: Sequence[Verdict]) -> str:
    """The matrix in Markdown: a row per source and kind, a column per target."""
    lines = [
        "| source | written as | " + " | ".join(target.label for target in TARGETS) + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    found = {verdict.cell.name: verdict for verdict in verdicts}
    for source in SOURCES:
        for universal in (False, True):
            row = [Cell(source=source, target=target, universal=universal).name for target in TARGETS]
            shown = " | ".join(_shown(found[name]) for name in row)
            lines.append(f"| {source.label} | {'universal' if universal else 'native'} | {shown} |")
    return "\n".join(lines)


def other_table(verdicts: Sequence[Verdict]) -> str:
    """Sources of other kinds in Markdown: what became of each target."""
    lines = ["| source | native | universal |", "|---|---|---|"]
    for source in OTHERS:
        columns = []
        for universal in (False, True):
            own = [v for v in verdicts if v.cell.source is source and v.cell.universal is universal]
            columns.append(", ".join(f"{verdict.cell.target.label}: {_shown(verdict)}" for verdict in own))
        lines.append(f"| {source.label} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _shown(verdict: Verdict) -> str:
    if verdict.cell.fails:
        return "not by DeepSpeed"
    if verdict.error:
        return f"**{verdict.error.partition(':')[0]}**"
    if verdict.differing:
        return f"**{len(verdict.differing)} tensors differ**"
    return "exact" if verdict.loss_gap == 0 else f"{verdict.loss_gap:.0e}"
