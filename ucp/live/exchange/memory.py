"""Load what ranks have in memory: a rank takes what it holds from itself, and the rest from ranks that hold it.

1. Every rank lists the boxes that its items need and that it does not hold itself;
2. each is sent by one of the ranks that hold it, the one that sends fewest bytes so far (`deal`);
3. boxes are sent in rounds, then stored as values that an index has are (`carry`).

An index refers to the memory of a rank as to a file of contiguous boxes (`memory_path`). The boxes that a rank needs in
a round take at most a quarter of its memory for buffers; those that it sends may take more, if few ranks send to many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ucp.core.assign import deal
from ucp.core.index import Fragment, Index
from ucp.core.region import Box, intersect
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.live.exchange.carry import CarryOptions, Traffic, carry
from ucp.live.exchange.stages import Exchange
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_PREFIX = "<memory of rank "

_Copies: TypeAlias = tuple[tuple[int, int], ...]
"""Every copy of a box: the rank that has it, and its offset there."""


@runtime_checkable
class Memory(Protocol):
    """What this rank keeps in host memory (`ucp.Snapshots`)."""

    def overlay(self, index: Index, ranks: Ranks, *, exact: bool) -> Index:
        """`index`, with newer parameters from the memory of all ranks. Collective."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The elements of a box, which begin at `offset` of this rank's memory, in row-major order."""


def memory_path(rank: int) -> str:
    """What stands for the memory of a rank in place of a file."""
    return f"{_PREFIX}{rank}>"


def is_memory(path: str | None) -> bool:
    """Whether a path stands for the memory of a rank."""
    return path is not None and path.startswith(_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A box that a rank needs and does not hold."""

    number: int
    """Number of the round."""
    nbytes: int
    """Its bytes."""
    copies: _Copies
    """Where it is."""


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
    in_memory = [number for number, item in enumerate(items) if any(map(_is_in_memory, item.source.fragments))]
    others = sorted({*range(len(items))} - {*in_memory})
    traffic = carry([items[number] for number in others], [into[number] for number in others], ranks, options)
    if memory is None:
        return traffic
    rounds = run_together(ranks, lambda: list(_plan_rounds(items, in_memory, limit=options.memory // 4)))
    requests = ranks.share(list(_list_requests(items, rounds, ranks.rank)))
    sent = _deal_requests(requests)
    options = replace(options, exchange=Exchange.NEVER, records=())
    for number in range(max(ranks.share(len(rounds)))):
        numbers = rounds[number] if number < len(rounds) else []
        received = _swap(sent, number, ranks, memory)
        resolved = run_together(ranks, partial(_resolve, [items[n] for n in numbers], received, memory, ranks.rank))
        carried = carry(resolved, [into[n] for n in numbers], ranks, options)
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


def _is_in_memory(fragment: Fragment) -> bool:
    return is_memory(fragment.path)


def _list_boxes(item: LoadItem) -> dict[Box, _Copies]:
    """Boxes of which an item needs elements, and their copies."""
    copies: dict[Box, _Copies] = {}
    for fragment in item.source.fragments:
        ref = fragment.ref
        assert isinstance(ref, TensorRef)
        if any(intersect(fragment.box, pair.global_box) for pair in item.slice.pairs):
            owner = int(ref.path[len(_PREFIX) : -1])
            copies[fragment.box] = (*copies.get(fragment.box, ()), (owner, ref.offset))
    return copies


def _nbytes_of(item: LoadItem, box: Box) -> int:
    return box.numel * item.source.dtype.itemsize


def _plan_rounds(items: Sequence[LoadItem], in_memory: Sequence[int], *, limit: int) -> Iterator[list[int]]:
    """Numbers of the items of each round."""
    numbers: list[int] = []
    free = limit
    for number in in_memory:
        nbytes = sum(_nbytes_of(items[number], box) for box in _list_boxes(items[number]))
        if nbytes > free and numbers:
            yield numbers
            numbers, free = [], limit
        numbers.append(number)
        free -= nbytes
    if numbers:
        yield numbers


def _list_requests(items: Sequence[LoadItem], rounds: Sequence[Sequence[int]], rank: int) -> Iterator[_Request]:
    for number, of_round in enumerate(rounds):
        boxes = {
            copies: _nbytes_of(items[item], box)
            for item in of_round
            for box, copies in _list_boxes(items[item]).items()
        }
        for copies, nbytes in boxes.items():
            if rank not in dict(copies):
                yield _Request(number=number, nbytes=nbytes, copies=copies)


def _deal_requests(requests: Sequence[Sequence[_Request]]) -> dict[tuple[int, int, int], list[_Request]]:
    """(Round, sender, receiver) to what is sent. `requests`: of every rank. All ranks compute the same."""
    ordered = [(rank, request) for rank, of_rank in enumerate(requests) for request in of_rank]
    ordered.sort(key=lambda entry: len(entry[1].copies))  # least choice first
    senders = deal(
        ((owner for owner, _ in request.copies) for _, request in ordered), (request.nbytes for _, request in ordered)
    )
    sent: dict[tuple[int, int, int], list[_Request]] = defaultdict(list)
    for (rank, request), sender in zip(ordered, senders, strict=True):
        assert sender is not None
        sent[request.number, sender, rank].append(request)
    return sent


def _swap(
    sent: dict[tuple[int, int, int], list[_Request]], number: int, ranks: Ranks, memory: Memory
) -> dict[_Copies, bytes]:
    """Send the boxes of a round. Returns those for this rank. Collective."""
    peers = range(ranks.count)
    parts = run_together(
        ranks,
        lambda: [
            _pack(
                memory.read(dict(request.copies)[ranks.rank], request.nbytes)
                for request in sent[number, ranks.rank, peer]
            )
            for peer in peers
        ],
    )
    received: dict[_Copies, bytes] = {}
    for peer, part in zip(peers, ranks.swap(parts), strict=True):
        data, start = part.tobytes(), 0
        for request in sent[number, peer, ranks.rank]:
            received[request.copies] = data[start : start + request.nbytes]
            start += request.nbytes
    return received


def _pack(boxes: Iterable[bytes]) -> NDArray[Any]:
    """The boxes one after another, as numbers of 64 bits."""
    import numpy as np

    data = b"".join(boxes)
    return np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.uint64)


def _resolve(items: Iterable[LoadItem], received: Mapping[_Copies, bytes], memory: Memory, rank: int) -> list[LoadItem]:
    """The items, with their elements in place of references to memory."""
    resolved = []
    for item in items:
        fragments = []
        for box, copies in _list_boxes(item).items():
            offset = dict(copies).get(rank)
            data = received[copies] if offset is None else memory.read(offset, _nbytes_of(item, box))
            ref = InlineTensor(data=data, dtype=item.source.dtype, shape=box.sizes)
            fragments.append(Fragment(box=box, ref=ref))
        resolved.append(replace(item, source=replace(item.source, fragments=tuple(fragments))))
    return resolved
