"""Drafts a torch file of a destination: its value, and the slices that fill its tensors.

A target builds the value from plain values and from tensors of the draft; `finish` lays the file out and places each
slice in it.

>>> from ucp.core.tensor import DType
>>> draft = FileDraft("empty.pt")
>>> draft.finish({"step": 3, "mask": draft.add_tensor(DType.FLOAT32, (2, 2))}).file.path
'empty.pt'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from pathlib import PurePath

from ucp.core.index import Index
from ucp.core.layout import AxisLayout, Layout
from ucp.core.target import Literal, OutputFile, Placement, RawCopy, Slice, TargetPlan, describe_casts
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.io.pickle.values import rebuild
from ucp.io.torch_file.layout import layout_torch_zip
from ucp.io.torch_file.storage import NewStorage, NewTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A slice that fills part of a tensor."""

    offset: int
    """Element of the tensor where it starts."""
    slice: Slice
    """The elements that are stored there, without gaps."""
    layout: Layout | None = None
    """Layout of the state over the ranks of the run; None if every file has the global tensor."""


def collect_layouts(parts: Iterable[Part]) -> dict[tuple[str, str], Layout]:
    """(parameter, state) to its layout, for states that are sharded or replicated over ranks."""
    return {(part.slice.param, part.slice.state): part.layout for part in parts if part.layout and part.layout.all_axes}


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file whose layout is decided."""

    file: OutputFile
    """Its size and known bytes."""
    placements: tuple[Placement, ...]
    """Slices that fill it, in increasing offset."""
    raw: tuple[RawCopy, ...] = ()
    """Tensors of extras that are copied into it."""
    layouts: Mapping[tuple[str, str], Layout] = field(default_factory=dict)
    """(parameter, state) to its layout over the ranks."""


def make_target_plan(
    index: Index,
    drafted: Sequence[FinishedFile],
    *,
    notes: Iterable[str],
    topology: Topology | None = None,
    axes_of: Callable[[str], Sequence[AxisLayout]] = lambda _: (),
    names_rounded: bool = False,
) -> TargetPlan:
    """Plan of all files, in the order given.

    `topology`: of the run that loads them, if only one can. `axes_of`: layout of a parameter over the axes of that run,
    outermost first; used for axes that the layouts of the files lack. `names_rounded`: see
    `ucp.core.target.describe_casts`.
    """
    placements = tuple(place for file_draft in drafted for place in file_draft.placements)
    layouts: dict[tuple[str, str], Layout] = {}
    for file_draft in drafted:
        for key, layout in file_draft.layouts.items():
            # a master has more axes than the model's weight
            if key not in layouts or len(layout.all_axes) > len(layouts[key].all_axes):
                layouts[key] = layout
    for param, state in dict.fromkeys((place.slice.param, place.slice.state) for place in placements):
        atom = index.atoms[param]
        if atom.is_count(state) or atom.states[state].global_shape != atom.global_shape:
            continue
        inner = layouts.get((param, state), Layout())
        names = {axis.axis for axis in inner.all_axes}
        outer = tuple(axis for axis in axes_of(param) if axis.axis not in names)
        if outer:
            layouts[param, state] = Layout((*outer, *inner.axes), inner.flat)
    return TargetPlan(
        files=tuple(file_draft.file for file_draft in drafted),
        placements=placements,
        raw=tuple(copy for file_draft in drafted for copy in file_draft.raw),
        notes=tuple(dict.fromkeys(notes)),
        casts=describe_casts(index, (place.slice for place in placements), names_rounded=names_rounded),
        topology=topology,
        layouts=layouts,
    )


class FileDraft:
    """Creates the tensors of one file and records what fills them."""

    def __init__(self, path: str) -> None:
        """Draft of the file at `path`, relative to the destination."""
        self._path = path
        self._filled: list[tuple[NewStorage, Part]] = []
        self._moved: dict[NewStorage, TensorRef] = {}
        self._known: dict[NewStorage, bytes] = {}

    def add_slice(self, slice_: Slice, layout: Layout | None = None) -> NewTensor:
        """Add a tensor that holds the local tensor of a slice. `layout`: see `Part`."""
        return self.add_tensor(slice_.dtype, slice_.local_shape, [Part(offset=0, slice=slice_, layout=layout)])

    def add_tensor(self, dtype: DType, shape: tuple[int, ...], parts: Iterable[Part] = ()) -> NewTensor:
        """Add a tensor of `shape` that `parts` fill; zero elsewhere."""
        storage = NewStorage(dtype, prod(shape))
        self._filled += [(storage, part) for part in parts if part.slice.nbytes]
        return NewTensor(storage=storage, shape=shape, strides=contiguous_strides(shape))

    def add_known(self, dtype: DType, shape: tuple[int, ...], data: bytes) -> NewTensor:
        """Add a tensor with the elements `data`, row-major and little-endian."""
        tensor = self.add_tensor(dtype, shape)
        self._known[tensor.storage] = data
        return tensor

    def copy_extra(self, value: object) -> object:
        """A value of the source's extras, with its tensors copied into this file."""
        return replace_tensors(value, self._moved)

    def finish(self, root: object) -> FinishedFile:
        """Lay out the file that holds `root`."""
        layout = layout_torch_zip(root, folder=PurePath(self._path).stem)
        places = [
            Placement(
                slice=part.slice,
                path=self._path,
                offset=layout.storages[storage] + part.offset * part.slice.dtype.itemsize,
            )
            for storage, part in self._filled
        ]
        places.sort(key=lambda place: place.offset)
        copies = [
            RawCopy(src=ref, path=self._path, offset=layout.storages[storage]) for storage, ref in self._moved.items()
        ]
        known = (Literal(layout.storages[storage], data) for storage, data in self._known.items())
        literals = tuple(sorted((*layout.literals, *known), key=attrgetter("offset")))
        file = OutputFile(path=self._path, nbytes=layout.nbytes, literals=literals, crcs=layout.crcs)
        layouts = collect_layouts(part for _, part in self._filled)
        return FinishedFile(file, tuple(places), tuple(copies), layouts)


def make_torch_file(path: str, value: object) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """A file that holds `value`, with the tensors of the source in it copied over."""
    moved: dict[NewStorage, TensorRef] = {}
    layout = layout_torch_zip(replace_tensors(value, moved), folder=PurePath(path).stem)
    raw = tuple(RawCopy(src=ref, path=path, offset=layout.storages[storage]) for storage, ref in moved.items())
    return OutputFile(path=path, nbytes=layout.nbytes, literals=layout.literals, crcs=layout.crcs), raw


def replace_tensors(value: object, moved: dict[NewStorage, TensorRef]) -> object:
    """Copy `value` with every tensor of the source replaced by a new one; `moved` records the source of each.

    Tensors that shared storage in the source (views of one buffer, tied weights) each get a storage. Lists, dicts and
    objects are copied; shared ones and cycles stay so.
    """
    tensors: dict[TensorRef, NewTensor] = {}

    def moved_tensor(leaf: object) -> object:
        if not isinstance(leaf, TensorRef):
            return leaf
        if leaf not in tensors:
            storage = NewStorage(leaf.dtype, leaf.numel)
            tensors[leaf] = NewTensor(storage=storage, shape=leaf.shape, strides=contiguous_strides(leaf.shape))
            if leaf.numel:
                moved[storage] = leaf
        return tensors[leaf]

    return rebuild(value, moved_tensor)
