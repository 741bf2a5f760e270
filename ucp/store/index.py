"""An atom store, whole or virtual, as an index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ucp.atom import Extra, Index, SourceFile
from ucp.errors import ChangedError, MalformedError, SourceError, listed
from ucp.identity import identity_of, size_and_time
from ucp.store.extras import read_extra
from ucp.store.interpret import ReferredFile, StoredExtra, files_of, interpret
from ucp.store.manifest import MANIFEST, parse
from ucp.tensor import Record

__all__ = ["read_store"]


def read_store(root: Path) -> Index:
    """Index of the store in the folder `root`. Raises ChangedError when a file it refers to is another one now."""
    document = parse(_read(root / MANIFEST), str(root / MANIFEST))
    files = files_of(document, root)
    _check_unchanged(files, root)
    index, stored = interpret(document, root, [own.file for own in files])
    extras, records = _extras(stored)
    return replace(
        index,
        extras=extras,
        files=(*index.files, _file(root / MANIFEST, "manifest"), *(_file(own.path, "extra") for own in stored)),
        records=(*index.records, *records),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _extras(stored: Iterable[StoredExtra]) -> tuple[tuple[Extra, ...], tuple[Record, ...]]:
    """Extras with their values, and the checksums of their tensors."""
    extras: dict[tuple[str, int | None], Extra] = {}
    records: list[Record] = []
    for own in stored:
        value, sums = read_extra(own.path)
        records.extend(sums)
        if (own.name, own.rank) in extras:
            raise MalformedError(f"{own.path}: the extra {own.name!r} of rank {own.rank} is stored twice")
        extras[own.name, own.rank] = Extra(name=own.name, rank=own.rank, value=value)
    return tuple(extras.values()), tuple(records)


def _file(path: Path | str, role: str) -> SourceFile:
    nbytes, mtime_ns = size_and_time(str(path))
    return SourceFile(path=str(path), nbytes=nbytes, mtime_ns=mtime_ns, role=role)


def _check_unchanged(files: Iterable[ReferredFile], root: Path) -> None:
    changed = []
    for own in files:
        now = (own.file.nbytes, own.file.mtime_ns)
        if own.identity and (now != (own.nbytes, own.mtime_ns) or identity_of(own.file.path) != own.identity):
            changed.append(f"{own.file.path}: {_difference(own)}")
    if changed:
        raise ChangedError(
            f"{root} is a virtual store, and files that it refers to were changed since it was made:\n"
            f"{listed(changed)}\nmake it again with `ucp convert SRC {root} --virtual --overwrite`"
        )


def _difference(own: ReferredFile) -> str:
    if own.nbytes != own.file.nbytes:
        return f"{own.nbytes} bytes then, {own.file.nbytes} now"
    if own.mtime_ns != own.file.mtime_ns:
        then = "unknown" if own.mtime_ns is None else _when(own.mtime_ns)
        return f"last written {then} then, {_when(own.file.mtime_ns)} now (copying with `cp -p` keeps the time)"
    return "its first or last 64 KiB differ"


def _when(mtime_ns: int) -> str:
    try:
        return datetime.fromtimestamp(mtime_ns / 1e9, tz=UTC).isoformat(sep=" ", timespec="microseconds")
    except (ValueError, OverflowError, OSError):  # a damaged manifest may say any number
        return f"{mtime_ns} ns after 1970"
