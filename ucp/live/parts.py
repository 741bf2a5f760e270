"""The seam between a live run and a checkpoint: which part of which tensor a rank holds.

Whatever a framework does, a rank holds parts of tensors of the whole model. A part is said by a `Layout` of declared
patterns and the rank's place in it, and comes to a slice as a part of a file does; nothing else computes regions.

>>> from ucp_patterns.chunk import Chunk
>>> from ucp.core.layout import AxisLayout
>>> half = LivePart(local_shape=(2, 4), layout=Layout((AxisLayout("tp", 2, Chunk(0)),)), coords={"tp": 1})
>>> str(half.slice_of("w", "weight", (4, 4), DType.FLOAT32).pairs[0].global_box)
'[2:4, 0:4]'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ucp.core.index import StateIndex
from ucp.core.layout import Layout, locate_shard
from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice
from ucp.core.tensor import DType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """What a rank holds of a tensor of the whole model."""

    local_shape: tuple[int, ...]
    """Elements per dim of the rank's tensor, before a flat cut."""
    layout: Layout = field(default_factory=Layout)
    """How the tensor lies over the ranks."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Where the rank is, along every axis of `layout`."""
    global_shape: tuple[int, ...] | None = None
    """Elements per dim of the whole; None where the live side does not know it, and the checkpoint's is cut."""
    hint: str = ""
    """What to do where its shape is not that of the checkpoint."""
    unassigned: str = ""
    """What of the checkpoint's no rank holds; empty for nothing."""
    is_padded: bool = False
    """Whether the whole may have other rows than the checkpoint's: more, which are padding, or less of such."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> LivePart:
        """All of a tensor."""
        return cls(local_shape=shape, global_shape=shape)

    @property
    def is_full(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.layout.all_axes

    def to_slice(self, param: str, state: str, shape: tuple[int, ...], dtype: DType) -> Slice:
        """The slice of a state of `shape` that the rank holds, in its own order.

        Raises ValueError, with what was expected, where the layout does not cut such a tensor to `local_shape`.
        """
        own = self.global_shape
        if self.is_padded and own is not None and own != shape and own[1:] == shape[1:]:
            return _first_rows(self.to_slice(param, state, own, dtype), shape[0])
        if own not in (None, shape):
            raise ValueError(f"has shape {list(own or ())} in the model and {list(shape)}")
        part = locate_shard(self.layout, shape, coords=self.coords)
        if part.local_shape != self.local_shape and (part.numel or prod(self.local_shape)):
            cut = ", ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in self.layout.axes)
            raise ValueError(
                f"has shape {list(self.local_shape)} on this rank; {cut or 'no cut'} leaves {list(part.local_shape)} "
                f"of {list(shape)}"
            )
        start, stop = 0, prod(part.local_shape) if part.regions else 0
        if part.flat is not None:
            runs = [run.pair.global_box for run in part.flat]
            start = runs[0].offsets[0] if runs else 0
            stop = start + sum(run.sizes[0] for run in runs)
            if runs and runs[-1].stops[0] != stop:
                raise ValueError("is held in several stretches, and one was expected")
        pairs = tuple(own.pair for own in part.regions)
        local = self.local_shape  # which says more than `part` of one without elements
        return Slice(param=param, state=state, dtype=dtype, pairs=pairs, local_shape=local, start=start, stop=stop)

    def narrow_to(self, own: LivePart) -> LivePart:
        """The range `own` of what the model holds as a part of the whole; one that is that already as it is."""
        if own.layout.axes:
            return own
        return replace(self, layout=Layout(self.layout.axes, own.layout.flat), coords={**self.coords, **own.coords})


def _first_rows(own: Slice, rows: int) -> Slice:
    """The first part of a slice of one stretch of rows, that of rows below `rows`."""
    width = prod(own.local_shape[1:])
    first = own.pairs[0].global_box.offsets[0] if own.pairs else 0
    local = (max(min(rows - first, own.local_shape[0]), 0), *own.local_shape[1:])
    stop = min(own.stop, local[0] * width)
    pairs = [RegionPair(Box(p.global_box.offsets, local), Box(p.local.offsets, local)) for p in own.pairs if local[0]]
    return replace(own, pairs=tuple(pairs), local_shape=local, start=min(own.start, stop), stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """Elements of a parameter in a flat tensor."""

    start: int
    """First element of the tensor, in row-major order."""
    numel: int
    """Elements held."""
    part: LivePart
    """What of the parameter they are."""

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor; one for this parameter alone may have its shape."""
        return tensor if self.numel == tensor.numel() else tensor.view(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or buffer of the model, as far as this rank holds it."""

    names: tuple[str, ...]
    """Names it goes by in the model of this rank, the first of them its own; several when it is tied."""
    dtype: DType
    """Element type."""
    part: LivePart
    """What of it this rank holds."""
    assigned_names: tuple[str, ...] = ()
    """Names it goes by in the whole model, where ranks number layers or experts otherwise; empty for `names`."""

    @property
    def global_names(self) -> tuple[str, ...]:
        """Names it goes by in the whole model."""
        return self.assigned_names or self.names

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveParam:
    """A parameter that the optimizer of this rank steps, or a part of one."""

    name: str
    """Name in the whole model."""
    keeps: Mapping[str, DType | None] | None
    """States that the optimizer keeps of it, None where it is a Python number; None when that is not known.

    With `weight` among them it keeps a master of its own, from which the model's weight is made.
    """
    part: LivePart | None = None
    """What of it this rank steps; None for what the model holds of it."""
    apart: Mapping[str, LivePart] = field(default_factory=dict)
    """States of which the rank keeps another part."""
    is_frozen: bool = False
    """Whether it is in a group of the optimizer and gets no gradient (`requires_grad=False`), so is not stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadItem:
    """A state to bring into the model or its optimizer."""

    name: str
    """Parameter or buffer, as the whole model calls it."""
    slice: Slice
    """What of it this rank holds, as the checkpoint calls it."""
    source: StateIndex
    """Where it lies."""
    is_optimizer_state: bool = False
    """Whether the optimizer keeps it: every state, and masters."""

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.slice.state
