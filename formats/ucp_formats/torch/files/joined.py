"""A tensor put together of what ranks saved: the pieces lie where the patterns place them, or nothing is believed.

Parts of a DTensor are placed by its own layout, and must have just the shapes that it gives. Ranks that hold the same
part (HSDP, data parallelism around tensor parallelism) hold copies. Plain tensors in the files of several ranks are
copies of one another: joining their rows is a known mistake of other tools.

>>> from ucp.core.tensor import DType
>>> ref = TensorRef(path="rank0", offset=0, dtype=DType.FLOAT32, shape=(2,), strides=(1,))
>>> copies = join({0: ref, 1: ref}, "w")
>>> [(str(own.box), own.replica) for own in copies.fragments], [axis.pattern.name for axis in copies.layout.axes]
([('[0:2]', 0), ('[0:2]', 1)], ['replicate'])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ucp.contract.plugins import pattern
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import AxisLayout, Layout, compute_local_shape, place
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.torch.files.parts import Part, part_of
from ucp_formats.torch.state_dict import Leaf

COPIES = "dp_replicate"
"""Axis of ranks that hold the same."""
_TORCH = ("torch._utils", "torch._tensor")
"""Modules whose functions make tensors again."""
COPY = "copy"
"""Number of a copy, until it is known along which axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A tensor in pieces."""

    dtype: DType
    """Element type"""
    shape: tuple[int, ...]
    """Elements of the whole, per dim"""
    fragments: tuple[Fragment, ...]
    """Where they lie"""
    layout: Layout
    """How ranks hold it"""
    is_shared: bool = False
    """Whether ranks say that it is a tensor they share (a DTensor), cut or not"""

    @classmethod
    def of(cls, leaf: Leaf) -> Joined:
        """The value of an entry that is a tensor."""
        assert isinstance(leaf.value, cls)
        return leaf.value

    @property
    def form(self) -> Hashable:
        """Shape and cuts, which a parameter and its states have in common."""
        return self.shape, tuple((own.box.offsets, own.box.sizes) for own in self.fragments)

    @property
    def storage(self) -> Hashable:
        """Where its elements lie: the same place for a parameter that was saved under a second name."""
        pieces = (
            (own.box, own.ref.path, own.ref.offset, own.ref.strides)
            for own in self.fragments
            if isinstance(own.ref, TensorRef) and not own.replica
        )
        return (self.dtype, self.shape, *pieces)

    def state(self, layout: Layout) -> StateIndex:
        """The state that it is, of an atom of that `layout`."""
        return StateIndex(
            dtype=self.dtype,
            global_shape=self.shape,
            fragments=self.fragments,
            overlap=self.layout.overlap,
            layout=None if self.layout == layout else self.layout,
        )


def is_tensor(value: object) -> bool:
    """Whether a value of a rank's file is a tensor, whole or in parts."""
    return isinstance(value, TensorRef) or part_of(value, "") is not None


def unread_kind(value: object) -> str | None:
    """What a tensor is that is none here (quantised, sparse, conjugate, of a class of its own); None for all else."""
    if not isinstance(value, Stub) or value.made_by.module not in _TORCH or is_tensor(value):
        return None
    inner = next((own for own in value.args if isinstance(own, Stub)), None)
    if value.made_by.qualname.startswith("_rebuild_parameter") and inner is not None:
        return unread_kind(inner)
    classes = [str(own) for own in value.args[1:2] if isinstance(own, GlobalName)]
    return (classes or [str(value.made_by)])[0] if value.made_by.qualname.startswith("_rebuild") else None


def shape_of(value: object) -> tuple[int, ...]:
    """Shape of the whole of a tensor of a rank's file."""
    whole = value if isinstance(value, TensorRef) else part_of(value, "")
    assert whole is not None
    return whole.shape


def join(values: Mapping[int, object], name: str) -> Joined:
    """The tensor `name`, from rank to what it saved.

    Raises MalformedError where parts do not make up one whole, UnsupportedError for what no pattern here places.
    """
    refs = {rank: own for rank, own in values.items() if isinstance(own, TensorRef)}
    if len(refs) == len(values):
        return _copies(refs, name)
    parts = {rank: own for rank, value in values.items() if (own := part_of(value, f"{name} of rank {rank}"))}
    if len(parts) != len(values):
        raise MalformedError(
            f"expected {name} in parts on all ranks, or whole on all; got parts on {sorted(parts)} and others on "
            f"{sorted(values.keys() - parts.keys())}. The files are of different runs"
        )
    return _parts(parts, name)


def _copies(refs: Mapping[int, TensorRef], name: str) -> Joined:
    kinds = {(own.dtype, own.shape): rank for rank, own in refs.items()}
    if len(kinds) > 1:
        shown = "; ".join(f"rank {rank} has {dtype} {list(shape)}" for (dtype, shape), rank in kinds.items())
        raise MalformedError(
            f"expected one plain tensor {name} in the files of all ranks, since it is no part of another; got {shown}. "
            "The files are of different runs, or of a way of saving that is not known here"
        )
    ((dtype, shape),) = kinds
    copies = AxisLayout(COPIES, len(refs), pattern("replicate"), "a plain tensor in the file of every rank")
    whole = Box.full(shape)
    return Joined(
        dtype=dtype,
        shape=shape,
        fragments=tuple(
            Fragment(box=whole, ref=own, replica=number) for number, (_, own) in enumerate(sorted(refs.items()))
        ),
        layout=Layout((copies,) if len(refs) > 1 else ()),
    )


def _parts(parts: Mapping[int, Part], name: str) -> Joined:
    first = next(iter(parts.values()))
    for rank, own in parts.items():
        if own.rank is not None and own.rank != rank:
            raise MalformedError(
                f"expected what rank {rank} saved of {name} in its file; it says that it is of rank {own.rank}. Files "
                "were exchanged, or renamed: give them the names that they were saved under"
            )
        if (own.shape, own.layout) != (first.shape, first.layout):
            raise MalformedError(
                f"{name}: rank {rank} has a part of {list(own.shape)} cut by {_shown(own.layout)}, rank "
                f"{next(iter(parts))} one of {list(first.shape)} cut by {_shown(first.layout)}. The files are of "
                "different runs"
            )
    layout, coords = _with_copies(first.layout, parts, name)
    fragments = tuple(own for rank, part in sorted(parts.items()) for own in _placed(part, layout, coords[rank], name))
    dtypes = {own.ref.dtype for own in parts.values() if own.ref is not None}
    if len(dtypes) != 1:
        raise MalformedError(
            f"expected parts of {name} of one type; got {', '.join(map(str, dtypes)) or 'no elements on any rank'}"
        )
    return Joined(dtype=dtypes.pop(), shape=first.shape, fragments=fragments, layout=layout, is_shared=True)


def _shown(layout: Layout) -> str:
    return " x ".join(f"{axis.axis}={axis.parts}: {axis.pattern.name}" for axis in layout.axes) or "nothing"


def _with_copies(layout: Layout, parts: Mapping[int, Part], name: str) -> tuple[Layout, dict[int, dict[str, int]]]:
    """The layout with an axis for ranks that stand at the same place, and the place of every rank in it."""
    seen: Counter[tuple[tuple[str, int], ...]] = Counter()
    coords: dict[int, dict[str, int]] = {}
    for rank, part in sorted(parts.items()):
        at = tuple(sorted(part.coords.items()))
        coords[rank] = {COPY: seen[at], **part.coords}
        seen[at] += 1
    wanted = prod(axis.parts for axis in layout.axes)
    copies = set(seen.values())
    if len(seen) != wanted or len(copies) != 1:
        raise MalformedError(
            f"expected parts of {name} from every place of a mesh of {_shown(layout)}; got {len(seen)} of {wanted} "
            f"places, from ranks {sorted(parts)}. Files of ranks are missing, or are of another run"
        )
    (number,) = copies
    if number == 1:
        return layout, {rank: dict(own.coords) for rank, own in parts.items()}
    name_of_copies = _varying(parts)
    if any(axis.axis == name_of_copies for axis in layout.axes):
        raise UnsupportedError(f"{name}: {number} ranks stand at every place of its mesh, {_shown(layout)}")
    copied = AxisLayout(name_of_copies, number, pattern("replicate"), "ranks at the same place of the mesh")
    at_copy = {rank: {name_of_copies: own.pop(COPY), **own} for rank, own in coords.items()}
    return Layout((copied, *layout.axes)), at_copy


def _varying(parts: Mapping[int, Part]) -> str:
    """The axis of the whole mesh along which parts are copies; `COPIES` where there are several, or none is known."""
    axes = {axis for own in parts.values() for axis in own.around}
    varying = [axis for axis in axes if len({own.around.get(axis) for own in parts.values()}) > 1]
    return varying[0] if len(varying) == 1 else COPIES


def _placed(part: Part, layout: Layout, coords: Mapping[str, int], name: str) -> Iterator[Fragment]:
    """The pieces of one rank, proved to have the shape that the layout gives."""
    try:
        wanted = compute_local_shape(layout, part.shape, coords)
        pieces = place(layout, part.shape, coords=coords)
    except ValueError as error:
        raise MalformedError(f"{name} of {list(part.shape)}, cut by {_shown(layout)}: {error}") from error
    found = part.ref.shape if part.ref is not None else (0,) * len(wanted)
    if found != wanted and prod(found) + prod(wanted) > 0:
        raise MalformedError(
            f"{name} of {list(part.shape)}, cut by {_shown(layout)}: expected {list(wanted)} elements at "
            f"{dict(coords)}; got {list(found)}. The file is of another run, or cut in a way that is not known here"
        )
    for own in pieces:
        if part.ref is not None and own.box.numel:
            if part.box is not None and part.box != own.box:
                raise MalformedError(f"{name}: expected the part {own.box} at {dict(coords)}; got {part.box}")
            sizes = own.box.sizes
            ref = part.ref.narrow(own.local.offsets, sizes)
            yield Fragment(box=own.box, ref=ref, replica=own.replica, term=own.term)
