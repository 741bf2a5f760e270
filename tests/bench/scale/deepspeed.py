"""Checkpoints of DeepSpeed 0.19.8 with ZeRO-1 and BF16_Optimizer, of any number of ranks, with holes for tensors.

`write_expert_run` writes what native mixture of experts leaves: expert files, and groups of experts cut over fewer
ranks. Names and contents are compared with a fixture that DeepSpeed wrote (tests/bench/scale/test_scale_deepspeed.py).
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType

import torch

from tests.bench.scale.holes import Holes
from tests.bench.scale.moe import Moe

VERSION = "0.19.8"
STEP = 3
_TAG = f"global_step{STEP}"
_MOST_IN_GROUP = 178_956_971
"""Elements of experts in a group (`split_params_into_different_moe_groups_for_optimizer`, moe/utils.py, 0.19.8)."""
_ADAM: Mapping[str, object] = {
    "betas": (0.9, 0.999),
    "eps": 1e-08,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_ROWS = 12
_CONFIG: Mapping[str, object] = {
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that the optimizer steps as one flat tensor."""

    shapes: Mapping[str, Shape]
    hyper: Mapping[str, object]
    """Learning rate and the like, before those of Adam."""
    holders: int


def write_expert_run(
    folder: Path, *, dense: Mapping[str, Shape], experts: Sequence[str], own: Mapping[str, Shape], run: Experts
) -> None:
    """Write a run of native mixture of experts, of data-parallel ranks alone.

    `dense`: shapes of everything but experts. `experts`: start of the names of each layer's experts. `own`: shapes in
    one expert. `run`: how it lies over ranks.
    """
    tag = _begun(folder)
    for layer, start in enumerate(experts):
        for number in range(run.experts):
            holes = Holes()
            named = {f"{start}{number}.{name}": shape for name, shape in own.items()}
            tensors = {name: holes.tensor(shape, torch.bfloat16, {0: name}) for name, shape in named.items()}
            holes.save(tensors, tag / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt")
    holes = Holes()
    module = OrderedDict((_anew(name), holes.tensor(shape, torch.bfloat16, {0: name})) for name, shape in dense.items())
    model = {
        "module": module,
        "buffer_names": [],
        **_training(run.groups, run.ranks),
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(run.ranks),
        "ds_version": VERSION,
        "num_experts": [run.experts],
        "ds_autoep_layers": None,
    }
    holes.save(model, tag / "mp_rank_00_model_states.pt")
    for rank in range(run.ranks):
        places = [rank // (run.ranks // group.holders) for group in run.groups]
        _write_optimizer(tag, run.groups, places, rank=rank, named=partial(_numbered, run, rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How experts and their optimizer lie over ranks."""

    ranks: int
    experts: int
    groups: tuple[Group, ...]
    """Groups of the optimizer, names of experts counted on their own rank."""

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.ranks // min(group.holders for group in self.groups)


def _numbered(run: Experts, rank: int, name: str) -> str:
    """Name of a parameter of data-parallel rank `rank`, experts counted over all ranks."""
    first = rank % run.ep * (run.experts // run.ep)
    return _EXPERT.sub(lambda found: f"{found[1]}{first + int(found[2])}.", name)


_EXPERT = re.compile(r"(deepspeed_experts\.)(\d+)\.")


def expert_groups(moe: Moe, *, ranks: int, ep: int) -> tuple[dict[str, Shape], list[str], dict[str, Shape], Experts]:
    """What `write_expert_run` takes for `moe`, its experts over `ep` of `ranks` ranks."""
    names = {
        "self_attention.linear_proj.weight": "attention.dense.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_qkv.weight": "attention.qkv.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.deepspeed_moe.gate.wg.weight",
    }
    attention = {names[name]: shape for name, shape in moe.attention().items()}
    embedding, norm, head = moe.ends().values()
    dense = {"embedding.weight": embedding}
    dense |= {f"layers.{n}.{name}": shape for n in range(moe.layers) for name, shape in attention.items()}
    dense |= {"final_layernorm.weight": norm, "lm_head.weight": head}
    starts = [f"layers.{n}.mlp.deepspeed_moe.experts.deepspeed_experts." for n in range(moe.layers)]
    own = {
        "gate_proj.weight": (moe.ffn, moe.hidden),
        "up_proj.weight": (moe.ffn, moe.hidden),
        "down_proj.weight": (moe.hidden, moe.ffn),
    }
    local = {f"{s}{n}.{name}": shape for s in starts for n in range(moe.experts // ep) for name, shape in own.items()}
    usual = {"lr": 0.01, "weight_decay": 0.1}
    groups = [Group(shapes=dense, hyper={**usual, "name": "group0"}, holders=ranks)]
    groups += [
        Group(shapes=part, hyper={**usual, "name": f"ep_size_{ep}", "moe": True}, holders=ranks // ep)
        for part in _split(local)
    ]
    return dense, starts, own, Experts(ranks=ranks, experts=moe.experts, groups=tuple(groups))


def _split(shapes: Mapping[str, Shape]) -> Iterator[dict[str, Shape]]:
    """Groups of experts of a bounded size, as DeepSpeed makes them."""
    part: dict[str, Shape] = {}
    held = 0
    for name, shape in shapes.items():
        if held + prod(shape) > _MOST_IN_GROUP:
            yield part
            part, held = {}, 0
        part[name] = shape
        held += prod(shape)
    yield part


def _begun(folder: Path) -> Path:
    """The tag folder, and `latest` beside it."""
    tag = folder / _TAG
    tag.mkdir(parents=True)
    (folder / "latest").write_text(_TAG)
    return tag


def _anew(name: str) -> str:
    """A string of its own, which a pickle writes out again, as of names that were made twice."""
    return "".join([name[:1], name[1:]])


def _config(ranks: int) -> dict[str, object]:
    return {**_CONFIG, "train_micro_batch_size_per_gpu": max(1, _ROWS // ranks)}


def _training(groups: Sequence[Group], ranks: int) -> dict[str, object]:
    """What a model-states file says of the training so far."""
    return {
        "optimizer": None,
        "param_shapes": [OrderedDict((name, (*own,)) for name, own in group.shapes.items()) for group in groups],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": STEP,
        "global_samples": _ROWS * STEP,
        "dp_world_size": ranks,
        "mp_world_size": 1,
    }


@dataclass
class fragment_address:  # noqa: N801  # its name in DeepSpeed
    """Where a parameter lies in a rank's share (deepspeed/utils/tensor_fragment.py)."""

    numel: int
    start: int


def _write_optimizer(
    tag: Path, groups: Sequence[Group], places: Sequence[int], *, rank: int, named: Callable[[str], str]
) -> None:
    """Write the file of one rank. `places`: which share of each group it has. `named`: what marks a parameter."""
    holes = Holes()
    cuts = [_share(group, place) for group, place in zip(groups, places, strict=True)]
    states = {
        number: {
            "step": torch.tensor(float(STEP)),
            **{
                name: holes.tensor((own.numel,), torch.float32, {0: f"{name} of {number} on {rank}"})
                for name in ("exp_avg", "exp_avg_sq")
            },
        }
        for number, own in enumerate(cuts)
    }
    inner = {
        "state": states,
        "param_groups": [{**g.hyper, **_ADAM, "params": [number]} for number, g in enumerate(groups)],
    }
    saved = {
        "clip_grad": 1.0,
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [
            holes.tensor((own.numel,), torch.float32, {at: named(name) for at, name in own.starts.items()})
            for own in cuts
        ],
        "group_paddings": [own.padding for own in cuts],
        "partition_count": [group.holders for group in groups],
        "ds_version": VERSION,
        "param_slice_mappings": [own.mapping for own in cuts],
    }
    root = {"optimizer_state_dict": saved, "ds_config": _config(groups[0].holders), "ds_version": VERSION}
    with _importable():
        holes.save(root, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A rank's share of a group."""

    numel: int
    padding: int
    mapping: OrderedDict[str, fragment_address]
    starts: Mapping[int, str]
    """Element where a parameter begins; -1 where it began with the last element of the share before."""


def _share(group: Group, place: int) -> _Share:
    """Share `place` of a group (`BF16_Optimizer._create_param_mapping`, bf16_optimizer.py, 0.19.8)."""
    used = sum(map(prod, group.shapes.values()))
    unit = 2 * group.holders  # nccl_start_alignment_factor
    numel = -(-used // unit) * 2
    low, high = place * numel, (place + 1) * numel
    mapping: OrderedDict[str, fragment_address] = OrderedDict()
    starts: dict[int, str] = {}
    at = 0
    for name, shape in group.shapes.items():
        if -1 <= at - low < numel:
            starts[at - low] = name
        first, last = max(at, low), min(at + prod(shape), high)
        if first < last:
            mapping[name] = fragment_address(numel=last - first, start=first - low)
        at += prod(shape)
    padding = numel * group.holders - used if place == group.holders - 1 else 0
    return _Share(numel=numel, padding=padding, mapping=mapping, starts=starts)


@contextmanager
def _importable() -> Iterator[None]:
    """Let a pickle name `fragment_address` as DeepSpeed's, without DeepSpeed."""
    names = ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment")
    there = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[names[-1]].fragment_address = fragment_address  # type: ignore[attr-defined]
    fragment_address.__module__ = names[-1]
    try:
        yield
    finally:
        for name, module in there.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
