"""Lightning goes on, over FSDP2 of other world sizes, from what `ucp convert` wrote of its distributed checkpoint.

FSDPStrategy asks for a GPU; ModelParallelStrategy writes the same layout on a CPU (`state_dict`, `optimizer_0`,
`meta.pt`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("lightning_worker.py")


@pytest.fixture(scope="module")
def python() -> str:
    """Python with Lightning in it; `make integration` makes one."""
    found = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    if subprocess.run([found, "-c", "import lightning"], capture_output=True, check=False).returncode:
        pytest.skip(f"{found} has no lightning; run `make integration`")
    return found


def trained(python: str, ranks: int, out: Path, *way: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(WORKER), "--ranks", str(ranks), "--out", str(out), *way]
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def losses(reports: list[dict[str, Any]]) -> list[float]:
    """Means over the ranks, which have rows of the global batch each."""
    return [sum(step) / len(step) for step in zip(*(own["losses"] for own in reports), strict=True)]


def test_a_run_goes_on_at_other_world_sizes(python: str, tmp_path: Path) -> None:
    saved, written = tmp_path / "saved.ckpt", tmp_path / "written.ckpt"
    whole = trained(python, 2, tmp_path / "whole", "--save", str(saved))
    assert len(losses(whole)) == 4
    ucp.convert(saved, written, to="dcp", topology="dp=3", settings={"style": "lightning"})
    for ranks in (1, 3):
        resumed = trained(python, ranks, tmp_path / f"resumed{ranks}", "--resume", str(written))
        assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
        assert {(own["lr"], own["step"]) for own in resumed} == {(own["lr"], own["step"]) for own in whole}


def test_a_deepspeed_run_has_the_same_states(python: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    trained(python, 2, tmp_path / "whole", "--save", str(saved))
    ucp.convert(saved, tmp_path / "z3", to="deepspeed", topology="dp=2,zero=3")
    assert ucp.diff(saved, tmp_path / "z3").equal
