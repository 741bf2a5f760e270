"""Random models of odd sizes under FSDP1, saved as LOCAL_STATE_DICT, for `test_flat_sizes.py`, under torchrun.

flat_sizes_worker.py OUT SEED...      OUT/<seed>/{checkpoint/, shapes.json, kind.json, truth.pt} for each seed
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp._flat_param import FlatParamHandle

COMPUTE_TYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Elements of the type in which a module computes tell where its parameters start with `use_orig_params`."""


class Layer(nn.Module):
    """Parameters of any shape, a buffer, and layers inside."""

    def __init__(self, choose: random.Random, depth: int) -> None:
        super().__init__()
        for number in range(choose.randint(1, 4)):
            shape = [choose.choice((1, 1, 2, 3, 5, 7, 8)) for _ in range(choose.randint(1, 3))]
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
        if choose.random() < 0.3:
            self.register_parameter("tied", choose.choice([*self.parameters()]))
        self.register_buffer("seen", torch.arange(choose.randint(1, 5)))
        self.inner = nn.ModuleList(Layer(choose, depth - 1) for _ in range(choose.randint(0, 2) if depth else 0))

    def forward(self, x: Tensor) -> Tensor:
        """A number to which every parameter adds."""
        for number, param in enumerate(self.parameters(recurse=False)):
            x = x + (param.float() * (1 + number)).square().mean().to(x.dtype)
        for layer in self.inner:
            x = layer(x)
        return x


def wrap(model: Layer, choose: random.Random, settings: dict[str, Any]) -> FullyShardedDataParallel:
    """The model as an FSDP module, with some of the layers inside it as further ones."""
    for number, layer in enumerate(model.inner):
        assert isinstance(layer, Layer)
        if choose.random() < 0.5:
            model.inner[number] = wrap(layer, choose, settings)
    return FullyShardedDataParallel(model, **settings)


def settings_of(choose: random.Random) -> dict[str, Any]:
    """Arguments of FullyShardedDataParallel."""
    compute = choose.choice(COMPUTE_TYPES)
    strategies: list[Any] = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    return {
        "use_orig_params": choose.random() < 0.6,
        "device_id": torch.device("cpu"),
        "mixed_precision": None if compute is torch.float32 else MixedPrecision(param_dtype=compute),
        "sharding_strategy": choose.choice(strategies),
    }


def gather_states(
    gather: Any, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, **how: Any
) -> dict[str, Any]:
    """States by name. On a CPU torch 2.13 gathers exp_avg and exp_avg_sq to the same memory, unless it is copied."""
    views = FlatParamHandle._get_unflat_views_aligned
    with mock.patch.object(
        FlatParamHandle, "_get_unflat_views_aligned", lambda handle, tensor: views(handle, tensor.clone())
    ):
        states: dict[str, Any] = gather(model, optimizer, **how)
    return states


def save(folder: Path, seed: int) -> None:
    """Train one model, and save it with its optimizer and the truth."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    layer, settings = Layer(choose, 2), settings_of(choose)
    is_named = choose.random() < 0.5
    if is_named and len([*layer.parameters()]) > 1 and choose.random() < 0.3:
        settings["ignored_states"] = [choose.choice([*layer.parameters()])]
    shapes = {name: list(param.shape) for name, param in layer.named_parameters()}
    model = wrap(layer, choose, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(torch.tensor(float(step + dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = {name: own.clone() for name, own in model.state_dict().items()}
    states = gather_states(FullyShardedDataParallel.full_optim_state_dict, model, optimizer, rank0_only=False)["state"]
    rank = dist.get_rank()
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), folder / "checkpoint" / f"pytorch_model_fsdp_rank{rank}.bin")
    kind = choose.choice((StateDictType.LOCAL_STATE_DICT, StateDictType.FULL_STATE_DICT))
    with FullyShardedDataParallel.state_dict_type(model, kind):
        name_states = FullyShardedDataParallel.optim_state_dict
        saved = gather_states(name_states, model, optimizer) if is_named else optimizer.state_dict()
    torch.save(saved, folder / "checkpoint" / f"optimizer_0_rank{rank}.bin")
    truth = {f"{name}/weight": own for name, own in weights.items()}
    for name, entries in states.items():
        truth |= {f"{name}/{key}": torch.as_tensor(own).clone() for key, own in entries.items()}
    if rank == 0:
        (folder / "shapes.json").write_text(json.dumps(shapes))
        torch.save({name.replace("_fsdp_wrapped_module.", ""): own for name, own in truth.items()}, folder / "truth.pt")
        kind = {"is_named": is_named, "use_orig_params": settings["use_orig_params"]}
        (folder / "kind.json").write_text(json.dumps(kind))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for number in map(int, sys.argv[2:]):
        save(Path(sys.argv[1]) / str(number), number)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
