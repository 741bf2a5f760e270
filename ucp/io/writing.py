"""Writes at an offset of a file, and reads back from it: completely, or with an error.

A system call may write fewer bytes than it is given, and only its result says so: a disk that becomes full begins so.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ucp.errors import DestinationError

TEMPORARY = "temporary-"
"""Prefix of files beside the growing destination that a conversion needs only while it runs."""

_WORTH_RESERVING = 1 << 20
"""Smaller files (bytes) are not reserved: it would take longer than it saves."""


_SYNC_FILE_RANGE_WRITE = 2
"""Flag of sync_file_range(2): start, do not wait (linux/fs.h)."""

_TMPFS_MAGIC = 0x01021994
"""First field of `struct statfs` on tmpfs (linux/magic.h)."""


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`. Raises OSError, or DestinationError if the file system accepts no more."""
    rest = memoryview(data)
    while rest.nbytes:
        written = os.pwrite(descriptor, rest, offset)
        if not written:
            raise DestinationError(f"wrote 0 of {rest.nbytes} bytes at {offset}; the file system takes no more")
        rest = rest[written:]
        offset += written


def read_back(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` with what was written at byte `offset`. Raises OSError, or DestinationError if the file ends."""
    while view.nbytes:
        got = os.preadv(descriptor, (view,), offset)
        if not got:
            raise DestinationError(
                f"expected {view.nbytes} bytes at {offset} of what was written; the file was cut short"
            )
        view = view[got:]
        offset += got


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all: beside its place, synced, then renamed. Raises OSError."""
    growing = path.parent / f".{path.name}.{os.getpid()}"
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a name for a file; got a folder", str(path))
    try:
        with growing.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        growing.replace(path)
    except BaseException:
        growing.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its full length and, if the file system can, its space on the disk (Linux `fallocate`).

    Reserved first, large files are written in place several times faster on ext4, and a full disk is noticed before
    the work begins. Not `os.posix_fallocate`: if the file system cannot reserve, glibc would write every block.
    """
    if nbytes >= _WORTH_RESERVING and sys.platform == "linux" and not is_memory(descriptor):
        fallocate = getattr(_libc(), "fallocate64", None) or _libc().fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if not fallocate(descriptor, 0, 0, nbytes):
            return
        if ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, nbytes)


def check_space(nbytes: int, folder: Path) -> None:
    """Raise DestinationError if fewer bytes are free at `folder`."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise DestinationError(
            f"expected {nbytes:,} free bytes at {folder}; got {free:,}. Free some, or write elsewhere"
        )


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the system begin to bring written bytes to the disk, without waiting for it (Linux `sync_file_range`).

    The `fsync` at the end then finds little left to do. Advice only: a system that cannot take it is left alone.
    """
    if sys.platform == "linux":
        _sync_file_range()(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    function = _libc().sync_file_range
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def is_memory(place: int | Path) -> bool:
    """Whether a file (its descriptor, or a path) is in memory, on tmpfs, where no write has to reach a disk."""
    if sys.platform != "linux":
        return False
    answer = ctypes.create_string_buffer(256)
    libc = _libc()
    status = libc.fstatfs(place, answer) if isinstance(place, int) else libc.statfs(os.fsencode(place), answer)
    magic = int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return status == 0 and magic == _TMPFS_MAGIC


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk, as far as this machine wrote it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def this_process() -> dict[str, str | int]:
    """Host and number of this process, for JSON."""
    return {"host": socket.gethostname(), "process": os.getpid()}


def describe_process(text: bytes) -> str:
    """The process that a JSON text names, for messages.

    >>> describe_process(b'{"host": "node7", "process": 1234}')
    'process 1234 on node7'
    >>> describe_process(b"")
    'a process that left no name'
    """
    try:
        noted = json.loads(text)
        return f"process {noted['process']} on {noted['host']}"
    except (ValueError, TypeError, KeyError):
        return "a process that left no name"


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
