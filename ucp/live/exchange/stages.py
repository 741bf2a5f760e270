"""The work of one rank, in order: first the slices that it exchanges, set of ranks by set, then all others.

Every rank works through its sets in the same order, the largest first, so that no two ranks wait for each other.
Within a set all members have the same slices in the same order, layer by layer. Both orders depend only on names and
hashes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.core.target import Slice
from ucp.live.exchange.read_shares import ALIGNMENT, Window, align, share_out
from ucp.live.exchange.reads import ReadItem, plan_reads, plan_solo_read
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, run_together
from ucp.source.read import pause_gc

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATUS = 4 * ALIGNMENT
"""Bytes after every part: whether its rank has failed, and what it has measured."""

_PART = 16 << 20
"""Bytes that a rank reads for a window, at most."""
_SMALL = 1 << 20
"""Bytes below which `Exchange.AUTO` does not exchange."""
_PROBE = 4 << 20
"""Bytes of a part of the first windows, whose times decide whether to continue exchanging."""
_PROBES = 4
"""Windows that are begun before that is decided."""
_PREFIX = re.compile(r"(.*\d)?")
"""A name up to its last number: layers.3.mlp.experts.7 of layers.3.mlp.experts.7.w1.weight."""
_WORD = 64
"""Ranks per 64-bit number of a bit mask."""


class Exchange(StrEnum):
    """Whether ranks that hold the same slices each read a share of them."""

    AUTO = "auto"
    """If that is faster, as measured on the first windows."""
    ALWAYS = "always"
    """Yes, so that storage is read as little as possible."""
    NEVER = "never"
    """No: every rank reads all that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Sizes of windows, in bytes."""

    part_nbytes: int
    """Bytes that each rank reads for a window."""
    round_nbytes: int
    """Bytes of such a part that are gathered at once."""

    @classmethod
    def within(cls, memory: int, readers: int) -> WindowSize:
        """Sizes with which two parts take at most half of `memory` bytes, and a gathered round the other half."""
        part = min(memory // 4, _PART) if readers > 1 else memory // 4
        rounds = -(-part // max(memory // 2 // readers - STATUS, ALIGNMENT))
        return cls(part_nbytes=part, round_nbytes=-(-part // max(rounds, 1)))


@dataclass(slots=True, kw_only=True)
class Stage:
    """What the ranks of one set read together."""

    members: tuple[int, ...]
    """Ranks, in increasing order."""
    items: list[ReadItem]
    """What all of them hold."""
    size: WindowSize
    """Size of its windows."""
    done: list[int] = field(default_factory=list)
    """For each item, the element up to which windows have been made."""
    has_failed: bool = False
    """Whether a member has failed: all of them stop at the same window."""
    is_dissolved: bool = False
    """Whether the members have agreed to read the rest for themselves."""
    timings: list[tuple[float, float]] = field(default_factory=list)
    """For each window: seconds to read a part of it; seconds to gather and store all of it."""

    def windows(self) -> Iterator[Window]:
        """All windows, until a member fails or the set is dissolved."""
        if not self.done:
            self.done = [item.slice.start for item in self.items]
        probes = islice(self._make_windows(_PROBE), _PROBES if len(self.members) > 1 else 0)
        for window in chain(probes, self._make_windows(self.size.part_nbytes)):
            if self.has_failed or self.is_dissolved:
                return
            for segment in window.segments:
                self.done[segment.slice_number] = segment.stop
            yield window

    def _make_windows(self, part_nbytes: int) -> Iterator[Window]:
        """What is not done yet, in parts of at most `part_nbytes`."""
        part = min(part_nbytes, self.size.part_nbytes)
        yield from share_out(
            [item.slice for item in self.items],
            costs=[item.cost for item in self.items],
            readers=len(self.members),
            part_nbytes=part,
            round_nbytes=min(self.size.round_nbytes, part),
            done=tuple(self.done),
        )

    def largest_window(self) -> WindowSize:
        """Sizes of the largest window, small if the stage is small, in multiples of `ALIGNMENT` as windows have."""
        total = sum(item.slice.nbytes + ALIGNMENT for item in self.items)
        part = max(align(min(self.size.part_nbytes, -(-total // len(self.members)))), ALIGNMENT)
        most = max(self.size.round_nbytes // ALIGNMENT, 1) * ALIGNMENT
        return WindowSize(part_nbytes=part, round_nbytes=min(most, part))

    def remainder(self, rank: int, memory: int, selected: Sequence[bool]) -> Stage:
        """A stage in which `rank` alone reads the rest of the `selected` items: what no window has held yet."""
        done = self.done or [item.slice.start for item in self.items]
        rows = zip(self.items, done, selected, strict=True)
        rest = [(item, start) for item, start, is_selected in rows if is_selected and start < item.slice.stop]
        return Stage(
            members=(rank,),
            items=[item for item, _ in rest],
            size=WindowSize.within(memory, 1),
            done=[start for _, start in rest],
        )


@pause_gc()
def plan_stages(items: Sequence[LoadItem], ranks: Ranks, *, exchange: Exchange, memory: int) -> list[Stage]:
    """The stages of this rank; in the last it reads alone. Collective."""
    numbered = [(number, item) for number, item in enumerate(items) if item.slice.nbytes]
    alone = (ranks.rank,)
    if ranks.count == 1 or exchange is Exchange.NEVER:
        solo_reads = run_together(ranks, lambda: [plan_solo_read(*entry) for entry in numbered])
        return [Stage(members=alone, items=solo_reads, size=WindowSize.within(memory, 1))]
    reads = run_together(ranks, lambda: [plan_reads(*entry) for entry in numbered])
    shared = [read for _, read in reads]
    keys = run_together(ranks, lambda: hash_slices([read.slice for read in shared]))
    holder_sets, set_numbers = find_holders(keys, ranks)
    members_of: list[list[int]] = [[] for _ in holder_sets]
    for position, number in enumerate(set_numbers):
        members_of[number].append(position)
    solo: list[int] = []
    stages = []
    for ranks_of_set, positions in sorted(
        zip(holder_sets, members_of, strict=True), key=lambda pair: (-len(pair[0]), pair[0])
    ):
        nbytes = sum(shared[position].slice.nbytes for position in positions)
        if len(ranks_of_set) == 1 or (exchange is Exchange.AUTO and nbytes < _SMALL):
            solo += positions
        else:
            positions.sort(key=lambda position: _model_order(shared[position].slice, keys[position]))
            size = WindowSize.within(memory, len(ranks_of_set))
            stages.append(Stage(members=ranks_of_set, items=[shared[position] for position in positions], size=size))
    solo_items = [reads[position][0] for position in sorted(solo)]
    return [*stages, Stage(members=alone, items=solo_items, size=WindowSize.within(memory, 1))]


def _model_order(piece: Slice, digest: int) -> tuple[str, str, str, str]:
    """Sort key that orders slices layer by layer, alike on all members: numbers in names count as numbers."""
    match = _PREFIX.match(piece.param)
    layer = re.sub(r"\d+", lambda number: number[0].zfill(8), match[0] if match else "")
    return layer, piece.param, piece.state, f"{digest:x}"


def hash_slices(slices: Sequence[Slice]) -> list[int]:
    """128 bits for each slice, the same on all ranks that hold it. A slice that a rank holds twice has two hashes."""
    texts: dict[tuple[object, ...], str] = {}
    counts: Counter[int] = Counter()
    hashes = []
    for piece in slices:
        boxes = tuple((pair.global_box.offsets, pair.local.offsets, pair.local.sizes) for pair in piece.pairs)
        kind = boxes, piece.dtype.value, piece.local_shape, piece.start, piece.stop
        if kind not in texts:
            texts[kind] = repr(kind)
        text = f"{piece.param}\0{piece.state}\0{texts[kind]}"
        digest = xxhash.xxh3_128_intdigest(text.encode())
        counts[digest] += 1
        copy = counts[digest]
        hashes.append(digest if copy == 1 else xxhash.xxh3_128_intdigest(f"{text}\0{copy}".encode()))
    return hashes


def find_holders(hashes: Sequence[int], ranks: Ranks) -> tuple[list[tuple[int, ...]], list[int]]:
    """Sets of ranks that hold the same slices, this rank in each; and for each hash, which set holds it. Collective.

    Every hash is sent to one rank, chosen by the hash, which answers with the ranks that sent it.
    """
    import numpy as np

    keys = np.frombuffer(b"".join(digest.to_bytes(16, "little") for digest in hashes), dtype="<u8").reshape(-1, 2)
    recipients = (keys[:, 0] % np.uint64(ranks.count)).astype(np.int64)
    order = np.argsort(recipients, kind="stable")
    ends = np.cumsum(np.bincount(recipients, minlength=ranks.count))[:-1]
    questions = ranks.swap([part.reshape(-1) for part in np.split(keys[order], ends)])
    answers = ranks.swap(_answer(questions))
    words = -(-ranks.count // _WORD)
    masks: dict[bytes, int] = {}  # sets by their bits, numbered
    numbers = np.zeros(len(hashes), dtype=np.int64)
    for positions, answer in zip(np.split(order, ends), answers, strict=True):
        stop = 1 + int(answer[0]) * words
        table = [masks.setdefault(mask.tobytes(), len(masks)) for mask in answer[1:stop].reshape(-1, words)]
        numbers[positions] = np.array(table, dtype=np.int64)[answer[stop:].astype(np.int64)]
    bits = (np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little") for mask in masks)
    return [tuple(np.flatnonzero(row).tolist()) for row in bits], numbers.tolist()


def _answer(questions: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What to answer each rank: how many sets there are, the ranks of each in bits, and the set of each hash."""
    import numpy as np

    counts = [len(question) // 2 for question in questions]
    keys = np.concatenate([question.reshape(-1, 2) for question in questions])
    sender = np.repeat(np.arange(len(questions)), counts)
    order = np.lexsort((keys[:, 0], keys[:, 1]))
    ordered = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.empty(len(keys), dtype=np.int64)
    group[order] = np.cumsum(is_first) - 1
    masks = np.zeros((int(is_first.sum()), -(-len(questions) // _WORD)), dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), (sender % _WORD).astype(np.uint64))
    np.bitwise_or.at(masks, (group, sender // _WORD), bits)
    factors = 2 * np.random.default_rng(0).integers(1 << 63, size=masks.shape[1], dtype=np.uint64) + np.uint64(1)
    mask_hashes = (masks * factors).sum(axis=1)  # sorting 64 bits takes a tenth of the time of sorting 1,024
    _, first, number = np.unique(mask_hashes, return_index=True, return_inverse=True)
    sets, number = masks[first], number.reshape(-1)[group]
    answers = []
    for set_numbers in np.split(number, np.cumsum(counts)[:-1]):
        used, short = np.unique(set_numbers, return_inverse=True)
        head = np.array([len(used)], dtype=np.uint64)
        answers.append(np.concatenate([head, sets[used].reshape(-1), short.reshape(-1).astype(np.uint64)]))
    return answers
