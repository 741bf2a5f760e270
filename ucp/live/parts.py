"""The seam between a live run and a checkpoint: which part of which tensor a rank holds.

Whatever a framework does, a rank holds parts of global tensors. A part is described by a `Layout` of declared patterns
and the rank's coordinates in it, and becomes a slice as a part of a file does; nothing else computes regions.

>>> from ucp_patterns.chunk import Chunk
>>> from ucp.core.layout import AxisLayout
>>> half = LivePart(local_shape=(2, 4), layout=Layout((AxisLayout("tp", 2, Chunk(0)),)), coords={"tp": 1})
>>> str(half.to_slice("w", "weight", (4, 4), DType.FLOAT32).pairs[0].global_box)
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
    """What a rank holds of a global tensor."""

    local_shape: tuple[int, ...]
    """Elements per dim of the rank's tensor, before it is cut as a flat buffer."""
    layout: Layout = field(default_factory=Layout)
    """How the tensor lies over the ranks."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Where the rank is, along every axis of `layout`."""
    global_shape: tuple[int, ...] | None = None
    """Elements per dim of the global tensor; None for the shape that the checkpoint has."""
    hint: str = ""
    """What to do if its shape is not that of the checkpoint."""
    unassigned: str = ""
    """What of the checkpoint's tensor no rank holds; empty for nothing."""
    is_padded: bool = False
    """Whether the global tensor may have more rows than the checkpoint's, or fewer: the difference is padding."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> LivePart:
        """All of a tensor."""
        return cls(local_shape=shape, global_shape=shape)

    @property
    def is_full(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.layout.all_axes

    def to_slice(self, param: str, state: str, shape: tuple[int, ...], dtype: DType) -> Slice:
        """The slice of a state of `shape` that the rank holds, in its order.

        Raises ValueError, with what was expected, if the layout does not cut such a tensor to `local_shape`.
        """
        full = self.global_shape
        if self.is_padded and full is not None and full != shape and full[1:] == shape[1:]:
            return _keep_rows(self.to_slice(param, state, full, dtype), shape[0])
        if full not in (None, shape):
            raise ValueError(f"has shape {list(full or ())} in the model and {list(shape)}")
        part = locate_shard(self.layout, shape, coords=self.coords)
        if part.local_shape != self.local_shape and (part.numel or prod(self.local_shape)):
            cut = ", ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in self.layout.axes)
            raise ValueError(
                f"has shape {list(self.local_shape)} on this rank; {cut or 'no cut'} leaves {list(part.local_shape)} "
                f"of {list(shape)}"
            )
        start, stop = 0, prod(part.local_shape) if part.regions else 0
        if part.flat is not None:
            boxes = [run.pair.global_box for run in part.flat]
            start = boxes[0].offsets[0] if boxes else 0
            stop = start + sum(box.sizes[0] for box in boxes)
            if boxes and boxes[-1].stops[0] != stop:
                raise ValueError("is held in several ranges, and one was expected")
        pairs = tuple(region.pair for region in part.regions)
        local = self.local_shape  # of a tensor without elements `part` does not know the other dims
        return Slice(param=param, state=state, dtype=dtype, pairs=pairs, local_shape=local, start=start, stop=stop)

    def narrow_to(self, part: LivePart) -> LivePart:
        """`part`, a flat range of what the model holds, as a part of the global tensor; as it is if it is one already.

        An optimizer of local tensors knows such ranges only.
        """
        if part.layout.axes:
            return part
        return replace(self, layout=Layout(self.layout.axes, part.layout.flat), coords={**self.coords, **part.coords})


def _keep_rows(piece: Slice, rows: int) -> Slice:
    """A slice of adjacent rows without those from row `rows` of the global tensor on."""
    width = prod(piece.local_shape[1:])
    first = piece.pairs[0].global_box.offsets[0] if piece.pairs else 0
    local = (max(min(rows - first, piece.local_shape[0]), 0), *piece.local_shape[1:])
    stop = min(piece.stop, local[0] * width)
    pairs = [RegionPair(Box(p.global_box.offsets, local), Box(p.local.offsets, local)) for p in piece.pairs if local[0]]
    return replace(piece, pairs=tuple(pairs), local_shape=local, start=min(piece.start, stop), stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """Elements of a parameter in a flat tensor."""

    start: int
    """First element of the tensor, in row-major order."""
    numel: int
    """Number of elements."""
    part: LivePart
    """What of the parameter they are."""

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor; one that holds no other parameter may have any shape."""
        return tensor if self.numel == tensor.numel() else tensor.view(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or buffer of the model, as far as this rank holds it."""

    names: tuple[str, ...]
    """Its names in the model of this rank, the principal one first; several when it is tied."""
    dtype: DType
    """Element type."""
    part: LivePart
    """What of it this rank holds."""
    assigned_names: tuple[str, ...] = ()
    """Its names in the whole model, where layers or experts are numbered otherwise there; empty for `names`."""

    @property
    def global_names(self) -> tuple[str, ...]:
        """Its names in the whole model."""
        return self.assigned_names or self.names

    @property
    def name(self) -> str:
        """The principal name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveParam:
    """A parameter that the optimizer of this rank steps, or a part of one."""

    name: str
    """Name in the whole model."""
    keeps: Mapping[str, DType | None] | None
    """States that the optimizer keeps of it, None for a Python number; None when that is not known.

    If `weight` is among them the optimizer keeps a master, from which the model's weight is made.
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
    """Parameter or buffer, by its name in the whole model."""
    slice: Slice
    """What of it this rank holds, by its name in the checkpoint."""
    source: StateIndex
    """Where it lies."""
    is_optimizer_state: bool = False
    """Whether the optimizer keeps it: every state, and masters."""

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.slice.state
