"""An atom store, whole or virtual, as an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ucp.core.index import Extra, Index
from ucp.core.tensor import Record
from ucp.errors import ChangedError, CorruptError, MalformedError, UcpError, counted, listed
from ucp.io.folder import names_of_folder
from ucp.io.identity import identity_of, source_file
from ucp.store.extras import EXTRAS, read_extra
from ucp.store.interpret import ReferredFile, files_of, inside, interpret
from ucp.store.manifest import MANIFEST, StoredExtra, parse, read_text

__all__ = ["read_store"]


def read_store(root: Path) -> Index:
    """Index of the store in the folder `root`. Raises ChangedError when a file it refers to is another one now."""
    path = inside(root, MANIFEST)
    document = parse(read_text(path), path)
    files = files_of(document, root)
    _check_unchanged(files, root)
    index, stored = interpret(document, root, [own.file for own in files])
    extras, records = _extras(root, stored)
    unchecked = tuple(_unchecked(root, stored))
    return replace(
        index,
        extras=extras,
        files=(
            *index.files,
            source_file(str(path), "manifest"),
            *(source_file(str(root / own.file), "extra") for own in stored),
        ),
        records=(*index.records, *records),
        notes=(*index.notes, *unchecked),
        unchecked=unchecked,
    )


def _extras(root: Path, stored: Iterable[StoredExtra]) -> tuple[tuple[Extra, ...], tuple[Record, ...]]:
    """Extras with their values, and the checksums of their tensors. Raises one error for all that are damaged."""
    extras: dict[tuple[str, int | None], Extra] = {}
    records: list[Record] = []
    problems: list[UcpError] = []
    for own in stored:
        if (own.name, own.rank) in extras:
            raise MalformedError(f"{root / own.file}: the extra {own.name!r} of rank {own.rank} is stored twice")
        try:
            value, sums = read_extra(inside(root, own.file), own)
        except UcpError as error:
            problems.append(error)
            continue
        records.extend(sums)
        extras[own.name, own.rank] = Extra(name=own.name, rank=own.rank, value=value)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CorruptError(f"{len(problems)} extras of {root} are damaged or missing:\n{listed(map(str, problems))}")
    return tuple(extras.values()), tuple(records)


def _unchecked(root: Path, stored: Sequence[StoredExtra]) -> Iterator[str]:
    """What no checksum covers, and what lies beside the extras and is none."""
    bare = [own.name for own in stored if own.crc32 is None]
    if bare:
        yield (
            f"without checksums: {counted(len(bare), 'extra')} of {root}, which was written before they were recorded; "
            "`ucp convert` makes a store of it that has them"
        )
    known = {own.file for own in stored}
    folder = root / EXTRAS
    strays = sorted(f"{EXTRAS}/{name}" for name in (names_of_folder(folder) if folder.is_dir() else ()))
    strays = [name for name in strays if name not in known]
    if strays:
        yield f"not in the manifest of {root}, not read: {', '.join(strays[:8])}{', ...' if len(strays) > 8 else ''}"


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
