"""Which rank reads which bytes of a layer, if several ranks hold the same parameters: each a part, then all gather.

A slot of the ring holds, for each set of ranks, what they hold alike, as one range of bytes. The range is cut into
windows, and a window into one part per rank of the set (MoESys, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ucp.errors import LoadError, UsageError
from ucp.live.exchange.stages import find_holders, hash_slices
from ucp.live.run.ranks import Ranks
from ucp.streaming.reader import ReadRange, StreamedParam, pad

if TYPE_CHECKING:
    import torch

_PART = 16 << 20
"""Bytes that a rank gives to others at a time, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWindow:
    """Bytes of a slot that several ranks hold: one part of each, in their order."""

    members: tuple[int, ...]
    """Ranks, in increasing order."""
    offset: int
    """First byte in the slot."""
    part_nbytes: int
    """Bytes that each rank reads."""

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parts, [ranks, bytes]."""
        count = len(self.members)
        return buffer[self.offset : self.offset + count * self.part_nbytes].view(count, self.part_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A layer in a slot."""

    offsets: Sequence[int]
    """First byte of each parameter."""
    reads: Sequence[ReadRange]
    """What this rank reads."""
    windows: Sequence[SharedWindow]
    """What ranks gather, in this order."""
    nbytes: int
    """Bytes of a slot that it takes."""


def plan_layers(layers: Sequence[Sequence[StreamedParam]], ranks: Ranks) -> list[LayerPlan]:
    """Where parameters of each layer are in a slot, and what this rank reads of them. Collective."""
    numbered = [(layer, param) for layer, params in enumerate(layers) for param in params]
    hashes = hash_slices([param.item.slice for _, param in numbered])
    keys = [digest ^ layer for digest, (layer, _) in zip(hashes, numbered, strict=True)]  # alike in the same layer
    holder_sets, set_numbers = find_holders(keys, ranks)
    entries = zip(keys, (holder_sets[number] for number in set_numbers), strict=True)
    return [_plan_layer([(param, *next(entries)) for param in params], ranks.rank) for params in layers]


def _plan_layer(entries: Sequence[tuple[StreamedParam, int, tuple[int, ...]]], rank: int) -> LayerPlan:
    """`entries`: each parameter with its key and the ranks that hold it."""
    offsets = [0] * len(entries)
    reads: list[ReadRange] = []
    windows: list[SharedWindow] = []
    position = 0

    def order(number: int) -> tuple[int, tuple[int, ...], int]:
        _, key, members = entries[number]
        return -len(members), members, number if len(members) == 1 else key  # every set in the order of all its ranks

    for members, group in groupby(sorted(range(len(entries)), key=order), key=lambda number: entries[number][2]):
        first, numbers = position, list(group)
        for number in numbers:
            offsets[number] = position
            position += pad(entries[number][0].nbytes)
        if len(members) == 1:
            reads += (ReadRange(entries[n][0], 0, entries[n][0].numel, offsets[n]) for n in numbers)
            continue
        count = -(-(position - first) // (len(members) * _PART))
        part = pad(-(-(position - first) // (len(members) * count)))
        for offset in range(first, first + count * len(members) * part, len(members) * part):
            window = SharedWindow(members=members, offset=offset, part_nbytes=part)
            windows.append(window)
            low = offset + members.index(rank) * part
            reads += _clip(((entries[number][0], offsets[number]) for number in numbers), low, low + part)
        position = first + count * len(members) * part
    return LayerPlan(offsets=offsets, reads=reads, windows=windows, nbytes=position)


def _clip(params: Iterator[tuple[StreamedParam, int]], low: int, high: int) -> Iterator[ReadRange]:
    """What bytes `low` to `high` of a slot hold of parameters that begin at the given bytes."""
    for param, offset in params:
        itemsize = param.item.slice.dtype.itemsize
        start, stop = max(low - offset, 0), min(high - offset, param.nbytes)
        if start < stop:
            yield ReadRange(param, start // itemsize, stop // itemsize, offset + start)


def gather(layer: int, plan: LayerPlan, buffer: torch.Tensor, ranks: Ranks, failure: Exception | None) -> None:
    """Gather the parts of other ranks into a slot, whose own parts are read. All ranks of each set take part.

    `failure`: why this rank could not read, which others learn. Raises it, or LoadError if another rank failed;
    UsageError if another rank is at another layer.
    """
    import torch

    for members, group in groupby(plan.windows, key=lambda window: window.members):
        status = torch.tensor([layer, failure is not None])
        statuses = status.new_empty(len(members), 2)
        ranks.gather(status, statuses, members)
        layers = dict(zip(members, statuses[:, 0].tolist(), strict=True))
        if len(set(layers.values())) > 1:
            failure = failure or UsageError(
                f"expected all ranks to run the same layers in the same order, as with exchange='always'; got layers "
                f"{layers} by rank. Run the same batches on all, or leave exchange out"
            )
        elif statuses[:, 1].any():
            failed = [rank for rank, has_failed in zip(members, statuses[:, 1].tolist(), strict=True) if has_failed]
            failure = failure or LoadError(f"layer {layer} could not be read on ranks {failed}; see their errors")
        else:
            for window in group:
                rows = window.rows(buffer)
                ranks.gather(rows[members.index(ranks.rank)], rows, members)
    if failure is not None:
        raise failure
