"""A file of a destination in the making (`ucp.io.torch_file.draft`), its tensors asked for by parameter and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ucp.core.dtypes import DType
from ucp.core.index import Index
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Slice
from ucp.io.torch_file.draft import Drafted, FileDraft, Part
from ucp.io.torch_file.tensors import NewTensor

__all__ = ["AtomDraft", "Stretch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a parameter's state in a flat tensor."""

    param: str
    """Parameter."""
    start: int
    """First element of its row-major order."""
    stop: int
    """One past the last."""
    offset: int
    """Element of the flat tensor where the stretch starts."""


class AtomDraft:
    """Hands out the tensors of one file."""

    def __init__(self, path: str, index: Index, cuts: Mapping[str, tuple[RegionPair, ...]] | None = None) -> None:
        """`index`: with the shapes that this file has. `cuts`: parameter to its boxes of the whole, where it is cut."""
        self._file = FileDraft(path)
        self._index = index
        self._cuts = cuts or {}
        self._wholes: dict[tuple[str, str, DType], NewTensor] = {}

    def whole(self, param: str, state: str, dtype: DType, *, shape: tuple[int, ...] | None = None) -> NewTensor:
        """A tensor that is all of a state. Asked for again, it is the same tensor, stored once.

        `shape`: the shape to give it, if not its own.
        """
        key = (param, state, dtype)
        if key not in self._wholes:
            source = self._index.atoms[param].states[state]
            own = self._slice(state, dtype, Stretch(param=param, start=0, stop=source.numel, offset=0))
            shape = source.global_shape if shape is None else shape
            self._wholes[key] = self._file.filled(dtype, shape, [Part(offset=0, slice=own)])
        return self._wholes[key]

    def flat(self, state: str, dtype: DType, numel: int, stretches: Iterable[Stretch]) -> NewTensor:
        """A one-dimensional tensor with stretches of several parameters in it; zero elsewhere."""
        parts = [Part(offset=own.offset, slice=self._slice(state, dtype, own)) for own in stretches]
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

    def _slice(self, state: str, dtype: DType, stretch: Stretch) -> Slice:
        """A stretch of what this file has of a state."""
        atom = self._index.atoms[stretch.param]
        shape = atom.states[state].global_shape
        whole = Box.whole(shape)
        cut = self._cuts.get(stretch.param) if shape == atom.global_shape else None
        return Slice(
            param=stretch.param,
            state=state,
            dtype=dtype,
            pairs=(RegionPair(whole, whole),) if cut is None else cut,
            local_shape=shape,
            start=stretch.start,
            stop=stretch.stop,
        )
