"""A folder of this machine's disk in which files grow that are uploaded; it goes when the run does.

One folder for each run, under a name that tells of its destination and that nobody can foresee. It is locked, so that
what a run left behind that was killed is known by its lock being free, and a second run to the same destination is
refused on the same machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import xxhash

from ucp.errors import DestinationError
from ucp.io.destination.goal import describe_process, this_process

_LONGEST = 4096
"""Bytes of a lock that are read."""

VARIABLE = "UCP_SCRATCH"
"""Variable of the environment that names the folder."""


def scratch_folder(asked: Path | None) -> Path:
    """The folder that was asked for, or that of the environment, or the system's. Raises DestinationError."""
    folder = asked or Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
    if not folder.is_dir():
        raise DestinationError(f"expected a folder for files that are to be uploaded at {folder}; create it first")
    return folder.resolve()


class Scratch:
    """The folder of one run."""

    def __init__(self, parent: Path, dst: str) -> None:
        """Raises DestinationError where a run to `dst` is at work on this machine, OSError."""
        kind = f"ucp-scratch-{xxhash.xxh3_64_hexdigest(dst.encode())}-"
        for left in parent.glob(f"{kind}*"):
            if left.stat(follow_symlinks=False).st_uid == os.getuid() and not left.is_symlink():
                _clear(left, dst)
        self.folder = Path(tempfile.mkdtemp(prefix=kind, dir=parent))
        self.root = self.folder / "data"
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(this_process()).encode())
        self.root.mkdir()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _clear(left: Path, dst: str) -> None:
    """Remove the folder of a run that is gone. Raises DestinationError for one that is at work."""
    try:
        descriptor = os.open(left / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # another is just making it, or removing it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:
        holder = describe_process(os.pread(descriptor, _LONGEST, 0))
        raise DestinationError(
            f"another conversion to {dst} is running on this machine: {holder} writes it now, by way of {left}. Wait "
            "until it has ended, or end it"
        ) from None
    finally:
        os.close(descriptor)
