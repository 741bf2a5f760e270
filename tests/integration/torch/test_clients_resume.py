"""Lightning and torchtitan go on, over FSDP2 of other world sizes, from what `ucp convert` wrote of their checkpoints.

FSDPStrategy asks for a GPU; ModelParallelStrategy writes the same layout on a CPU (`state_dict`, `optimizer_0`,
`meta.pt`). Of torchtitan its CheckpointManager, optimizers and schedulers run; its trainer wants a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp

pytestmark = pytest.mark.integration

LIGHTNING = Path(__file__).with_name("lightning_worker.py")
TITAN = Path(__file__).with_name("titan_worker.py")


def python_with(package: str) -> str:
    """Python with a package in it; `make integration` makes one with all."""
    found = os.path.abspath(os.environ.get("UCP_TRANSFORMERS", sys.executable))
    if subprocess.run([found, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{found} has no {package}; run `make integration`")
    return found


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("lightning")


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def trained(python: str, ranks: int, out: Path, *way: str) -> list[dict[str, Any]]:
    run([python, str(LIGHTNING), "--ranks", str(ranks), "--out", str(out), *way], out.parent)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def losses(reports: list[dict[str, Any]]) -> list[float]:
    """Means over the ranks, which have rows of the global batch each."""
    return [sum(step) / len(step) for step in zip(*(own["losses"] for own in reports), strict=True)]


def test_lightning_goes_on_at_other_world_sizes(python: str, tmp_path: Path) -> None:
    saved, written = tmp_path / "saved.ckpt", tmp_path / "written.ckpt"
    whole = trained(python, 2, tmp_path / "whole", "--save", str(saved))
    assert len(losses(whole)) == 4
    ucp.convert(saved, written, to="dcp", topology="dp=3", settings={"style": "lightning"})
    for ranks in (1, 3):
        resumed = trained(python, ranks, tmp_path / f"resumed{ranks}", "--resume", str(written))
        assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
        assert {(own["lr"], own["step"]) for own in resumed} == {(own["lr"], own["step"]) for own in whole}


def test_lightning_goes_on_from_one_file(python: str, tmp_path: Path) -> None:
    """What DDP saves in one file becomes a folder for ModelParallelStrategy, with the `meta.pt` that it asks for."""
    saved, written = tmp_path / "one.ckpt", tmp_path / "written.ckpt"
    whole = trained(python, 2, tmp_path / "whole", "--whole", "--save", str(saved))
    ucp.convert(saved, written, to="dcp", topology="dp=3", settings={"style": "lightning"}, verify=True)
    for ranks in (1, 3):
        resumed = trained(python, ranks, tmp_path / f"resumed{ranks}", "--resume", str(written))
        assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
        assert {(own["lr"], own["step"]) for own in resumed} == {(own["lr"], own["step"]) for own in whole}


def test_lightning_goes_on_by_a_callback(python: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    whole = trained(python, 2, tmp_path / "whole", "--save", str(saved))
    for ranks, *way in ((3,), (1, "--whole"), (2, "--whole")):
        out = tmp_path / f"resumed{ranks}{''.join(way)}"
        resumed = trained(python, ranks, out, "--resume", str(saved), "--hook", *way)
        assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
        assert {(own["lr"], own["step"]) for own in resumed} == {(own["lr"], own["step"]) for own in whole}
        assert {own["batches"] for own in resumed} == {8}  # also those before the save


def test_lightning_goes_on_from_one_file_by_a_callback(python: str, tmp_path: Path) -> None:
    saved = tmp_path / "one.ckpt"
    whole = trained(python, 2, tmp_path / "whole", "--whole", "--save", str(saved))
    resumed = trained(python, 3, tmp_path / "resumed", "--resume", str(saved), "--hook")
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert {(own["lr"], own["step"], own["batches"]) for own in resumed} == {(own["lr"], 8, 8) for own in whole}


def test_lightning_goes_on_from_what_it_did_not_save(python: str, tmp_path: Path) -> None:
    """Only the number of steps is known: two epochs begin again, in which the run does what plain torch does."""
    store = tmp_path / "store"
    trained(python, 2, tmp_path / "whole", "--save", str(store), "--hook")
    (resumed,) = trained(python, 1, tmp_path / "resumed", "--resume", str(store), "--hook", "--whole")
    model = torch.nn.ModuleDict(
        {"net": torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ucp.load_into(model, store, optimizer=optimizer)
    data = torch.randn(48, 7, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))  # of DistributedSampler, in the first epoch
    plain = []
    for rows in data[order].split(12):
        loss = model["net"](rows).square().mean()
        plain.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert resumed["losses"][:4] == pytest.approx(plain, rel=1e-5)
    assert (resumed["step"], resumed["batches"]) == (4 + 8, 8)


def test_a_checkpoint_of_lightning_becomes_one_of_deepspeed(python: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    trained(python, 2, tmp_path / "whole", "--save", str(saved))
    ucp.convert(saved, tmp_path / "z3", to="deepspeed", topology="dp=2,zero=3")
    assert ucp.diff(saved, tmp_path / "z3").equal


def test_torchtitan_goes_on_at_another_world_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with("torchtitan.components.checkpoint")

    def trained(ranks: int, folder: Path, *way: str) -> dict[str, Any]:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        run([*command, str(TITAN), "--out", str(folder), *way], folder)
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (second / "checkpoint").mkdir(parents=True)
    whole = trained(2, first)
    step = second / "checkpoint" / "step-3"
    ucp.convert(first / "checkpoint" / "step-3", step, to="dcp", topology="dp=3", settings={"style": "torchtitan"})
    saved = str(first / "checkpoint" / "step-3")
    runs = [trained(3, second, "--resume")]
    for name, *way in (("third", "--initial", saved), ("fourth",)):
        (tmp_path / name).mkdir()
        runs.append(trained(3, tmp_path / name, "--resume", "--hook", *way))
        monkeypatch.setenv("UCP_CHECKPOINT", saved)  # for the fourth
    monkeypatch.setenv("UCP_CHECKPOINT", "nowhere")
    runs.append(trained(2, first, "--resume", "--hook"))  # from what the run itself saved
    for resumed in runs:
        assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert resumed["lr"] == whole["lr"]
