"""An optimizer of local tensors, once it is known which parts of the whole these are.

What an optimizer says of itself (whole local tensors, or stretches of them as ZeRO cuts them) is put into the parts of
the model; states of a padded vocabulary get their padding back, as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.core.layout import Layout
from ucp.core.names import WEIGHT
from ucp.errors import UnsupportedError
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
    padded: Mapping[str, tuple[int, ...]]
    """Shape that a rank's tensor has in truth, where it has rows that no checkpoint has."""
    filled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Parameter and state to the memory with its padding, of which the checkpoint's rows are a view."""

    def groups(self) -> Sequence[LiveGroup]:
        """Its groups."""
        return self.own.groups()

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Sequence[LiveParam]:
        """What it keeps, as parts of the whole. Raises UnsupportedError for stretches of a padded vocabulary."""
        return [self._placed(param) for param in self.own.params(hyper)]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """Memory of the optimizer, the padding left out."""
        full = self.padded.get(name)
        if full is None or counts or shape != self.parts[name].local_shape:
            return self.own.landing(name, state, dtype, shape, counts=counts)
        memory = self.own.landing(name, state, dtype, full, counts=counts)
        for dim, (kept, length) in enumerate(zip(shape, full, strict=True)):
            if kept < length and state != WEIGHT:
                memory.narrow(dim, kept, length - kept).zero_()
        self.filled[name, state] = memory
        return memory[tuple(slice(0, length) for length in shape)]

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Give it what was brought, with its padding."""
        whole = {
            name: {state: self.filled.get((name, state), value) for state, value in own.items()}
            for name, own in states.items()
        }
        self.own.put(whole, counts)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.own.put_hyper(hyper)

    def _placed(self, param: LiveParam) -> LiveParam:
        own, held = param.part, self.parts.get(param.name)
        if own is None or held is None or own.layout.axes:
            return param
        if prod(self.padded.get(param.name, held.local_shape)) != prod(held.local_shape):
            raise UnsupportedError(
                f"{param.name}: an optimizer that cuts parameters in stretches cannot have a padded vocabulary that "
                "the checkpoint lacks. Convert the checkpoint to the padded size first (`ucp convert`)"
            )
        layout = Layout(held.layout.axes, own.layout.flat)
        return replace(
            param,
            part=LivePart(local_shape=held.local_shape, layout=layout, coords={**held.coords, **own.coords}),
        )
