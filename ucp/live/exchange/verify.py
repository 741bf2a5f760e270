"""Read everything again, straight from the files, and compare it with what has landed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ucp.errors import CorruptError, counted, listed
from ucp.live.exchange.loads import Load, own_load
from ucp.live.exchange.places import Places, bytes_of
from ucp.live.exchange.read_shares import Window, share_out
from ucp.live.exchange.reading import start_reading
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, together
from ucp.transfer.gather import Reader

if TYPE_CHECKING:
    import torch

__all__ = ["verify"]


def verify(items: Sequence[LoadItem], into: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
    """Compare the landing tensors bit for bit with their items, cast as these are. Collective.

    Raises CorruptError, on all ranks, that names what differs.
    """
    loads = [own_load(number, item) for number, item in enumerate(items) if item.slice.nbytes]

    def compare() -> None:
        with Reader(1) as reader:
            differing = list(dict.fromkeys(at for at in _differing(loads, Places(into), reader, memory // 2)))
        if differing:
            names = (f"{items[at].name}/{items[at].state}" for at in differing)
            many = counted(len(differing), "tensor in memory differs", "tensors in memory differ")
            raise CorruptError(
                f"expected what the checkpoint holds; when it is read again, {many}:\n{listed(names)}\n"
                "something else writes to the model or the files meanwhile, or memory or network are faulty: load again"
            )

    together(ranks, compare)


def _differing(loads: Sequence[Load], places: Places, reader: Reader, nbytes: int) -> list[int]:
    """Items that differ."""
    import torch

    found = []
    windows: Sequence[Window] = list(
        share_out([own.slice for own in loads], costs=[own.cost for own in loads], readers=1, part_nbytes=nbytes)
    )
    buffer = torch.empty(max((window.part_nbytes for window in windows), default=0), dtype=torch.uint8)
    for window in windows:
        segments = list(window.segments(0))
        parts = [buffer[own.offset : own.offset + own.nbytes] for own in segments]
        start_reading(reader, loads, segments, [part.numpy().data for part in parts]).finish()
        for segment, part in zip(segments, parts, strict=True):
            load = loads[segment.load]
            pieces = places.pieces(load, segment, part)
            if not all(_same(spot, values) for spot, values in pieces):
                found.append(load.item)
    return found


def _same(spot: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    import torch

    held, wanted = (bytes_of(own.cpu().contiguous()) for own in (spot, values))
    return torch.equal(held, wanted)
