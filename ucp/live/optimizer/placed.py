"""An optimizer of local tensors, once it is known which parts of the whole these are.

What an optimizer says of itself (whole local tensors, or stretches of them as ZeRO cuts them) is put into the parts of
the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.core.layout import Layout
from ucp.live.adapters import LiveOptimizer
from ucp.live.match.groups import LiveGroup
from ucp.live.parts import LiveParam, LivePart

if TYPE_CHECKING:
    import torch

__all__ = ["PlacedOptimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOptimizer:
    """`own`, of parts of the whole model."""

    own: LiveOptimizer
    """The optimizer as it describes itself."""
    parts: Mapping[str, LivePart]
    """What the model holds of each tensor."""

    def groups(self) -> Sequence[LiveGroup]:
        """Its groups."""
        return self.own.groups()

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Sequence[LiveParam]:
        """What it keeps, as parts of the whole."""
        return [self._placed(param) for param in self.own.params(hyper)]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """Memory of the optimizer, with the padding of a vocabulary, which the slice has not."""
        held = self.parts.get(name)
        is_padded = held is not None and held.is_padded and not counts and shape[1:] == held.local_shape[1:]
        full = held.local_shape if held is not None and is_padded else shape
        return self.own.landing(name, state, dtype, full, counts=counts)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Give it what was brought."""
        self.own.put(states, counts)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.own.put_hyper(hyper)

    def _placed(self, param: LiveParam) -> LiveParam:
        held = self.parts.get(param.name)
        if held is None:
            return param
        apart = {state: _within(held, own) for state, own in param.apart.items()}
        return replace(param, part=param.part and _within(held, param.part), apart=apart)


def _within(held: LivePart, own: LivePart) -> LivePart:
    """The stretch `own` of what the model holds; a part of the whole as it is."""
    if own.layout.axes:
        return own
    return replace(held, layout=Layout(held.layout.axes, own.layout.flat), coords={**held.coords, **own.coords})
