"""Runs inside jobs of megatron-core: makes sources of the matrix, and loads what `ucp` made of them.

    PYTHONPATH=.mcore/0.16.1 python megatron_worker.py JOBS.json

JOBS.json is a list of groups, each the work of one process group: `{"layout", "fused_adam"}` and

- `save`: `{"model", "cases", "truth"}`: train the model as the fixtures are trained, write it as each of the named
  cases, and to `truth` what all ranks hold, whole;
- `load`: `{"folder", "truth", "result", "anew"}`: load the folder into a fresh job of other weights, gather what the
  ranks hold, and write to `result` what differs from `truth`; `anew`: without the states of the optimizer.

Megatron is imported once, and a group of processes serves all models of a layout: that is most of what a load costs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))

import torch.distributed as dist
from megatron_args import ITERATION, arguments
from megatron_cases import CASES, Case, Layout
from megatron_checkpoint import content_metadata, iteration_folder, load, save
from megatron_load import arguments_of, started_anew, steps_of
from megatron_model import build, initialize_parallel, load_mcore
from megatron_ranks import run_ranks
from megatron_shims import install, kernels, patch_mcore
from megatron_state import compare, gather, initialize, train
from safetensors.torch import load_file, save_file


def main() -> None:
    logging.disable(logging.WARNING)
    install()
    with kernels():
        load_mcore()
    gc.freeze()  # megatron-core collects garbage on every load; what is imported is none
    codes = [attempt(group) for group in json.loads(Path(sys.argv[1]).read_text())]
    sys.exit(max(codes))


def attempt(group: dict[str, Any]) -> int:
    """Other layouts go on where the ranks of one could not."""
    layout = Layout.parse(group["layout"])
    try:
        run_ranks(layout.world, work, group, layout)
    except SystemExit as error:
        print(f"{layout}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def work(group: dict[str, Any], layout: Layout) -> None:
    try:
        patch_mcore(fused_adam=group["fused_adam"])
        initialize_parallel(_local(Case(model="gpt", layout=layout, proves="process groups")))
    except Exception as error:
        for item in group.get("load", []):
            _report(item, {"error": _told(error)})
        raise
    for item in group.get("save", []):
        make(item, layout)
    for item in group.get("load", []):
        check(item, layout)
        gc.collect()


def make(item: dict[str, Any], layout: Layout) -> None:
    """Train a model and write it."""
    collect_results_without_another_interpreter()
    job = build(_local(Case(model=item["model"], layout=layout, proves="what Megatron holds here")), initialize)
    train(job, ITERATION)
    for name, folder in item["cases"].items():
        case = CASES[name]
        metadata = content_metadata(case.sharding, singleton=case.singleton, version=case.version)
        save(replace(job, args=_local(case)), Path(folder), metadata)
    held = gather(job)
    if held is not None:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, item["truth"])


def check(item: dict[str, Any], layout: Layout) -> None:
    """Load a folder and write what is other than it should be; the ranks end where one cannot load it."""
    try:
        report = loaded(item, layout)
    except Exception as error:
        _report(item, {"error": _told(error)})
        raise
    if report is not None:
        _report(item, report)


def loaded(item: dict[str, Any], layout: Layout) -> dict[str, Any] | None:
    """What was compared and what differs, on rank 0."""
    iteration, anew = iteration_folder(Path(item["folder"])), item["anew"]
    args = arguments_of(iteration, layout)
    args.no_load_optim = anew
    job = build(args, functools.partial(initialize, seed="another "))
    load(job, iteration)
    steps, found = steps_of(job), gather(job)
    if found is None:
        return None
    truth = load_file(item["truth"])
    differences = [f"{own.name}: {own.what}" for own in compare(started_anew(truth) if anew else truth, found)]
    if steps != {float(ITERATION)} and not (anew and steps <= {0.0}):
        differences.append(f"step: expected {0 if anew else ITERATION}; got {sorted(steps)}")
    return {"tensors": len(found), "differences": differences}


def _told(error: Exception) -> str:
    """Its message, and where it came from."""
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _report(item: dict[str, Any], report: dict[str, Any]) -> None:
    """Write a result in one go; the first rank that does is heard, as others fail because it is gone."""
    path = Path(item["result"])
    own = path.with_name(f"{path.name}.{dist.get_rank()}")
    own.write_text(json.dumps(report))
    with contextlib.suppress(FileExistsError):
        os.link(own, path)


def _local(case: Case) -> Any:
    args = arguments(case)
    args.rank = args.local_rank = dist.get_rank()
    return args


def collect_results_without_another_interpreter() -> None:
    """The writer of torch_dist starts a Python per rank for a queue of results: seconds each. A fork serves as well."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


if __name__ == "__main__":
    main()
