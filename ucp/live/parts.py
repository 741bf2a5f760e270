"""Which parts of global tensors a rank of a live run holds, whatever its framework.

A part is described by a `Layout` of declared patterns and the rank's coordinates on its axes. `LivePart.to_slice`
computes its regions from them, as is done for the ranks of a checkpoint.

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

_MEMORY = "<memory of rank "
"""Prefix of what stands for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """What a rank holds of a global tensor."""

    local_shape: tuple[int, ...]
    """Elements per dim of the rank's tensor, before it is cut as a flat buffer."""
    layout: Layout = field(default_factory=Layout)
    """How the tensor is distributed over the ranks."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """The rank's coordinate on every axis of `layout`."""
    global_shape: tuple[int, ...] | None = None
    """Elements per dim of the global tensor; None for the shape that the checkpoint has."""
    hint: str = ""
    """What to do if its shape is not that of the checkpoint."""
    unassigned: str = ""
    """Which elements of the checkpoint's tensor no rank holds, as text; empty if there are none."""
    is_padded: bool = False
    """Whether the global tensor may have more or fewer rows than the checkpoint's: the difference is padding."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> LivePart:
        """A part that is the whole tensor."""
        return cls(local_shape=shape, global_shape=shape)

    @property
    def is_full(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.layout.all_axes

    def to_slice(self, param: str, state: str, shape: tuple[int, ...], dtype: DType) -> Slice:
        """The slice that the rank holds of a state of `shape`.

        Raises ValueError if the layout does not cut such a tensor to `local_shape`; callers put the name before the
        message, and where the state is behind it.
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
                f"has shape {list(self.local_shape)} on this rank; {cut or 'no cut'} gives {list(part.local_shape)} "
                f"of {list(shape)}"
            )
        start, stop = 0, prod(part.local_shape) if part.regions else 0
        if part.flat is not None:
            boxes = [run.pair.global_box for run in part.flat]
            start = boxes[0].offsets[0] if boxes else 0
            stop = start + sum(box.sizes[0] for box in boxes)
            if boxes and boxes[-1].stops[0] != stop:
                raise ValueError("has several ranges (expected one) on this rank of the tensor")
        pairs = tuple(region.pair for region in part.regions)
        local = self.local_shape  # `part.local_shape` may be another one without elements
        return Slice(param=param, state=state, dtype=dtype, pairs=pairs, local_shape=local, start=start, stop=stop)

    def narrow_to(self, part: LivePart) -> LivePart:
        """`part`, a flat range of this local tensor, as a part of the global tensor; unchanged if it is one already.

        An optimizer that steps local tensors knows only such ranges.
        """
        if part.layout.axes:
            return part
        return replace(self, layout=Layout(self.layout.axes, part.layout.flat), coords={**self.coords, **part.coords})


def _keep_rows(piece: Slice, rows: int) -> Slice:
    """A slice of adjacent rows, without those at or after row `rows` of the global tensor."""
    width = prod(piece.local_shape[1:])
    first = piece.pairs[0].global_box.offsets[0] if piece.pairs else 0
    local = (max(min(rows - first, piece.local_shape[0]), 0), *piece.local_shape[1:])
    stop = min(piece.stop, local[0] * width)
    pairs = [RegionPair(Box(p.global_box.offsets, local), Box(p.local.offsets, local)) for p in piece.pairs if local[0]]
    return replace(piece, pairs=tuple(pairs), local_shape=local, start=min(piece.start, stop), stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """The elements of a parameter that a flat tensor holds."""

    start: int
    """First element of the tensor, in row-major order."""
    numel: int
    """Number of elements."""
    part: LivePart
    """Which part of the parameter they are."""

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of `tensor`, which may have any shape if it holds no other parameter."""
        return tensor if self.numel == tensor.numel() else tensor.view(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """This rank's part of a parameter or buffer of the model."""

    names: tuple[str, ...]
    """Its names in the model of this rank, the principal one first; several when it is tied."""
    dtype: DType
    """Element type."""
    part: LivePart
    """Which part this rank holds."""
    assigned_names: tuple[str, ...] = ()
    """Its names in the whole model, if layers or experts have other numbers there; empty if they are `names`."""

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
    """Its principal name, as in `LiveTensor.name`."""
    keeps: Mapping[str, DType | None] | None
    """State that the optimizer keeps for it to its dtype (None: a Python number). None if the states are not known.

    If `weight` is among them, the optimizer keeps a master weight, from which the model's weight is cast.
    """
    part: LivePart | None = None
    """Which part this rank steps; None for the part that the model holds."""
    apart: Mapping[str, LivePart] = field(default_factory=dict)
    """State to its part, for states of which the rank keeps another part."""
    is_frozen: bool = False
    """Whether it is in a group of the optimizer but gets no gradient (`requires_grad=False`), so is never stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadItem:
    """A state to load into the model or its optimizer."""

    name: str
    """Parameter or buffer, by its principal name, as in `LiveTensor.name`."""
    slice: Slice
    """Which part this rank holds, by the name in the checkpoint."""
    source: StateIndex
    """Where its bytes are in the checkpoint."""
    is_optimizer_state: bool = False
    """Whether the optimizer keeps it: an optimizer state, or a master weight."""

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.slice.state


def memory_path(rank: int) -> str:
    """What stands for the memory of a rank in place of a file."""
    return f"{_MEMORY}{rank}>"


def memory_rank(path: str) -> int:
    """The rank whose memory a path stands for.

    >>> memory_rank(memory_path(3))
    3
    """
    return int(path.removeprefix(_MEMORY)[:-1])


def is_memory(path: str | None) -> bool:
    """Whether a path stands for the memory of a rank."""
    return path is not None and path.startswith(_MEMORY)
