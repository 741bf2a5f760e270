"""The reference model under torch's own data parallelism: in one process, DDP, FSDP2, HSDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.integration.live.reference.model import Chunk, Share
from tests.integration.live.reference.run import ADAM, named_groups
from tests.integration.live.reference.sizes import Sizes, initial, tokens


class TorchRun:
    """The model on this rank, its optimizer, and the next step. Collective. `kind`: dp1, ddp, fsdp2, hsdp."""

    def __init__(self, sizes: Sizes, kind: str, *, seed: str = "", lr: float | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        plain = started(sizes, seed)
        self.names = dict(plain.named_parameters()).keys()
        self.model = _wrapped(plain, kind)
        self.bare = self.model.module if kind == "ddp" else self.model
        self.optimizer = torch.optim.AdamW(
            named_groups(list(self.bare.named_parameters())), **ADAM | {"lr": lr or sizes.lr}
        )

    def step(self, at: int) -> float:
        """Take a step; the mean loss of the global batch before it."""
        rows = tokens(at).chunk(self.ranks)[self.rank]
        logits = self.model(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / self.ranks

    def save(self, folder: Path, step: int) -> None:
        """As torch.distributed.checkpoint's own recipe."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "step": step}, checkpoint_id=str(folder))

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, state and whole tensor, gathered by torch."""
        for name, param in self.bare.named_parameters():
            yield name, "weight", whole_tensor(param.detach())
            for state, own in self.optimizer.state[param].items():
                yield name, state, whole_tensor(own)

    def steps(self) -> set[float]:
        """What the optimizer counts."""
        return {float(own["step"]) for own in self.optimizer.state.values()}

    def expected(self, name: str, state: str, whole: dict[str, dict[str, Tensor]]) -> Tensor:
        """What `states` should give."""
        return whole[state][name]


def started(sizes: Sizes, seed: str) -> Chunk:
    """The whole model with its first weights."""
    model = Chunk(sizes, range(sizes.layers), Share())
    model.load_state_dict(initial(sizes, seed=seed))
    return model


def whole_tensor(own: Tensor) -> Tensor:
    """All of a tensor that ranks share."""
    return own.full_tensor() if isinstance(own, DTensor) else own


def _wrapped(model: Chunk, kind: str) -> nn.Module:
    if kind == "dp1":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = _mesh(kind)
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mesh(kind: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
