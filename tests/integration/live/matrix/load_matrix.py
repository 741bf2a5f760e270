"""The matrix of `ucp.load_into`: every source straight into every target of its model, each a run of a real framework.

1. `make_sources` trains the sources, saves them half-way, and keeps their losses to the end.
2. `load_all` starts every target once, and has it load all sources in turn and train on (`matrix_worker.py`).
3. `Outcome` says how the states and the losses compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.live.reference.sizes import DENSE
from tests.integration.megatron.megatron_jobs import environment

STEPS = 50
"""Before the save, and after the load."""
RELEASE = "0.16.1"
"""Of megatron-core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A layout, and what trains in it."""

    label: str
    """unique among ways of a model"""
    model: str
    """dense or moe"""
    way: str
    """megatron, deepspeed, torch or hand"""
    grid: str
    """ranks along each axis, e.g. `tp2 pp2`"""
    kind: str
    """what more the way has to know: Megatron's files, a ZeRO stage, torch's wrapper, a style of the model by hand"""

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.model}-{self.label}".lower().replace(" ", "-")


def _way(model: str, label: str, way: str, grid: str, kind: str) -> Way:
    return Way(label=label, model=model, way=way, grid=grid, kind=kind)


SOURCES = (
    _way("dense", "Megatron TP2 PP2 DP2 ZeRO-1", "megatron", "tp2 pp2 dp2", "full"),
    _way("dense", "DeepSpeed ZeRO-3 DP4", "deepspeed", "dp4", "3"),
    _way("dense", "FSDP2 DP4", "torch", "dp4", "fsdp2"),
    _way("dense", "Megatron TP4", "megatron", "tp4", "torch"),
    _way("dense", "Megatron PP4 interleaved", "megatron", "pp4 vpp2", "dp"),
    _way("moe", "Megatron EP4", "megatron", "ep4 dp4", "full"),
    _way("moe", "Megatron EP2 x TP2", "megatron", "tp2 dp2 ep2", "torch-zero"),
)
TARGETS = (
    *SOURCES[:5],
    _way("dense", "DP1", "torch", "dp1", "dp1"),
    _way("dense", "TP2 PP2 by hand", "hand", "tp2 pp2", "local marked"),
    _way("dense", "TP2 PP2 DP2 ZeRO-1 by hand", "hand", "tp2 pp2 dp2", "local marked zero"),
    _way("dense", "HSDP 2x2", "torch", "dp4", "hsdp"),
    *SOURCES[5:],
    _way("moe", "DP1", "torch", "dp1", "dp1"),
    _way("moe", "FSDP2 DP4", "torch", "dp4", "fsdp2"),
    _way("moe", "TP2 by hand", "hand", "tp2", ""),
    _way("moe", "EP4 by hand", "hand", "ep4 dp4", "local marked"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a source in a target."""

    compared: int = 0
    """tensors compared bit for bit, on all ranks"""
    differing: Sequence[str] = ()
    """those that differ"""
    read: Sequence[int] = ()
    """bytes that each rank read"""
    total: int = 0
    """bytes of everything that was loaded"""
    losses: Sequence[float] = ()
    """after the load"""
    error: str = ""
    """what stopped it"""

    @property
    def exact(self) -> bool:
        """Whether something was compared, and all of it equal."""
        return self.compared > 0 and not self.differing and not self.error

    def gaps(self, uninterrupted: Sequence[float]) -> list[float]:
        """Relative differences of the losses from the run that was never stopped."""
        wanted = uninterrupted[len(uninterrupted) - len(self.losses) :]
        return [abs(own - loss) / loss for own, loss in zip(self.losses, wanted, strict=True)]


def cells() -> list[tuple[Way, Way]]:
    """Sources and targets of one model."""
    return [(source, target) for target in TARGETS for source in SOURCES if source.model == target.model]


def make_sources(root: Path, wanted: Iterable[Way] = SOURCES) -> Mapping[Way, Sequence[float]]:
    """Train and save in `root/<name>`; the losses of each, from the first step to the last."""
    sources = list(wanted)
    jobs = {
        source: _job(source)
        | {"save": {"folder": str(root / source.name), "result": str(root / f"{source.name}.json")}}
        for source in sources
    }
    said = _run(jobs, root, "make")
    missing = [source.label for source in sources if not (root / f"{source.name}.json").exists()]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} did not train:\n{said[-6000:]}")
    return {source: json.loads((root / f"{source.name}.json").read_text())["losses"] for source in sources}


def load_all(wanted: Iterable[tuple[Way, Way]], root: Path) -> Mapping[tuple[Way, Way], Outcome]:
    """Load and train on in every cell; sources lie in `root`."""
    every = list(wanted)
    jobs = {}
    for target in dict.fromkeys(target for _, target in every):
        items = [_item(source, target, root) for source, other in every if other is target]
        jobs[target] = _job(target) | {"load": items}
    said = _run(jobs, root, "load")
    return {(source, target): _outcome(Path(_item(source, target, root)["result"]), said) for source, target in every}


def _job(way: Way) -> dict[str, object]:
    return {"way": way.way, "model": way.model, "grid": way.grid, "kind": way.kind, "steps": STEPS}


def _item(source: Way, target: Way, root: Path) -> dict[str, Any]:
    """`settings`: heads, which nothing but Megatron records, and its fused queries, keys and values go by."""
    is_said = source.way != "megatron" == target.way
    return {
        "folder": str(root / source.name),
        "result": str(root / f"{source.name}-to-{target.name}.json"),
        "settings": {"num_attention_heads": DENSE.heads, "num_query_groups": DENSE.groups} if is_said else {},
    }


def _run(jobs: Mapping[Way, dict[str, object]], root: Path, what: str) -> str:
    """Megatron patches torch, and DeepSpeed too: each has a process of its own. What they said."""
    said = ""
    for way in dict.fromkeys(own.way for own in jobs):
        path = root / f"{what}-{way}.json"
        path.write_text(json.dumps([job for own, job in jobs.items() if own.way == way]))
        command = [sys.executable, "-m", "tests.integration.live.matrix.matrix_worker", str(path)]
        done = subprocess.run(command, env=_environment(way), capture_output=True, text=True, check=False)
        said += f"{done.stdout}\n{done.stderr}" if done.returncode else ""
    return said


def _environment(way: str) -> dict[str, str]:
    own = environment(RELEASE) if way == "megatron" else dict(os.environ)
    here = str(Path(__file__).resolve().parents[4])
    return own | {
        "PYTHONPATH": os.pathsep.join(filter(None, [own.get("PYTHONPATH", ""), here])),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def _outcome(result: Path, said: str) -> Outcome:
    if not result.exists():
        return Outcome(error=f"not reached: the ranks ended before\n{said[-2000:]}")
    return Outcome(**{key: own for key, own in json.loads(result.read_text()).items() if key != "where"})
