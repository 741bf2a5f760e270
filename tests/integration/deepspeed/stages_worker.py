"""Real pipeline runs of DeepSpeed, several in one launch: to train and save, or to load and go on.

    torchrun --nproc-per-node 4 tests/integration/deepspeed/stages_worker.py JOBS.json

`JOBS.json` is a list of the fields of `Job`. Each writes `OUT/truth*.safetensors` and `.json` as
`deepspeed_train.py` does: what each rank holds after the save or load, and the losses of the next steps. Or it
takes a single step in which no rank waits for another stage, and `OUT/sums-RANK` is how often it would have.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "fixtures" / "make" / "deepspeed"))

import deepspeed
import deepspeed_run
import deepspeed_train
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_cases import CASES, Case, case_from_json
from deepspeed_model import ParallelModel, next_token_loss
from deepspeed_run import Run, start
from torch import Tensor, nn
from torch.nn import functional

PATIENCE = 240
"""Seconds after which a launch says where it hangs, and ends: DeepSpeed waits for ever where ranks disagree."""
STEPS = 3
"""Trained after the save or load."""
OWN = Case(name="chain", kind="pipeline", stage=1)
"""The case of `chain`, which is not among the fixtures."""
_PARTITION = PipelineModule._partition_layers  # what its argument partition_method decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    case: str
    """Fixture whose model to train, or `chain`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the case to replace."""
    partition: str | list[int] | None = None
    """`partition_method`, or the bounds of the stages as a script of its own sets them; None for the model's own."""
    load: str | None = None
    """Folder to load; None to train and save to OUT/checkpoint."""
    universal: bool = False
    """Whether the folder is a universal checkpoint."""
    count_sums: bool = False
    """Whether to count the sums over all stages that a step takes, in place of taking them."""
    out: str
    """Folder for the result."""


class Affine(nn.Module):
    """A linear of `inner` features there and back, so that layers weigh differently, and a buffer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, length, hidden], passed through both."""
        if self.training:
            self.get_buffer("seen").add_(1)
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def _logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return functional.linear(x, embedding.weight)


def _as_float(x: Tensor) -> Tensor:
    return x.float()


def chain(stages: int, hidden: int = 8) -> PipelineModule:
    """Layers of very different weight, a function and a module without parameters among them, a function last."""
    inner = (3, 40, 6, 6, 50, 4, 12)
    blocks = [LayerSpec(Affine, hidden, own) for own in inner]
    vocab = ParallelModel.batch_shape.vocab
    layers = [
        TiedLayerSpec("emb", nn.Embedding, vocab, hidden),
        *blocks[:3],
        torch.tanh,
        *blocks[3:5],
        LayerSpec(nn.Dropout, 0.0),
        *blocks[5:],
        LayerSpec(nn.LayerNorm, hidden),
        TiedLayerSpec("emb", nn.Embedding, vocab, hidden, forward_fn=_logits),
        _as_float,
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=next_token_loss)


def main() -> None:
    """Carry out all jobs, one after another."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    deepspeed_run._keep_builds_apart()  # before the first operator is built
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        _carry_out(Job(**job))
        deepspeed.comm.barrier()
        gc.collect()
    deepspeed.comm.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _carry_out(job: Job) -> None:
    case = case_from_json(CASES.get(job.case, OWN), job.overrides)
    PipelineModule._partition_layers = _dealing(job.partition)
    run = _started(case, seed=1 if job.load else 0, universal=job.universal)
    options = Namespace(
        out=Path(job.out), resume=job.load, tag=None, no_truth=False, steps_after=STEPS, unmanaged_from=None
    )
    if job.load and job.count_sums:
        _write_sums(run, job)
    elif job.load:
        deepspeed_train._resume(case, run, options)  # the same steps as for the fixtures
    else:
        deepspeed_train._train_and_save(case, run, options)


def _write_sums(run: Run, job: Job) -> None:
    """Load, and count the calls of all_reduce over the ranks of a replica in one step; their results stay local."""
    run.engine.load_checkpoint(job.load)
    stages, real, calls = run.engine.grid.get_model_parallel_group(), deepspeed.comm.all_reduce, []

    def counted(tensor: Tensor, *args: Any, **options: Any) -> object:
        if options.get("group") is not stages:
            return real(tensor, *args, **options)
        calls.append(tensor)
        return None

    deepspeed.comm.all_reduce = counted
    try:
        run.step()
    finally:
        deepspeed.comm.all_reduce = real
    path = Path(job.out) / f"sums-{deepspeed.comm.get_rank():02d}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(str(len(calls)))


def _started(case: Case, *, seed: int, universal: bool) -> Run:
    if case.name != OWN.name:
        return start(case, seed=seed, universal=universal)
    if case.dtype == "fp16":
        get_accelerator().is_fp16_supported = lambda: True  # as for the fixtures: torch emulates it on this CPU
    torch.manual_seed(seed)
    return deepspeed_run._pipeline_run(case, chain(case.model_parallel_size), universal=universal)


def _dealing(partition: str | list[int] | None) -> Callable[..., None]:
    """`PipelineModule._partition_layers`, whatever method the model asks for."""

    def deal(module: PipelineModule, method: str = "uniform") -> None:
        _PARTITION(module, method=partition if isinstance(partition, str) else method)
        if isinstance(partition, list):
            stage = module.stage_id
            module.parts = partition
            module._set_bounds(start=partition[stage], stop=partition[stage + 1])

    return deal


if __name__ == "__main__":
    main()
