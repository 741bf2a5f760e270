"""The union: joins what ranks stored of a tensor into one atom, each piece at the position that `place` computes.

1. A reader of files describes each tensor as `ShardedTensor`: what every rank stored, its coordinates, a layout.
2. `Union.build_state` makes the fragments; ranks that differ only along replicated axes hold numbered replicas.
3. `Union.build_atom` joins the states. If the optimizer keeps a master, this is the weight; the model's tensor is then
   a derived copy, which is compared with it and never used. `merge_counts` joins counts such as `step`.

>>> from ucp.core.layout import AxisLayout
>>> from ucp_patterns.replicate import Replicate
>>> ref = TensorRef(path="rank0", offset=0, dtype=DType.FLOAT32, shape=(2,), strides=(1,))
>>> layout = Layout((AxisLayout("dp", 2, Replicate()),))
>>> shards = ShardSet(layout, tuple(StoredShard({"dp": rank}, ref) for rank in (0, 1)))
>>> tensor = ShardedTensor(dtype=DType.FLOAT32, shape=(2,), shard_sets=(shards,))
>>> [(str(piece.box), piece.replica) for piece in Union().build_state(tensor).fragments]
[('[0:2]', 0), ('[0:2]', 1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import pack
from typing import NamedTuple

from ucp.core.index import WEIGHT, AtomIndex, Fragment, Kind, StateIndex
from ucp.core.layout import Layout, PlacedBox, place
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import DType, InlineTensor, TensorRef, contiguous_strides, select_elements


class StoredShard(NamedTuple):
    """What one rank stored of a tensor."""

    coords: Mapping[str, int]
    """Coordinates of the rank: mesh axis to index."""
    ref: TensorRef
    """Its local tensor; one-dimensional if the layout has flat axes."""
    start: int = 0
    """Element of a one-dimensional tensor where the shard of this parameter begins."""
    boxes: tuple[tuple[Box, TensorRef], ...] = ()
    """Boxes of the local tensor, if it is not stored as one tensor."""

    def pieces(
        self, placed: PlacedBox, layout: Layout, *, replica: int | None = None, derived: bool = False
    ) -> tuple[Fragment, ...]:
        """Fragments of a box that `place` gave for `layout`. `replica`: number of the copy, if not `placed.replica`."""
        number = placed.replica if replica is None else replica
        if self.boxes:
            pair, copy = RegionPair(placed.local, placed.box), {"replica": number, "term": placed.term}
            fragments = (Fragment(box=box, ref=ref, derived=derived, **copy) for box, ref in self.boxes)
            return tuple(piece for fragment in fragments if (piece := map_fragment(pair, fragment)) is not None)
        if layout.flat:
            ref = self.ref.strided(self.start + placed.offset, placed.box.sizes, placed.strides)
        else:
            ref = self.ref.narrow(placed.local.offsets, placed.box.sizes)
        return (Fragment(box=placed.box, ref=ref, replica=number, term=placed.term, derived=derived),)


def place_fragments(layout: Layout, global_shape: Sequence[int], shards: Iterable[StoredShard]) -> tuple[Fragment, ...]:
    """Fragments of a tensor, from the shards that ranks stored of it."""
    return tuple(
        piece
        for shard in shards
        for placed in place(layout, global_shape, coords=shard.coords)
        for piece in shard.pieces(placed, layout)
    )


def add_copies(first: Sequence[Fragment], second: Iterable[Fragment], *, derived: bool = False) -> tuple[Fragment, ...]:
    """Fragments of a tensor, and those of an equal tensor as further copies (`derived`: computed from the first)."""
    number = 1 + max((fragment.replica for fragment in first), default=-1)
    return (
        *first,
        *(
            replace(fragment, replica=fragment.replica + number, derived=derived or fragment.derived)
            for fragment in second
        ),
    )


def map_fragment(pair: RegionPair, fragment: Fragment) -> Fragment | None:
    """The part of a fragment inside `pair`, as a fragment of the pair's local tensor; None if they do not overlap."""
    near = pair.within(fragment.box)
    if near is None:
        return None
    ref = fragment.ref
    inside = map(int.__sub__, near.global_box.offsets, fragment.box.offsets)
    first = sum(map(int.__mul__, inside, ref.strides))
    sizes, strides = near.local.sizes, ref.strides
    if near.dims is not None:
        steps = zip(near.dims, near.steps, strict=True)
        strides = tuple(0 if dim is None else strides[dim] * step for dim, step in steps)
    return replace(fragment, box=near.local, ref=select_elements(ref, first, sizes, strides))


class ShardSet(NamedTuple):
    """What some ranks stored of a tensor."""

    layout: Layout
    """Layout of the tensor over these ranks."""
    shards: tuple[StoredShard, ...]
    """Shards of each rank; if a rank stored several copies, they follow one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor as it is stored in files."""

    dtype: DType
    """Type of its elements."""
    shape: tuple[int, ...]
    """Elements per dim: of one model-parallel rank's tensor, until ranks are joined."""
    shard_sets: tuple[ShardSet, ...]
    """Shards of all ranks; several sets if the buffers of model-parallel ranks differ."""

    @classmethod
    def unsharded(cls, *copies: TensorRef) -> ShardedTensor:
        """A tensor stored in full, once or more."""
        stored = tuple(StoredShard({}, ref) for ref in copies)
        return cls(dtype=copies[0].dtype, shape=copies[0].shape, shard_sets=(ShardSet(Layout(), stored),))

    @property
    def layout(self) -> Layout:
        """Layout of the first shard set."""
        return self.shard_sets[0].layout

    @property
    def first(self) -> TensorRef:
        """What the first rank stored."""
        return self.shard_sets[0].shards[0].ref


StateSource = StateIndex | ShardedTensor
"""A state of a parameter: its fragments, or a tensor that is still to be placed."""


class Union:
    """Builds states and atoms; placements are cached, as many parameters share layout and shape."""

    def __init__(self) -> None:
        self._states, self._models = _PlacementCache(), _PlacementCache()

    def build_state(self, state: StateSource) -> StateIndex:
        """The state with its fragments."""
        if isinstance(state, StateIndex):
            return state
        return StateIndex(
            dtype=state.dtype,
            global_shape=state.shape,
            fragments=_fragments(state, self._states),
            overlap=state.layout.overlap,
        )

    def build_atom(
        self,
        name: str,
        *,
        kind: Kind,
        layout: Layout,
        states: Mapping[str, StateSource],
        model: StateSource | None = None,
        model_dtype: DType | None = None,
    ) -> AtomIndex:
        """The atom of a parameter. `model`: the model's own tensor; `model_dtype`: dtype in which it computes.

        Expects a weight among `states`, or `model`.
        """
        master = states.get(WEIGHT, model)
        assert master is not None
        weight = self.build_state(master)
        if model is not None and master is not model and weight.numel:
            if isinstance(model, StateIndex):
                pieces = add_copies(weight.fragments, model.fragments, derived=True)
            else:
                first = 1 + max([piece.replica for piece in weight.fragments], default=-1)
                pieces = weight.fragments + _fragments(model, self._models, first, derived=True)
            weight = replace(weight, fragments=pieces)
        dtype = model.dtype if model_dtype is None and model is not None else model_dtype
        return AtomIndex(
            name=name,
            global_shape=weight.global_shape,
            kind=kind,
            states={WEIGHT: weight, **{key: self.build_state(state) for key, state in states.items() if key != WEIGHT}},
            model_dtype=dtype if dtype is not weight.dtype else None,
            layout=layout,
        )


class _PlacementCache:
    """Results of `place` for one layout, by shape and coordinates."""

    def __init__(self) -> None:
        self._take(Layout())

    def _take(self, layout: Layout) -> None:
        self._layout = layout
        self._axes = [axis.axis for axis in layout.all_axes]
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[PlacedBox, ...]] = {}

    def place(
        self, layout: Layout, shape: tuple[int, ...], rank: StoredShard
    ) -> tuple[tuple[int, ...], tuple[PlacedBox, ...]]:
        """Coordinates of a rank on the axes of the layout, and its boxes."""
        if layout is not self._layout and layout != self._layout:
            self._take(layout)
        indexes = tuple([rank.coords[axis] for axis in self._axes])
        placed = self._known.get((shape, indexes))
        if placed is None:
            placed = self._known[shape, indexes] = place(layout, shape, coords=rank.coords)
        return indexes, placed


def _fragments(
    tensor: ShardedTensor, places: _PlacementCache, first: int = 0, *, derived: bool = False
) -> tuple[Fragment, ...]:
    """Fragments of a global tensor; a single empty one if it has no elements. `first`: number of the first copy."""
    shape = tensor.shape
    if 0 in shape:
        ref = tensor.first.strided(0, shape, contiguous_strides(shape))
        return (Fragment(box=Box.full(shape), ref=ref),)
    pieces: list[Fragment] = []
    stored_before: dict[tuple[int, ...], int] = {}
    copies = {(0, 0): first}
    for layout, stored in tensor.shard_sets:
        for rank in stored:
            indexes, boxes = places.place(layout, shape, rank)
            nth = stored_before.get(indexes, 0)
            stored_before[indexes] = nth + 1
            for placed in boxes:
                replica = copies.setdefault((nth, placed.replica), first + len(copies))
                pieces += rank.pieces(placed, layout, replica=replica, derived=derived)
    return tuple(pieces)


def state_of_boxes(dtype: DType, shape: tuple[int, ...], boxes: Iterable[tuple[Box, TensorRef]]) -> StateIndex:
    """A state whose files record the box of each piece; a box that occurs again is a copy.

    >>> ref = TensorRef(path="rank0", offset=0, dtype=DType.FLOAT32, shape=(2,), strides=(1,))
    >>> boxes = [(Box((0,), (2,)), ref), (Box((2,), (2,)), ref), (Box((0,), (2,)), ref)]
    >>> [piece.replica for piece in state_of_boxes(DType.FLOAT32, (4,), boxes).fragments]
    [0, 0, 1]
    """
    copies: dict[Box, int] = {}
    pieces = []
    for box, ref in boxes:
        replica = copies[box] = copies.get(box, -1) + 1
        pieces.append(Fragment(box=box, ref=ref, replica=replica))
    return StateIndex(dtype=dtype, global_shape=shape, fragments=tuple(pieces))


def merge_counts(counts: Sequence[StateIndex]) -> StateIndex:
    """A count of a parameter that several ranks stored: the first rank's, with the others as copies."""
    pieces = [piece for count in counts for piece in count.fragments]
    return replace(counts[0], fragments=tuple(replace(piece, replica=number) for number, piece in enumerate(pieces)))


_PAST_INT64 = 1 << 63
"""One past the largest Python int that a state can hold (as int64)."""


def state_from_number(number: float) -> StateIndex:
    """A Python number as a 0-d state of dtype bool, int64 or float64, without loss.

    >>> state_from_number(3).dtype, state_from_number(3.0).dtype
    (<DType.INT64: 'int64'>, <DType.FLOAT64: 'float64'>)
    """
    if isinstance(number, bool):
        ref = InlineTensor(data=bytes([number]), dtype=DType.BOOL)
    elif isinstance(number, float):
        ref = InlineTensor(data=pack("<d", number), dtype=DType.FLOAT64)
    else:
        ref = InlineTensor(data=number.to_bytes(8, "little", signed=True), dtype=DType.INT64)
    return StateIndex.from_tensor(ref)


def state_from_scalar(value: object) -> StateIndex | None:
    """A Python number or a tensor of one element as a state; None for anything else."""
    if isinstance(value, float) or (isinstance(value, int) and -_PAST_INT64 <= value < _PAST_INT64):
        return state_from_number(value)
    return StateIndex.from_tensor(value) if isinstance(value, TensorRef) and value.numel == 1 else None
