"""Runs inside jobs of megatron-core: `ucp.load_into` fills them, and what the ranks hold is compared with the truth.

    PYTHONPATH=.mcore/0.16.1 python live_worker.py JOBS.json

JOBS.json is a list of groups, each the work of one process group: `{"layout", "fused_adam", "loads"}`; a load is
`{"folder", "truth", "result", "settings", "step", "saved", "goes_on"}`:

- a model of the arguments in `folder`, under `settings`, with other weights, is filled from `folder`;
- weights, masters, moments and the step are compared with `truth`, bit for bit;
- `saved`: Megatron then writes its checkpoint there;
- `goes_on`: a file of what the ranks hold after more steps of the run that was never stopped, which is compared too.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import megatron_worker as jobs
from megatron_args import ITERATION
from megatron_cases import Case, Layout
from megatron_checkpoint import content_metadata, iteration_folder, save
from megatron_load import arguments_of, steps_of
from megatron_model import build, initialize_parallel, load_mcore
from megatron_ranks import run_ranks
from megatron_shims import install, kernels, patch_mcore
from megatron_state import compare, gather, initialize
from safetensors.torch import load_file

import ucp


def main() -> None:
    logging.disable(logging.WARNING)
    install()
    with kernels():
        load_mcore()
    gc.freeze()  # what is imported is no garbage
    codes = []
    for group in json.loads(Path(sys.argv[1]).read_text()):
        layout = Layout.parse(group["layout"])
        try:
            run_ranks(layout.world, work, group, layout)
        except SystemExit as error:
            codes.append(f"{layout}: {error}")
    sys.exit("\n".join(codes) or 0)


def work(group: dict[str, Any], layout: Layout) -> None:
    patch_mcore(fused_adam=group["fused_adam"])
    initialize_parallel(jobs._local(Case(model="gpt", layout=layout, proves="process groups")))
    for item in group["loads"]:
        try:
            report = loaded(item, layout)
        except Exception as error:
            jobs._report(item, {"error": jobs._told(error)})
            raise
        if report is not None:
            jobs._report(item, report)
        gc.collect()


def loaded(item: dict[str, Any], layout: Layout) -> dict[str, Any] | None:
    """What was compared and what differs, on rank 0."""
    args = arguments_of(iteration_folder(Path(item["folder"])), layout)
    vars(args).update(item["settings"])
    job = build(args, functools.partial(initialize, seed="another "))
    said = ucp.load_into(job.chunks, item["topology"], item["folder"], optimizer=job.optimizer)
    steps, found = steps_of(job), gather(job)
    if item["saved"]:
        jobs._collect_results_without_another_interpreter()
        sharding = "fully_reshardable" if args.use_distributed_optimizer else None
        save(job, Path(item["saved"]), content_metadata(sharding, singleton=False, version=item["release"]))
    if found is None:
        return None
    differences = [f"{own.name}: {own.what}" for own in compare(load_file(item["truth"]), found)]
    if steps != {float(ITERATION)}:
        differences.append(f"step: expected {ITERATION}; got {sorted(steps)}")
    groups = [{key: group[key] for key in ("lr", "weight_decay", "eps")} for group in job.optimizer.param_groups]
    return {"tensors": len(found), "differences": differences, "groups": groups, "report": str(said)}


if __name__ == "__main__":
    main()
