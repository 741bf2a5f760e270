"""Units of work: which blocks of which slices are written together, by which task.

1. Every placement is split into blocks of at most `BLOCK` bytes: a huge embedding is many blocks, in many tasks.
2. Blocks that follow one another in a file are joined to fills of at most `BLOCK` bytes, which are one write each.
3. Fills are bundled into tasks of about equal bytes.
4. Slices of one state whose blocks are spread over the source (`tiles`) are one task, which reads the state once.
5. A job has all these tasks, or those of its share (`Share`).

A task holds only numbers. The worker that carries it out resolves the pieces that fill a block
(`ucp.core.slices.resolve`), so a plan stays small however many ranks wrote the source. A list of tasks stores only
where each begins (`task_list`), so it stays small however many bytes are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol, TypeVar

from ucp.errors import MemoryBudgetError

BLOCK = 8 << 20
"""Bytes of one write, and of one digest. A multiple of every itemsize."""

TASK = 4 * BLOCK
"""The most bytes of a bundle, and so of nearly every task."""

SCRATCH = 3 * BLOCK
"""Bytes that a thread may need in addition to the block itself: a strided, cast, compared or encoded block."""


class Sized(Protocol):
    """Anything with a number of bytes."""

    @property
    def nbytes(self) -> int:
        """Number of bytes."""


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of one placement."""

    placement: int
    """Position in `TargetPlan.placements`; numbers from their count on are positions in `TargetPlan.raw`."""
    start: int
    """First element, counted in the slice's local tensor."""
    stop: int
    """One past the last element."""
    offset: int
    """Byte in the output file."""
    nbytes: int
    """Bytes in the output file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Consecutive bytes of one output file, written at once."""

    path: str
    """Output file, relative to the destination."""
    sections: tuple[Section, ...]
    """The sections that the bytes consist of, without gaps."""

    @property
    def offset(self) -> int:
        """First byte."""
        return self.sections[0].offset

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.sections[-1].offset + self.sections[-1].nbytes - self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit of work. Any worker may run it, more than once, and in any order."""

    number: int
    """Position in the plan."""
    fills: tuple[Fill, ...]
    """What the task writes."""
    nbytes: int
    """Bytes that the task writes."""
    projected_bytes: int = BLOCK + SCRATCH
    """Bytes of memory that the task needs while it runs."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of several parts of the work, of about equal bytes: tasks that follow one another, in few files.

    >>> str(Share(3, 8)), [Share.find_part(low, low + 10, total=40, parts=2) for low in (0, 10, 20, 30)]
    ('3/8', [1, 1, 2, 2])
    """

    number: int = 1
    """Number of the part, counted from 1."""
    parts: int = 1
    """Number of parts."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.parts:
            raise ValueError(f"expected a part from 1 to {self.parts}; got {self.number}")

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def overlaps(self, other: Share) -> bool:
        """Whether a task can be in both shares.

        >>> Share(1, 2).overlaps(Share(2, 4)), Share(1, 2).overlaps(Share(3, 4))
        (True, False)
        """
        begins, ends = (self.number - 1) * other.parts, self.number * other.parts
        return begins < other.number * self.parts and (other.number - 1) * self.parts < ends

    @staticmethod
    def find_part(start: int, stop: int, *, total: int, parts: int) -> int:
        """Number of the part that a task belongs to: the one with the middle of its bytes, `start` to `stop` of all."""
        return 1 + (start + stop) * parts // (2 * total)


def fit_workers(
    memory: int, *, workers: int, threads: int, thread_bytes: int = BLOCK + SCRATCH, reserved: int = 0
) -> tuple[int, int]:
    """Numbers of workers, and of threads in each, that fit `memory` bytes: at most as many as requested.

    `thread_bytes`: bytes that a thread needs. `reserved`: bytes for other uses. Raises MemoryBudgetError if not even
    one thread fits.
    """
    most_threads = (memory - reserved) // thread_bytes
    if most_threads < 1:
        uploads = f" and uploads {format_amount(reserved)}" if reserved else ""
        raise MemoryBudgetError(
            f"expected a memory budget of at least {format_amount(thread_bytes + reserved)}: one thread needs "
            f"{format_amount(thread_bytes)}{uploads}; got {format_amount(memory)}. Raise --memory"
        )
    workers = min(workers, most_threads)
    return workers, min(threads, most_threads // workers)


def format_amount(nbytes: int) -> str:
    """A number of bytes as text, in the largest unit that divides it.

    >>> format_amount(32 << 20), format_amount(1 << 10), format_amount(2_000_000), format_amount(1023)
    ('32 MiB', '1 KiB', '2 MB', '1,023 bytes')
    """
    for base, unit in ((1024, "iB"), (1000, "B")):
        for power, prefix in ((3, "G"), (2, "M"), (1, "K")):
            if nbytes and nbytes % base**power == 0:
                return f"{nbytes // base**power:,} {prefix}{unit}"
    return f"{nbytes:,} bytes"


def bundle(items: Iterable[S], *, limit: int) -> Iterator[list[S]]:
    """Groups of neighbours, in order, of at most `limit` bytes; an item with more is a group by itself."""
    group: list[S] = []
    room = limit
    for item in items:
        if group and item.nbytes > room:
            yield group
            group, room = [], limit
        group.append(item)
        room -= item.nbytes
    if group:
        yield group


def interleave(items: Iterable[T], key: Callable[[T], Hashable]) -> list[T]:
    """One item of each key in turn, in order within a key, so that neighbours have different keys as long as possible.

    >>> interleave(["a1", "a2", "a3", "b1", "c1"], key=lambda item: item[0])
    ['a1', 'b1', 'c1', 'a2', 'a3']
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    rounds = zip_longest(*([(item,) for item in group] for group in groups.values()), fillvalue=())
    return [item for turn in rounds for item in chain.from_iterable(turn)]
