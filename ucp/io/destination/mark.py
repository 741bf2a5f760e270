"""The file in every finished destination that says how it was made, and of which files it consists.

Whoever is asked to go on with a conversion that is finished can see by it, without reading a tensor, whether all is
still there as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from zlib_ng import zlib_ng

from ucp.errors import DestinationError, SourceError, counted, listed
from ucp.io.files import open_source
from ucp.io.folder import MARK, is_url
from ucp.io.json_text import Natural, NotJson, decode, has_wrong_digest, with_digest
from ucp.io.remote.url import key_of

_ABOVE = 2
"""Folders above a checkpoint in which the file may lie: a tag or an iteration is a folder of the destination."""

_SPAN = 8 << 20
"""Bytes that are summed at once."""


class Mark(Struct, frozen=True, kw_only=True):
    """What the file says, as far as it is compared; the rest is for people."""

    fingerprint: str = ""
    """Equal for conversions that write the same bytes."""
    target: str = ""
    """Name of the target that it was written for."""
    made: dict[str, str] = {}
    """What was made from what, and how."""
    files: dict[str, Natural | None] = {}
    """File to bytes, None for one that may change."""
    crc32: dict[str, Natural] = {}
    """CRC-32 of files that say what the others hold."""


def dump_mark(origin: Mapping[str, Any], sizes: Mapping[str, int | None], sums: Mapping[str, int]) -> bytes:
    """Text of the file: `origin`, how the destination was made, and what it consists of.

    `sizes`: bytes of each file; None for one that may change, as a framework overwrites it. `sums`: CRC-32 of those
    that say what the others hold.
    """
    document = {**origin, "files": {MARK: None, **sizes}, "crc32": dict(sums)}
    return with_digest(json.dumps(document, indent=1).encode())


def read_mark(dst: Path) -> Mark:
    """What the destination says of how it was made; empty where it says nothing. Raises DestinationError for damage."""
    try:
        text = (dst / MARK).read_bytes()
    except OSError:
        return Mark()
    try:
        if not has_wrong_digest(text):
            return decode(text, Mark)
    except NotJson:
        pass
    raise DestinationError(
        f"{dst / MARK} is damaged: it says which conversion wrote {dst}, and which files. Copy it again from where it "
        f"is whole; or remove {dst} yourself, and convert again"
    )


def find_destination(path: Path) -> Path | None:
    """The destination that a checkpoint at `path` was written to; None where no conversion says that it wrote it."""
    above = (folder for folder in path.parents[:_ABOVE] if not is_url(str(folder)) or "/" in key_of(str(folder)))
    return next((folder for folder in (path, *above) if (folder / MARK).is_file()), None)


def is_complete(dst: Path, fingerprint: str, *, overwrite: bool = False) -> bool:
    """Whether the conversion of this fingerprint was finished at `dst`.

    Raises DestinationError where files are no longer as it wrote them; with `overwrite`, it is not complete then.
    """
    mark = read_mark(dst)
    if mark.fingerprint != fingerprint:
        return False
    damage = find_damage(dst, mark)
    if damage and not overwrite:
        files, verb = counted(len(damage), "file"), "is" if len(damage) == 1 else "are"
        raise DestinationError(
            f"this conversion was finished, but {files} in {dst} {verb} not as written:\n"
            f"{listed(damage)}\ncopy them again from where they are whole, or write all of them anew with --overwrite "
            "in place of --resume"
        )
    return not damage


def find_damage(dst: Path, mark: Mark, *, measured: Collection[str] | None = None) -> list[str]:
    """A line for each file that `mark` names which is missing, or has another length or another recorded CRC-32.

    `measured`: which files have their length compared, beside those with a CRC-32; all, if not given. A file that the
    framework overwrites only has to be there.
    """
    damage, sums = [], mark.crc32
    for path, nbytes in mark.files.items():
        if measured is not None and path not in measured and path not in sums:
            continue
        try:
            length = (dst / path).stat().st_size
            if nbytes is not None and length != nbytes:
                damage.append(f"{path}: expected {nbytes:,} bytes; got {length:,}")
            elif path in sums and _crc32(dst / path) != sums[path]:
                damage.append(f"{path}: its bytes are not those that were written (CRC-32 differs)")
        except (FileNotFoundError, NotADirectoryError):
            damage.append(f"{path}: missing")
        except (OSError, SourceError) as error:
            damage.append(f"{path}: cannot be read ({error})")
    return damage


def _crc32(path: Path) -> int:
    crc = 0
    with open_source(str(path)) as file:
        for start in range(0, file.nbytes, _SPAN):
            crc = zlib_ng.crc32(file.read(start, min(_SPAN, file.nbytes - start)), crc)
    return crc
