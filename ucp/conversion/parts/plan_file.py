"""The plan of a conversion in a file that all its parts read, each the piece that is its own.

    chunk, chunk, ...   tasks that follow one another, with all that they refer to: JSON, compressed with zstd
    head                where the chunks lie and what they are of, in the same form
    last 40 bytes       where the head lies, and its digest

It is a cache: whatever is wrong with it, a part that cannot use it plans by itself. It is used by the user who wrote
it alone, as it says which files are read: what others may write to is not believed.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
import zstandard

from ucp.contract.registry import target
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.plan_values import Chunk, Encoder, Known
from ucp.conversion.prepare import Prepared, workers_of
from ucp.core.index import Index, SourceFile
from ucp.core.target import TargetPlan
from ucp.core.topology import Topology
from ucp.io.identity import source_file
from ucp.transfer.plan.job import Job, every_task
from ucp.transfer.plan.tasks import Share

__all__ = ["plan_path", "read_plan", "write_plan"]

CHUNKS = 1024
"""Chunks of a plan, about: the finest that parts are told apart."""

_TAIL = struct.Struct("<QQ8s16s")
"""Offset and bytes of the head, a mark, digest of the head (16 bytes)."""
_MARK = b"ucp plan"
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, IndexError, struct.error, zstandard.ZstdError)


def plan_path(folder: Path, key: str) -> Path:
    """File of the plan of a conversion, by what it was made of, in the folder that its parts share."""
    return folder / f"plan-{key}"


def write_plan(folder: Path, key: str, prepared: Prepared) -> None:
    """Put a plan in its place, whole or not at all. `key`: what it was made of. Raises OSError."""
    path = folder / f"plan-{secrets.token_hex(8)}"
    every, encoder = every_task(prepared.job), Encoder(prepared.job)
    total = every.nbytes
    chunks: list[tuple[int, int, int, str]] = []
    at = 0
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            for numbers in every.ranges(total // CHUNKS):
                data = _packed(encoder.chunk(every, numbers))
                file.write(data)
                chunks.append((every.starts[numbers.start], at, len(data), xxhash.xxh3_128_hexdigest(data)))
                at += len(data)
            head = _packed(json.dumps(_head(key, prepared, chunks, total)).encode())
            file.write(head + _TAIL.pack(at, len(head), _MARK, xxhash.xxh3_128_digest(head)))
        os.replace(path, plan_path(folder, key))
    except BaseException:
        with suppress(FileNotFoundError):
            path.unlink()
        raise


def _packed(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(text)


def _unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _head(key: str, prepared: Prepared, chunks: Sequence[object], total: int) -> dict[str, object]:
    index, plan = prepared.job.index, prepared.job.target
    return {
        "key": key,
        "fingerprint": prepared.fingerprint,
        "facts": dict(prepared.facts),
        "warnings": prepared.warnings,
        "source": [index.path, index.format, index.notes, index.dropped],
        "files": [[file.path, file.nbytes, file.mtime_ns, file.role, file.version] for file in index.files],
        "target": [len(plan.placements), len(plan.raw), plan.compress, plan.casts, plan.notes],
        "topology": None if plan.topology is None else str(plan.topology),
        "nbytes": total,
        "chunks": chunks,
    }


def read_plan(folder: Path, key: str, options: ConvertOptions) -> Prepared | None:
    """The piece of a plan that is of the part in `options`.

    None where there is none of this `key`, or it is damaged, or another user's, or where a file of the source is not
    as it was when the plan was made.
    """
    try:
        with _opened(plan_path(folder, key)) as file:
            head = _read_head(file)
            if head["key"] != key or any(source_file(own.path, own.role) != own for own in _files(head)):
                return None
            return _prepared(head, _read_chunks(file, head, options.part or Share()), options)
    except _UNUSABLE:
        return None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file that this user alone may write to. Raises OSError, ValueError for any other."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise ValueError(f"{path} is not only ours")
        yield file


def _read_head(file: BinaryIO) -> dict[str, Any]:
    file.seek(-_TAIL.size, os.SEEK_END)
    offset, nbytes, mark, digest = _TAIL.unpack(file.read(_TAIL.size))
    file.seek(offset)
    data = file.read(nbytes)
    if mark != _MARK or xxhash.xxh3_128_digest(data) != digest:
        raise ValueError("the head is damaged")
    head: dict[str, Any] = json.loads(_unpacked(data))
    return head


def _files(head: Mapping[str, Any]) -> tuple[SourceFile, ...]:
    """Files of the source, as they were when the plan was made."""
    return tuple(
        SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role, version=version)
        for path, nbytes, mtime_ns, role, version in head["files"]
    )


def _read_chunks(file: BinaryIO, head: Mapping[str, Any], share: Share) -> Chunk:
    """The tasks of a share, and all that they refer to. Chunks without a task of it are not read."""
    total, found = head["nbytes"], Chunk()
    stops = [*(start for start, *_ in head["chunks"]), total][1:]
    for (start, offset, nbytes, digest), stop in zip(head["chunks"], stops, strict=True):
        if not _share_at(start, total, share) <= share.number <= _share_at(stop, total, share):
            continue
        file.seek(offset)
        data = file.read(nbytes)
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise ValueError("a chunk is damaged")
        found.add(_unpacked(data), share, total)
    return found


def _share_at(byte: int, total: int, share: Share) -> int:
    return Share.at(byte, byte, total=total, parts=share.parts)


def _prepared(head: Mapping[str, Any], found: Chunk, options: ConvertOptions) -> Prepared:
    path, form, notes, dropped = head["source"]
    placements, raw, compress, casts, target_notes = head["target"]
    index = Index(
        path=path,
        format=form,
        evidence=(),
        producer="",
        topology=Topology(),
        step=None,
        atoms=found.atoms,
        files=tuple(
            SourceFile(path=p, nbytes=n, mtime_ns=t, role=role, version=v) for p, n, t, role, v in head["files"]
        ),
        records=tuple(found.records),
        notes=tuple(notes),
        dropped=tuple(dropped),
    )
    workers, threads = workers_of(options, index)
    plan = TargetPlan(
        files=tuple(found.files.values()),
        placements=Known(placements, found.placements),
        raw=Known(raw, found.raw),
        compress=compress,
        casts=tuple(casts),
        notes=tuple(target_notes),
        topology=None if head["topology"] is None else Topology.parse(head["topology"]),
    )
    job = Job(
        index=index,
        target=plan,
        tasks=tuple(found.tasks),
        checking=frozenset(found.checking),
        crosswise=frozenset(found.crosswise),
        fsync=options.fsync,
    )
    return Prepared(
        job=job,
        target=target(options.to),
        engine=options.engine,
        workers=workers,
        threads=threads,
        fingerprint=head["fingerprint"],
        facts=head["facts"],
        warnings=tuple(head["warnings"]),
    )
