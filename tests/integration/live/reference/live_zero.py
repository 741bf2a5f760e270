"""How hand-written ZeRO-1 describes itself to `ucp.load_into`: `optimizer=LiveZero(...)`, and no adapter is needed.

Of every parameter that a rank steps a range of, master and moments lie in flat memory: a `Partition` of the
data-parallel axis, which the core puts beneath the cuts of the model. States are brought straight into that memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from ucp_patterns.partition import Partition

from tests.integration.live.reference.zero import Flat, FlatAdamW
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import DType
from ucp.live.match.groups import LiveGroup
from ucp.live.parts import LiveParam, LivePart

_KEPT = ("weight", "exp_avg", "exp_avg_sq", "step")


class LiveZero:
    """A `ucp.live.adapters.LiveOptimizer` over an optimizer of ranges. `model`: what its parameters are of."""

    def __init__(self, optimizer: FlatAdamW, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.names = {param: name for name, param in model.named_parameters()}
        self.slots = {
            self.names[param]: (part, *part.place(param)) for part in optimizer.parts for param in part.params
        }

    def groups(self) -> list[LiveGroup]:
        """Groups by names."""
        return [
            LiveGroup(
                params=tuple(self.names[own] for own in group["params"]),
                hyper={key: own for key, own in group.items() if key != "params"},
            )
            for group in self.optimizer.param_groups
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """Ranges of parameters, with a master of their own."""
        return list(self._params())

    def _params(self) -> Iterator[LiveParam]:
        for name, (part, param, start) in self.slots.items():
            axis = AxisLayout("dp", part.count, Partition(start, part.numel))
            place = LivePart(local_shape=tuple(param.shape), layout=Layout(flat=(axis,)), coords={"dp": part.index})
            yield LiveParam(name=name, keeps=dict.fromkeys(_KEPT, DType.FLOAT32), part=place)

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> Tensor:
        """The range in the flat memory of master or moment; a count is given to `put`."""
        if counts:
            return torch.empty(shape, dtype=getattr(torch, dtype.value))
        part, param, start = self.slots[name]
        low, high = (min(max(at - part.index * part.numel, 0), part.numel) for at in (start, start + param.numel()))
        return self._memory(part, state)[low:high]

    def _memory(self, part: Flat, state: str) -> Tensor:
        if state == "weight":
            return part.master.detach()
        own: dict[str, Any] = self.optimizer.inner.state[part.master]
        return own.setdefault(state, torch.zeros_like(part.master.detach()))

    def put(self, states: Mapping[str, Mapping[str, Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Set the step of every range; the rest is where it belongs."""
        for name, own in states.items():
            if "step" in own:
                part = self.slots[name][0]
                self.optimizer.inner.state[part.master]["step"] = own["step"].to(torch.float32)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set the hyper-parameters of every group, which each step hands on."""
        for group, restored in zip(self.optimizer.param_groups, hyper, strict=True):
            group.update(restored)
