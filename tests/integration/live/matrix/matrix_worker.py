"""Runs of the matrix: sources are trained and saved, targets load them by `ucp.load_into` and train on.

    python -m tests.integration.live.matrix.matrix_worker JOBS.json

JOBS.json is a list of jobs, each the work of one process group: `{"way", "model", "grid", "kind", "steps"}` and

- `save`: `{"folder", "result"}`: train `steps`, save to `folder`, train as many more, and write losses to `result`;
- `load`: a list of `{"folder", "result", "settings"}`: start a run of other weights and another learning rate, load
  `folder` into it, compare what its ranks hold with what `ucp.open` reads there, train `steps`, and write what was
  found.

`way` is `megatron` (with megatron-core on PYTHONPATH; all jobs of a call, or none), `torch`, `deepspeed` or `hand`.
Libraries are imported once, and the ranks forked.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
sys.path.insert(0, str(FIXTURES / "make" / "megatron"))

from megatron_ranks import run_ranks  # noqa: E402

import ucp  # noqa: E402
from tests.integration.live.matrix.megatron_names import separated  # noqa: E402
from tests.integration.live.reference.grid import Grid  # noqa: E402
from tests.integration.live.reference.model import Style  # noqa: E402
from tests.integration.live.reference.run import Run  # noqa: E402
from tests.integration.live.reference.sizes import DENSE, MOE, Sizes  # noqa: E402

MODELS = {"dense": DENSE, "moe": MOE}


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if any(job["way"] == "megatron" for job in jobs):
        from tests.integration.live.matrix.megatron_run import prepare

        prepare()
    if any(job["way"] == "deepspeed" for job in jobs):
        pass
    sys.exit(max([attempt(job) for job in jobs]))


def attempt(job: dict[str, Any]) -> int:
    """Other jobs go on where the ranks of one could not."""
    try:
        run_ranks(Grid.parse(job["grid"]).world, work, job)
    except SystemExit as error:
        print(f"{job['way']} {job['grid']}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def work(job: dict[str, Any]) -> None:
    """On every rank."""
    if save := job.get("save"):
        report(saved(job, Path(save["folder"])), save["result"])
    for item in job.get("load", []):
        try:
            found = loaded(job, Path(item["folder"]), item["settings"])
        except Exception as error:
            report({"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}, item["result"])
            if not isinstance(error, ucp.UcpError):
                raise  # other ranks may wait for this one
            continue
        report(found, item["result"])


def report(found: dict[str, Any], path: str) -> None:
    """What rank 0 found."""
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()


def start(job: dict[str, Any], **options: Any) -> Any:
    """A run of the job's way."""
    sizes, grid, kind = MODELS[job["model"]], Grid.parse(job["grid"]), job["kind"]
    match job["way"]:
        case "megatron":
            from tests.integration.live.matrix.megatron_run import MegatronRun

            return MegatronRun(sizes, grid, kind, **options)
        case "deepspeed":
            from tests.integration.live.matrix.deepspeed_run import DeepSpeedRun

            return DeepSpeedRun(sizes, int(kind), **options)
        case "torch":
            from tests.integration.live.matrix.torch_run import TorchRun

            return TorchRun(sizes, kind, **options)
    words = kind.split()
    style = Style(local="local" in words, marked="marked" in words)
    return Run(sizes, grid, style=style, zero="zero" in words, **options)


def saved(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The uninterrupted run, saved half-way."""
    run, steps = start(job), job["steps"]
    losses = [run.step(at) for at in range(steps)]
    run.save(folder, steps)
    return {"losses": losses + [run.step(at) for at in range(steps, 2 * steps)]}


def loaded(job: dict[str, Any], folder: Path, settings: dict[str, int]) -> dict[str, Any]:
    """A run resumed from `folder`."""
    is_foreign = bool(settings)  # no rates that Megatron's schedule goes by: those of the job itself hold
    run, steps = start(job, seed="another ", lr=None if is_foreign else 1.0), job["steps"]
    told = ucp.load_into(
        run.model, topology(job), folder, optimizer=getattr(run, "live_optimizer", run.optimizer), settings=settings
    )
    whole = wholes(folder, MODELS[job["model"]])
    compared, differing = 0, []
    for name, state, own in run.states():
        if state != "step":
            compared += 1
            if not torch.equal(own, run.expected(name, state, whole)):
                differing.append(f"{name}/{state}")
    if run.steps() != {float(steps)}:
        differing.append(f"step: expected {steps}; got {sorted(run.steps())}")
    everywhere: list[Any] = [None] * dist.get_world_size()
    losses = [run.step(at) for at in range(steps, 2 * steps)]
    dist.all_gather_object(everywhere, (compared, differing, told.nbytes_read))
    return {
        "compared": sum(own for own, _, _ in everywhere),
        "differing": [f"rank {rank}: {own}" for rank, (_, found, _) in enumerate(everywhere) for own in found],
        "read": [own for _, _, own in everywhere],
        "total": told.nbytes_total,
        "losses": losses,
    }


def topology(job: dict[str, Any]) -> str:
    """As a user writes it."""
    if job["kind"] == "hsdp":
        return "dp_replicate=2,dp_shard=2"
    return Grid.parse(job["grid"]).topology + (",zero=3" if job["way"] == "deepspeed" else "")


def wholes(folder: Path, sizes: Sizes) -> dict[str, dict[str, Tensor]]:
    """All of a checkpoint as `ucp.open` reads it: state to name of Hugging Face to tensor."""
    checkpoint = ucp.open(folder)
    found: dict[str, dict[str, Tensor]] = {}
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        found[state] = separated({name: checkpoint.read(name, state) for name in checkpoint.atoms}, sizes)
    return found


if __name__ == "__main__":
    main()
