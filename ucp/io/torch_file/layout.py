"""Lays out a file of torch.save before its elements are known.

The file consists of literals (headers, the pickle, the directory), the bytes of the storages, which tasks write later,
and the CRC-32 of each storage, filled in last. Members, flags, padding and end records equal those of torch 2.13 byte
for byte (caffe2/serialize/inline_container.cc over miniz): storages start at multiples of 64 bytes, can be
memory-mapped, and `torch.serialization`'s `calculate_storage_offsets` finds them.

>>> from ucp.core.tensor import DType
>>> from ucp.io.torch_file.storage import NewTensor
>>> storage = NewStorage(DType.FLOAT32, 6)
>>> layout = layout_torch_zip({"weight": NewTensor(storage=storage, shape=(2, 3), strides=(3, 1))})
>>> layout.storages[storage] % 64, layout.crcs[0].stop - layout.crcs[0].start
(0, 24)
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from struct import pack

from zlib_ng import zlib_ng

from ucp.core.target import CrcField, Literal
from ucp.io.pickle.emit import emit_pickle
from ucp.io.torch_file.storage import NewStorage
from ucp.io.torch_file.zipdir import ALIGNMENT, UINT32_MAX, aligned_start

_UTF8 = 0x0800
_DESCRIPTOR = 0x0008


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchZip:
    """A file of torch.save to be written."""

    nbytes: int
    """Size of the file in bytes."""
    literals: tuple[Literal, ...]
    """Known bytes, in increasing offset; the fields of `crcs` are zero in them."""
    crcs: tuple[CrcField, ...]
    """Checksums to fill in, one per storage that has bytes, in increasing start."""
    storages: dict[NewStorage, int]
    """Byte offset in the file of the elements of each storage."""


def layout_torch_zip(root: object, *, folder: str = "archive") -> TorchZip:
    """Layout of the file that torch.load reads as `root`.

    Parameters
    ----------
    root
        Plain values, names, stubs and `NewTensor`, in any nesting.
    folder
        Name of the folder inside the archive; torch.save takes the stem of the file name.

    Raises
    ------
    DestinationError
        `root` holds a value of a type that has no place in a checkpoint.
    """
    pickled = emit_pickle(root)
    contents: list[tuple[str, bytes | NewStorage]] = [
        ("data.pkl", pickled.data),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % ALIGNMENT),
        ("byteorder", b"little"),
        *((f"data/{key}", storage) for key, storage in enumerate(pickled.storages)),
        ("version", b"3\n"),
        # forty digits, which torch writes for its logs and never reads; ours depend on the pickle alone
        (".data/serialization_id", b"%040d" % (int.from_bytes(sha256(pickled.data).digest()) % 10**40)),
    ]
    known, at = KnownBytes(), 0
    members, storages, crcs = [], {}, []
    for label, content in contents:
        name, data = f"{folder}/{label}".encode(), content if isinstance(content, bytes) else b""
        nbytes = len(data) if isinstance(content, bytes) else content.nbytes
        start = aligned_start(header=at, name_nbytes=len(name), nbytes=nbytes)
        crc32 = zlib_ng.crc32(data) if len(data) == nbytes else None
        member = _Member(name=name, header=at, start=start, nbytes=nbytes, crc32=crc32)
        members.append(member)
        if not isinstance(content, bytes):
            storages[content] = start
        known.add(at, member.local_header() + data)
        known.add(start + nbytes, member.descriptor())
        at = start + nbytes + len(member.descriptor())
    directory = at
    for member in members:
        entry = member.entry()
        if member.crc32 is None:
            stop = member.start + member.nbytes
            crcs.append(CrcField(start=member.start, stop=stop, at=(stop + 4, at + 16)))
        known.add(at, entry)
        at += len(entry)
    ends = _end_records(len(members), start=directory, stop=at)
    known.add(at, ends)
    return TorchZip(nbytes=at + len(ends), literals=known.literals(), crcs=tuple(crcs), storages=storages)


def _end_records(count: int, *, start: int, stop: int) -> bytes:
    """The zip64 end record, its locator and the end record; torch writes all three into every file."""
    wide = pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, stop - start, start)
    locator = pack("<4sIQI", b"PK\x06\x07", 0, stop, 1)
    few = min(count, 0xFFFF)
    sizes = (min(stop - start, UINT32_MAX), min(start, UINT32_MAX))
    return wide + locator + pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, *sizes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One member laid out."""

    name: bytes
    """Name with its folder."""
    header: int
    """Byte offset of the local header."""
    start: int
    """Byte offset of the data."""
    nbytes: int
    """Bytes of data."""
    crc32: int | None
    """CRC-32 of the data; None when they are not known yet."""

    @property
    def flags(self) -> int:
        """General purpose flags; miniz writes no descriptor for an empty member."""
        return _UTF8 | (_DESCRIPTOR if self.nbytes else 0)

    @property
    def wide(self) -> bytes:
        """The zip64 extra field, empty when 32 bits hold everything."""
        sizes = pack("<QQ", self.nbytes, self.nbytes) if self.nbytes >= UINT32_MAX else b""
        place = pack("<Q", self.header) if self.header >= UINT32_MAX else b""
        return pack("<HH", 1, len(sizes + place)) + sizes + place if sizes or place else b""

    def local_header(self) -> bytes:
        """Header up to the data; the padding is an extra field "FB" full of Z."""
        padding = self.start - self.header - 30 - len(self.name) - len(self.wide) - 4
        extra = self.wide + b"FB" + pack("<H", padding) + b"Z" * padding
        fields = pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return fields + self.name + extra

    def descriptor(self) -> bytes:
        """Data descriptor: CRC-32 (zero while unknown) and sizes."""
        if not self.nbytes:
            return b""
        form = "<4sIQQ" if self.wide else "<4sIII"
        return pack(form, b"PK\x07\x08", self.crc32 or 0, self.nbytes, self.nbytes)

    def entry(self) -> bytes:
        """Entry of the central directory, with the CRC-32 at byte 16."""
        nbytes, header = min(self.nbytes, UINT32_MAX), min(self.header, UINT32_MAX)
        sizes = (self.crc32 or 0, nbytes, nbytes, len(self.name), len(self.wide))
        fields = pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 0, 0, self.flags, 0, 0, 0, *sizes, 0, 0, 0, 0, header)
        return fields + self.name + self.wide


class KnownBytes:
    """Collects known bytes of a file, in increasing offset, and joins adjacent ones."""

    def __init__(self) -> None:
        self._literals: list[Literal] = []
        self._start = 0
        self._data = bytearray()

    def add(self, offset: int, data: bytes) -> None:
        """Add bytes."""
        if offset != self._start + len(self._data):
            self._flush()
            self._start = offset
        self._data += data

    def _flush(self) -> None:
        if self._data:
            self._literals.append(Literal(self._start, bytes(self._data)))
            self._start, self._data = self._start + len(self._data), bytearray()

    def literals(self) -> tuple[Literal, ...]:
        """The bytes added so far, as literals."""
        self._flush()
        return tuple(self._literals)
