"""Everything decided before a byte moves: which blocks of which slices are written together, by which task.

1. every placement is cut into blocks of at most `BLOCK` bytes: a giant embedding is many blocks, of many tasks;
2. blocks that follow one another in a file are joined to fills of at most `BLOCK` bytes: one write each;
3. fills are bundled into tasks of about equal bytes;
4. slices of one state whose blocks are spread over the source (`tiles`) are one task, which reads the state once;
5. of these a job takes all, or those of its share (`Share`): they are made one after another, and the others forgotten.

A task holds numbers only. The pieces that fill a block are resolved by whoever carries it out
(`ucp.core.slices.resolve`), so a plan stays small however many ranks wrote the source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from struct import unpack
from typing import Protocol, TypeVar

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import Index, StateIndex
from ucp.core.region import Box, RegionPair, intersect
from ucp.core.slices import Locator, Slice, block_ranges
from ucp.core.target import Placement, TargetPlan
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.errors import CoverError, MemoryBudgetError, MissingStateError, UsageError, listed
from ucp.transfer.tiles import is_crosswise

__all__ = [
    "BLOCK",
    "TASK",
    "Fill",
    "Job",
    "Section",
    "Share",
    "Task",
    "amount",
    "bundle",
    "check_target",
    "checking_placements",
    "each_task",
    "fit_workers",
    "interleave",
    "make_job",
    "raw_slice",
]

BLOCK = 8 << 20
"""Bytes of one write, and of one digest. A multiple of every itemsize."""

TASK = 4 * BLOCK
"""Bytes that one task writes, at most by one block more."""

SCRATCH = 3 * BLOCK
"""Bytes beside the block itself that a thread may need: a strided, cast, compared or encoded block."""

_EXACT = 1 << 24
"""Whole numbers up to it are the same in float32."""


class Sized(Protocol):
    """Anything that knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


S = TypeVar("S", bound=Sized)
T = TypeVar("T")

_Claims = dict[tuple[RegionPair, ...], list[tuple[int, int]]]
"""Element ranges that are spoken for, in increasing order, by the regions of the local tensor they are ranges of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of one placement."""

    placement: int
    """Position in `TargetPlan.placements`; or, counted on from there, in `TargetPlan.raw`."""
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
    """Output file, relative."""
    sections: tuple[Section, ...]
    """What they are, without gaps."""

    @property
    def offset(self) -> int:
        """First byte."""
        return self.sections[0].offset

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.sections[-1].offset + self.sections[-1].nbytes - self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit of work: may be run twice, by anyone, in any order."""

    number: int
    """Position in the plan."""
    fills: tuple[Fill, ...]
    """What it writes."""
    nbytes: int
    """Bytes it writes."""
    projected_bytes: int = BLOCK + SCRATCH
    """Memory it needs while it runs."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of several parts of the work, of about equal bytes: tasks that follow one another, in few files.

    >>> str(Share(3, 8)), [Share.at(low, low + 10, total=40, parts=2) for low in (0, 10, 20, 30)]
    ('3/8', [1, 1, 2, 2])
    """

    number: int = 1
    """Which part, counted from 1."""
    parts: int = 1
    """How many there are."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.parts:
            raise ValueError(f"expected a part from 1 to {self.parts}; got {self.number}")

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    @staticmethod
    def at(start: int, stop: int, *, total: int, parts: int) -> int:
        """Number of the part that a task is of: where the middle of its bytes, start:stop of all, lies."""
        return 1 + (start + stop) * parts // (2 * total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A whole conversion, ready to be carried out."""

    index: Index
    """The source."""
    target: TargetPlan
    """The destination."""
    tasks: tuple[Task, ...]
    """The work; those of all shares together write every placement once."""
    checking: frozenset[int]
    """Placements whose bytes are compared with the source's copies of them (each copy once in all)."""
    crosswise: frozenset[int] = frozenset()
    """Placements (and raw copies, counted on) that are filled in the order of the source, as `tiles` says."""
    fsync: bool = True
    """Whether the bytes must be on the disk at the end, so that bringing them there may as well begin early."""

    @property
    def nbytes(self) -> int:
        """Bytes the tasks write."""
        return sum(task.nbytes for task in self.tasks)


def make_job(index: Index, target: TargetPlan, share: Share | None = None) -> Job:
    """Plan the work; with `share`, the tasks of this part of it alone, numbered as among all.

    Raises CoverError, MissingStateError or UsageError when source and target do not fit.
    """
    check_target(index, target)
    crosswise = _crosswise(index, target)
    tasks = tuple(_of_share(_tasks(target, crosswise), share or Share(), total=_nbytes(target)))
    checking = checking_placements(target.placements)
    return Job(index=index, target=target, tasks=tasks, checking=checking, crosswise=crosswise)


def each_task(job: Job) -> Iterator[Task]:
    """All tasks of the plan that a job is a share of, made one after another."""
    return _of_share(_tasks(job.target, job.crosswise), Share(), total=_nbytes(job.target))


def _nbytes(target: TargetPlan) -> int:
    return sum(own.slice.nbytes for own in target.placements) + sum(raw.src.nbytes for raw in target.raw)


def _of_share(tasks: Iterable[Sequence[Fill]], share: Share, *, total: int) -> Iterator[Task]:
    """The tasks of a share; one of the others is held at a time."""
    start = 0
    for number, fills in enumerate(tasks):
        stop = start + sum(fill.nbytes for fill in fills)
        if Share.at(start, stop, total=total, parts=share.parts) == share.number:
            yield Task(number=number, fills=tuple(fills), nbytes=stop - start)
        start = stop


def _tasks(target: TargetPlan, crosswise: Collection[int]) -> Iterator[Sequence[Fill]]:
    """What each task writes, one after another: spread states, encoded packs, and bundles of all else."""
    files = _by_path(target)
    spread: dict[object, list[tuple[str, int]]] = {}
    packs = {placement.path for placement in target.placements} if target.compress else frozenset()
    for path, numbers in files:
        for number in numbers if path not in packs else ():
            if number in crosswise:
                spread.setdefault(_whole_of(target, number), []).append((path, number))
    for places in spread.values():
        yield [Fill(path=path, sections=tuple(_sections(target, number))) for path, number in places]
    for path, numbers in files:
        if path in packs:
            yield [Fill(path=path, sections=tuple(_each(target, numbers)))]
    plain = ((path, [own for own in numbers if own not in crosswise]) for path, numbers in files if path not in packs)
    yield from bundle(chain.from_iterable(_fills(path, _each(target, own)) for path, own in plain), limit=TASK)


def _crosswise(index: Index, target: TargetPlan) -> frozenset[int]:
    """Placements and raw copies whose blocks are spread over the source."""
    found = set()
    known: dict[object, bool] = {}
    for number, placement in enumerate(target.placements):
        own = placement.slice
        if is_crosswise(own, index.atoms[own.param].states[own.state], nbytes=BLOCK, known=known):
            found.add(number)
    for number, raw in enumerate(target.raw, len(target.placements)):
        own, locator = raw_slice(raw.src)
        if is_crosswise(own, locator.state, nbytes=BLOCK):
            found.add(number)
    return frozenset(found)


def _whole_of(target: TargetPlan, number: int) -> object:
    """What is read at once where it is read for placement `number`: a state in the type it is written in."""
    if number >= len(target.placements):
        return number
    own = target.placements[number].slice
    return own.param, own.state, own.dtype


def raw_slice(ref: TensorRef) -> tuple[Slice, Locator]:
    """A tensor of an extra as a slice, and where its pieces are found."""
    box = Box.whole(ref.shape)
    state = StateIndex(dtype=ref.dtype, global_shape=ref.shape, fragments=(Fragment(box=box, ref=ref),))
    own = Slice(
        param="extra",
        state="",
        dtype=ref.dtype,
        pairs=(RegionPair(box, box),),
        local_shape=ref.shape,
        start=0,
        stop=ref.numel,
    )
    return own, Locator(state)


def fit_workers(
    memory: int, *, workers: int, threads: int, lane: int = BLOCK + SCRATCH, beside: int = 0
) -> tuple[int, int]:
    """Workers and threads in each that fit `memory` bytes, at most as many as asked for. `lane`: bytes of one thread.

    `beside`: bytes for others. Raises MemoryBudgetError when not even one thread fits.
    """
    lanes = (memory - beside) // lane
    if lanes < 1:
        need = "the need of one thread" + (f" and of uploads, {amount(beside)}" if beside else "")
        raise MemoryBudgetError(
            f"expected a memory budget of at least {amount(lane + beside)}, {need}; got {amount(memory)}. "
            "Raise --memory"
        )
    workers = min(workers, lanes)
    return workers, min(threads, lanes // workers)


def amount(nbytes: int) -> str:
    """Bytes in the largest unit that they are a whole number of.

    >>> amount(32 << 20), amount(1 << 10), amount(2_000_000), amount(1023)
    ('32 MiB', '1 KiB', '2 MB', '1,023 bytes')
    """
    for base, unit in ((1024, "iB"), (1000, "B")):
        for power, prefix in ((3, "G"), (2, "M"), (1, "K")):
            if nbytes and nbytes % base**power == 0:
                return f"{nbytes // base**power:,} {prefix}{unit}"
    return f"{nbytes:,} bytes"


def bundle(items: Iterable[S], *, limit: int) -> Iterator[list[S]]:
    """Neighbours together, in order, up to `limit` bytes; an item above it stands alone."""
    own: list[S] = []
    room = limit
    for item in items:
        if own and item.nbytes > room:
            yield own
            own, room = [], limit
        own.append(item)
        room -= item.nbytes
    if own:
        yield own


def interleave(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """One item of each key in turn, in order within a key: neighbours in time then differ in key, while keys last.

    >>> interleave(["a1", "a2", "a3", "b1", "c1"], key=lambda item: item[0])
    ['a1', 'b1', 'c1', 'a2', 'a3']
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    rounds = zip_longest(*([(item,) for item in group] for group in groups.values()), fillvalue=())
    return [item for turn in rounds for item in chain.from_iterable(turn)]


def _by_path(target: TargetPlan) -> list[tuple[str, list[int]]]:
    """Numbers of what is written to each output file, in the order of the files and of the bytes in them.

    Of placements, and of raw copies, counted on; what is empty is left out.
    """
    rank = {file.path: position for position, file in enumerate(target.files)}
    sized = [(rank[p.path], p.offset, n) for n, p in enumerate(target.placements) if p.slice.start < p.slice.stop]
    raw = enumerate(target.raw, len(target.placements))
    sized += [(rank[own.path], own.offset, number) for number, own in raw if own.src.numel]
    by_file = groupby(sorted(sized), key=lambda item: item[0])
    return [(target.files[position].path, [number for _, _, number in own]) for position, own in by_file]


def _each(target: TargetPlan, numbers: Iterable[int]) -> Iterator[Section]:
    return chain.from_iterable(_sections(target, number) for number in numbers)


def _sections(target: TargetPlan, number: int) -> Iterator[Section]:
    """The blocks of a placement, or of a raw copy."""
    if number < len(target.placements):
        placement = target.placements[number]
        start, stop, itemsize = placement.slice.start, placement.slice.stop, placement.slice.dtype.itemsize
        offset = placement.offset
    else:
        raw = target.raw[number - len(target.placements)]
        start, stop, itemsize, offset = 0, raw.src.numel, raw.src.dtype.itemsize, raw.offset
    for low, high in block_ranges(start, stop, max(1, BLOCK // itemsize)):
        yield _section(number, low, high, offset + (low - start) * itemsize, itemsize)


def _section(placement: int, start: int, stop: int, offset: int, itemsize: int) -> Section:
    return Section(placement=placement, start=start, stop=stop, offset=offset, nbytes=(stop - start) * itemsize)


def _fills(path: str, sections: Iterable[Section]) -> Iterator[Fill]:
    run: list[Section] = []
    for section in sections:
        joins = bool(run) and run[-1].offset + run[-1].nbytes == section.offset
        if run and not (joins and section.offset + section.nbytes - run[0].offset <= BLOCK):
            yield Fill(path=path, sections=tuple(run))
            run = []
        run.append(section)
    if run:
        yield Fill(path=path, sections=tuple(run))


def check_target(index: Index, target: TargetPlan) -> None:
    """Prove that every slice can be filled from the source, and that no two write the same bytes."""
    missing = [p.slice for p in target.placements if not _held(index, p.slice)]
    if missing:
        names = sorted({f"{own.param}/{own.state}" for own in missing})
        raise MissingStateError(f"the target needs states that {index.path} does not hold:\n{listed(names)}")
    for placement in target.placements:
        own = placement.slice
        source = index.atoms[own.param].states[own.state]
        is_usual = own.dtype is source.dtype or (own.dtype.is_floating and source.dtype.is_floating)
        if not is_usual and not _is_whole_number(source):
            raise UsageError(f"{own.param}/{own.state} is {source.dtype}: it cannot be cast to {own.dtype}")
    _check_disjoint(target)


def _is_whole_number(state: StateIndex) -> bool:
    """Whether a state is a count that every type of numbers holds: a plain whole number below 2**24."""
    ref = state.fragments[0].ref
    if not isinstance(ref, InlineTensor) or ref.shape:
        return False
    if ref.dtype is DType.FLOAT64:
        (number,) = unpack("<d", ref.data)
        return bool(number.is_integer() and abs(number) < _EXACT)
    return ref.dtype is DType.INT64 and abs(int.from_bytes(ref.data, "little", signed=True)) < _EXACT


def _held(index: Index, own: Slice) -> bool:
    return own.param in index.atoms and own.state in index.atoms[own.param].states


def _check_disjoint(target: TargetPlan) -> None:
    limits = {file.path: file.nbytes for file in target.files}
    spans = [(p.path, p.offset, p.slice.nbytes) for p in target.placements]
    spans += [(raw.path, raw.offset, raw.src.nbytes) for raw in target.raw]
    spans += [(f.path, part.offset, len(part.data)) for f in target.files for part in f.literals]
    before: tuple[str, int] = ("", 0)
    for path, offset, nbytes in sorted(span for span in spans if span[2]):
        if (path == before[0] and offset < before[1]) or (offset + nbytes > limits[path] and not target.compress):
            raise CoverError(f"bytes {offset}:{offset + nbytes} of {path} are planned twice, or past its end")
        before = (path, offset + nbytes)


def checking_placements(placements: Sequence[Placement]) -> frozenset[int]:
    """Placements that between them hold every element of a state at most once: those that check the copies."""
    chosen: set[int] = set()
    claimed: dict[tuple[str, str], _Claims] = {}
    for number, placement in enumerate(placements):
        own = placement.slice
        if _claim(claimed.setdefault((own.param, own.state), {}), own):
            chosen.add(number)
    return frozenset(chosen)


def _claim(claims: _Claims, own: Slice) -> bool:
    """Whether nothing of a slice was spoken for before; from now on it is."""
    ranges = claims.get(own.pairs)
    if ranges is None:
        if any(intersect(a.whole, b.whole) for pairs in claims for a in pairs for b in own.pairs):
            return False
        ranges = claims[own.pairs] = []
    if own.start == own.stop:
        return True
    at = bisect_right(ranges, (own.start, own.stop))
    if (at and own.start < ranges[at - 1][1]) or (at < len(ranges) and ranges[at][0] < own.stop):
        return False
    ranges.insert(at, (own.start, own.stop))
    return True
