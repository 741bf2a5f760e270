"""Compares bytes with recorded checksums, copies with one another, and states of two checkpoints, block by block.

Each thread needs `THREAD_BYTES` of memory, whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import xxhash
from zlib_ng import zlib_ng

from ucp.contract.protocols import Observer
from ucp.core.index import Index, StateIndex
from ucp.core.layout import Overlap
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import Slice, full_slice
from ucp.core.tensor import GAP, DType, Record, TensorRef
from ucp.errors import CorruptError, SourceError
from ucp.io.elements import Difference, differing, viewed, widened, without_payloads
from ucp.io.files import join_ranges
from ucp.transfer.checksums import find_mismatches
from ucp.transfer.drift import find_drifts
from ucp.transfer.gather import Gatherer, Span, ThreadedReader
from ucp.transfer.plan.tasks import BLOCK, bundle, fit_workers
from ucp.transfer.plan.tiles import needs_tiles, split_blocks

T = TypeVar("T")

THREADS = 4
"""Default number of threads."""
REMOTE_THREADS = 8
"""Default number of threads for files in an object store, where threads mostly wait."""

THREAD_BYTES = 5 * BLOCK
"""The most bytes that one thread needs: a block of each side, a decoded or cast one, an encoded one, and the rest."""

_WIDEST = 16
"""The most bytes per element of the dtype in which values of two different dtypes are compared."""


def fit_threads(memory: int, *, requested: int = 0, remote: bool = False) -> int:
    """Number of threads that fit `memory` bytes, at most `requested` (0: the default). Raises MemoryBudgetError.

    `remote`: whether any of the files is in an object store.
    """
    return fit_workers(
        memory, workers=requested or (REMOTE_THREADS if remote else THREADS), threads=1, thread_bytes=THREAD_BYTES
    )[0]


class Pair(NamedTuple):
    """A state that two checkpoints have with the same shape."""

    param: str
    """Name of the parameter, or of an extra."""
    state: str
    """Name of the state, or place inside the extra."""
    a: StateIndex
    """The state in the first checkpoint."""
    b: StateIndex
    """The state in the second checkpoint."""


def compare_states(
    shared: Sequence[Pair], observer: Observer, *, cast: bool, threads: int
) -> dict[tuple[str, str, int], list[Difference]]:
    """States that differ: the difference of each part that differs.

    Keys are (parameter, state, elements of the state). `cast`: whether to cast the first to the dtype of the second.
    Two versions of a chain of deltas that have the same patches of a state are not read.
    """
    shared = [p for p in shared if p.a.overlap is not Overlap.PATCHED or p.a.fragments != p.b.fragments]
    nbytes = sum(p.a.numel * max(_choose_dtype(p.a, p.b, cast=cast).itemsize, p.b.dtype.itemsize) for p in shared)
    differing_parts: dict[tuple[str, str, int], list[Difference]] = {}

    def compare_batch(jobs: Sequence[_PartPair], gatherer: Gatherer) -> None:
        observer.advance(sum(job.nbytes for job in jobs))
        all_a, all_b = _read_parts([job.a for job in jobs], gatherer), _read_parts([job.b for job in jobs], gatherer)
        if all_a[0].obj == all_b[0].obj and all(job.a.slice.dtype is job.b.slice.dtype for job in jobs):
            return
        for job, data_a, data_b in zip(jobs, all_a, all_b, strict=True):
            values_a, values_b = viewed(data_a, job.a.slice.dtype), viewed(data_b, job.b.slice.dtype)
            if values_a.dtype != values_b.dtype:
                wide = "complex128" if "c" in (values_a.dtype.kind, values_b.dtype.kind) else "float64"
                values_a, values_b = widened(values_a, wide), widened(values_b, wide)
            result = differing(values_a, values_b)
            if result and job.a.locator.state.dtype is not job.b.locator.state.dtype:
                result = differing(without_payloads(values_a, values_b), values_b)  # casts may change payloads of NaNs
            if result is not None:
                key = job.a.slice.param, job.a.slice.state, job.a.locator.state.numel
                differing_parts.setdefault(key, []).append(result)

    jobs = (job for pair in shared for job in _pair_parts(pair, cast=cast))
    run_stage(bundle(jobs, limit=BLOCK), compare_batch, threads, observer, title="compare", nbytes=nbytes)
    return differing_parts


def find_drift(index: Index, observer: Observer, threads: int = THREADS) -> list[str]:
    """A line for each copy that differs from what is read: replicas, and the model's low-precision weights."""
    lines_by_state = find_drifting_states(index, observer, threads=threads)
    return [f"copies differ: {line}" for line in sorted(line for lines in lines_by_state.values() for line in lines)]


def find_drifting_states(
    index: Index, observer: Observer, *, threads: int = THREADS
) -> dict[tuple[str, str], list[str]]:
    """(Parameter, state) whose copies differ, with a line for each difference."""
    replicated = [(a.name, name, s) for a, name, s in index.states() if any(f.replica for f in s.fragments)]
    lines_by_state: dict[tuple[str, str], list[str]] = {}

    def compare_batch(parts: Sequence[_StatePart], gatherer: Gatherer) -> None:
        checked = [(*part, data) for part, data in zip(parts, _read_parts(parts, gatherer), strict=True)]
        for tensor_slice, lines in find_drifts(checked, gatherer):
            lines_by_state.setdefault((tensor_slice.param, tensor_slice.state), []).extend(lines)
        observer.advance(sum(part.nbytes for part in parts))

    parts = (
        _StatePart(part, locator)
        for param, name, state in replicated
        for locator in (Locator(state),)
        for part in split_blocks(full_slice(param, name, state), state, nbytes=BLOCK)
    )
    nbytes = sum(state.nbytes for _, _, state in replicated)
    run_stage(bundle(parts, limit=BLOCK), compare_batch, threads, observer, title="copies", nbytes=nbytes)
    return lines_by_state


def count_checked_bytes(index: Index) -> int:
    """Number of bytes that `find_corruption` reads."""
    digested = sum(state.nbytes for _, _, state in index.states() if state.digests or _hasher(state) is not None)
    return digested + sum(record.nbytes for record in _undigested(index))


def _undigested(index: Index) -> list[Record]:
    """Records whose bytes no digest of a state covers."""
    covered = {
        (fragment.ref.path, fragment.ref.offset, fragment.ref.nbytes)
        for _, _, state in index.states()
        if state.digests
        for fragment in state.fragments
        if isinstance(fragment.ref, TensorRef)
    }
    return [record for record in index.records if (record.path, record.offset, record.nbytes) not in covered]


def find_corruption(index: Index, observer: Observer, threads: int) -> list[str]:
    """A line for each record and each state whose bytes do not match what the writer recorded."""
    damaged = scan_records(index, observer, threads)
    return [
        *(f"CRC-32 differs: {r.path}: {r.name}{describe_owners(index, r)}" for r in damaged),
        *(f"digest differs: {line}" for line in scan_digests(index, observer, threads)),
        *(f"checksum differs: {line}" for line in scan_checksums(index, observer, threads)),
    ]


def describe_owners(index: Index, record: Record) -> str:
    """The states whose bytes a record contains, as text for a message."""
    names = []
    for atom, name, state in index.states():
        for fragment in state.fragments:
            ref = fragment.ref
            if not isinstance(ref, TensorRef) or ref.path != record.path or not ref.numel:
                continue
            if ref.offset < record.offset + record.nbytes and record.offset < ref.offset + ref.extent:
                names.append(f"{atom.name}/{name}")
                break
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f", part of {shown}" if names else ""


def scan_records(index: Index, observer: Observer, threads: int = THREADS) -> list[Record]:
    """Records whose bytes do not have the recorded checksum, except those that `scan_digests` covers."""
    records = sorted(_undigested(index), key=lambda record: (record.path, record.offset))
    spans: list[Span] = []

    def scan_batch(job: tuple[str, list[tuple[int, int]]], gatherer: Gatherer) -> None:
        gatherer.scan(*job)
        spans.extend(gatherer.spans)
        gatherer.spans.clear()
        observer.advance(sum(stop - start for start, stop in job[1]))

    nbytes = sum(record.nbytes for record in records)
    run_stage(_group_nearby(records), scan_batch, threads, observer, title="checksums", nbytes=nbytes)
    return find_mismatches(records, spans)


def _group_nearby(records: Iterable[Record]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Ranges of records that are read at once: near one another in a file, in increasing offset, at most a block."""
    for path, group in groupby(records, key=attrgetter("path")):
        ranges = [
            part for record in group for part in block_ranges(record.offset, record.offset + record.nbytes, BLOCK)
        ]
        parts = iter(ranges)
        for _, _, count in join_ranges(ranges, gap=GAP, limit=BLOCK):
            yield path, list(islice(parts, count))


def scan_digests(index: Index, observer: Observer, threads: int = THREADS) -> list[str]:
    """A line for each block of a state whose bytes do not have the recorded digest."""
    digested = [(atom.name, name, state) for atom, name, state in index.states() if state.digests]
    wrong: list[str] = []

    def check_batch(parts: Sequence[_StatePart], gatherer: Gatherer) -> None:
        wrong.extend(_check_digests(parts, gatherer))
        observer.advance(sum(part.nbytes for part in parts))

    parts = (
        _StatePart(replace(full, start=low, stop=high), locator)
        for param, name, state in digested
        for full, locator in ((full_slice(param, name, state), Locator(state)),)
        for low, high in block_ranges(0, full.stop, state.digest_nbytes // state.dtype.itemsize)
    )
    nbytes = sum(state.nbytes for _, _, state in digested)
    run_stage(bundle(parts, limit=BLOCK), check_batch, threads, observer, title="digests", nbytes=nbytes)
    return sorted(wrong)


def _check_digests(parts: Sequence[_StatePart], gatherer: Gatherer) -> Iterator[str]:
    """A line for each part whose bytes do not have the recorded digest, or cannot be read."""
    try:
        read = _read_parts(parts, gatherer)
    except (CorruptError, SourceError) as error:
        if len(parts) > 1:  # read each part separately to find the damaged one
            yield from chain.from_iterable(_check_digests([part], gatherer) for part in parts)
        else:
            yield f"{parts[0].label}: {error}"
        return
    for part, data in zip(parts, read, strict=True):
        state = part.locator.state
        number = part.slice.start * part.slice.dtype.itemsize // state.digest_nbytes
        if xxhash.xxh3_64_hexdigest(data) != state.digests[number]:
            yield f"{part.label}, in {state.fragments[0].path}"


def scan_checksums(index: Index, observer: Observer, threads: int = THREADS) -> list[str]:
    """A line for each state whose bytes do not have the recorded checksum, or cannot be read."""
    summed = [
        _StatePart(full_slice(atom.name, name, state), Locator(state))
        for atom, name, state in index.states()
        if _hasher(state) is not None and not state.digests
    ]
    wrong: list[str] = []

    def check(whole: _StatePart, gatherer: Gatherer) -> None:
        state = whole.locator.state
        hasher = _hasher(state)
        try:
            for low, high in block_ranges(0, state.numel, BLOCK // state.dtype.itemsize) if hasher else ():
                part = whole._replace(slice=replace(whole.slice, start=low, stop=high))
                hasher.update(_read_parts([part], gatherer)[0])
                observer.advance(part.nbytes)
        except (CorruptError, SourceError) as error:
            wrong.append(f"{whole.slice.param}/{whole.slice.state}: {error}")
            return
        expected = state.checksum.partition(":")[2]
        if hasher and int(hasher.hexdigest(), 16) != int(expected, 16):
            wrong.append(
                f"{whole.slice.param}/{whole.slice.state}: expected {state.checksum}; got {hasher.hexdigest()}"
            )

    nbytes = sum(part.nbytes for part in summed)
    run_stage(summed, check, threads, observer, title="checksums of tensors", nbytes=nbytes)
    return sorted(wrong)


def _hasher(state: StateIndex) -> Any:
    """Computes the checksum that is recorded of a state; None without one, or without the library for it."""
    match state.checksum.partition(":")[0]:
        case "adler32":
            return _Adler32()
        case "xxh3-128":
            return xxhash.xxh3_128()
        case "blake3" if find_spec("blake3") is not None:
            return import_module("blake3").blake3()
    return None


class _Adler32:
    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: memoryview) -> None:
        self._sum = zlib_ng.adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


class _StatePart(NamedTuple):
    """A part of a state that is read at once."""

    slice: Slice
    """The elements of the part."""
    locator: Locator
    """Finds the pieces of the state."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.slice.nbytes

    @property
    def label(self) -> str:
        """Name of the part, for messages."""
        return f"{self.slice.param}/{self.slice.state}, elements {self.slice.start}:{self.slice.stop}"


class _PartPair(NamedTuple):
    """The same elements of two checkpoints."""

    a: _StatePart
    """In the first checkpoint, cast if requested."""
    b: _StatePart
    """In the second."""

    @property
    def nbytes(self) -> int:
        """Bytes, in the wider of the two dtypes."""
        return max(self.a.nbytes, self.b.nbytes)


def _choose_dtype(a: StateIndex, b: StateIndex, *, cast: bool) -> DType:
    """Dtype in which the first of two states is read."""
    return b.dtype if cast and a.dtype.is_floating and b.dtype.is_floating else a.dtype


def _pair_parts(pair: Pair, *, cast: bool) -> Iterator[_PartPair]:
    """All elements of both states, block by block, so that each source is read once."""
    param, name, a, b = pair
    slice_a = full_slice(param, name, a, dtype=_choose_dtype(a, b, cast=cast))
    slice_b, locators = full_slice(param, name, b), (Locator(a), Locator(b))
    if 0 < a.numel * _WIDEST <= BLOCK:
        yield _PartPair(_StatePart(slice_a, locators[0]), _StatePart(slice_b, locators[1]))
        return
    lead, state = (slice_b, b) if needs_tiles(slice_b, b, nbytes=BLOCK) else (slice_a, a)
    nbytes = BLOCK // (b.dtype.itemsize if slice_a.dtype is b.dtype else _WIDEST) * lead.dtype.itemsize
    for part in split_blocks(lead, state, nbytes=nbytes):
        both = [part if part.dtype is dtype else replace(part, dtype=dtype) for dtype in (slice_a.dtype, slice_b.dtype)]
        yield _PartPair(_StatePart(both[0], locators[0]), _StatePart(both[1], locators[1]))


def _read_parts(parts: Sequence[_StatePart], gatherer: Gatherer) -> list[memoryview]:
    """The bytes of parts, read together into one buffer; neighbours in a file are read by one call."""
    return gatherer.read([(p.stop - p.start, p.dtype, resolve(p, at, p.start, p.stop)) for p, at in parts])


def run_stage(
    jobs: Iterable[T], work: Callable[[T, Gatherer], None], threads: int, observer: Observer, *, title: str, nbytes: int
) -> None:
    """Call `work(job, gatherer)` for every job, on `threads` threads, as a separate stage for the observer."""
    observer.begin(title=title, nbytes=nbytes)
    try:
        with ThreadedReader(threads) as reader:
            reader.run_all(jobs, work)
    finally:
        observer.end()
