"""Compare bytes with their recorded checksums, copies with one another, and states of two checkpoints; block by block.

Everything is streamed: memory is `LANE` bytes per thread, whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

import xxhash

from ucp.contract.protocols import Observer
from ucp.core.index import Index, StateIndex
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import Slice, full_slice
from ucp.core.tensor import GAP, DType, Record, TensorRef
from ucp.errors import CorruptError, SourceError
from ucp.io.elements import differing, viewed, widened, without_payloads
from ucp.io.files import join_ranges
from ucp.transfer.checksums import find_mismatches
from ucp.transfer.drift import find_drifts
from ucp.transfer.gather import Gatherer, Reader, Span
from ucp.transfer.plan.tasks import BLOCK, bundle, fit_workers
from ucp.transfer.plan.tiles import needs_tiles, split_blocks

T = TypeVar("T")

THREADS = 4
"""Threads where nobody says how many."""
REMOTE_THREADS = 8
"""The same where something lies in a store: each waits for the block that it asked for."""

THREAD_BYTES = 5 * BLOCK
"""Bytes that one thread may need: a block of each side, one that is decoded or cast, an encoded one, and the rest."""

_WIDEST = 16
"""Bytes of an element as which two types are compared that differ."""


def fit_threads(memory: int, *, requested: int = 0, remote: bool = False) -> int:
    """Threads that fit `memory` bytes: at most `asked` (0: `THREADS`). Raises MemoryBudgetError when not one does.

    `remote`: whether something lies in a store.
    """
    return fit_workers(
        memory, workers=requested or (REMOTE_THREADS if remote else THREADS), threads=1, thread_bytes=THREAD_BYTES
    )[0]


class Pair(NamedTuple):
    """One state, of one shape, in two checkpoints."""

    param: str
    """Parameter, or extra."""
    state: str
    """State, or place in the extra."""
    a: StateIndex
    """In the first."""
    b: StateIndex
    """In the second."""


def compare_states(
    shared: Sequence[Pair], observer: Observer, *, cast: bool, threads: int
) -> dict[tuple[str, str, int], list[tuple[int, float]]]:
    """Those of `shared` whose elements differ: how many and by how much at most, for parts of each.

    By parameter, state and elements of the whole. `cast`: those of the first after a cast to the type of the second.
    """
    pairs = ((one.numel, _choose_dtype(one, other, cast=cast), other.dtype) for *_, one, other in shared)
    nbytes = sum(numel * max(left.itemsize, right.itemsize) for numel, left, right in pairs)
    differing_parts: dict[tuple[str, str, int], list[tuple[int, float]]] = {}

    def compare_batch(jobs: Sequence[_PartPair], gatherer: Gatherer) -> None:
        observer.advance(sum(job.nbytes for job in jobs))
        lefts, rights = _read_parts([job.a for job in jobs], gatherer), _read_parts([job.b for job in jobs], gatherer)
        if lefts[0].obj == rights[0].obj and all(job.a.slice.dtype is job.b.slice.dtype for job in jobs):
            return
        for job, *data in zip(jobs, lefts, rights, strict=True):
            left, right = viewed(data[0], job.a.slice.dtype), viewed(data[1], job.b.slice.dtype)
            if left.dtype != right.dtype:
                wide = "complex128" if "c" in (left.dtype.kind, right.dtype.kind) else "float64"
                left, right = widened(left, wide), widened(right, wide)
            result = differing(left, right)
            if result and job.a.locator.state.dtype is not job.b.locator.state.dtype:
                result = differing(without_payloads(left, right), right)  # casts need not agree in payloads of NaNs
            if result is not None:
                key = job.a.slice.param, job.a.slice.state, job.a.locator.state.numel
                differing_parts.setdefault(key, []).append((result.numel, result.largest))

    jobs = (job for pair in shared for job in _pair_parts(*pair, cast=cast))
    _run_stage(bundle(jobs, limit=BLOCK), compare_batch, threads, observer, title="compare", nbytes=nbytes)
    return differing_parts


def compare_copies(index: Index, observer: Observer, *, threads: int = THREADS) -> list[str]:
    """Copies in the source (replicas, the model's own low-precision weights) that differ from what is taken."""
    return sorted(line for lines in find_drifting_states(index, observer, threads=threads).values() for line in lines)


def find_drifting_states(
    index: Index, observer: Observer, *, threads: int = THREADS
) -> dict[tuple[str, str], list[str]]:
    """States whose copies differ from what is taken, by parameter and state, with a line for each difference."""
    replicated = [own for own in index.states() if any(fragment.replica for fragment in own[2].fragments)]
    lines_by_state: dict[tuple[str, str], list[str]] = {}

    def compare_batch(parts: Sequence[_StatePart], gatherer: Gatherer) -> None:
        checked = [
            (own, locator, data) for (own, locator), data in zip(parts, _read_parts(parts, gatherer), strict=True)
        ]
        for own, lines in find_drifts(checked, gatherer):
            lines_by_state.setdefault((own.param, own.state), []).extend(lines)
        observer.advance(sum(part.nbytes for part in parts))

    parts = (
        _StatePart(part, locator)
        for atom, name, state in replicated
        for locator in (Locator(state),)
        for part in split_blocks(full_slice(atom.name, name, state), state, nbytes=BLOCK)
    )
    nbytes = sum(state.nbytes for _, _, state in replicated)
    _run_stage(bundle(parts, limit=BLOCK), compare_batch, threads, observer, title="copies", nbytes=nbytes)
    return lines_by_state


def count_checked_bytes(index: Index) -> int:
    """Bytes that `scan_records` and `scan_digests` between them look at."""
    digested = sum(state.nbytes for _, _, state in index.states() if state.digests)
    return digested + sum(record.nbytes for record in _undigested(index))


def _undigested(index: Index) -> list[Record]:
    """Records whose bytes no digest of a state covers: what is digested need not be summed as well."""
    covered = {
        (fragment.ref.path, fragment.ref.offset, fragment.ref.nbytes)
        for _, _, state in index.states()
        if state.digests
        for fragment in state.fragments
        if isinstance(fragment.ref, TensorRef)
    }
    return [record for record in index.records if (record.path, record.offset, record.nbytes) not in covered]


def scan_records(index: Index, observer: Observer, *, threads: int = THREADS) -> list[Record]:
    """Stretches whose bytes are not those that the writer summed; without those that `scan_digests` covers."""
    records = sorted(_undigested(index), key=lambda record: (record.path, record.offset))
    spans: list[Span] = []

    def scan_batch(job: tuple[str, list[tuple[int, int]]], gatherer: Gatherer) -> None:
        gatherer.scan(*job)
        spans.extend(gatherer.spans)
        gatherer.spans.clear()
        observer.advance(sum(stop - start for start, stop in job[1]))

    nbytes = sum(record.nbytes for record in records)
    _run_stage(_group_nearby(records), scan_batch, threads, observer, title="checksums", nbytes=nbytes)
    return find_mismatches(records, spans)


def _group_nearby(records: Iterable[Record]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What is read at once of records in increasing offset: ranges of a file that are near, a block at most."""
    for path, group in groupby(records, key=attrgetter("path")):
        ranges = [part for own in group for part in block_ranges(own.offset, own.offset + own.nbytes, BLOCK)]
        parts = iter(ranges)
        for _, _, count in join_ranges(ranges, gap=GAP, limit=BLOCK):
            yield path, list(islice(parts, count))


def scan_digests(index: Index, observer: Observer, *, threads: int = THREADS) -> list[str]:
    """States whose bytes are not those that were digested, one line each."""
    digested = [own for own in index.states() if own[2].digests]
    wrong: list[str] = []

    def check_batch(parts: Sequence[_StatePart], gatherer: Gatherer) -> None:
        wrong.extend(_check_digests(parts, gatherer))
        observer.advance(sum(part.nbytes for part in parts))

    parts = (
        _StatePart(replace(full, start=low, stop=high), locator)
        for atom, name, state in digested
        for full, locator in ((full_slice(atom.name, name, state), Locator(state)),)
        for low, high in block_ranges(0, full.stop, state.digest_nbytes // state.dtype.itemsize)
    )
    nbytes = sum(state.nbytes for _, _, state in digested)
    _run_stage(bundle(parts, limit=BLOCK), check_batch, threads, observer, title="digests", nbytes=nbytes)
    return sorted(wrong)


def _check_digests(parts: Sequence[_StatePart], gatherer: Gatherer) -> Iterator[str]:
    """A line for each of some stretches whose bytes are not those that were digested, or cannot be read."""
    try:
        read = _read_parts(parts, gatherer)
    except (CorruptError, SourceError) as error:
        if len(parts) > 1:  # which of them it is, is seen when each is read alone
            yield from chain.from_iterable(_check_digests([part], gatherer) for part in parts)
        else:
            yield f"{parts[0].label}: {error}"
        return
    for part, data in zip(parts, read, strict=True):
        state = part.locator.state
        number = part.slice.start * part.slice.dtype.itemsize // state.digest_nbytes
        if xxhash.xxh3_64_hexdigest(data) != state.digests[number]:
            yield f"{part.label}, in {state.fragments[0].path}"


class _StatePart(NamedTuple):
    """A part of a state that is read at once."""

    slice: Slice
    """Which."""
    locator: Locator
    """Where its pieces are found."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.slice.nbytes

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return f"{self.slice.param}/{self.slice.state}, elements {self.slice.start}:{self.slice.stop}"


class _PartPair(NamedTuple):
    """The same elements of two checkpoints, which are compared at once."""

    a: _StatePart
    """Of the first; cast, where that was asked for."""
    b: _StatePart
    """Of the second."""

    @property
    def nbytes(self) -> int:
        """Bytes of them, in the wider type."""
        return max(self.a.nbytes, self.b.nbytes)


def _choose_dtype(a: StateIndex, b: StateIndex, *, cast: bool) -> DType:
    """Type as which the first of two states is read to be compared."""
    return b.dtype if cast and a.dtype.is_floating and b.dtype.is_floating else a.dtype


def _pair_parts(param: str, name: str, a: StateIndex, b: StateIndex, *, cast: bool) -> Iterator[_PartPair]:
    """All elements of both, a block at a time, such that either is read once."""
    left, right = full_slice(param, name, a, dtype=_choose_dtype(a, b, cast=cast)), full_slice(param, name, b)
    first, second = Locator(a), Locator(b)
    if 0 < a.numel * _WIDEST <= BLOCK:
        yield _PartPair(_StatePart(left, first), _StatePart(right, second))
        return
    lead, state = (right, b) if needs_tiles(right, b, nbytes=BLOCK) else (left, a)
    nbytes = BLOCK // (b.dtype.itemsize if left.dtype is b.dtype else _WIDEST) * lead.dtype.itemsize
    for part in split_blocks(lead, state, nbytes=nbytes):
        typed = [part if part.dtype is dtype else replace(part, dtype=dtype) for dtype in (left.dtype, right.dtype)]
        yield _PartPair(_StatePart(typed[0], first), _StatePart(typed[1], second))


def _read_parts(parts: Sequence[_StatePart], gatherer: Gatherer) -> list[memoryview]:
    """The bytes of parts in one buffer; they are read together where they are neighbours in a file."""
    return gatherer.read([(p.stop - p.start, p.dtype, resolve(p, at, p.start, p.stop)) for p, at in parts])


def _run_stage(
    jobs: Iterable[T], work: Callable[[T, Gatherer], None], threads: int, observer: Observer, *, title: str, nbytes: int
) -> None:
    """`some(job, gatherer)` for every job, on so many threads: a stage by itself."""
    observer.begin(title=title, nbytes=nbytes)
    try:
        with Reader(threads) as reader:
            reader.run_all(jobs, work)
    finally:
        observer.end()
