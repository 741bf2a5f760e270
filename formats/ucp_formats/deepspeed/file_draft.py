"""A torch file of a destination in the making: its value, and the slices that will fill its tensors.

The value is built from plain values and the tensors that a draft hands out; `finish` lays the file out and says where
each slice goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ucp.atom import Index
from ucp.dtypes import DType
from ucp.io.graft import grafted
from ucp.io.torchzip import NewStorage, NewTensor, layout_torch_zip
from ucp.region import Box, RegionPair
from ucp.slice import Slice
from ucp.target import OutputFile, Placement, RawCopy
from ucp.tensor import TensorRef, contiguous_strides

__all__ = ["Drafted", "FileDraft", "Part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a parameter's state in a flat tensor."""

    param: str
    """Parameter."""
    start: int
    """First element of its row-major order."""
    stop: int
    """One past the last."""
    offset: int
    """Element of the flat tensor where the stretch starts."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A file that is decided."""

    file: OutputFile
    """Its size and known bytes."""
    placements: tuple[Placement, ...]
    """Slices that fill it, in increasing offset."""
    raw: tuple[RawCopy, ...]
    """Tensors of extras that fill it."""


class FileDraft:
    """Hands out the tensors of one file and remembers what fills them."""

    def __init__(self, path: str, index: Index, cuts: Mapping[str, tuple[RegionPair, ...]] | None = None) -> None:
        """`index`: with the shapes that this file has. `cuts`: parameter to its boxes of the whole, where it is cut."""
        self._path = path
        self._index = index
        self._cuts = cuts or {}
        self._filled: list[tuple[NewStorage, int, Slice]] = []
        self._moved: dict[NewStorage, TensorRef] = {}
        self._wholes: dict[tuple[str, str, DType], NewTensor] = {}

    def whole(self, param: str, state: str, dtype: DType, *, shape: tuple[int, ...] | None = None) -> NewTensor:
        """A tensor that is all of a state. Asked for again, it is the same tensor, stored once.

        `shape`: the shape to give it, if not its own.
        """
        key = (param, state, dtype)
        if key not in self._wholes:
            source = self._index.atoms[param].states[state]
            storage = NewStorage(dtype, source.numel)
            shape = source.global_shape if shape is None else shape
            self._wholes[key] = NewTensor(storage=storage, shape=shape, strides=contiguous_strides(shape))
            if source.numel:
                part = Part(param=param, start=0, stop=source.numel, offset=0)
                self._filled.append((storage, 0, self._slice(state, dtype, part)))
        return self._wholes[key]

    def flat(self, state: str, dtype: DType, numel: int, parts: Iterable[Part]) -> NewTensor:
        """A one-dimensional tensor with stretches of several parameters in it; zero elsewhere."""
        storage = NewStorage(dtype, numel)
        for part in parts:
            self._filled.append((storage, part.offset, self._slice(state, dtype, part)))
        return NewTensor(storage=storage, shape=(numel,), strides=(1,))

    def _slice(self, state: str, dtype: DType, part: Part) -> Slice:
        """A stretch of what this file has of a state."""
        shape = self._index.atoms[part.param].states[state].global_shape
        whole = Box.whole(shape)
        cut = self._cuts.get(part.param) if shape else None
        return Slice(
            param=part.param,
            state=state,
            dtype=dtype,
            pairs=(RegionPair(whole, whole),) if cut is None else cut,
            local_shape=shape,
            start=part.start,
            stop=part.stop,
        )

    def zeros(self, dtype: DType, shape: tuple[int, ...]) -> NewTensor:
        """A tensor that nothing fills."""
        strides = contiguous_strides(shape)
        numel = 1
        for length in shape:
            numel *= length
        return NewTensor(storage=NewStorage(dtype, numel), shape=shape, strides=strides)

    def carried(self, value: object) -> object:
        """A value of the source's extras, its tensors copied into this file."""
        return grafted(value, self._moved)

    def finish(self, root: object) -> Drafted:
        """The file that holds `root`."""
        layout = layout_torch_zip(root)
        places = [
            Placement(slice=own, path=self._path, offset=layout.storages[storage] + at * own.dtype.itemsize)
            for storage, at, own in self._filled
        ]
        places.sort(key=lambda place: place.offset)
        copies = [
            RawCopy(src=ref, path=self._path, offset=layout.storages[storage]) for storage, ref in self._moved.items()
        ]
        file = OutputFile(path=self._path, nbytes=layout.nbytes, literals=layout.literals, crcs=layout.crcs)
        return Drafted(file, tuple(places), tuple(copies))
