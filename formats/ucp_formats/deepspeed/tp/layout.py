"""How one parameter lies over the tensor-parallel ranks: a pattern, found to fit the shapes that the ranks hold.

>>> layout = cut_layout(0, [(4, 8), (4, 8)], None)
>>> layout.pattern.name, layout.global_shape
('shard(dim=0)', (8, 8))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Layout, Overlap, Pattern, local_shape
from ucp.core.region import Box, RegionPair
from ucp.errors import TopologyError, listed
from ucp.io.pickle.fields import Shape

__all__ = ["MisfitError", "TensorLayout", "cut_layout", "equal_layout", "even_parts", "shared_divisors"]


def shared_divisors(lengths: Iterable[int]) -> str:
    """Degrees that divide all lengths, for a message.

    >>> shared_divisors([8, 12])
    '1, 2, 4'
    """
    most = gcd(*lengths)
    return ", ".join(str(degree) for degree in range(1, most + 1) if most % degree == 0)


def even_parts(wholes: Mapping[str, tuple[Shape, int | None]], parts: int) -> dict[str, tuple[Shape, ...]]:
    """Shapes that `parts` ranks hold of tensors, given by shape and the dim that is cut (None: of none).

    Raises TopologyError with all that cannot be cut evenly.

    >>> even_parts({"a": ((4, 6), 1), "b": ((3,), None)}, 2)
    {'a': ((4, 3), (4, 3)), 'b': ((3,), (3,))}
    """
    uneven = [
        f"{name}: {list(shape)} along dim {dim}"
        for name, (shape, dim) in wholes.items()
        if dim is not None and (dim >= len(shape) or shape[dim] % parts)
    ]
    if uneven:
        lengths = (n for shape, dim in wholes.values() if dim is not None for n in shape[dim : dim + 1])
        raise TopologyError(
            f"expected tensors that {parts} tensor-parallel ranks can cut evenly; got\n{listed(uneven)}\nchoose a "
            f"degree that divides them, and all others that are cut: {shared_divisors(lengths)}"
        )
    return {
        name: (shape if dim is None else (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :]),) * parts
        for name, (shape, dim) in wholes.items()
    }


class MisfitError(ValueError):
    """The shapes that the ranks hold are not those of the pattern; the argument says how, in a few words."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A pattern over some ranks, for a tensor of one shape."""

    pattern: Pattern
    """How the tensor lies over them."""
    global_shape: Shape
    """Shape of the whole."""
    parts: int
    """Ranks."""

    def __post_init__(self) -> None:
        self.held(0)

    @property
    def overlap(self) -> Overlap:
        """What pieces of several terms mean."""
        return Overlap.MEAN if self.pattern.overlap is Overlap.MEAN else Overlap.EXCLUSIVE

    @property
    def axis(self) -> AxisLayout:
        """The pattern along its axis."""
        return AxisLayout("tp", self.parts, self.pattern)

    def local_shape(self, index: int) -> Shape:
        """Shape of the tensor that rank `index` holds."""
        return local_shape(Layout((self.axis,)), self.global_shape, {"tp": index})

    def block_widths(self) -> tuple[int, list[tuple[int, ...]]] | None:
        """Dim that is cut, and the elements of each block on each rank; None for a tensor that is whole on all ranks.

        Raises MisfitError for pieces that are no such blocks.
        """
        held = [self.held(index) for index in range(self.parts)]
        whole = Box.whole(self.global_shape)
        if all([pair.whole for pair in own] == [whole] for own in held):
            return None
        for dim in range(len(self.global_shape)):
            blocks = _blocks(held, self.global_shape, dim)
            if blocks is not None:
                return dim, blocks
        raise MisfitError(f"{self.pattern.name} is no cut of one dim, block by block")

    def held(self, index: int) -> tuple[RegionPair, ...]:
        """What rank `index` holds, in increasing local offset."""
        return self.pattern.regions(self.global_shape, self.parts, index)


def equal_layout(name: str, shapes: Sequence[Shape]) -> TensorLayout:
    """The layout of a tensor that all ranks hold whole, under pattern `name`. Raises MisfitError."""
    if len(set(shapes)) > 1:
        raise MisfitError(f"expected one shape on all ranks; got {_listed(shapes)}")
    return TensorLayout(pattern(name), shapes[0], len(shapes))


def cut_layout(dim: int, shapes: Sequence[Shape], widths: Sequence[Sequence[int]] | None) -> TensorLayout:
    """The layout of a tensor of which each rank holds a cut of `dim`. Raises MisfitError.

    `shapes`: of what each rank holds. `widths`: elements of each block on each rank; None for one block.
    """
    if any(dim >= len(shape) for shape in shapes):
        raise MisfitError(f"expected tensors with a dim {dim}, along which they are cut; got {_listed(shapes)}")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise MisfitError(f"expected shapes that differ in dim {dim} only; got {_listed(shapes)}")
    lengths = [shape[dim] for shape in shapes]
    blocks = [tuple(block) for block in widths] if widths is not None else [tuple(lengths)]
    if any(len(block) != len(shapes) for block in blocks):
        raise MisfitError(f"expected a width for each of {len(shapes)} ranks; got {[list(block) for block in blocks]}")
    sums = [sum(own) for own in zip(*blocks, strict=True)]
    if sums != lengths:
        raise MisfitError(f"expected {sums} elements of dim {dim} on the ranks, as the widths say; got {lengths}")
    whole = (*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :])
    return TensorLayout(_cut(dim, blocks), whole, len(shapes))


def _blocks(held: Sequence[Sequence[RegionPair]], shape: Shape, dim: int) -> list[tuple[int, ...]] | None:
    """Widths of blocks of `dim`, where each rank holds one stretch of each block, one after another; else None."""
    across = (*shape[:dim], *shape[dim + 1 :])
    boxes = [[pair.whole for pair in own if pair.whole.numel] for own in held]
    if any((*box.sizes[:dim], *box.sizes[dim + 1 :]) != across for own in boxes for box in own):
        return None
    if len({len(own) for own in boxes}) != 1:
        return None
    edge, blocks = 0, []
    for block in zip(*boxes, strict=True):
        for box in block:
            if box.offsets[dim] != edge:
                return None
            edge += box.sizes[dim]
        blocks.append(tuple(box.sizes[dim] for box in block))
    return blocks if edge == shape[dim] else None


def _cut(dim: int, blocks: Sequence[tuple[int, ...]]) -> Pattern:
    """`shard` where its own arithmetic gives these widths, else `cut`."""
    if all(block == _even(sum(block), len(block)) for block in blocks):
        return pattern("shard", dim=dim, blocks=tuple(map(sum, blocks)) if len(blocks) > 1 else ())
    return pattern("cut", dim=dim, widths=tuple(blocks))


def _even(length: int, parts: int) -> tuple[int, ...]:
    base, rest = divmod(length, parts)
    return tuple(base + (index < rest) for index in range(parts))


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
