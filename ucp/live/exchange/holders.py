"""Which ranks hold the same: found by all of them together, with no rank that knows everything.

Every slice has a digest of all that makes it what it is. A digest is sent to the rank whose number it says (modulo the
count of ranks), which sees who else sent it and answers all of them: so each rank handles about as many digests as it
holds slices, however many ranks there are.

1. `digests` of what this rank holds;
2. `holders` sends them round, and says who holds each: `_answers` is what a rank says to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.core.slices import Slice
from ucp.live.run.ranks import Ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Holders", "digests", "holders"]

_WORD = 64
"""Ranks that one number tells of, one per bit."""


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
        cut = cuts.get(kind)
        if cut is None:
            cut = cuts[kind] = repr(kind)
        text = f"{own.param}\0{own.state}\0{cut}"
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
    known: dict[bytes, int] = {}
    numbers = np.zeros(len(own), dtype=np.int64)
    for where, answer in zip(np.split(order, ends), answers, strict=True):
        numbers[where] = _numbers(answer, known, words=-(-ranks.count // _WORD))
    return Holders(sets=tuple(_ranks(mask) for mask in known), numbers=tuple(numbers.tolist()))


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


def _numbers(answer: NDArray[Any], known: dict[bytes, int], *, words: int) -> NDArray[Any]:
    """The set of each digest of an answer; `known`: sets by their bits, to which new ones are added."""
    import numpy as np

    stop = 1 + int(answer[0]) * words
    table = [known.setdefault(mask.tobytes(), len(known)) for mask in answer[1:stop].reshape(-1, words)]
    return np.array(table, dtype=np.int64)[answer[stop:].astype(np.int64)]


def _ranks(mask: bytes) -> tuple[int, ...]:
    import numpy as np

    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return tuple(np.flatnonzero(bits).tolist())
