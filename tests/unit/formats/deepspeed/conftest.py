"""A checkpoint of a run that never was: DeepSpeed's files with plain values, to be changed before they are saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]

TRAINED: tuple[Shapes, ...] = ({"a.weight": (3, 5), "b.weight": (4, 2)}, {"a.bias": (3,), "b.bias": (4,)})


@dataclass
class FakeRun:
    """Files by name, and what they were made from."""

    stage: int
    ranks: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path, *, legacy: bool = False) -> Path:
        """Write the files below `folder`, with `latest`; gives the folder."""
        tag = folder / "global_step7"
        tag.mkdir(parents=True, exist_ok=True)
        for name, root in self.files.items():
            torch.save(root, tag / name, _use_new_zipfile_serialization=not legacy)
        (folder / "latest").write_text("global_step7")
        return folder

    @property
    def models(self) -> list[dict[str, Any]]:
        return [root for name, root in self.files.items() if "model_states" in name]

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        return [root for name, root in self.files.items() if "optim_states" in name]


def optimizer_name(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_name(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


@pytest.fixture
def fake_run() -> Callable[..., FakeRun]:
    """`fake_run(stage, ranks, groups=..., dtype=...)`: a run with a frozen weight, a buffer and a tied weight."""
    return make_run


def make_run(
    stage: int, ranks: int, *, groups: tuple[Shapes, ...] = TRAINED, dtype: torch.dtype = torch.bfloat16
) -> FakeRun:
    run = FakeRun(stage, ranks)
    start = 1
    for shapes in groups:
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            run.weights[name] = torch.arange(start, start + numel, dtype=torch.float32).reshape(shape)
            start += numel
    run.weights["frozen"] = torch.arange(-7.0, 0.0)
    if stage == 3:
        _add_sharded(run, groups, dtype)
    elif stage:
        _add_shared(run, groups, dtype)
    else:
        _add_whole(run, groups, dtype)
    return run


def base_model(run: FakeRun, groups: tuple[Shapes, ...]) -> dict[str, Any]:
    return {
        "buffer_names": ["mean"],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in groups],
        "frozen_param_shapes": OrderedDict(frozen=torch.Size([7])),
        "shared_params": {"head": next(iter(groups[0]))},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 70,
        "dp_world_size": run.ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": run.stage}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8 ",
    }


def _module(run: FakeRun, dtype: torch.dtype, *, placeholders: bool = False) -> OrderedDict[str, Tensor]:
    def own(weight: Tensor) -> Tensor:
        return torch.empty(0, dtype=dtype) if placeholders else weight.to(dtype)

    module = OrderedDict((name, own(weight)) for name, weight in run.weights.items())
    module["mean"] = torch.full((2,), 0.5)
    module["head"] = module["a.weight"] if "a.weight" in module else next(iter(module.values()))
    return module


def param_groups(count: int) -> list[dict[str, Any]]:
    return [{"lr": 0.1 * (number + 1), "betas": (0.9, 0.99), "params": [number]} for number in range(count)]


def _flat(run: FakeRun, shapes: Shapes) -> Tensor:
    return torch.cat([run.weights[name].flatten() for name in shapes])


def _add_shared(run: FakeRun, groups: tuple[Shapes, ...], dtype: torch.dtype) -> None:
    frozen = {"frozen_param_fragments": OrderedDict(frozen=run.weights["frozen"].to(dtype))} if run.stage == 2 else {}
    run.files["mp_rank_00_model_states.pt"] = {"module": _module(run, dtype), **base_model(run, groups), **frozen}
    flats = [_flat(run, shapes) for shapes in groups]
    shares = [-(-flat.numel() // (2 * run.ranks)) * 2 for flat in flats]
    for rank in range(run.ranks):
        own = [flat[rank * s : (rank + 1) * s].clone() for flat, s in zip(flats, shares, strict=True)]
        padded = [
            torch.cat([part, torch.full((s - part.numel(),), torch.nan)]) for part, s in zip(own, shares, strict=True)
        ]
        state = {
            number: {"step": torch.tensor(7.0), "exp_avg": 2 * part, "exp_avg_sq": 3 * part}
            for number, part in enumerate(padded)
        }
        run.files[optimizer_name(rank)] = {
            "optimizer_state_dict": {
                "loss_scaler": None,
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": {"state": state, "param_groups": param_groups(len(groups))},
                "single_partition_of_fp32_groups": own,
                "zero_stage": run.stage,
                "group_paddings": [99] * len(groups),
                "partition_count": [run.ranks] * len(groups),
            },
            "ds_config": run.models[0]["ds_config"],
            "ds_version": "0.19.8",
        }


def _add_sharded(run: FakeRun, groups: tuple[Shapes, ...], dtype: torch.dtype) -> None:
    def chunk(tensor: Tensor, rank: int) -> Tensor:
        length = -(-tensor.numel() // run.ranks)
        padded = torch.cat([tensor.flatten(), torch.full((length * run.ranks - tensor.numel(),), torch.nan)])
        return padded[rank * length : (rank + 1) * length].clone()

    for rank in range(run.ranks):
        run.files[model_name(rank)] = {
            "module": _module(run, dtype, placeholders=True),
            **base_model(run, groups),
            "frozen_param_fragments": OrderedDict(frozen=chunk(run.weights["frozen"], rank).to(dtype)),
            "shared_params": {"head": next(iter(groups[0]))} if rank == 0 else {},
        }
        flats = [torch.cat([chunk(run.weights[name], rank) for name in shapes]) for shapes in groups]
        state = {number: {"step": 7, "exp_avg": 2 * flat, "exp_avg_sq": 3 * flat} for number, flat in enumerate(flats)}
        run.files[optimizer_name(rank)] = {
            "optimizer_state_dict": {
                "zero_stage": 3,
                "loss_scaler": None,
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": run.ranks,
                "optimizer_state_dict": {"state": state, "param_groups": param_groups(len(groups))},
                "fp32_flat_groups": flats,
            },
            "ds_config": run.models[0]["ds_config"],
            "ds_version": "0.19.8",
        }


def _add_whole(run: FakeRun, groups: tuple[Shapes, ...], dtype: torch.dtype) -> None:
    state, entries, number = {}, [], 0
    for group, shapes in zip(param_groups(len(groups)), groups, strict=True):
        numbers = []
        for name in shapes:
            weight = run.weights[name]
            state[number] = {"step": torch.tensor(7.0), "exp_avg": 2 * weight, "exp_avg_sq": 3 * weight}
            numbers.append(number)
            number += 1
        entries.append({**group, "params": numbers})
    run.files["mp_rank_00_model_states.pt"] = {
        "module": _module(run, dtype),
        **base_model(run, groups),
        "optimizer": {"state": state, "param_groups": entries},
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
    }
