"""Recognises items of a distributed checkpoint by comparing bytes, which is faster than parsing each.

An item is a zip archive of torch.save with about 1.5 KB beside the elements, and a checkpoint has hundreds of thousands
of them. Items of one shape and dtype differ only in their elements, their CRC-32 and a serialization id. So one item is
parsed and becomes a *template*: the bytes before and after its elements, with holes where items may differ. An item
that equals the template outside the holes needs no parsing: every byte of its structure was compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ucp.core.tensor import Record, TensorRef
from ucp.io.torch_file.archive import Archive
from ucp.io.torch_file.zipdir import Window, ZipMember, data_offset, read_directory

ITEM_END = 2048
"""Bytes at both ends of an item within which the structure of a template must lie."""


class Item(NamedTuple):
    """What one item holds."""

    root: object
    """A tensor reference, or plain values with tensor references in them."""
    records: tuple[Record, ...]
    """Checksums of its storages, where recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Items of one length that hold one contiguous tensor, or equal objects without tensors."""

    head: bytes
    """Everything before the elements; empty for an object."""
    tail_nbytes: int
    """Bytes after the elements."""
    parts: tuple[tuple[int, bytes], ...]
    """Bytes of the tail that are the same in every item: position in the tail, and bytes."""
    crcs: tuple[int, ...]
    """Positions in the tail of the CRC-32 of the elements."""
    item: Item
    """Content of the item that it was made from."""

    def match(self, path: str, start: int, nbytes: int, find: Callable[[int], tuple[bytes, int]]) -> Item | None:
        """The item in the bytes `start` to `start + nbytes` of a file if it matches, else None.

        `find`: returns a buffer that contains a byte of the file, and the position of that byte in it.
        """
        buffer, at = find(start)
        if not buffer.startswith(self.head, at):
            return None
        skip = nbytes - self.tail_nbytes
        buffer, at = find(start + skip) if nbytes > 2 * ITEM_END else (buffer, at + skip)
        for place, part in self.parts:
            if not buffer.startswith(part, at + place):
                return None
        crcs = {buffer[at + place : at + place + 4] for place in self.crcs}
        if len(crcs) > 1:
            return None
        root, records = self.item
        if not crcs or not isinstance(root, TensorRef):
            return self.item
        offset, crc32 = start + len(self.head), int.from_bytes(crcs.pop(), "little")
        ref = TensorRef(path=path, offset=offset, dtype=root.dtype, shape=root.shape, strides=root.strides)
        if not records:
            return Item(ref, ())
        record = Record(path=path, name=records[0].name, offset=offset, nbytes=records[0].nbytes, crc32=crc32)
        return Item(ref, (record,))


def make_template(window: Window, archive: Archive) -> Template | None:
    """Template of the item in `window`, parsed as `archive`; None if it is too long or not one contiguous tensor."""
    ref, members = archive.root, read_directory(window) if archive.kind == "zip" else {}
    data = [member for name, member in members.items() if "/data/" in name]
    start = stop = 0
    if type(ref) is TensorRef and ref.is_contiguous and len(data) == 1 and data[0].nbytes == ref.nbytes:
        start, stop = ref.offset - window.start, ref.offset - window.start + ref.nbytes
    most = ITEM_END if data else 2 * ITEM_END
    if not members or (data and not stop) or start > ITEM_END or window.nbytes - stop > most:
        return None
    holes, crcs = [], []
    for member in members.values():
        if member not in data and not member.name.endswith("/.data/serialization_id"):
            continue
        places = _crc_places(window, member)
        if not places:
            return None
        holes += [(place - stop, place - stop + 4) for place in places]
        if member in data:
            crcs += [place - stop for place in places]
        else:
            at = data_offset(window, member) - stop
            holes.append((at, at + member.nbytes))
    if any(low < 0 for low, _ in holes):
        return None
    tail, at, parts = window.read(stop, window.nbytes - stop), 0, []
    for low, high in [*sorted(holes), (len(tail), len(tail))]:
        parts.append((at, tail[at:low]))
        at = high
    head, item = window.read(0, start), Item(ref, archive.records)
    return Template(head=head, tail_nbytes=len(tail), parts=tuple(parts), crcs=tuple(crcs), item=item)


def _crc_places(window: Window, member: ZipMember) -> list[int]:
    """Positions in the item of the CRC-32 of `member`: in its data descriptor, if any, and in the directory."""
    crc = member.crc32.to_bytes(4, "little")
    places = []
    if member.descriptor_nbytes:
        at = data_offset(window, member) + member.nbytes
        if window.read(at, 8) != b"PK\x07\x08" + crc:
            return []
        places.append(at + 4)
    base = window.nbytes - min(window.nbytes, ITEM_END)
    end = window.read(base, window.nbytes - base)
    entry = end.rfind(member.name.encode()) - 46  # 46: bytes of a directory entry before the name
    if entry < 0 or end[entry : entry + 4] != b"PK\x01\x02" or end[entry + 16 : entry + 20] != crc:
        return []
    return [*places, base + entry + 16]
