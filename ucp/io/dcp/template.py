"""Items of a distributed checkpoint that are alike byte for byte, told by comparison instead of by parsing.

An item is a whole zip archive of torch.save, about 1.5 KB of it beside the elements, and a checkpoint has hundreds of
thousands. Two tensors of one shape and type differ in their elements, their CRC-32 and a serialization id, and in
nothing else. So one item is parsed in full and becomes a *template*: the bytes before its elements, and a pattern for
those after them that leaves out what may differ. An item that equals the template everywhere else has been read: not
one byte of its structure is assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ucp.core.dtypes import DType
from ucp.core.tensor import TensorRef
from ucp.io.torch_file.archive import Archive
from ucp.io.torch_file.zipdir import Window, ZipMember, data_offset, read_directory

__all__ = ["ITEM_END", "ObjectTemplate", "TensorTemplate", "compiled", "object_template", "tensor_template"]

ITEM_END = 2048
"""Bytes at both ends of an item within which the structure of a template must lie."""

_SERIALIZATION_ID = "/.data/serialization_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTemplate:
    """Items that hold one tensor, whole and row-major."""

    head: bytes
    """Everything before the elements."""
    tail: bytes
    """Pattern of everything after the elements (`compiled`); group 1 is the CRC-32 of the elements."""
    tail_nbytes: int
    """Bytes of the tail."""
    record: str
    """Name of the member with the elements."""
    summed: bool
    """Whether the writer recorded checksums."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step per dim."""
    nbytes: int
    """Bytes of the elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectTemplate:
    """Items that hold one and the same object without tensors."""

    pattern: bytes
    """Pattern of the whole item (`compiled`)."""
    nbytes: int
    """Bytes of it."""
    root: object
    """The object."""


@lru_cache(maxsize=256)
def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """The pattern of a template: most templates of a small checkpoint are of one item, and never compiled."""
    return re.compile(pattern, re.DOTALL)


class _Hole(NamedTuple):
    """Bytes that may differ between items of one template."""

    start: int
    """First byte, in the item."""
    stop: int
    """One past the last."""
    pattern: bytes
    """What may stand there."""


def tensor_template(window: Window, archive: Archive) -> TensorTemplate | None:
    """Template of the item in `window`, which was read as `archive`; None when it is not one plain tensor."""
    ref = archive.root
    if archive.kind != "zip" or type(ref) is not TensorRef or not ref.is_contiguous:
        return None
    members = read_directory(window)
    data = [member for name, member in members.items() if "/data/" in name]
    if len(data) != 1 or data[0].nbytes != ref.nbytes:
        return None
    start = ref.offset - window.start
    stop = start + ref.nbytes
    tail_nbytes = window.nbytes - stop
    if start > ITEM_END or tail_nbytes > ITEM_END:
        return None
    tail = window.read(stop, tail_nbytes)
    holes = _holes(window, members, data[0], named=True)
    pattern = None if holes is None else _pattern(tail, [h for h in holes if h.start >= stop], base=stop)
    if pattern is None or (holes and min(hole.start for hole in holes) < stop):
        return None
    return TensorTemplate(
        head=window.read(0, start),
        tail=pattern,
        tail_nbytes=tail_nbytes,
        record=data[0].name,
        summed=bool(archive.records),
        dtype=ref.dtype,
        shape=ref.shape,
        strides=ref.strides,
        nbytes=ref.nbytes,
    )


def object_template(window: Window, archive: Archive) -> ObjectTemplate | None:
    """Template of the item in `window`, which was read as `archive`; None when it has storages or is long."""
    if archive.kind != "zip" or window.nbytes > 2 * ITEM_END:
        return None
    members = read_directory(window)
    if any("/data/" in name for name in members):
        return None
    holes = _holes(window, members, None, named=False)
    pattern = None if holes is None else _pattern(window.read(0, window.nbytes), holes, base=0)
    return None if pattern is None else ObjectTemplate(pattern=pattern, nbytes=window.nbytes, root=archive.root)


def _holes(window: Window, members: dict[str, ZipMember], data: ZipMember | None, *, named: bool) -> list[_Hole] | None:
    """What may differ: checksums of the elements, and the serialization id with its checksums."""
    directory = window.nbytes - min(window.nbytes, ITEM_END)
    end = window.read(directory, window.nbytes - directory)
    holes = []
    for member in members.values():
        own = member is data
        if not own and not member.name.endswith(_SERIALIZATION_ID):
            continue
        sums = _sums(window, member, end, directory)
        if sums is None:
            return None
        first, *others = sums
        if own and named:
            holes += [_Hole(first, first + 4, b"(.{4})"), *(_Hole(at, at + 4, rb"(?:\1)") for at in others)]
        else:
            holes += [_Hole(at, at + 4, b".{4}") for at in sums]
        if not own:
            start = data_offset(window, member)
            holes.append(_Hole(start, start + member.nbytes, b"[0-9]{%d}" % member.nbytes))
    return sorted(holes)


def _sums(window: Window, member: ZipMember, end: bytes, base: int) -> list[int] | None:
    """Where in the item the CRC-32 of `member` stands: in its descriptor, if it has one, and in the directory."""
    crc = member.crc32.to_bytes(4, "little")
    found = []
    if member.descriptor_nbytes:
        at = data_offset(window, member) + member.nbytes
        if window.read(at, 8) != b"PK\x07\x08" + crc:
            return None
        found.append(at + 4)
    entry = end.rfind(member.name.encode()) - 46  # 46: bytes of a directory entry before the name
    if entry < 0 or end[entry : entry + 4] != b"PK\x01\x02" or end[entry + 16 : entry + 20] != crc:
        return None
    found.append(base + entry + 16)
    return found


def _pattern(data: bytes, holes: list[_Hole], *, base: int) -> bytes | None:
    """`data`, which begins at byte `base` of the item, with `holes` left open."""
    parts, at = [], 0
    for start, stop, pattern in holes:
        if start - base < at or not re.fullmatch(
            pattern.replace(rb"\1", b".{4}"), data[start - base : stop - base], re.DOTALL
        ):
            return None
        parts += [re.escape(data[at : start - base]), pattern]
        at = stop - base
    parts.append(re.escape(data[at:]))
    return b"".join(parts)
