"""Carries out one task: gathers blocks, compares copies, computes checksums, writes in place.

A task may be run twice, and by any worker: it always writes the same bytes to the same places.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from uuid import uuid4

import xxhash
from zlib_ng import zlib_ng

from ucp.core.layout import Overlap
from ucp.core.slices import Locator, Piece, block_ranges, resolve, resolve_replicas
from ucp.core.target import Slice
from ucp.core.tensor import TensorRef, list_offsets
from ucp.errors import CorruptError
from ucp.io.elements import encode_block
from ucp.io.files import Sources
from ucp.io.provenance import is_remote
from ucp.io.writing import TEMPORARY, read_back, start_writeback, write_at
from ucp.transfer.drift import describe_drift, find_drifts
from ucp.transfer.gather import ByteRun, Gatherer, Span, to_extent, to_run, view_piece
from ucp.transfer.patches import Patcher
from ucp.transfer.plan.job import Job, locate_raw
from ucp.transfer.plan.tasks import BLOCK, Fill, Section, Task, bundle
from ucp.transfer.plan.tiles import resolve_in_tile, split_tiles

MEAN_WINDOW, PATCH_WINDOW = BLOCK // 8, BLOCK // 2
"""Bytes that are computed at once: of a mean, or of a patched tensor that is cast; of a tensor that is patched."""

TILE = 2 * BLOCK
"""Bytes of a tile that is not compared with copies, and so needs less memory besides its own bytes."""

WINDOW = 512 << 10
"""Bytes that are read and checksummed at once, while they are in the processor's cache."""

CACHED_LOCATORS = 1024
"""Number of states whose sorted pieces a thread keeps: all blocks of a large state need the same ones."""

MIN_JOINED = 4096
"""Least number of new spans for which joining pays."""


class Sum(NamedTuple):
    """Checksums of a section that was written."""

    placement: int
    """Number of the placement that the section is a block of."""
    start: int
    """First element."""
    nbytes: int
    """Bytes, uncompressed."""
    digest: str
    """xxh3-64 of the uncompressed bytes, 16 hex digits."""
    crc32: int
    """CRC-32 of the uncompressed bytes."""
    block: tuple[int, int] | None = None
    """File offset and number of encoded bytes, if the section is compressed."""


@dataclass(frozen=True, slots=True)
class Done:
    """Report of a finished task."""

    task: int
    """Its number."""
    sums: tuple[Sum, ...]
    """Checksums of each section, in order."""
    spans: tuple[Span, ...]
    """Ranges that were read from files with recorded checksums."""
    drift: tuple[str, ...] = field(default=())
    """A line for each copy in the source that differs from what was written."""

    @property
    def nbytes(self) -> int:
        """Bytes that the task wrote, uncompressed."""
        return sum(section.nbytes for section in self.sums)


class Step(NamedTuple):
    """Progress report of a long task."""

    task: int
    """Its number."""
    nbytes: int
    """Bytes written since the last report, uncompressed."""


class _SliceOutput(NamedTuple):
    """Output of a slice that is written in tiles."""

    section: Section
    """Its first section."""
    file: str | int
    """Output file, or its descriptor."""
    offset: int
    """Byte in that file where the first element goes."""


class Worker:
    """Carries out tasks of one job, one at a time; every thread has its own worker."""

    def __init__(self, job: Job, root: Path) -> None:
        self._job = job
        self._root = root
        self._sources = Sources(job.index.files)
        self._is_remote = is_remote(job.index.files)
        self._announced: dict[int, int] = {}
        self._patcher = Patcher()
        self._tracked = frozenset(record.path for record in job.index.records)
        atoms = job.index.atoms
        self._locator = lru_cache(CACHED_LOCATORS)(  # caching a bound method would make a reference cycle
            lambda param, state: Locator(atoms[param].states[state])
        )
        self._buffer = memoryview(mmap.mmap(-1, TILE))  # pages that are never touched take no memory

    def carry_out_all(self, tasks: Iterable[Task]) -> Iterator[Step | Done]:
        """Carry out tasks one after another, and meanwhile prefetch what the next one reads from object stores."""
        if not self._is_remote:
            yield from chain.from_iterable(map(self.carry_out, tasks))
            return
        waiting: deque[Task] = deque()
        for task in tasks:
            self._announce(task)
            waiting.append(task)
            if len(waiting) > 1:
                yield from self.carry_out(waiting.popleft())
        if waiting:
            yield from self.carry_out(waiting.popleft())

    def carry_out(self, task: Task) -> Iterator[Step | Done]:
        """Carry out a task; the last report is a `Done`. Raises UcpError or OSError."""
        if self._is_remote:
            self._announce(task)
        gatherer = Gatherer(sources=self._sources, tracked=self._tracked, patcher=self._patcher)
        drift_lines: list[str] = []
        sums: list[Sum] = []
        if not self._is_encoded(task.fills[0]) and task.fills[0].sections[0].placement in self._job.tiled:
            sums.extend(self._write_tiled(task.fills, gatherer, drift_lines))
        else:
            for fill in task.fills:
                if not self._is_encoded(fill):
                    sums.extend(self._write(fill, gatherer, drift_lines))
                    continue
                for section_sum in self._write_encoded(fill, gatherer, drift_lines):
                    sums.append(section_sum)
                    yield Step(task.number, section_sum.nbytes)
        if self._is_remote:
            self._sources.cancel(batch=self._announced.pop(task.number))
        yield Done(task=task.number, sums=tuple(sums), spans=tuple(gatherer.spans), drift=tuple(drift_lines))

    def _announce(self, task: Task) -> None:
        """Start to prefetch what a task reads from object stores, unless that has begun already."""
        if task.number not in self._announced:
            self._announced[task.number] = number = max(self._announced.values(), default=0) + 1
            self._sources.prefetch(
                (extent for piece in self._list_pieces(task) if (extent := to_extent(piece))), batch=number
            )

    def _list_pieces(self, task: Task) -> Iterator[Piece]:
        """The pieces that a task reads, in about the order in which it reads them."""
        sections = [section for fill in task.fills for section in fill.sections]
        if not self._is_encoded(task.fills[0]) and sections[0].placement in self._job.tiled:
            parts = self._needed_tiles(sections)
        else:
            parts = (
                (replace(target_slice, start=section.start, stop=section.stop), locator)
                for section in sections
                for target_slice, locator in (self._find_slice(section),)
            )
        is_checked = any(section.placement in self._job.checking for section in sections)
        for tensor_slice, locator in parts:
            yield from resolve(tensor_slice, locator, tensor_slice.start, tensor_slice.stop)
            if is_checked and locator.replicas:
                yield from chain.from_iterable(
                    resolve_replicas(tensor_slice, locator, tensor_slice.start, tensor_slice.stop)
                )

    def _needed_tiles(self, sections: Sequence[Section]) -> Iterator[tuple[Slice, Locator]]:
        """The tiles that contain elements of these slices of one state."""
        tensor_slice, locator = self._find_slice(sections[0])
        slices = {section.placement: self._find_slice(section)[0] for section in sections}.values()
        shape = locator.state.global_shape
        for tile in split_tiles(tensor_slice, locator.state, nbytes=TILE):
            if any(True for other in slices for _ in resolve_in_tile(other, tile, shape)):
                yield tile, locator

    def close(self) -> None:
        """Close source files."""
        self._sources.close()

    def _is_encoded(self, fill: Fill) -> bool:
        """Whether a fill is a file of encoded blocks; tensors of extras are never encoded."""
        target = self._job.target
        return target.compress and fill.sections[0].placement < len(target.placements)

    def _write(self, fill: Fill, gatherer: Gatherer, drift_lines: list[str]) -> Iterator[Sum]:
        """Read, checksum and write a fill, one window (several small sections, or a part of one) after another."""
        with _open_output(str(self._root / fill.path)) as descriptor:
            for sections in bundle(fill.sections, limit=WINDOW):
                runs = self._find_runs(sections[0]) if sections[0].nbytes > WINDOW else None
                if runs is not None:
                    yield self._copy_section(sections[0], runs, descriptor, gatherer)
                    continue
                part = Fill(path=fill.path, sections=tuple(sections))
                data = self._buffer[: part.nbytes]
                yield from self._gather_fill(part, data, gatherer, drift_lines)
                write_at(descriptor, data, part.offset)
            if self._job.fsync:
                start_writeback(descriptor, fill.offset, fill.nbytes)

    def _find_runs(self, section: Section) -> list[ByteRun] | None:
        """The ranges of the source that a section is copied from, cut into windows; None if it is not a plain copy."""
        tensor_slice, locator = self._find_slice(section)
        if section.placement in self._job.checking and locator.replicas:
            return None
        pieces = resolve(tensor_slice, locator, section.start, section.stop)
        runs = [to_run(piece, tensor_slice.dtype) for piece in sorted(pieces, key=lambda piece: piece.dst_offset)]
        return None if None in runs else [part for run in runs if run for part in run.cut(WINDOW)]

    def _copy_section(self, section: Section, runs: Iterable[ByteRun], descriptor: int, gatherer: Gatherer) -> Sum:
        """Copy a section; the CRC-32 of each window is computed once, for the source and for the destination."""
        digest, crc, offset = xxhash.xxh3_64(), 0, section.offset
        for window in bundle(runs, limit=WINDOW):
            data = self._buffer[: sum(run.nbytes for run in window)]
            for run_crc, nbytes in gatherer.copy_runs(window, data):
                crc = zlib_ng.crc32_combine(crc, run_crc, nbytes)
            digest.update(data)
            write_at(descriptor, data, offset)
            offset += data.nbytes
        return Sum(section.placement, section.start, section.nbytes, digest.hexdigest(), crc)

    def _write_encoded(self, fill: Fill, gatherer: Gatherer, drift_lines: list[str]) -> Iterator[Sum]:
        """Write a file of encoded blocks, then move it into place: another worker may be running the same task."""
        offset = 0
        growing = self._root.parent / f"{TEMPORARY}{uuid4().hex}"
        with open(growing, "xb") as file:
            for section_sum in self._gather_sections(fill, gatherer, drift_lines):
                itemsize = self._job.target.placements[section_sum.placement].slice.dtype.itemsize
                encoded = encode_block(self._buffer[: section_sum.nbytes], itemsize)
                file.write(encoded)
                yield section_sum._replace(block=(offset, len(encoded)))
                offset += len(encoded)
        os.replace(growing, self._root / fill.path)

    def _gather_sections(self, fill: Fill, gatherer: Gatherer, drift_lines: list[str]) -> Iterator[Sum]:
        """Gather the sections of a fill, one after another, into the buffer, each for the caller to encode."""
        for number, group in groupby(fill.sections, lambda section: section.placement):
            sections = list(group)
            if number not in self._job.tiled:
                for section in sections:
                    yield from self._gather_fill(
                        Fill(path=fill.path, sections=(section,)), self._buffer[: section.nbytes], gatherer, drift_lines
                    )
                continue
            with TemporaryFile(dir=self._root.parent) as rows:  # tiles come in another order than blocks are encoded in
                first = sections[0]
                self._copy_tiles([_SliceOutput(first, rows.fileno(), 0)], gatherer, drift_lines)
                for section in sections:
                    yield self._read_back(section, rows.fileno(), section.offset - first.offset)

    def _write_tiled(self, fills: Sequence[Fill], gatherer: Gatherer, drift_lines: list[str]) -> Iterator[Sum]:
        """Write slices of one state, each a fill, in the order of the source; then checksum them in their own order."""
        self._copy_tiles(
            [_SliceOutput(f.sections[0], str(self._root / f.path), f.offset) for f in fills], gatherer, drift_lines
        )
        for fill in fills:
            with _open_output(str(self._root / fill.path)) as descriptor:
                for section in fill.sections:
                    yield self._read_back(section, descriptor, section.offset)
                if self._job.fsync:
                    start_writeback(descriptor, fill.offset, fill.nbytes)

    def _copy_tiles(self, outputs: Sequence[_SliceOutput], gatherer: Gatherer, drift_lines: list[str]) -> None:
        """Write the slices of `outputs`, tile by tile, and compare each tile with its copies."""
        first_slice, locator = self._find_slice(outputs[0].section)
        state = locator.state
        slices = [self._find_slice(output.section)[0] for output in outputs]
        is_checked = any(output.section.placement in self._job.checking for output in outputs)
        boundaries = {(f.ref.path, f.ref.offset) for f in state.fragments if isinstance(f.ref, TensorRef)}
        span_count = 0
        nbytes = (BLOCK if locator.replicas else TILE) if state.overlap is Overlap.EXCLUSIVE else MEAN_WINDOW
        for tile in split_tiles(first_slice, state, nbytes=nbytes):
            copies = [
                (s, piece)
                for s, o in zip(outputs, slices, strict=True)
                for piece in resolve_in_tile(o, tile, state.global_shape)
            ]
            if not copies:
                continue
            data = self._buffer[: tile.nbytes]
            gatherer.fill(data, tile.dtype, resolve(tile, locator, 0, tile.stop))
            if is_checked:
                drift_lines.extend(describe_drift(tile, locator, data, gatherer))
            for output, piece in copies:
                _scatter_piece(output, piece, data)
            if len(gatherer.spans) > 2 * span_count + MIN_JOINED:
                gatherer.join_spans(boundaries)
                span_count = len(gatherer.spans)
        gatherer.join_spans(boundaries)

    def _read_back(self, section: Section, descriptor: int, offset: int) -> Sum:
        """Read a section, which was written at `offset`, back into the buffer; return its checksums."""
        digest, crc = xxhash.xxh3_64(), 0
        for low in range(0, section.nbytes, WINDOW):
            part = self._buffer[low : min(low + WINDOW, section.nbytes)]
            read_back(descriptor, part, offset + low)
            digest.update(part)
            crc = zlib_ng.crc32(part, crc)
        return Sum(section.placement, section.start, section.nbytes, digest.hexdigest(), crc)

    def _gather_fill(self, fill: Fill, data: memoryview, gatherer: Gatherer, drift_lines: list[str]) -> list[Sum]:
        """Gather all sections into `data`, compare them with their copies; return their checksums."""
        parts, requests, checked = [], [], []
        for section in fill.sections:
            tensor_slice, locator = self._find_slice(section)
            at = section.offset - fill.offset
            part = data[at : at + section.nbytes]
            parts.append(part)
            dtype, item, state = tensor_slice.dtype, tensor_slice.dtype.itemsize, locator.state
            step = PATCH_WINDOW if state.overlap is Overlap.PATCHED and dtype is state.dtype else MEAN_WINDOW
            step = section.stop - section.start if state.overlap is Overlap.EXCLUSIVE else step // item
            for low, high in block_ranges(section.start, section.stop, step):
                window = part[(low - section.start) * item : (high - section.start) * item]
                requests.append((window, dtype, resolve(tensor_slice, locator, low, high)))
                if section.placement in self._job.checking and locator.replicas:
                    checked.append((replace(tensor_slice, start=low, stop=high), locator, window))
        try:
            gatherer.fill_many(requests)
        except CorruptError as error:
            raise self._locate_error(error, fill) from error
        drift_lines.extend(line for _, lines in find_drifts(checked, gatherer) for line in lines)
        return [
            Sum(s.placement, s.start, part.nbytes, xxhash.xxh3_64_hexdigest(part), zlib_ng.crc32(part))
            for s, part in zip(fill.sections, parts, strict=True)
        ]

    def _locate_error(self, error: CorruptError, fill: Fill) -> CorruptError:
        """`error` with the name of the state whose bytes are damaged, found by reading each state separately."""
        for section in fill.sections:
            tensor_slice, locator = self._find_slice(section)
            data = self._buffer[: section.nbytes]
            pieces = resolve(tensor_slice, locator, section.start, section.stop)
            try:
                Gatherer(sources=self._sources).fill(data, tensor_slice.dtype, pieces)
            except CorruptError as state_error:
                return CorruptError(f"{tensor_slice.param}/{tensor_slice.state}: {state_error}")
        return error

    def _find_slice(self, section: Section) -> tuple[Slice, Locator]:
        placements = self._job.target.placements
        if section.placement < len(placements):
            tensor_slice = placements[section.placement].slice
            return tensor_slice, self._locator(tensor_slice.param, tensor_slice.state)
        ref = self._job.target.raw[section.placement - len(placements)].src
        return locate_raw(ref)


@contextmanager
def _open_output(file: str | int) -> Iterator[int]:
    """A descriptor of an output file, for writing and reading back; an open descriptor is duplicated."""
    descriptor = os.dup(file) if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _scatter_piece(output: _SliceOutput, piece: Piece, data: memoryview) -> None:
    """Write the elements of a piece, which are in `data`, run by run to their places in the output."""
    import numpy as np

    values = view_piece(data, piece, piece.src_offset)
    lead, run = len(piece.sizes), values.itemsize  # dims before those that form a run in the output; bytes of a run
    while lead and (piece.sizes[lead - 1] == 1 or piece.dst_strides[lead - 1] * values.itemsize == run):
        lead -= 1
        run *= piece.sizes[lead]
    steps = tuple(step * values.itemsize for step in piece.dst_strides)
    first = output.offset + piece.dst_offset * values.itemsize
    rows = len(values) if values.flags.c_contiguous else max(1, BLOCK * len(values) // values.nbytes)
    with _open_output(output.file) as descriptor:
        for low in range(0, len(values), rows):
            packed = np.ascontiguousarray(values[low : low + rows]).reshape(-1).view(np.uint8).data
            sizes = (min(rows, len(values) - low), *piece.sizes[1:])[:lead]
            starts = list_offsets(sizes, steps[:lead], first=first + low * steps[0])
            nbytes = packed.nbytes // len(starts)
            for at, start in zip(range(0, packed.nbytes, nbytes), starts, strict=True):
                write_at(descriptor, packed[at : at + nbytes], start)
