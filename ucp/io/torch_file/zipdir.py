"""Reads the directory of a zip archive: its members and the offsets of their bytes.

Supported is what torch.save writes: stored members, one disk, no comment. Layout after PKWARE APPNOTE 6.3.9: local
header and bytes per member, then the central directory, then (zip64) end records. The directory does not give the
offset of the bytes, as the extra field of the local header may differ in length. `data_offsets` computes the offset as
torch does; if the next member's header does not confirm it, it reads the local header.

>>> aligned_start(header=866, name_nbytes=17)
960
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.files import SourceFile

ALIGNMENT = 64
"""Bytes to which torch aligns the data of every member."""
UINT32_MAX = 0xFFFFFFFF
_UINT16_MAX = 0xFFFF
_LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_END64 = Struct("<4sQHHIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_END_NBYTES = 4096
"""Bytes kept of both ends of an archive; they hold all indexes of an archive of one tensor."""
_DEFLATED = {8: "deflated", 9: "deflated", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}


class Window:
    """The range of a file that holds an archive. Both ends, which contain the indexes, are read once and cached."""

    __slots__ = ("_head", "_tail", "_tail_start", "file", "nbytes", "start")

    def __init__(self, file: SourceFile, start: int, nbytes: int) -> None:
        """Archive of `nbytes` bytes at byte `start` of `file`. Raises MalformedError when the file is shorter."""
        if start < 0 or nbytes < 0 or start + nbytes > file.nbytes:
            raise MalformedError(
                f"expected {nbytes} bytes of an archive at byte {start} of {file.path}; the file has {file.nbytes}. "
                "It is truncated, or the index that points there belongs to another file"
            )
        self.file, self.start, self.nbytes = file, start, nbytes
        self._head = file.read(start, min(nbytes, _END_NBYTES))
        self._tail_start = max(len(self._head), nbytes - _END_NBYTES)
        self._tail = file.read(start + self._tail_start, nbytes - self._tail_start)

    @property
    def where(self) -> str:
        """The archive, for messages."""
        is_full_file = self.start == 0 and self.nbytes == self.file.nbytes
        return self.file.path if is_full_file else f"{self.file.path} (archive at byte {self.start})"

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes at `offset` of the archive. Raises MalformedError outside it."""
        if offset >= 0 and 0 <= nbytes <= len(self._head) - offset:
            return self._head[offset : offset + nbytes]
        within = offset - self._tail_start
        if within >= 0 and 0 <= nbytes <= len(self._tail) - within:
            return self._tail[within : within + nbytes]
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MalformedError(
                f"expected {nbytes} bytes at {offset} of {self.where}; the archive ends at {self.nbytes}. "
                "It is damaged; copy it again"
            )
        return self.file.read(self.start + offset, nbytes)


class ZipMember(NamedTuple):
    """One stored member."""

    name: str
    """Name in the archive."""
    name_nbytes: int
    """Bytes of the name as stored."""
    header: int
    """Offset in the archive of the local header."""
    nbytes: int
    """Bytes of data."""
    crc32: int
    """Recorded CRC-32 of the data."""
    flags: int
    """General purpose flags; bit 3: a data descriptor follows the data."""

    @property
    def descriptor_nbytes(self) -> int:
        """Bytes of the data descriptor that torch writes after the data."""
        if not self.flags & 0x0008:
            return 0
        return 24 if max(self.nbytes, self.header) >= UINT32_MAX else 16


def aligned_start(*, header: int, name_nbytes: int, nbytes: int = 0) -> int:
    """Offset of the data of a member as torch writes it (`getPadding` in caffe2/serialize/inline_container.cc)."""
    start = header + _LOCAL.size + name_nbytes + 4
    if nbytes >= UINT32_MAX or header >= UINT32_MAX:
        start += 4 + (16 if nbytes >= UINT32_MAX else 0) + (8 if header >= UINT32_MAX else 0)
    return -(-start // ALIGNMENT) * ALIGNMENT


def read_directory(window: Window) -> dict[str, ZipMember]:
    """Members by name, in the order of the directory.

    Raises
    ------
    MalformedError
        Truncated, inconsistent, or no zip archive.
    UnsupportedError
        A member is compressed or encrypted, or the archive spans several files.
    """
    start, stop, count = _find_directory(window)
    data = window.read(start, stop - start)
    members: dict[str, ZipMember] = {}
    at = 0
    for _ in range(count):
        member, at = _entry(window, data, at)
        if member.header + _LOCAL.size + member.name_nbytes + member.nbytes > start:
            raise _damaged(window, f"member {member.name!r} reaches past byte {start}, where the directory begins")
        if member.name in members:
            raise _damaged(window, f"two members are named {member.name!r}")
        members[member.name] = member
    if at != len(data):
        raise _damaged(window, f"{len(data) - at} bytes of the directory belong to no member")
    return members


def data_offset(window: Window, member: ZipMember) -> int:
    """Offset in the archive of the data of `member`, from its local header."""
    fields = _LOCAL.unpack(window.read(member.header, _LOCAL.size))
    if fields[0] != b"PK\x03\x04" or fields[9] != member.name_nbytes:
        raise _damaged(window, f"no local header of {member.name!r} at byte {member.header}")
    offset = member.header + _LOCAL.size + member.name_nbytes + int(fields[10])
    if offset + member.nbytes > window.nbytes:
        raise _damaged(window, f"member {member.name!r} reaches past the end of the archive")
    return offset


def data_offsets(window: Window, members: Sequence[ZipMember], *, directory: dict[str, ZipMember]) -> dict[str, int]:
    """Offsets in the archive of the data of `members`, by name.

    Reading each local header would cost a request per member. torch pads the header so that the data are aligned. If
    the data so located end exactly at the next member's header, the offset is used without reading the header. (The
    CRC of the member proves it when the data are read.)
    """
    headers = sorted(member.header for member in directory.values())
    after = dict(pairwise(headers))
    offsets = {}
    for member in members:
        derived = aligned_start(header=member.header, name_nbytes=member.name_nbytes, nbytes=member.nbytes)
        if after.get(member.header) == derived + member.nbytes + member.descriptor_nbytes:
            offsets[member.name] = derived
        else:
            offsets[member.name] = data_offset(window, member)
    return offsets


def _find_directory(window: Window) -> tuple[int, int, int]:
    """First byte, one past the last byte, and number of entries of the central directory."""
    end = window.nbytes - _END.size
    if end < 0 or window.read(end, 4) != b"PK\x05\x06":
        raise _damaged(window, f"expected the end record of a zip archive at byte {max(end, 0)}; got other bytes")
    _, disk, first_disk, here, count, nbytes, start, comment = _END.unpack(window.read(end, _END.size))
    locator = end - _LOCATOR.size
    if locator < 0 or window.read(locator, 4) != b"PK\x06\x07":
        if (disk, first_disk, comment) != (0, 0, 0) or here != count or start + nbytes != end:
            raise _damaged(window, "its end record does not fit its length")
        return start, end, count
    _, disk, record, disks = _LOCATOR.unpack(window.read(locator, _LOCATOR.size))
    if record + _END64.size != locator or disk != 0 or disks > 1:
        raise _damaged(window, "its zip64 locator does not fit its length")
    magic, _, _, _, disk, first_disk, here, count, nbytes, start = _END64.unpack(window.read(record, _END64.size))
    if magic != b"PK\x06\x06" or (disk, first_disk) != (0, 0) or here != count or start + nbytes != record:
        raise _damaged(window, "its zip64 end record does not fit its length")
    return start, record, count


def _entry(window: Window, data: bytes, at: int) -> tuple[ZipMember, int]:
    """Member at byte `at` of the directory, and where the next one begins."""
    if at + _CENTRAL.size > len(data):
        raise _damaged(window, "its directory ends in the middle of a member")
    fields = _CENTRAL.unpack_from(data, at)
    magic, flags, method, crc32 = fields[0], fields[3], fields[4], fields[7]
    stored, nbytes, name_nbytes, extra_nbytes, comment_nbytes, header = (*fields[8:13], fields[16])
    name_at = at + _CENTRAL.size
    extra_at = name_at + name_nbytes
    stop = extra_at + extra_nbytes + comment_nbytes
    if magic != b"PK\x01\x02" or stop > len(data):
        raise _damaged(window, f"no member at byte {at} of its directory")
    try:
        name = data[name_at:extra_at].decode()
    except UnicodeDecodeError:
        raise _damaged(window, f"a member name is not UTF-8: {data[name_at : name_at + 80]!r}") from None
    if method or flags & 0x0041:
        raise UnsupportedError(
            f"{window.where}: member {name!r} is {_DEFLATED.get(method, 'encrypted or compressed')}; "
            "expected stored members, as torch.save writes them. Unpack the archive and zip it again with `zip -0`"
        )
    if UINT32_MAX in (stored, nbytes, header):
        nbytes, stored, header = _zip64(window, data[extra_at : extra_at + extra_nbytes], (nbytes, stored, header))
    if stored != nbytes:
        raise _damaged(window, f"stored member {name!r} has {stored} bytes for {nbytes}")
    member = ZipMember(name=name, name_nbytes=name_nbytes, header=header, nbytes=nbytes, crc32=crc32, flags=flags)
    return member, stop


def _zip64(window: Window, extra: bytes, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """The three sizes; those that do not fit 32 bits come from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        tag = int.from_bytes(extra[at : at + 2], "little")
        stop = at + 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
        if tag == 1:
            wide = iter(int.from_bytes(extra[i : i + 8], "little") for i in range(at + 4, min(stop, len(extra)) - 7, 8))
            nbytes, stored, header = (next(wide, -1) if n == UINT32_MAX else n for n in sizes)
            if min(nbytes, stored, header) >= 0:
                return nbytes, stored, header
        at = stop
    raise _damaged(window, "a member of 4 GiB or more without its zip64 sizes")


def _damaged(window: Window, problem: str) -> MalformedError:
    return MalformedError(
        f"{window.where}: not a whole zip archive: {problem}. It is truncated or damaged; copy it again"
    )
