"""Load what ranks have in memory: a rank takes what it holds from itself, and the rest from ranks that hold it.

1. Every rank lists the boxes that its items need and that it does not hold itself;
2. each is sent by one of the ranks that hold it, the one that sends fewest bytes so far (`deal`);
3. boxes are sent in rounds, then stored as values that an index has are (`carry`).

An index refers to the memory of a rank as to a file of contiguous boxes (`memory_path`). The boxes that a rank needs in
a round take at most a quarter of its memory for buffers; those that it sends may take more, if few ranks send to many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ucp.core.assign import deal
from ucp.core.index import Fragment, Index
from ucp.core.region import Box, intersect
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.live.exchange.carry import CarryOptions, Traffic, carry
from ucp.live.exchange.stages import Exchange
from ucp.live.parts import LoadItem, is_memory, memory_rank
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_Copies: TypeAlias = tuple[tuple[int, int], ...]
"""Every copy of a box: the rank that has it, and its offset there."""
_Boxes: TypeAlias = dict[Box, tuple[_Copies, int]]
"""Box to its copies and its bytes."""


@runtime_checkable
class Memory(Protocol):
    """What this rank keeps in host memory (`ucp.Snapshots`)."""

    def overlay(self, index: Index, ranks: Ranks, *, exact: bool) -> Index:
        """`index`, with newer parameters from the memory of all ranks. Collective."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The elements of a box, which begin at `offset` of this rank's memory, in row-major order."""


class _Request(NamedTuple):
    """A box that a rank needs and does not hold."""

    number: int
    """Number of the round."""
    copies: _Copies
    """Where it is."""
    nbytes: int
    """Its bytes."""


def carry_with_memory(
    items: Sequence[LoadItem],
    into: Sequence[torch.Tensor],
    ranks: Ranks,
    options: CarryOptions,
    memory: Memory | None,
) -> Traffic:
    """`carry`, for items in files and in the memory of ranks. Collective.

    `memory`: of this rank; None if no rank has items in memory.
    """
    if memory is None:
        return carry(items, into, ranks, options)
    in_memory = {n: item for n, item in enumerate(items) if any(is_memory(f.path) for f in item.source.fragments)}
    others = sorted({*range(len(items))} - in_memory.keys())
    traffic = carry([items[n] for n in others], [into[n] for n in others], ranks, options)
    rounds = run_together(ranks, lambda: list(_plan_rounds(in_memory, limit=options.memory // 4)))
    sent = _deal_requests(ranks.share(list(_list_requests(rounds, ranks.rank))))
    options = replace(options, exchange=Exchange.NEVER, records=())
    for number in range(max(ranks.share(len(rounds)))):
        of_round = rounds[number] if number < len(rounds) else {}
        received = _swap(sent, number, ranks, memory)
        resolved = run_together(
            ranks, partial(_resolve, [items[n] for n in of_round], [*of_round.values()], received, memory, ranks.rank)
        )
        carried = carry(resolved, [into[n] for n in of_round], ranks, options)
        nbytes = sum(map(len, received.values()))
        traffic = replace(
            traffic,
            nbytes=tuple(map(add, traffic.nbytes, carried.nbytes)),
            exchanged_nbytes=traffic.exchanged_nbytes + nbytes,
            landed_nbytes=traffic.landed_nbytes + carried.landed_nbytes,
            memory_nbytes=traffic.memory_nbytes + carried.landed_nbytes,
            peak_nbytes=max(traffic.peak_nbytes, carried.peak_nbytes + nbytes),
        )
    return traffic


def _list_boxes(item: LoadItem) -> _Boxes:
    """Boxes of which an item needs elements."""
    copies: dict[Box, _Copies] = {}
    for fragment in item.source.fragments:
        ref = fragment.ref
        assert isinstance(ref, TensorRef)
        if any(intersect(fragment.box, pair.global_box) for pair in item.slice.pairs):
            owner = memory_rank(ref.path)
            copies[fragment.box] = (*copies.get(fragment.box, ()), (owner, ref.offset))
    return {box: (of_box, box.numel * item.source.dtype.itemsize) for box, of_box in copies.items()}


def _plan_rounds(in_memory: Mapping[int, LoadItem], *, limit: int) -> Iterator[dict[int, _Boxes]]:
    """The items of each round, by number, with the boxes that they need."""
    of_round: dict[int, _Boxes] = {}
    free = limit
    for number, item in in_memory.items():
        boxes = _list_boxes(item)
        nbytes = sum(size for _, size in boxes.values())
        if nbytes > free and of_round:
            yield of_round
            of_round, free = {}, limit
        of_round[number] = boxes
        free -= nbytes
    if of_round:
        yield of_round


def _list_requests(rounds: Sequence[Mapping[int, _Boxes]], rank: int) -> Iterator[_Request]:
    for number, of_round in enumerate(rounds):
        for copies, nbytes in dict.fromkeys(copy for boxes in of_round.values() for copy in boxes.values()):
            if rank not in dict(copies):
                yield _Request(number, copies, nbytes)


def _deal_requests(requests: Sequence[Sequence[_Request]]) -> dict[tuple[int, int, int], list[_Request]]:
    """(Round, sender, receiver) to what is sent. `requests`: of every rank. All ranks compute the same."""
    ordered = [(rank, request) for rank, of_rank in enumerate(requests) for request in of_rank]
    ordered.sort(key=lambda entry: len(entry[1].copies))  # least choice first
    senders = deal((dict(request.copies) for _, request in ordered), (request.nbytes for _, request in ordered))
    sent: dict[tuple[int, int, int], list[_Request]] = defaultdict(list)
    for (rank, request), sender in zip(ordered, senders, strict=True):
        assert sender is not None
        sent[request.number, sender, rank].append(request)
    return sent


def _swap(
    sent: Mapping[tuple[int, int, int], Sequence[_Request]], number: int, ranks: Ranks, memory: Memory
) -> dict[_Copies, bytes]:
    """Send the boxes of a round. Returns those for this rank. Collective."""
    import numpy as np

    def pack(peer: int) -> NDArray[Any]:
        requests = sent.get((number, ranks.rank, peer), ())
        data = b"".join(memory.read(dict(copies)[ranks.rank], nbytes) for _, copies, nbytes in requests)
        return np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.uint64)

    parts = run_together(ranks, lambda: [pack(peer) for peer in range(ranks.count)])
    received: dict[_Copies, bytes] = {}
    for peer, part in enumerate(ranks.swap(parts)):
        data, start = part.tobytes(), 0
        for _, copies, nbytes in sent.get((number, peer, ranks.rank), ()):
            received[copies] = data[start : start + nbytes]
            start += nbytes
    return received


def _resolve(
    items: Sequence[LoadItem], boxes: Sequence[_Boxes], received: Mapping[_Copies, bytes], memory: Memory, rank: int
) -> list[LoadItem]:
    """The items, with the elements of their boxes in place of references to memory."""
    resolved = []
    for item, of_item in zip(items, boxes, strict=True):
        fragments = []
        for box, (copies, nbytes) in of_item.items():
            offset = dict(copies).get(rank)
            data = received[copies] if offset is None else memory.read(offset, nbytes)
            fragments.append(Fragment(box=box, ref=InlineTensor(data=data, dtype=item.source.dtype, shape=box.sizes)))
        resolved.append(replace(item, source=replace(item.source, fragments=tuple(fragments))))
    return resolved
