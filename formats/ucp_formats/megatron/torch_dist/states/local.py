"""Tensors as one rank of the model-parallel grid held them, out of the chunks of a torch_dist checkpoint.

megatron-core writes a chunk for every local tensor, and the same chunk only once. So the chunks of a tensor say how it
was cut: as many along a dim as there are ranks (a plain cut), twice as many along dim 0 (gate and up projection of a
gated MLP, each cut), or a single one (held by all).
"""

from __future__ import annotations

from collections.abc import Sequence

from ucp.core.region import Box, RegionPair
from ucp_formats.megatron.flat_buffer.boxes import Candidate
from ucp_formats.megatron.torch_dist.unstack import Piece, Whole

__all__ = ["local_tensor"]


def local_tensor(whole: Whole, *, rank: int, ranks: int, kind: str) -> Candidate | None:
    """The tensor as rank `rank` of `ranks` held it; None when its chunks are no regular cut over so many ranks.

    `kind`: see `Candidate`.
    """
    chosen: list[Piece] = []
    start = 0
    for length in whole.parts or (whole.shape[0] if whole.shape else 1,):
        inside = [piece for piece in whole.pieces if _lies_in(piece.box, start, start + length)]
        own = _of_rank(inside, rank=rank, ranks=ranks)
        if own is None:
            return None
        chosen += own
        start += length
    pairs, shape = _end_to_end(chosen)
    return Candidate(
        name=whole.name,
        local_shape=shape,
        pairs=pairs,
        refs=tuple(piece.ref for piece in chosen),
        kind=kind,
    )


def _lies_in(box: Box, start: int, stop: int) -> bool:
    return not box.offsets or start <= box.offsets[0] < stop


def _of_rank(pieces: Sequence[Piece], *, rank: int, ranks: int) -> list[Piece] | None:
    """Pieces of a rank, in the order of the local tensor; None when they are no regular cut."""
    if not pieces or not all(piece.ref.is_contiguous for piece in pieces):
        return None
    if len(pieces) == 1:
        return list(pieces)
    cut = [dim for dim in range(len(pieces[0].box.sizes)) if len({piece.box.offsets[dim] for piece in pieces}) > 1]
    if len(cut) != 1 or len({piece.box.sizes for piece in pieces}) != 1:
        return None
    ordered = sorted(pieces, key=lambda piece: piece.box.offsets[cut[0]])
    if len(ordered) == ranks:
        return [ordered[rank]]
    if len(ordered) == 2 * ranks and cut[0] == 0:
        return [ordered[rank], ordered[ranks + rank]]
    return None


def _end_to_end(pieces: Sequence[Piece]) -> tuple[tuple[RegionPair, ...], tuple[int, ...]]:
    """Where the pieces lie in the local tensor that they make up along dim 0, and its shape."""
    if not pieces[0].box.sizes:
        return (RegionPair(pieces[0].box, pieces[0].box),), ()
    pairs = []
    row = 0
    for piece in pieces:
        sizes = piece.box.sizes
        pairs.append(RegionPair(piece.box, Box((row, *(0,) * (len(sizes) - 1)), sizes)))
        row += sizes[0]
    return tuple(pairs), (row, *pieces[0].box.sizes[1:])
