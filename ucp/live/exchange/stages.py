"""What one rank does, in which order: first what it exchanges, set of holders by set, then what it reads for itself.

Every rank goes through its sets in the same order, the largest first, so that none waits for one that waits for it.
Within a set all members have the same slices in the same order, layer by layer; both follow from names and digests
alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from ucp.live.exchange.holders import digests, holders
from ucp.live.exchange.loads import Load, loads_of, own_load
from ucp.live.exchange.read_shares import ALIGNMENT, Window, share_out
from ucp.live.exchange.traffic import Exchange
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, together
from ucp.source.read import no_cycle_collection

__all__ = ["STATUS", "Room", "Stage", "plan_stages"]

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

_NUMBER = re.compile(r"\d+")

_DIGITS = 8
"""Of a number that is compared as text."""


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

    def rest(self, rank: int, memory: int, wanted: Callable[[Load], bool]) -> Stage:
        """What was not begun, of loads that are `wanted`, for `rank` to read alone."""
        done = self.done or [own.slice.start for own in self.loads]
        left = [(own, at) for own, at in zip(self.loads, done, strict=True) if at < own.slice.stop and wanted(own)]
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
        return [_stage((ranks.rank,), together(ranks, lambda: [own_load(*one) for one in wanted]), memory)]
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
            stages.append(_stage(members, [shared[at] for at in _in_order(some, shared, keys)], memory))
    return [*stages, _stage((ranks.rank,), [alone[at] for at in sorted(own)], memory)]


def _stage(members: tuple[int, ...], loads: list[Load], memory: int) -> Stage:
    return Stage(members=members, loads=loads, room=Room.within(memory, len(members)))


def _in_order(some: Sequence[int], loads: Sequence[Load], keys: Sequence[int]) -> list[int]:
    """Layer by layer; all members find the same order."""
    places: dict[str, str] = {}

    def key(at: int) -> str:
        own = loads[at].slice
        match = _PREFIX.match(own.param)
        prefix = match[0] if match else ""
        if prefix not in places:
            places[prefix] = _NUMBER.sub(lambda number: number[0].zfill(_DIGITS), prefix)
        return f"{places[prefix]}\0{own.param}\0{own.state}\0{keys[at]:x}"

    return sorted(some, key=key)
