"""A file of a destination in the making (`ucp.io.torch_file.draft`), its tensors asked for by parameter and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ucp.contract.flat_buffer import FlatLayout
from ucp.core.dtypes import DType
from ucp.core.index import Index
from ucp.core.layout import AxisLayout, Layout, Pattern, part_of
from ucp.core.layout import Part as LocalPart
from ucp.core.region import RegionPair
from ucp.core.slices import Slice, whole_slice
from ucp.io.torch_file.draft import Drafted, FileDraft, Part
from ucp.io.torch_file.layout import NewTensor
from ucp_formats.deepspeed.tp.layout import TensorLayout

__all__ = ["AtomDraft", "Stored"]


class Stored(NamedTuple):
    """A range of a parameter in a tensor of a file."""

    param: str
    """Parameter."""
    offset: int
    """Element of the tensor where it starts."""
    pairs: tuple[RegionPair, ...]
    """Boxes of the whole that the model-parallel rank has."""
    local_shape: tuple[int, ...]
    """Shape of what it has."""
    start: int
    """First element of the row-major order of that."""
    stop: int
    """One past the last."""
    layout: Layout
    """How the parameter lies over the ranks."""


class AtomDraft:
    """Hands out the tensors of one file."""

    def __init__(
        self,
        path: str,
        index: Index,
        cuts: Mapping[str, TensorLayout] | None = None,
        tp: int = 0,
        *,
        known_from: str = "",
    ) -> None:
        """`index`: with the shapes that this file has. `cuts`: layouts of what is cut over tensor-parallel ranks.

        `tp`: the rank among these. `known_from`: where the cuts are known from.
        """
        self._file = FileDraft(path)
        self._index = index
        self._cuts = cuts or {}
        self._tp = tp
        self._known_from = known_from
        self._wholes: dict[tuple[str, str, DType], NewTensor] = {}

    def whole(self, param: str, state: str, dtype: DType, *, shape: tuple[int, ...] | None = None) -> NewTensor:
        """A tensor that is all that the rank has of a state. Asked for again, it is the same tensor, stored once.

        `shape`: the shape to give it, if not its own.
        """
        key = (param, state, dtype)
        if key not in self._wholes:
            source = self._index.atoms[param].states[state]
            own = whole_slice(param, state, source, dtype=dtype)
            layout = None
            if param in self._cuts and source.global_shape == self._index.atoms[param].global_shape:
                layout = self._layout(param)
                own = replace(own, pairs=_pairs(self._part(param, layout)))
            shape = source.global_shape if shape is None else shape
            self._wholes[key] = self._file.filled(dtype, shape, [Part(offset=0, slice=own, layout=layout)])
        return self._wholes[key]

    def stored(self, layout: FlatLayout, axes: Mapping[str, AxisLayout], rank: int) -> list[Stored]:
        """What the flat tensor of data-parallel rank `rank` has of each parameter; `axes`: those of `layout`."""
        found = []
        for param, (start, _) in layout.spans(rank).items():
            lies = self._layout(param, axes[param])
            part = self._part(param, lies, rank)
            pairs = _pairs(part)
            for own in part.flat or ():
                (at,), (first,), (numel,) = own.pair.local.offsets, own.pair.whole.offsets, own.pair.whole.sizes
                found.append(Stored(param, start + at, pairs, part.local_shape, first, first + numel, lies))
        return found

    def flat(self, state: str, dtype: DType, numel: int, stored: Iterable[Stored]) -> NewTensor:
        """A one-dimensional tensor with these ranges in it; zero elsewhere, and where a parameter lacks the state."""
        atoms = self._index.atoms
        parts = [
            Part(
                offset=offset,
                slice=Slice(
                    param=param, state=state, dtype=dtype, pairs=pairs, local_shape=shape, start=start, stop=stop
                ),
                layout=layout,
            )
            for param, offset, pairs, shape, start, stop, layout in stored
            if state in atoms[param].states
        ]
        return self._file.filled(dtype, (numel,), parts)

    def zeros(self, dtype: DType, shape: tuple[int, ...]) -> NewTensor:
        """A tensor that nothing fills."""
        return self._file.filled(dtype, shape)

    def carried(self, value: object) -> object:
        """A value of the source's extras, its tensors copied into this file."""
        return self._file.carried(value)

    def finish(self, root: object) -> Drafted:
        """The file that holds `root`."""
        return self._file.finish(root)

    def _layout(self, param: str, *flat: AxisLayout) -> Layout:
        """How a parameter lies over the ranks; `flat` cuts the row-major order of what model-parallel ranks have."""
        cut = self._cuts.get(param)
        return _one_layout(() if cut is None else (cut.pattern, cut.parts, self._known_from), flat)

    def _part(self, param: str, layout: Layout, rank: int = 0) -> LocalPart:
        """What data-parallel rank `rank` has of a parameter."""
        cut = self._cuts.get(param)
        shape = self._index.atoms[param].global_shape if cut is None else cut.global_shape
        return part_of(layout, shape, coords={"tp": self._tp, "dp": rank})


@lru_cache(maxsize=1 << 14)
def _one_layout(cut: tuple[Pattern, int, str] | tuple[()], flat: tuple[AxisLayout, ...]) -> Layout:
    """One object for all ranks and states of a parameter."""
    return Layout((AxisLayout("tp", cut[1], cut[0], cut[2]),) if cut else (), flat)


def _pairs(part: LocalPart) -> tuple[RegionPair, ...]:
    return tuple([own.pair for own in part.held])
