"""Runs inside jobs of megatron-core: `ucp.load_into` fills them, and what the ranks hold is compared with the truth.

    PYTHONPATH=.mcore/0.16.1 python live_worker.py JOBS.json

JOBS.json is a list of groups, each the work of one process group: `{"layout", "fused_adam", "items"}`. An item is

- `{"make": {"model", "settings", "folder", "truth", "later"}}`: train a model, write it, and what the ranks hold then
  (`truth`) and after more steps (`later`);
- `{"load": {"folder", "checkpoint", "truth", "later", "result", "settings", "arguments", "saved", "anew"}}`: build the
  model that is in `folder`, under `settings`, with other weights; fill it from `checkpoint`; compare weights, masters,
  moments and the step with `truth`, bit for bit; let Megatron write it to `saved`; take more steps, and compare with
  `later`. `anew`: the checkpoint has weights alone.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_worker as jobs
import torch
from megatron_args import ITERATION, with_layout
from megatron_cases import Case, Layout
from megatron_checkpoint import _allocate_states_of_torch_adam, content_metadata, iteration_folder, save
from megatron_load import arguments_of, steps_of
from megatron_model import Job, build, initialize_parallel, load_mcore
from megatron_ranks import run_ranks
from megatron_shims import install, kernels, patch_mcore
from megatron_state import State, compare, gather, initialize, train
from safetensors.torch import load_file, save_file
from ucp_formats.megatron.live.model import describe_chunks

import ucp
from ucp.contract.registry import choose_family
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.live.parts import LivePart
from ucp.live.run.ranks import ProcessGroupRanks

MORE = 3
"""Steps taken after a load."""


def main() -> None:
    logging.disable(logging.WARNING)
    install()
    with kernels():
        load_mcore()
    gc.freeze()  # what is imported is no garbage
    failed = []
    for group in json.loads(Path(sys.argv[1]).read_text()):
        layout = Layout.parse(group["layout"])
        try:
            run_ranks(layout.world, work, group, layout)
        except SystemExit as error:
            failed.append(f"{layout}: {error}")
    sys.exit("\n".join(failed) or 0)


def work(group: dict[str, Any], layout: Layout) -> None:
    patch_mcore(fused_adam=group["fused_adam"])
    jobs.collect_results_without_another_interpreter()
    initialize_parallel(jobs._local(Case(model="gpt", layout=layout, proves="process groups")))
    for item in group["items"]:
        if "make" in item:
            make(item["make"], layout)
        else:
            check(item["load"], layout)
        gc.collect()


def make(item: dict[str, Any], layout: Layout) -> None:
    """Train a model and write it; then go on."""
    args = jobs._local(Case(model=item["model"], layout=layout, sharding="dp_reshardable", proves="a source"))
    job = build(with_layout(_set(args, item["settings"]), layout), initialize)
    train(job, ITERATION)
    _save(job, item["folder"])
    for path in (item["truth"], item["later"]):
        held = gather(job)
        if held is not None:
            save_file({name: tensor.contiguous() for name, tensor in held.items()}, path)
        train(job, MORE)


def _set(args: Any, settings: dict[str, Any]) -> Any:
    vars(args).update(settings)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.half if args.fp16 else torch.float32
    return args


def check(item: dict[str, Any], layout: Layout) -> None:
    """Fill a job and write what is other than it should be; a refusal is written as it is."""
    try:
        report = loaded(item, layout)
    except ucp.UcpError as error:
        jobs._report(item, {"error": f"{type(error).__name__}: {error}"})
    except Exception as error:
        jobs._report(item, {"error": jobs._told(error)})
        raise
    else:
        if report is not None:
            jobs._report(item, report)


def loaded(item: dict[str, Any], layout: Layout) -> dict[str, Any] | None:
    """What was compared and what differs, on rank 0."""
    folder = Path(item["folder"])
    args = arguments_of(iteration_folder(folder), layout)
    job = build(_set(args, item["settings"]), functools.partial(initialize, seed="another "))
    beside = {"optimizer": job.optimizer, "scheduler": None if item["anew"] else job.scheduler}
    said = ucp.load_into(job.chunks, checkpoint=item["checkpoint"], **beside, **item["arguments"])
    if item["anew"]:
        _allocate_states_of_torch_adam(job)
    scale = float(job.optimizer.get_loss_scale())
    found, steps, unruled = gather(job), steps_of(job), _against_rules(job, args, folder)
    groups = [{key: group[key] for key in ("lr", "weight_decay")} for group in job.optimizer.param_groups]
    if item["saved"]:
        _save(job, item["saved"])
    later = None
    if item["later"]:
        train(job, MORE)
        later = gather(job)
    if found is None:
        return None
    truth = load_file(item["truth"])
    if item["anew"]:
        truth |= {name: torch.zeros_like(own) for name, own in truth.items() if "/exp_avg" in name}
    differences = unruled + _differences(truth, found, "", args)
    if later is not None:
        differences += _differences(load_file(item["later"]), later, f" after {MORE} more steps", args)
    if steps != {0.0 if item["anew"] else float(ITERATION)}:
        differences.append(f"step: got {sorted(steps)}")
    report = {"tensors": len(found), "differences": differences, "groups": groups, "notes": said.notes}
    return report | {"scale": scale}


def _against_rules(job: Job, args: Any, folder: Path) -> list[str]:
    """Where the modules say that a tensor lies otherwise than the rules of its family do."""
    from megatron.core import parallel_state

    index = ucp.open(folder).index
    arguments = {key: value for key, value in vars(args).items() if isinstance(value, bool | int | float | str)}
    family, _ = choose_family(names=index.atoms, shapes=index.shapes, arguments=arguments)
    axes = {"tp": args.tensor_model_parallel_size, "etp": args.expert_tensor_parallel_size}
    coords = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
    }
    ranks = ProcessGroupRanks(None, torch.device("cpu"))
    odd = []
    for own in describe_chunks(job.chunks, ranks).tensors:
        shape = own.part.global_shape or index.atoms[own.name].global_shape
        layout = family.match([own.name])[own.name].layout(axes=axes, global_shape=shape)
        by_rule = replace(own.part, layout=layout, coords=coords)
        if _boxes(by_rule, shape) != _boxes(own.part, shape):
            odd.append(f"{own.name}: the module has another part than {layout}")
    return [line for own in ranks.share(odd) for line in own]


def _boxes(part: LivePart, shape: tuple[int, ...]) -> list[tuple[Box, Box]]:
    pairs = part.to_slice("", "", shape, DType.FLOAT32).pairs
    return [(pair.global_box, pair.local) for pair in pairs]


def _differences(truth: State, found: State, when: str, args: Any) -> list[str]:
    wanted = dict(truth)
    if args.params_dtype is torch.float32:  # the weights of the model are what else the masters would be
        wanted |= {name.replace("/weight", "/model"): own for name, own in wanted.items() if name.endswith("/weight")}
    return [f"{own.name}{when}: {own.what}" for own in compare(wanted, found)]


def _save(job: Job, folder: str) -> None:
    """As torch_dist, which any layout of Megatron loads."""
    from megatron.core import package_info

    job.args.ckpt_format, job.args.use_dist_ckpt, job.args.ckpt_fully_parallel_save = "torch_dist", True, True
    sharding = "fully_reshardable" if job.args.use_distributed_optimizer else None
    save(job, Path(folder), content_metadata(sharding, singleton=False, version=package_info.__version__))


if __name__ == "__main__":
    main()
