"""Writing at a place of a file, whole or with an error.

The system may take less than it is given and say so only by a number: on a disk that is nearly full, that is how it
begins.
"""

from __future__ import annotations

import os

from ucp.errors import DestinationError

__all__ = ["write_at"]


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`. Raises OSError, or DestinationError when the system takes no more."""
    rest = memoryview(data)
    while rest.nbytes:
        written = os.pwrite(descriptor, rest, offset)
        if not written:
            raise DestinationError(f"wrote 0 of {rest.nbytes} bytes at {offset}; the file system takes no more")
        rest = rest[written:]
        offset += written
