"""Files of torch.save whose tensors are holes: real archives, sparse files, checksums of what is read.

1. torch writes the archive and leaves the bytes of storages out (`torch.serialization.skip_data`).
2. Small tensors, such as counts of steps, are written as they are. Others begin with a number of their own, so that no
   two files are copies of one another, and are zeros from there on.
3. Checksums of all storages, which torch leaves 0 then, are those of what the file reads as.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from zlib_ng import zlib_ng

__all__ = ["Item", "item_of", "save_with_holes"]

_REAL_NBYTES = 64
"""Storages of at most so many bytes are written."""
_LOCAL = struct.Struct("<26xHH")
_CENTRAL_NBYTES = 46
_CENTRAL_CRC = 16
_DESCRIPTOR_CRC = 4


def save_with_holes(value: object, path: Path) -> None:
    """`torch.save(value, path)`, with holes where the tensors in `value` (on the CPU, one storage each) are not small.

    A tensor may be `torch.empty`: its bytes are not looked at.
    """
    with torch.serialization.skip_data():
        torch.save(value, path)
    with path.open("r+b", buffering=0) as file, zipfile.ZipFile(path) as archive:
        entry = archive.start_dir
        tensors = list(_tensors(value))
        for info in archive.infolist():
            folder, _, key = info.filename.rpartition("/")
            if folder.endswith("/data"):
                start = _data_start(file.fileno(), info.header_offset)
                crc = _filled(file.fileno(), start, tensors[int(key)], info.file_size)
                os.pwrite(file.fileno(), crc, entry + _CENTRAL_CRC)
                os.pwrite(file.fileno(), crc, start + info.file_size + _DESCRIPTOR_CRC)
            entry += _entry_nbytes(info)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors in the order in which a pickle meets them, which is how torch numbers their storages."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from _tensors(own)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for own in value:
            yield from _tensors(own)


def _data_start(file: int, header: int) -> int:
    name, extra = _LOCAL.unpack(os.pread(file, _LOCAL.size, header))
    return header + _LOCAL.size + int(name) + int(extra)


def _filled(file: int, start: int, tensor: torch.Tensor, nbytes: int) -> bytes:
    """The checksum of a storage, as it stands in the archive; its first bytes, or all of a small one, are written."""
    if nbytes > _REAL_NBYTES:
        return _marked(file, start, nbytes)
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    os.pwrite(file, data, start)
    return zlib_ng.crc32(data).to_bytes(4, "little")


def _marked(file: int, start: int, nbytes: int) -> bytes:
    """Write a number that no other storage has, and give the checksum of it and the zeros that follow."""
    data = struct.pack("<I", next(_NUMBERS))
    os.pwrite(file, data, start)
    rest = nbytes - len(data)
    return zlib_ng.crc32_combine(zlib_ng.crc32(data), _crc_of_zeros(rest), rest).to_bytes(4, "little")


@lru_cache(maxsize=1 << 12)
def _crc_of_zeros(nbytes: int) -> int:
    """CRC-32 of so many zeros, by doubling."""
    crc, one, length = 0, zlib_ng.crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = zlib_ng.crc32_combine(crc, one, length)
        one, length, nbytes = zlib_ng.crc32_combine(one, one, length), 2 * length, nbytes >> 1
    return crc


class Item(NamedTuple):
    """What torch.save writes of a tensor to a buffer."""

    head: bytes
    """Bytes before the elements."""
    nbytes: int
    """Bytes of the elements."""
    tail: bytes
    """Bytes after them, with a checksum in two places."""
    sums: tuple[int, int]
    """These places in the tail."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return len(self.head) + self.nbytes + len(self.tail)

    def write(self, file: int, start: int) -> None:
        """Write it at byte `start`, a hole for the elements."""
        os.pwrite(file, self.head, start)
        crc = _marked(file, start + len(self.head), self.nbytes)
        tail = bytearray(self.tail)
        for at in self.sums:
            tail[at : at + 4] = crc
        os.pwrite(file, tail, start + len(self.head) + self.nbytes)


@cache
def item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
    """A tensor of that kind, saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # torch names the archive so where it has no name
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), path)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entry = archive.start_dir
            for info in archive.infolist():
                if info.filename == "archive/data/0":
                    break
                entry += _entry_nbytes(info)
            start = _data_start(file.fileno(), info.header_offset)
            stop = start + info.file_size
            head = os.pread(file.fileno(), start, 0)
            tail = os.pread(file.fileno(), path.stat().st_size - stop, stop)
            return Item(head, info.file_size, tail, (_DESCRIPTOR_CRC, entry + _CENTRAL_CRC - stop))


def _entry_nbytes(info: zipfile.ZipInfo) -> int:
    """Bytes of an entry of the directory."""
    return _CENTRAL_NBYTES + len(info.filename.encode()) + len(info.extra) + len(info.comment)


_NUMBERS = count(1)
