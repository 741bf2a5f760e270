"""How one parameter is split over the tensor-parallel ranks: a pattern that fits the shapes of the ranks' shards.

>>> layout = cut_layout(0, [(4, 8), (4, 8)], None)
>>> layout.pattern.name, layout.global_shape
('shard(dim=0)', (8, 8))

`affine_map` of DeepSpeed 0.19.8 (checkpoint/affine.py) lists, for each rank, blocks of the global tensor as views with
strides.

1. A block becomes boxes. It is one box if its strides are those of the global tensor and of the rank's tensor, dim by
   dim; else it is split into ranges that are consecutive in both.
2. If the boxes split one dim, the pattern is `shard` or `cut`; if every rank holds the full tensor, it is `replicate`;
   otherwise it is `pieces`.

>>> whole = {"shape": [2, 4], "source": [8, [4, 1]], "dest": [0, [4, 1]], "locations": [1]}
>>> [str(pair.global_box) for pair in _pairs(whole, (4, 4), (2, 4))]
['[2:4, 0:4]']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout, Overlap, Pattern, compute_local_shape
from ucp.core.region import Box, RegionPair, cut_flat_range, find_gaps
from ucp.core.tensor import contiguous_strides
from ucp.errors import TopologyError, format_list
from ucp.io.pickle.fields import Shape, require_integer, require_mapping, require_sequence


def shared_divisors(lengths: Iterable[int]) -> str:
    """Degrees that divide all lengths, as text for a message.

    >>> shared_divisors([8, 12])
    '1, 2, 4'
    """
    most = gcd(*lengths)
    return ", ".join(str(degree) for degree in range(1, most + 1) if most % degree == 0)


def even_parts(tensors: Mapping[str, tuple[Shape, int | None]], parts: int) -> dict[str, tuple[Shape, ...]]:
    """Shape of each tensor's shard on each of `parts` ranks; `tensors`: global shape, and the dim to split or None.

    Raises TopologyError that lists all tensors that cannot be split evenly.

    >>> even_parts({"a": ((4, 6), 1), "b": ((3,), None)}, 2)
    {'a': ((4, 3), (4, 3)), 'b': ((3,), (3,))}
    """
    uneven = [
        f"{name}: {list(shape)} along dim {dim}"
        for name, (shape, dim) in tensors.items()
        if dim is not None and (dim >= len(shape) or shape[dim] % parts)
    ]
    if uneven:
        lengths = (n for shape, dim in tensors.values() if dim is not None for n in shape[dim : dim + 1])
        raise TopologyError(
            f"expected tensors that {parts} tensor-parallel ranks can split evenly; got\n{format_list(uneven)}\n"
            f"Choose a degree that divides the split dims of all tensors: {shared_divisors(lengths)}"
        )
    return {
        name: (shape if dim is None else (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :]),) * parts
        for name, (shape, dim) in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShapes:
    """The shards of one parameter or buffer."""

    local: tuple[Shape, ...]
    """Shape on each tensor-parallel rank."""
    declared: bool = True
    """Whether the tensor is split if the record does not name it: parameters are; buffers are equal on all ranks."""


class MisfitError(ValueError):
    """The shapes of the shards do not fit the pattern; the argument says why, in a few words."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor is split over the tensor-parallel ranks, or over the ranks of another axis."""

    pattern: Pattern
    """The pattern of the split."""
    global_shape: Shape
    """Shape of the global tensor."""
    parts: int
    """Number of ranks."""
    axis: str = "tp"
    """The axis of these ranks."""
    known_from: str = ""
    """Where the layout is known from, if not from the record or family of the run."""

    def __post_init__(self) -> None:
        self.regions(0)

    @property
    def overlap(self) -> Overlap:
        """How to treat an element that several ranks hold."""
        return Overlap.MEAN if self.pattern.overlap is Overlap.MEAN else Overlap.EXCLUSIVE

    def local_shape(self, index: int) -> Shape:
        """Shape of the tensor that rank `index` holds."""
        return compute_local_shape(
            Layout((AxisLayout("tp", self.parts, self.pattern),)), self.global_shape, {"tp": index}
        )

    def block_widths(self) -> tuple[int, list[tuple[int, ...]]] | None:
        """The dim that is split, and the width of each block on each rank; None if all ranks hold the full tensor.

        Raises MisfitError if the tensor is not split along one dim, block by block.
        """
        regions = [self.regions(index) for index in range(self.parts)]
        full = Box.full(self.global_shape)
        if all([pair.global_box for pair in pairs] == [full] for pairs in regions):
            return None
        for dim in range(len(self.global_shape)):
            blocks = _blocks(regions, self.global_shape, dim)
            if blocks is not None:
                return dim, blocks
        raise MisfitError(f"{self.pattern.name} does not split one dim, block by block")

    def regions(self, index: int) -> tuple[RegionPair, ...]:
        """The boxes that rank `index` holds, in increasing local offset."""
        return self.pattern.regions(self.global_shape, self.parts, index)


def equal_layout(name: str, shapes: Sequence[Shape]) -> TensorLayout:
    """The layout of a tensor that all ranks hold in full, with the pattern called `name`. Raises MisfitError."""
    if len(set(shapes)) > 1:
        raise MisfitError(f"expected the same shape on all ranks; got {_format_shapes(shapes)}")
    return TensorLayout(pattern(name), shapes[0], len(shapes))


def cut_layout(dim: int, shapes: Sequence[Shape], widths: Sequence[Sequence[int]] | None) -> TensorLayout:
    """The layout of a tensor that is split along `dim`. Raises MisfitError.

    `shapes`: the shard's shape on each rank. `widths`: for each block of `dim`, its length on each rank; None if `dim`
    is one block.
    """
    parts = len(shapes)
    if any(dim >= len(shape) for shape in shapes):
        raise MisfitError(f"expected tensors with a dim {dim}, the one that is split; got {_format_shapes(shapes)}")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise MisfitError(f"expected shapes that differ in dim {dim} only; got {_format_shapes(shapes)}")
    lengths = [shape[dim] for shape in shapes]
    blocks = [tuple(block) for block in widths] if widths is not None else [tuple(lengths)]
    if any(len(block) != parts for block in blocks):
        raise MisfitError(f"expected a width for each of {parts} ranks; got {[list(block) for block in blocks]}")
    sums = [sum(rank_widths) for rank_widths in zip(*blocks, strict=True)]
    if sums != lengths:
        raise MisfitError(f"expected dim {dim} to be {sums} on the ranks, the sums of the widths; got {lengths}")
    global_shape = (*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :])
    totals = [sum(block) for block in blocks]
    even = [tuple((total + count) // parts for count in reversed(range(parts))) for total in totals]
    if blocks == even:  # what `shard` computes
        cut = pattern("shard", dim=dim, blocks=tuple(totals) if len(blocks) > 1 else ())
    else:
        cut = pattern("cut", dim=dim, widths=tuple(blocks))
    return TensorLayout(cut, global_shape, parts)


def _blocks(regions: Sequence[Sequence[RegionPair]], shape: Shape, dim: int) -> list[tuple[int, ...]] | None:
    """Widths of the blocks of `dim`, if each rank holds one range of each block, in order; else None."""
    across = (*shape[:dim], *shape[dim + 1 :])
    boxes = [[pair.global_box for pair in pairs if pair.global_box.numel] for pairs in regions]
    if any((*box.sizes[:dim], *box.sizes[dim + 1 :]) != across for pairs in boxes for box in pairs):
        return None
    if len({len(pairs) for pairs in boxes}) != 1:
        return None
    edge, blocks = 0, []
    for block in zip(*boxes, strict=True):
        for box in block:
            if box.offsets[dim] != edge:
                return None
            edge += box.sizes[dim]
        blocks.append(tuple(box.sizes[dim] for box in block))
    return blocks if edge == shape[dim] else None


def _format_shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


AFFINE_VERSION = 1
"""Supported version of the map (`AFFINE_MAP_FORMAT_VERSION`, 0.19.8)."""

_MOST_PAIRS = 200_000
"""The most boxes that one rank's part of a parameter can have; a map with more is damaged."""


class RefusedError(ValueError):
    """The global tensor cannot be restored bit for bit from this layout; the argument says why, in a few words."""


def affine_layout(entry: object, shapes: Sequence[Shape], where: str) -> TensorLayout:
    """The layout that `entry`, the map of one parameter, records; `shapes`: the shard's shape on each rank.

    Raises MisfitError if the map contradicts the shapes or itself, RefusedError if values are scaled.
    """
    saved = require_mapping(entry, where)
    logical = _sizes(saved.get("logical_shape"), f"logical_shape of {where}")
    by_rank = {
        require_integer(int(str(key)), where): record
        for key, record in require_mapping(saved.get("ranks"), where).items()
    }
    if sorted(by_rank) != list(range(len(shapes))):
        raise MisfitError(f"expected pieces of ranks 0 to {len(shapes) - 1}; got those of {sorted(by_rank)}")
    regions = []
    for rank, shape in enumerate(shapes):
        record = require_mapping(by_rank[rank], where)
        if _sizes(record.get("shard_shape"), where) != shape:
            raise MisfitError(f"expected {list(shape)} as shard_shape of rank {rank}; got {record.get('shard_shape')}")
        pieces = [require_mapping(piece, where) for piece in require_sequence(record.get("pieces"), where)]
        pairs: list[RegionPair] = []
        for piece in pieces:
            scale = piece.get("scale", 1.0)
            if scale != 1.0:
                raise RefusedError(f"ranks hold it multiplied by {scale}, as AutoTP does with some biases")
            pairs += _pairs(piece, logical, shape)
            if len(pairs) > _MOST_PAIRS:
                raise MisfitError(f"more than {_MOST_PAIRS} pieces on rank {rank}")
        if prod(shape) and (len(shape) != len(logical) or find_gaps(shape, [pair.local for pair in pairs], most=1)):
            raise MisfitError(f"the pieces of rank {rank} do not fill its tensor {list(shape)} exactly")
        regions.append(tuple(sorted(pairs, key=lambda pair: pair.local.offsets)))
    # the copies of a box are numbered in the order of the ranks that hold them; two different boxes do not overlap
    seen: Counter[Box] = Counter()
    numbered = []
    for own_pairs in regions:
        numbered.append(tuple(pair._replace(copy=seen[pair.global_box]) for pair in own_pairs))
        seen.update(pair.global_box for pair in own_pairs)
    layout = TensorLayout(pattern("pieces", held=tuple(numbered)), logical, len(shapes))
    try:
        blocks = layout.block_widths()
    except MisfitError:
        return layout
    return equal_layout("replicate", shapes) if blocks is None else cut_layout(blocks[0], shapes, blocks[1])


def _pairs(piece: Mapping[object, object], logical: Shape, local: Shape) -> list[RegionPair]:
    """The boxes of one block (`piece`) of the map, in the global tensor (`logical`) and in the rank's (`local`)."""
    where = "a piece of affine_map"
    sizes = _sizes(piece.get("shape"), where)
    sides = []
    for key, shape in (("source", logical), ("dest", local)):
        offset, strides = (*require_sequence(piece.get(key), where), None, None)[:2]
        sides.append(_Side(require_integer(offset, where), _sizes(strides, where), shape))
    if any(len(side.strides) != len(sizes) for side in sides):
        raise MisfitError(f"a piece of shape {list(sizes)} has the strides {[list(side.strides) for side in sides]}")
    if min((*sizes, *sides[0].strides, *sides[1].strides), default=0) < 0:
        raise MisfitError(f"a piece of shape {list(sizes)} has a size or stride below 0")
    if not prod(sizes):
        return []
    ends = [side.offset + sum((n - 1) * by for n, by in zip(sizes, side.strides, strict=True)) for side in sides]
    if any(side.offset < 0 or end >= prod(side.shape) for side, end in zip(sides, ends, strict=True)):
        raise MisfitError(
            f"a piece of shape {list(sizes)} exceeds the global tensor {list(logical)} or the rank's {list(local)}"
        )
    boxes = [side.box(sizes) for side in sides]
    if boxes[0] is not None and boxes[1] is not None:
        return [RegionPair(boxes[0], boxes[1])]
    return list(_split_block(sizes, sides[0], sides[1]))


class _Side(NamedTuple):
    """A block as a view of a tensor: of the global one, or of the rank's."""

    offset: int
    strides: Shape
    shape: Shape

    def box(self, sizes: Shape) -> Box | None:
        """The block as a box; None if its strides are not those of the tensor."""
        strides = contiguous_strides(self.shape)
        if len(strides) != len(sizes) or any(
            n > 1 and stride != step for n, stride, step in zip(sizes, self.strides, strides, strict=True)
        ):
            return None
        offsets, rest = [], self.offset
        for step in strides:
            offsets.append(rest // step)
            rest %= step
        inside = all(at + n <= length for at, n, length in zip(offsets, sizes, self.shape, strict=True))
        return Box(tuple(offsets), sizes) if inside else None


def _split_block(sizes: Shape, source: _Side, dest: _Side) -> Iterator[RegionPair]:
    """The boxes of a block, from ranges that are consecutive both in the global tensor and in the rank's."""
    inner = len(sizes)
    length = 1
    while inner and all(sizes[inner - 1] == 1 or side.strides[inner - 1] == length for side in (source, dest)):
        inner -= 1
        length *= sizes[inner]
    if prod(sizes[:inner]) > _MOST_PAIRS:
        raise MisfitError(f"a piece of shape {list(sizes)} splits into {prod(sizes[:inner])} ranges, too many")
    for index in product(*map(range, sizes[:inner])):
        starts = [
            side.offset + sum(at * stride for at, stride in zip(index, side.strides, strict=False))
            for side in (source, dest)
        ]
        yield from _match_boxes(source.shape, dest.shape, starts, length)


def _match_boxes(logical: Shape, local: Shape, starts: list[int], length: int) -> Iterator[RegionPair]:
    """The boxes of a range, each as large as possible while it is one box in both tensors."""
    if len(logical) != len(local):
        raise MisfitError(f"the global tensor {list(logical)} and a rank's {list(local)} differ in number of dims")
    source, dest = starts
    while length:
        a = cut_flat_range(logical, source, source + length)[0]
        b = cut_flat_range(local, dest, dest + length)[0]
        if a.sizes != b.sizes:
            row = min(logical[-1] - source % logical[-1], local[-1] - dest % local[-1], length)
            a, b = cut_flat_range(logical, source, source + row)[0], cut_flat_range(local, dest, dest + row)[0]
        yield RegionPair(a, b)
        source, dest, length = source + a.numel, dest + a.numel, length - a.numel


def _sizes(value: object, where: str) -> Shape:
    return tuple(require_integer(n, where) for n in require_sequence(value, where))
