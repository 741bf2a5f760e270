"""torch's ZeroRedundancyOptimizer: every rank has all parameters, and the states of those that it steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.errors import UnsupportedError
from ucp.live.adapters import LiveModel
from ucp.live.match.groups import LiveGroup
from ucp.live.optimizer.torch_optimizer import TorchOptimizer, describe_optimizer, set_hyper
from ucp.live.parts import LiveParam

if TYPE_CHECKING:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancy", "describe_zero_redundancy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRedundancy:
    """An optimizer that leaves most parameters to other ranks."""

    outer: ZeroRedundancyOptimizer
    """What the user steps: groups of all parameters, whose hyper-parameters it copies before every step."""
    names: tuple[tuple[str, ...], ...]
    """Names of the parameters of each group, of all ranks."""
    own: TorchOptimizer
    """The optimizer of this rank's parameters."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        return [replace(group, params=names) for group, names in zip(self.own.groups(), self.names, strict=True)]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """What it keeps of the parameters that this rank steps."""
        return self.own.params(hyper)

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """As of the optimizer of this rank."""
        return self.own.landing(name, state, dtype, shape, counts=counts)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """As of the optimizer of this rank."""
        self.own.put(states, counts)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group, in both optimizers."""
        self.own.put_hyper(hyper)
        set_hyper(self.outer.param_groups, hyper)


def describe_zero_redundancy(optimizer: ZeroRedundancyOptimizer, model: LiveModel) -> ZeroRedundancy:
    """The optimizer by names. Raises as `describe_optimizer`, and UnsupportedError for one that overlaps with DDP."""
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedError(
            "expected a ZeroRedundancyOptimizer whose parameters are dealt out from the start; got one with "
            "overlap_with_ddp=True, which deals them out during training. Make it with overlap_with_ddp=False"
        )
    own = describe_optimizer(optimizer.optim, model)
    names = tuple(tuple(model.owners[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    return ZeroRedundancy(outer=optimizer, names=names, own=own)
