"""Real AutoEP resumes, at another ep, dp and ZeRO stage, from what `ucp convert` wrote: universal and native files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import torch
from safetensors.torch import load_file

import ucp
from ucp.core.topology import Topology

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[3] / "fixtures" / "deepspeed"
LOADS = [("z1-autoep2", 2, 1, 1), ("z1-autoep2", 2, 2, 2), ("z2-autoep2-dp4-bf16", 2, 1, 1), ("z1-autoep2", 2, 2, 3)]
"""Source, and the ranks, ep and ZeRO stage of the run that resumes."""
NATIVE = [
    ("z1-autoep2", 4, 4, 2),
    ("z3-autoep2-dp4", 4, 2, 1),
    ("z0-autoep2", 2, 1, 3),
    ("z1-autoep2", 4, 2, 3),
    ("z3-autoep2-dp4", 4, 4, 0),
    ("z2-autoep2-dp4-bf16", 2, 2, 3),
]
"""The same, for loads without load_universal."""
LIVE = [
    ("z1-autoep2", 4, 4, 1),
    ("z3-autoep2-dp4", 2, 1, 2),
    ("z1-autoep2", 4, 2, 3),
    ("z1-autoep2", 2, 2, 0),
    ("z1-autoep2-placed", 2, 2, 3),
]
"""The same, for `ucp.load_into`."""


def resume(source: str, *, ranks: int, ep: int, stage: int, root: Path, way: str) -> Path:
    """Load a checkpoint in processes of their own: DeepSpeed keeps the groups of earlier engines.

    `way`: "universal" or "native": what `convert` writes; or "live".
    """
    universal, path = way == "universal", FIXTURES / source / "checkpoint"
    to, topology = ("-universal", None) if universal else ("", Topology(dp=ranks, ep=ep, zero=stage))
    if way != "live":
        ucp.convert(path, root / "written", to=f"deepspeed{to}", topology=topology)
        path = root / "written"
    job = {
        "base": source.removesuffix("-placed"),
        "case": {"stage": stage, "ranks": ranks, "expert_parallel_size": ep},
        "checkpoint": str(path),
        "live": way == "live",
        "universal": universal,
        "mended": universal and stage == 3,
        "unmanaged_from": None,
        "out": str(root / "out"),
    }
    (root / "jobs.json").write_text(json.dumps([job]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "5"}
    worker = str(HERE / "resume_worker.py")
    done = subprocess.run(
        [*launcher, worker, str(root / "jobs.json")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "out"


@pytest.mark.parametrize(
    ("source", "ranks", "ep", "stage", "way"),
    [(*row, way) for way, rows in {"universal": LOADS, "native": NATIVE, "live": LIVE}.items() for row in rows],
)
def test_every_rank_holds_its_experts_and_goes_on(
    source: str, ranks: int, ep: int, stage: int, way: str, tmp_path: Path
) -> None:
    out = resume(source, ranks=ranks, ep=ep, stage=stage, root=tmp_path, way=way)
    held = [load_file(path) for path in sorted(out.glob("truth-ep*.safetensors"))]
    assert len(held) == ep, [path.read_text() for path in out.glob("error*")]
    checkpoint = ucp.open(FIXTURES / source / "checkpoint")
    for atom, state, _ in checkpoint.index.states():
        if state != "step":
            key = f"{atom.name}/{state}"
            parts = [rank[key] for rank in held]
            found = parts[0] if parts[0].shape == atom.global_shape else torch.cat(parts)
            assert torch.equal(found, checkpoint.read(atom.name, state)), key
    losses, expected = (
        json.loads((folder / "truth-ep00.json").read_text())["losses_after"]
        for folder in (out, FIXTURES / source.removesuffix("-placed"))
    )
    tolerance = 5e-3 if "bf16" in source else 1e-5
    assert losses == pytest.approx(expected[: len(losses)], rel=tolerance)
