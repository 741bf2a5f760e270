"""One rank of `test_save.py`: saves runs that torch shards with `ucp.save`, or loads what was saved.

torchrun --nproc-per-node 4 save_worker.py save JOBS OUT     (JOBS: a JSON list of {name, case, fields, ...})
torchrun --nproc-per-node 2 save_worker.py load JOBS OUT     (with {source} besides: the name of a job that saved)

The truth is what torch itself gathers (`get_state_dict`), and the losses of the run that saved, which goes on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ucp

sys.path[:0] = [str(Path(__file__).parents[4] / "fixtures" / "make" / "torch"), str(Path(__file__).parents[1])]

import torch_train  # noqa: E402
from sharded_worker import differing, fsdp1  # noqa: E402
from torch_cases import CASES, Case  # noqa: E402

STEPS_AFTER = 3


def main() -> None:
    mode, jobs, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    work = {"save": save, "load": load}[mode]
    results = [work(job, out) for job in jobs]
    (out / f"{mode}-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def make_run(job: dict[str, Any], seed: int) -> torch_train.Run:
    fields = {name: getattr(CASES[job["case"]], name) for name in Case.__dataclass_fields__} if "case" in job else {}
    case = Case(**{"name": "own", **fields, **job.get("fields", {})})
    wrapped = torch_train._wrapped
    if "fsdp1" in job:
        torch_train._wrapped = lambda case, model, mesh: fsdp1(model, **job["fsdp1"])
    run = torch_train.Run(case, seed=seed)
    torch_train._wrapped = wrapped
    return run


def save(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train, save, go on; the report and the losses after."""
    run = make_run(job, 0)
    for at in range(3):
        run.step(at)
    generator = torch.get_rng_state()
    path = out / job["name"]
    options = {"scheduler": run.scheduler, "extras": {"seen": 3}, "asynchronous": job.get("asynchronous", False)}
    saved = ucp.save(run.model, run.optimizer, job.get("topology"), path, **options)
    assert torch.equal(torch.get_rng_state(), generator)
    tensors, _ = run._gathered() if run.case.wrap == "fsdp1" else run.truth(path)
    if dist.get_rank() == 0:
        save_file(tensors, out / f"{job['name']}.safetensors")
    losses = [run.step(at) for at in range(3, 3 + STEPS_AFTER)]
    report = saved.wait() if job.get("asynchronous") else saved  # which trained on while it was written
    return {"losses": losses, "step": report.step, "written": report.nbytes_written, "planned": report.nbytes_planned}


def load(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Load what another job saved into a fresh run, and go on; what differs, and the losses."""
    run = make_run(job, 1)
    scheduler = run.scheduler
    report = ucp.load_into(
        run.model, job.get("topology"), out / job["source"], optimizer=run.optimizer, scheduler=scheduler, verify=True
    )
    wrong, compared = differing(run, load_file(out / f"{job['source']}.safetensors"))
    losses = [run.step(at) for at in range(3, 3 + STEPS_AFTER)]
    return {"wrong": wrong, "compared": compared, "losses": losses, "step": report.step, "unused": report.extras}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
