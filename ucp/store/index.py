"""Indexes an atom store, virtual or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from zlib_ng import zlib_ng

from ucp.core.index import Extra, Index, SourceFile
from ucp.core.tensor import Record
from ucp.core.text.units import time_text
from ucp.errors import ChangedError, CorruptError, MalformedError, UcpError, format_list
from ucp.io.files import SourceFile as OpenFile
from ucp.io.files import open_source
from ucp.io.folder import names_of_folder
from ucp.io.json_text import parsed
from ucp.io.provenance import identity_of, source_file
from ucp.io.torch_file.archive import read_embedded
from ucp.store.interpret import find_files, inside, interpret
from ucp.store.manifest import EXTRAS, MANIFEST, Manifest, StoredExtra, StoredFile, parse, read_text
from ucp.store.values import from_json
from ucp.transfer.checksums import combine_crcs


def read_store(root: Path) -> Index:
    """Index of the store in the folder `root`. Raises ChangedError if a file that it refers to was changed."""
    path = inside(root, MANIFEST)
    manifest = parse(read_text(path), path)
    files = find_files(manifest, root)
    _check_unchanged(manifest, files, root)
    index = interpret(manifest, root, files)
    extras, records = _extras(root, manifest.extras)
    unchecked = tuple(_unchecked(root, manifest.extras))
    return replace(
        index,
        extras=extras,
        files=(
            *index.files,
            source_file(str(path), "manifest"),
            *(source_file(str(root / extra.file), "extra") for extra in manifest.extras),
        ),
        records=(*index.records, *records),
        notes=(*index.notes, *unchecked),
        unchecked=unchecked,
    )


def _extras(root: Path, stored: Iterable[StoredExtra]) -> tuple[tuple[Extra, ...], tuple[Record, ...]]:
    """The extras with their values, and the checksums of their tensors. Raises one error for all damaged extras."""
    extras: dict[tuple[str, int | None], Extra] = {}
    records: list[Record] = []
    problems: list[UcpError] = []
    for extra in stored:
        if (extra.name, extra.rank) in extras:
            raise MalformedError(f"{root / extra.file}: the extra {extra.name!r} of rank {extra.rank} is stored twice")
        try:
            value, sums = _read_extra(inside(root, extra.file), extra)
        except UcpError as error:
            problems.append(error)
            continue
        records.extend(sums)
        extras[extra.name, extra.rank] = Extra(name=extra.name, rank=extra.rank, value=value)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CorruptError(
            f"{len(problems)} extras of {root} are damaged or missing:\n{format_list(map(str, problems))}"
        )
    return tuple(extras.values()), tuple(records)


def _unchecked(root: Path, stored: Sequence[StoredExtra]) -> Iterator[str]:
    """A note on files in the folder of extras that the manifest does not list."""
    known = {extra.file for extra in stored}
    folder = root / EXTRAS
    strays = sorted(f"{EXTRAS}/{name}" for name in (names_of_folder(folder) if folder.is_dir() else ()))
    strays = [name for name in strays if name not in known]
    if strays:
        yield f"not in the manifest of {root}, not read: {', '.join(strays[:8])}{', ...' if len(strays) > 8 else ''}"


def _check_unchanged(manifest: Manifest, files: Iterable[SourceFile], root: Path) -> None:
    changed = [
        f"{file.path}: {difference}"
        for stored, file in zip(manifest.files, files, strict=True)
        if stored.identity and (difference := _difference(stored, file))
    ]
    if changed:
        raise ChangedError(
            f"{root} is a virtual store, and files that it refers to have changed since it was made:\n"
            f"{format_list(changed)}\nMake it again with `ucp convert SRC {root} --virtual --overwrite`"
        )


def _difference(stored: StoredFile, file: SourceFile) -> str:
    """How a file differs from the one that a virtual store was made from; empty if it does not."""
    if stored.nbytes != file.nbytes:
        return f"{stored.nbytes} bytes then, {file.nbytes} now"
    if stored.mtime_ns != file.mtime_ns:
        times = (stored.mtime_ns, file.mtime_ns)
        then, now = ("at an unknown time" if time is None else time_text(time) for time in times)
        return f"last written {then} then, {now} now (`cp -p` keeps the time)"
    return "" if identity_of(file.path) == stored.identity else "its first or last 64 KiB differ"


def _read_extra(path: str, stored: StoredExtra) -> tuple[object, tuple[Record, ...]]:
    """Read the value stored in the file at `path`, and the recorded checksums of its tensors.

    Tensors are not read: the CRC-32 of the file is computed from the rest of it and from the recorded CRC-32s of the
    tensors.

    Raises
    ------
    SourceError
        The file is damaged or missing, or it is not the one that was stored.
    """
    if not path.endswith(".pt"):
        text = read_text(path)
        _check(path, stored, nbytes=len(text), crc32=zlib_ng.crc32(text))
        record = Record(path=path, name=stored.file, offset=0, nbytes=len(text), crc32=stored.crc32)
        try:
            return from_json(parsed(text)), (record,)
        except (ValueError, RecursionError, MalformedError) as error:
            raise MalformedError(
                f"expected JSON that ucp wrote in {path}; {error}. The file is damaged: copy it again"
            ) from error
    with open_source(path) as file:
        archive = read_embedded(file, start=0, nbytes=file.nbytes)
        _check(path, stored, nbytes=file.nbytes, crc32=_crc_of(file, archive.records))
    return archive.root, archive.records


def _check(path: str, stored: StoredExtra, *, nbytes: int, crc32: int) -> None:
    """Raise CorruptError if a file was changed since it was stored."""
    if (nbytes, crc32) != (stored.nbytes, stored.crc32):
        raise CorruptError(
            f"expected {stored.nbytes} bytes with CRC-32 {stored.crc32:08x} in {path}; got {nbytes} bytes with "
            f"{crc32:08x}. The file was changed after it was written: copy it again from where the store was made, or "
            "make the store again"
        )


def _crc_of(file: OpenFile, records: Iterable[Record]) -> int:
    """CRC-32 of a file if the ranges in `records` are intact: only the bytes between these ranges are read."""
    parts: list[tuple[int, int]] = []
    at = 0
    for record in sorted(records, key=lambda record: record.offset):
        parts += [(zlib_ng.crc32(file.read(at, record.offset - at)), record.offset - at), (record.crc32, record.nbytes)]
        at = record.offset + record.nbytes
    return combine_crcs([*parts, (zlib_ng.crc32(file.read(at, file.nbytes - at)), file.nbytes - at)])
