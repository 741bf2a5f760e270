"""What one rank does, in which order: first what it exchanges, set of holders by set, then what it reads for itself.

Every rank goes through its sets in the same order, the largest first, so that none waits for one that waits for it.
Within a set all members have the same slices in the same order, layer by layer; both follow from names and digests
alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.core.target import Slice
from ucp.live.exchange.loads import Load, loads_of, own_load
from ucp.live.exchange.read_shares import ALIGNMENT, Window, aligned, share_out
from ucp.live.exchange.traffic import Exchange
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, together
from ucp.source.read import no_cycle_collection

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATUS = 4 * ALIGNMENT
"""Bytes after every part: whether its rank has failed, and what it has measured."""

_PART = 16 << 20
"""Bytes that a rank reads for a window, at most."""

_SMALL = 1 << 20
"""Bytes for whose sake no exchange is begun where one may be left out."""

_PROBE = 4 << 20
"""Bytes of a part of the first windows: what they take says how to go on."""
_PROBES = 4
"""Windows that are begun before that is decided."""

_PREFIX = re.compile(r"(.*\d)?")
"""A name up to its last number: layers.3.mlp.experts.7 of layers.3.mlp.experts.7.w1.weight."""

_WORD = 64
"""Ranks that one number tells of, one per bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How large the windows of so many readers are."""

    part_nbytes: int
    """Bytes that a rank reads for one."""
    round_nbytes: int
    """Bytes of that which are gathered at once."""

    @classmethod
    def within(cls, memory: int, readers: int) -> Room:
        """Such that two parts take half of `memory` bytes at most, and what is gathered at once the other half."""
        part = min(memory // 4, _PART) if readers > 1 else memory // 4
        rounds = -(-part // max(memory // 2 // readers - STATUS, ALIGNMENT))
        return cls(part_nbytes=part, round_nbytes=-(-part // max(rounds, 1)))


@dataclass(slots=True, kw_only=True)
class Stage:
    """What the ranks of one set read between them."""

    members: tuple[int, ...]
    """Ranks, in increasing order."""
    loads: list[Load]
    """What they all hold."""
    room: Room
    """Size of its windows."""
    done: list[int] = field(default_factory=list)
    """For each load, the element up to which windows have been made."""
    is_over: bool = False
    """Whether a member has failed: all of them stop at the same window."""
    is_left: bool = False
    """Whether the members have agreed to read the rest for themselves."""
    measured: list[tuple[float, float]] = field(default_factory=list)
    """For each window: seconds to read a part of it; seconds to gather and place all of it."""

    def windows(self) -> Iterator[Window]:
        """All of them, while the set holds together."""
        if not self.done:
            self.done = [own.slice.start for own in self.loads]
        probes = islice(self._cut(_PROBE), _PROBES if len(self.members) > 1 else 0)
        for window in chain(probes, self._cut(self.room.part_nbytes)):
            if self.is_over or self.is_left:
                return
            for segment in window.laid:
                self.done[segment.load] = segment.stop
            yield window

    def _cut(self, part_nbytes: int) -> Iterator[Window]:
        """What is not done yet, by parts of at most so many bytes."""
        part = min(part_nbytes, self.room.part_nbytes)
        yield from share_out(
            [own.slice for own in self.loads],
            costs=[own.cost for own in self.loads],
            readers=len(self.members),
            part_nbytes=part,
            round_nbytes=min(self.room.round_nbytes, part),
            done=tuple(self.done),
        )

    def needed(self) -> Room:
        """The room that it takes, little where it carries little; multiples of `ALIGNMENT`, as windows are."""
        total = sum(own.slice.nbytes + ALIGNMENT for own in self.loads)
        part = max(aligned(min(self.room.part_nbytes, -(-total // len(self.members)))), ALIGNMENT)
        return Room(part_nbytes=part, round_nbytes=min(max(self.room.round_nbytes // ALIGNMENT, 1) * ALIGNMENT, part))

    def rest(self, rank: int, memory: int, wanted: Sequence[bool]) -> Stage:
        """What was not begun, of the loads that are `wanted`, for `rank` to read alone."""
        done = self.done or [own.slice.start for own in self.loads]
        every = zip(self.loads, done, wanted, strict=True)
        left = [(own, at) for own, at, is_wanted in every if is_wanted and at < own.slice.stop]
        return Stage(
            members=(rank,),
            loads=[own for own, _ in left],
            room=Room.within(memory, 1),
            done=[at for _, at in left],
        )


@no_cycle_collection()
def plan_stages(items: Sequence[LoadItem], ranks: Ranks, *, exchange: Exchange, memory: int) -> list[Stage]:
    """The stages of this rank; the last is what it reads for itself. Collective."""
    wanted = [(at, item) for at, item in enumerate(items) if item.slice.nbytes]
    if ranks.count == 1 or exchange is Exchange.NEVER:
        own_loads = together(ranks, lambda: [own_load(*one) for one in wanted])
        return [Stage(members=(ranks.rank,), loads=own_loads, room=Room.within(memory, 1))]
    loads = together(ranks, lambda: [loads_of(*one) for one in wanted])
    alone, shared = [own for own, _ in loads], [both for _, both in loads]
    keys = together(ranks, lambda: digests([own.slice for own in shared]))
    found = holders(keys, ranks)
    held: list[list[int]] = [[] for _ in found.sets]
    for at, number in enumerate(found.numbers):
        held[number].append(at)
    own: list[int] = []
    stages = []
    for members, some in sorted(zip(found.sets, held, strict=True), key=lambda pair: (-len(pair[0]), pair[0])):
        nbytes = sum(shared[at].slice.nbytes for at in some)
        if len(members) == 1 or (exchange is Exchange.AUTO and nbytes < _SMALL):
            own += some
        else:
            ordered = sorted(some, key=lambda at: _place_in_model(shared[at].slice, keys[at]))
            loads_of_set = [shared[at] for at in ordered]
            stages.append(Stage(members=members, loads=loads_of_set, room=Room.within(memory, len(members))))
    return [*stages, Stage(members=(ranks.rank,), loads=[alone[at] for at in sorted(own)], room=Room.within(memory, 1))]


def _place_in_model(piece: Slice, digest: int) -> tuple[str, str, str, str]:
    """What orders slices layer by layer, alike on all members: numbers in names count as numbers."""
    match = _PREFIX.match(piece.param)
    layer = re.sub(r"\d+", lambda number: number[0].zfill(8), match[0] if match else "")
    return layer, piece.param, piece.state, f"{digest:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Who holds each slice of this rank."""

    sets: tuple[tuple[int, ...], ...]
    """Ranks that hold the same, in increasing order; this rank is in all of them."""
    numbers: tuple[int, ...]
    """For each slice, which of `sets` holds it."""


def digests(slices: Sequence[Slice]) -> list[int]:
    """128 bits for each slice: the same on all ranks that hold it. What a rank holds twice has two."""
    cuts: dict[tuple[object, ...], str] = {}
    seen: Counter[int] = Counter()
    found = []
    for own in slices:
        boxes = tuple((pair.whole.offsets, pair.local.offsets, pair.local.sizes) for pair in own.pairs)
        kind = boxes, own.dtype.value, own.local_shape, own.start, own.stop
        if kind not in cuts:
            cuts[kind] = repr(kind)
        text = f"{own.param}\0{own.state}\0{cuts[kind]}"
        digest = xxhash.xxh3_128_intdigest(text.encode())
        seen[digest] += 1
        found.append(digest if seen[digest] == 1 else xxhash.xxh3_128_intdigest(f"{text}\0{seen[digest]}".encode()))
    return found


def holders(own: Sequence[int], ranks: Ranks) -> Holders:
    """Which ranks hold what has these digests. Collective."""
    import numpy as np

    keys = np.frombuffer(b"".join(one.to_bytes(16, "little") for one in own), dtype="<u8").reshape(-1, 2)
    askers = (keys[:, 0] % np.uint64(ranks.count)).astype(np.int64)
    order = np.argsort(askers, kind="stable")
    ends = np.cumsum(np.bincount(askers, minlength=ranks.count))[:-1]
    told = ranks.swap([part.reshape(-1) for part in np.split(keys[order], ends)])
    answers = ranks.swap(_answers(told))
    words = -(-ranks.count // _WORD)
    known: dict[bytes, int] = {}  # sets by their bits, numbered
    numbers = np.zeros(len(own), dtype=np.int64)
    for where, answer in zip(np.split(order, ends), answers, strict=True):
        stop = 1 + int(answer[0]) * words
        table = [known.setdefault(mask.tobytes(), len(known)) for mask in answer[1:stop].reshape(-1, words)]
        numbers[where] = np.array(table, dtype=np.int64)[answer[stop:].astype(np.int64)]
    bits = (np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little") for mask in known)
    sets = tuple(tuple(np.flatnonzero(own).tolist()) for own in bits)
    return Holders(sets=sets, numbers=tuple(numbers.tolist()))


def _answers(told: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What to answer each rank: how many sets there are, the ranks of each in bits, and the set of each digest."""
    import numpy as np

    counts = [len(own) // 2 for own in told]
    keys = np.concatenate([own.reshape(-1, 2) for own in told])
    asker = np.repeat(np.arange(len(told)), counts)
    order = np.lexsort((keys[:, 0], keys[:, 1]))
    ordered = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.empty(len(keys), dtype=np.int64)
    group[order] = np.cumsum(is_first) - 1
    masks = np.zeros((int(is_first.sum()), -(-len(told) // _WORD)), dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), (asker % _WORD).astype(np.uint64))
    np.bitwise_or.at(masks, (group, asker // _WORD), bits)
    factors = 2 * np.random.default_rng(0).integers(1 << 63, size=masks.shape[1], dtype=np.uint64) + np.uint64(1)
    hashes = (masks * factors).sum(axis=1)  # sorting 64 bits takes a tenth of the time of sorting 1,024
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    sets, number = masks[first], number.reshape(-1)[group]
    answers = []
    for own in np.split(number, np.cumsum(counts)[:-1]):
        used, short = np.unique(own, return_inverse=True)
        head = np.array([len(used)], dtype=np.uint64)
        answers.append(np.concatenate([head, sets[used].reshape(-1), short.reshape(-1).astype(np.uint64)]))
    return answers
