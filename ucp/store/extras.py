"""Extras as files: JSON where the value is plain, else a `torch.save` file that holds the same recipe.

Neither is ever executed: the second kind is written and read by our own pickle code (`ucp.io.pickle.emit`,
`ucp.io.pickle.unpickle`). The manifest has the CRC-32 of every such file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from zlib_ng import zlib_ng

from ucp.core.target import Literal, OutputFile, RawCopy
from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError
from ucp.io.files import SourceFile, open_source
from ucp.io.json_text import NotJson, parsed
from ucp.io.torch_file.archive import read_embedded
from ucp.io.torch_file.draft import torch_file
from ucp.store.manifest import LONGEST, StoredExtra, read_text
from ucp.store.values import NotPlainError, from_json, to_json
from ucp.transfer.checksums import combine

__all__ = ["EXTRAS", "extra_file", "read_extra"]

EXTRAS = "extra"
"""Folder of a store that holds them."""


def extra_file(value: object, stem: str) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """The file `stem`.json or `stem`.pt that holds `value`, and the tensors to copy into it."""
    try:
        text = json.dumps(to_json(value), indent=1, ensure_ascii=False).encode() + b"\n"
    except (NotPlainError, UnicodeEncodeError):
        text = b""
    if not 0 < len(text) <= LONGEST:
        return torch_file(f"{stem}.pt", value)
    return OutputFile(path=f"{stem}.json", nbytes=len(text), literals=(Literal(0, text),)), ()


def read_extra(path: str, stored: StoredExtra) -> tuple[object, tuple[Record, ...]]:
    """The value that was stored in the file at `path`, and checksums of what of the file is left to be compared.

    Of tensors nothing is read: the file of these has their CRC-32s, and is compared with its own as if they were right.

    Raises
    ------
    SourceError
        The file is damaged, missing, or another one than was stored.
    """
    if not path.endswith(".pt"):
        text = read_text(path)
        _check(path, stored, nbytes=len(text), crc32=zlib_ng.crc32(text))
        whole = Record(path=path, name=stored.file, offset=0, nbytes=len(text), crc32=stored.crc32 or 0)
        return _parsed(text, path), () if stored.crc32 is None else (whole,)
    with open_source(path) as file:
        archive = read_embedded(file, start=0, nbytes=file.nbytes)
        if stored.crc32 is not None:
            _check(path, stored, nbytes=file.nbytes, crc32=_crc_of(file, archive.records))
    return archive.root, archive.records


def _parsed(text: bytes, path: str) -> object:
    try:
        return from_json(parsed(text))
    except NotJson as error:
        raise MalformedError(f"expected JSON in {path}; {error}. The file is damaged: copy it again") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(
            f"expected a value of ucp in {path}; {error}. The file is damaged: copy it again"
        ) from error
    except MalformedError as error:
        raise MalformedError(f"{path}: {error}. It is damaged; copy it again") from error


def _check(path: str, stored: StoredExtra, *, nbytes: int, crc32: int) -> None:
    """Raise CorruptError for a file that is not the one that was stored."""
    if stored.crc32 is not None and (nbytes, crc32) != (stored.nbytes, stored.crc32):
        raise CorruptError(
            f"expected {stored.nbytes} bytes of CRC-32 {stored.crc32:08x} in {path}; got {nbytes} of {crc32:08x}. It "
            "was changed after it was written: copy it again from where the store was made, or make the store again"
        )


def _crc_of(file: SourceFile, records: Iterable[Record]) -> int:
    """CRC-32 of a whole file, if what lies in `records` is as they say: only what lies between them is read."""
    parts: list[tuple[int, int]] = []
    at = 0
    for record in sorted(records, key=lambda record: record.offset):
        parts += [(zlib_ng.crc32(file.read(at, record.offset - at)), record.offset - at), (record.crc32, record.nbytes)]
        at = record.offset + record.nbytes
    return combine([*parts, (zlib_ng.crc32(file.read(at, file.nbytes - at)), file.nbytes - at)])
