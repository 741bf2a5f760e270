"""Files of torch.save whose tensors are holes: real archives, sparse files, checksums of what is read.

1. torch writes the archive and leaves the bytes of storages out (`torch.serialization.skip_data`).
2. Small tensors, such as counts of steps, are written as they are. Of others a *mark* is written, two values that
   follow from a name, and the rest are zeros: no two files are copies of one another, and a master in fp32, rounded,
   is the weight in bf16.
3. Checksums of all storages, which torch leaves 0 then, are those of what the file reads as.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from zlib_ng import zlib_ng

_LOCAL = struct.Struct("<26xHH")
_CENTRAL_NBYTES = 46
_CENTRAL_CRC = 16
_DESCRIPTOR_CRC = 4


class Holes:
    """Makes tensors whose bytes are never looked at, and saves them."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, int]] = {}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, marks: Mapping[int, str]) -> torch.Tensor:
        """A tensor to be saved. `marks`: element to the name that is marked there; it may lie outside by one."""
        made = torch.empty(shape, dtype=dtype)
        values = ((at + nth, value) for at, name in marks.items() for nth, value in enumerate(mark(name)))
        self._marks[id(made)] = {at: value for at, value in values if 0 <= at < made.numel()}
        return made

    def save(self, value: object, path: Path) -> None:
        """`torch.save(value, path)`, with holes where a tensor is of `tensor`; others are written."""
        with torch.serialization.skip_data():
            torch.save(value, path)
        with path.open("r+b", buffering=0) as file, zipfile.ZipFile(path) as archive:
            entry = archive.start_dir
            tensors = list(_tensors(value))
            for info in archive.infolist():
                folder, _, key = info.filename.rpartition("/")
                if folder.endswith("/data"):
                    start = _data_start(file.fileno(), info.header_offset)
                    crc = self._fill(file.fileno(), start, tensors[int(key)], info.file_size)
                    os.pwrite(file.fileno(), crc, entry + _CENTRAL_CRC)
                    os.pwrite(file.fileno(), crc, start + info.file_size + _DESCRIPTOR_CRC)
                entry += _entry_nbytes(info)

    def _fill(self, file: int, start: int, tensor: torch.Tensor, nbytes: int) -> bytes:
        """Write what is written of a storage; its checksum, as it stands in the archive."""
        marks = self._marks.get(id(tensor))
        if marks is not None:
            return _fill(file, start, nbytes, tensor.dtype, marks)
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        os.pwrite(file, data, start)
        return zlib_ng.crc32(data).to_bytes(4, "little")


def mark(name: str) -> tuple[int, int]:
    """Bits of two positive bfloat16 numbers."""
    first, second = divmod(zlib_ng.crc32(name.encode()), 1 << 16)
    return _LEAST + first % _NUMBERS, _LEAST + second % _NUMBERS


_LEAST, _NUMBERS = 0x0080, 0x7F00
"""Bits of the smallest number that is not subnormal, and how many there are from there on."""


def _fill(file: int, start: int, nbytes: int, dtype: torch.dtype, marks: Mapping[int, int]) -> bytes:
    """Write marks, given as element to the bits of a bfloat16; the checksum of all with the zeros between."""
    form = "<I" if dtype is torch.float32 else "<H"
    shift, item = (16, 4) if dtype is torch.float32 else (0, 2)
    crc, at = 0, 0
    for element, bits in sorted(marks.items()):
        data = struct.pack(form, bits << shift)
        os.pwrite(file, data, start + element * item)
        crc = _with_zeros(crc, element * item - at)
        crc, at = zlib_ng.crc32(data, crc), (element + 1) * item
    return _with_zeros(crc, nbytes - at).to_bytes(4, "little")


def _with_zeros(crc: int, nbytes: int) -> int:
    """Checksum of bytes with that checksum and so many zeros."""
    return zlib_ng.crc32_combine(crc, _crc_of_zeros(nbytes), nbytes) if nbytes else crc


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
    nbytes: int
    dtype: torch.dtype
    tail: bytes
    """Bytes after them, with a checksum in two places."""
    sums: tuple[int, int]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return len(self.head) + self.nbytes + len(self.tail)

    def write(self, file: int, start: int, name: str) -> None:
        """Write it at byte `start`, the elements marked by `name` and a hole."""
        os.pwrite(file, self.head, start)
        crc = _fill(file, start + len(self.head), self.nbytes, self.dtype, dict(enumerate(mark(name))))
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
            return Item(head, info.file_size, dtype, tail, (_DESCRIPTOR_CRC, entry + _CENTRAL_CRC - stop))


def _entry_nbytes(info: zipfile.ZipInfo) -> int:
    """Bytes of an entry of the directory."""
    return _CENTRAL_NBYTES + len(info.filename.encode()) + len(info.extra) + len(info.comment)
