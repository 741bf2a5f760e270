"""The plan of a conversion in a file that all its parts read, each the piece that is its own.

    chunk, chunk, ...   tasks that follow one another, with all that they refer to: msgpack, compressed with zstd
    head                where the chunks lie and what they are of, in the same form
    last 16 bytes       where the head lies

It is a cache: whatever is wrong with it, a part that cannot use it plans by itself. It is used by the user who wrote
it alone, as it says which files are read: what others may write to is not believed. What is read is put together from
numbers and strings by the structures below alone, so nothing of a file is ever run.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, overload

import msgspec
import zstandard
from msgspec import Struct

from ucp.contract.registry import target
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Prepared, workers_of
from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, Kind, SourceFile, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.target import OutputFile, Placement, RawCopy, TargetPlan
from ucp.core.tensor import InlineTensor, Record, Tensor, TensorRef
from ucp.core.topology import Topology
from ucp.io.identity import source_file
from ucp.transfer.plan.job import Job, every_task
from ucp.transfer.plan.tasks import Share, Task, bundle

__all__ = ["plan_path", "read_plan", "write_plan"]

CHUNKS = 1024
"""Chunks of a plan, about: the finest that parts are told apart."""

_TAIL = struct.Struct("<QQ")
"""Offset and bytes of the head."""
_UNUSABLE = (OSError, ValueError, IndexError, struct.error, zstandard.ZstdError)

K = TypeVar("K")
T = TypeVar("T")


class _Piece(Struct, frozen=True, gc=False, array_like=True):
    """A fragment of a state. One of `ref` and `inline` is there."""

    box: Box
    ref: TensorRef | None
    inline: InlineTensor | None
    replica: int
    term: int
    derived: bool

    def fragment(self) -> Fragment:
        ref = self.ref or self.inline
        if ref is None:
            raise ValueError("a piece that lies nowhere")
        return Fragment(box=self.box, ref=ref, replica=self.replica, term=self.term, derived=self.derived)


class _State(Struct, frozen=True, array_like=True):
    """A state, and what is needed of its parameter."""

    param: str
    param_shape: tuple[int, ...]
    kind: Kind
    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    overlap: Overlap


class _Chunk(Struct, frozen=True, array_like=True):
    """Tasks that follow one another. Placements and raw copies by their numbers, those of raw copies from 0 on."""

    tasks: tuple[Task, ...]
    placements: dict[int, Placement]
    raw: dict[int, RawCopy]
    states: tuple[_State, ...]
    files: dict[str, int]
    records: tuple[Record, ...]
    checking: tuple[int, ...]
    crosswise: tuple[int, ...]


class _Range(Struct, frozen=True, array_like=True):
    """Where a chunk lies."""

    start: int
    """Bytes that tasks of the chunks before it write."""
    offset: int
    nbytes: int


class _Head(Struct, frozen=True):
    """What all parts need."""

    key: str
    fingerprint: str
    facts: dict[str, str]
    warnings: tuple[str, ...]
    path: str
    format: str
    notes: tuple[str, ...]
    dropped: tuple[str, ...]
    files: tuple[SourceFile, ...]
    placements: int
    raw: int
    compress: bool
    casts: tuple[str, ...]
    target_notes: tuple[str, ...]
    topology: str | None
    nbytes: int
    chunks: tuple[_Range, ...]


@dataclass(frozen=True, slots=True)
class _Known(Sequence[T]):
    """A sequence of which some items are known, each at its place."""

    length: int
    items: Mapping[int, T]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            raise TypeError("expected a number; got a slice: not all items are known")
        return self.items[at]


def plan_path(folder: Path, key: str) -> Path:
    """File of the plan of a conversion, by what it was made of, in the folder that its parts share."""
    return folder / f"plan-{key}"


def write_plan(folder: Path, key: str, prepared: Prepared) -> None:
    """Put a plan in its place, whole or not at all. `key`: what it was made of. Raises OSError."""
    path = folder / f"plan-{secrets.token_hex(8)}"
    tasks, records = every_task(prepared.job), _Records(prepared.job.index.records)
    nbytes = {file.path: file.nbytes for file in prepared.job.target.files}
    chunks: list[_Range] = []
    start = at = 0
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            for several in bundle(tasks, limit=tasks.nbytes // CHUNKS):
                data = _packed(_chunk(prepared.job, several, records, nbytes))
                file.write(data)
                chunks.append(_Range(start, at, len(data)))
                at += len(data)
                start += sum(task.nbytes for task in several)
            head = _packed(_head(key, prepared, chunks, start))
            file.write(head + _TAIL.pack(at, len(head)))
        os.replace(path, plan_path(folder, key))
    except BaseException:
        with suppress(FileNotFoundError):
            path.unlink()
        raise


def _packed(value: object) -> bytes:
    """`value` as it is written; its checksum is of zstd."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(msgspec.msgpack.encode(value))


def _unpacked(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data), type=kind)


def _chunk(job: Job, tasks: Sequence[Task], records: _Records, nbytes: Mapping[str, int]) -> _Chunk:
    """Tasks that follow one another, with all that they refer to."""
    base = len(job.target.placements)
    fills = [fill for task in tasks for fill in task.fills]
    numbers = sorted({section.placement for fill in fills for section in fill.sections})
    placements = {number: job.target.placements[number] for number in numbers if number < base}
    raw = {number - base: job.target.raw[number - base] for number in numbers if number >= base}
    named = dict.fromkeys((placement.slice.param, placement.slice.state) for placement in placements.values())
    states = {key: job.index.atoms[key[0]].states[key[1]] for key in named}
    refs = [piece.ref for state in states.values() for piece in state.fragments]
    return _Chunk(
        tasks=tuple(tasks),
        placements=placements,
        raw=raw,
        states=tuple(_state(job.index.atoms[param], name, state) for (param, name), state in states.items()),
        files={fill.path: nbytes[fill.path] for fill in fills},
        records=tuple(records.met_by([*refs, *(copy.src for copy in raw.values())])),
        checking=tuple(number for number in numbers if number in job.checking),
        crosswise=tuple(number for number in numbers if number in job.crosswise),
    )


def _state(atom: AtomIndex, name: str, state: StateIndex) -> _State:
    pieces = [
        _Piece(
            piece.box,
            piece.ref if isinstance(piece.ref, TensorRef) else None,
            piece.ref if isinstance(piece.ref, InlineTensor) else None,
            piece.replica,
            piece.term,
            piece.derived,
        )
        for piece in state.fragments
    ]
    return _State(
        param=atom.name,
        param_shape=atom.global_shape,
        kind=atom.kind,
        name=name,
        dtype=state.dtype,
        shape=state.global_shape,
        pieces=tuple(pieces),
        overlap=state.overlap,
    )


class _Records:
    """Ranges with a recorded checksum, by file and in order."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records: dict[str, list[Record]] = {}
        for record in sorted(records, key=lambda record: (record.path, record.offset)):
            self._records.setdefault(record.path, []).append(record)

    def met_by(self, refs: Iterable[Tensor]) -> Iterator[Record]:
        """Those that some of `refs` lie in, each once."""
        met: dict[str, set[int]] = {}
        for ref in refs:
            if not isinstance(ref, TensorRef) or ref.path not in self._records:
                continue
            records = self._records[ref.path]
            stop = ref.offset + (ref.codec_nbytes if ref.codec else ref.extent)
            at = max(0, bisect_right(records, ref.offset, key=lambda record: record.offset) - 1)
            while at < len(records) and records[at].offset < stop:
                met.setdefault(ref.path, set()).add(at)
                at += 1
        for path, numbers in met.items():
            yield from (self._records[path][number] for number in sorted(numbers))


def _head(key: str, prepared: Prepared, chunks: Sequence[_Range], nbytes: int) -> _Head:
    index, plan = prepared.job.index, prepared.job.target
    return _Head(
        key=key,
        fingerprint=prepared.fingerprint,
        facts=dict(prepared.facts),
        warnings=prepared.warnings,
        path=index.path,
        format=index.format,
        notes=index.notes,
        dropped=index.dropped,
        files=index.files,
        placements=len(plan.placements),
        raw=len(plan.raw),
        compress=plan.compress,
        casts=plan.casts,
        target_notes=plan.notes,
        topology=None if plan.topology is None else str(plan.topology),
        nbytes=nbytes,
        chunks=tuple(chunks),
    )


def read_plan(folder: Path, key: str, options: ConvertOptions) -> Prepared | None:
    """The piece of a plan that is of the part in `options`.

    None where there is none of this `key`, or it is damaged, or another user's, or where a file of the source is not
    as it was when the plan was made.
    """
    try:
        with _opened(plan_path(folder, key)) as file:
            file.seek(-_TAIL.size, os.SEEK_END)
            head = _unpacked(_read(file, *_TAIL.unpack(file.read(_TAIL.size))), _Head)
            if head.key != key or any(source_file(known.path, known.role) != known for known in head.files):
                return None
            return _prepared(head, [*_read_chunks(file, head, options.part or Share())], options)
    except _UNUSABLE:
        return None


def _read(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    if offset + nbytes > os.fstat(file.fileno()).st_size:
        raise ValueError("it is cut")
    file.seek(offset)
    return file.read(nbytes)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file that this user alone may write to. Raises OSError, ValueError for any other."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise ValueError(f"{path} is not only ours")
        yield file


def _read_chunks(file: BinaryIO, head: _Head, share: Share) -> Iterator[tuple[int, _Chunk]]:
    """Chunks that have tasks of a share, each with the byte of the work at which it begins. No others are read."""
    total = head.nbytes
    stops = [*(chunk.start for chunk in head.chunks), total][1:]
    for chunk, stop in zip(head.chunks, stops, strict=True):
        low, high = (Share.at(byte, byte, total=total, parts=share.parts) for byte in (chunk.start, stop))
        if low <= share.number <= high:
            yield chunk.start, _unpacked(_read(file, chunk.offset, chunk.nbytes), _Chunk)


def _tasks(chunk: _Chunk, start: int, share: Share, total: int) -> Iterator[Task]:
    for task in chunk.tasks:
        if Share.at(start, start + task.nbytes, total=total, parts=share.parts) == share.number:
            yield task
        start += task.nbytes


def _atoms(chunks: Iterable[_Chunk]) -> dict[str, AtomIndex]:
    atoms: dict[str, AtomIndex] = {}
    for state in (state for chunk in chunks for state in chunk.states):
        index = StateIndex(
            dtype=state.dtype,
            global_shape=state.shape,
            fragments=tuple(piece.fragment() for piece in state.pieces),
            overlap=state.overlap,
        )
        others = atoms[state.param].states if state.param in atoms else {}
        atoms[state.param] = AtomIndex(
            name=state.param, global_shape=state.param_shape, kind=state.kind, states={**others, state.name: index}
        )
    return atoms


def _joined(tables: Iterable[Mapping[K, T]]) -> dict[K, T]:
    return {key: value for table in tables for key, value in table.items()}


def _prepared(head: _Head, found: Sequence[tuple[int, _Chunk]], options: ConvertOptions) -> Prepared:
    share, chunks = options.part or Share(), [chunk for _, chunk in found]
    index = Index(
        path=head.path,
        format=head.format,
        evidence=(),
        producer="",
        topology=Topology(),
        step=None,
        atoms=_atoms(chunks),
        files=head.files,
        records=tuple(dict.fromkeys(record for chunk in chunks for record in chunk.records)),
        notes=head.notes,
        dropped=head.dropped,
    )
    workers, threads = workers_of(options, index)
    plan = TargetPlan(
        files=tuple(
            OutputFile(path=path, nbytes=nbytes) for path, nbytes in _joined(chunk.files for chunk in chunks).items()
        ),
        placements=_Known(head.placements, _joined(chunk.placements for chunk in chunks)),
        raw=_Known(head.raw, _joined(chunk.raw for chunk in chunks)),
        compress=head.compress,
        casts=head.casts,
        notes=head.target_notes,
        topology=None if head.topology is None else Topology.parse(head.topology),
    )
    job = Job(
        index=index,
        target=plan,
        tasks=tuple(task for start, chunk in found for task in _tasks(chunk, start, share, head.nbytes)),
        checking=frozenset(number for chunk in chunks for number in chunk.checking),
        crosswise=frozenset(number for chunk in chunks for number in chunk.crosswise),
        fsync=options.fsync,
    )
    return Prepared(
        job=job,
        target=target(options.to),
        engine=options.engine,
        workers=workers,
        threads=threads,
        fingerprint=head.fingerprint,
        facts=head.facts,
        warnings=head.warnings,
    )
