"""Files on their way to a bucket: the scratch folder where they are written, and the process that uploads them.

Every run has its own scratch folder, with a lock. Its name consists of a digest of the destination and a random part.
While the lock is held, other runs to the same destination are refused; if the run was killed, its lock is free, and the
next run removes the folder.

Uploads need threads and connections. A process that has these must not fork, but engines fork workers for every round.
So a separate process, forked at the start, uploads files and records them in the journal. Uploads to memory:// (tests)
happen in this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import xxhash

from ucp.conversion.destination.bucket_journal import BucketJournal
from ucp.errors import DestinationError, UcpError, WorkerDiedError
from ucp.io.files import close_connections
from ucp.io.remote.url import scheme_of
from ucp.io.remote.write import SMALL, SMALL_UPLOADS, UPLOADS, StoredObject, put_file
from ucp.io.writing import describe_process, this_process
from ucp.transfer.engines.processes import as_worker, undisturbed

_LOCK_NBYTES = 4096
"""How many bytes of a lock file are read."""

SCRATCH_VARIABLE = "UCP_SCRATCH"
"""Environment variable that names the folder for scratch folders."""


def scratch_parent(path: Path | None) -> Path:
    """The folder for scratch folders: `path`, `$UCP_SCRATCH`, or the system's. Raises DestinationError."""
    folder = path or Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())
    if not folder.is_dir():
        raise DestinationError(f"expected a folder at {folder}, for files before their upload; create it first")
    return folder.resolve()


class Scratch:
    """The scratch folder of one run."""

    def __init__(self, parent: Path, dst: str) -> None:
        """Raises DestinationError while another run to `dst` is active on this machine, OSError."""
        prefix = f"ucp-scratch-{xxhash.xxh3_64_hexdigest(dst.encode())}-"
        for folder in parent.glob(f"{prefix}*"):
            if folder.stat(follow_symlinks=False).st_uid == os.getuid() and not folder.is_symlink():
                _remove_abandoned(folder, dst)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.root = self.folder / "data"
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(this_process()).encode())
        self.root.mkdir()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(folder: Path, dst: str) -> None:
    """Remove the folder of a killed run. Raises DestinationError if the run is active."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # another run is just creating or removing it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        holder = describe_process(os.pread(descriptor, _LOCK_NBYTES, 0))
        raise DestinationError(
            f"another conversion to {dst} is running on this machine: {holder} writes it now, with scratch folder "
            f"{folder}. Wait until it has ended, or end it"
        ) from None
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A complete file to upload."""

    number: int
    """Position in the plan."""
    path: str
    """Relative to the destination."""
    file: str
    """Local path; the file is removed after the upload."""
    nbytes: int
    """Bytes."""
    line: dict[str, object]
    """Its record for the journal."""


class Uploaded(NamedTuple):
    """An uploaded file."""

    path: str
    """Relative to the destination."""
    stored: StoredObject
    """Size and version of the object."""


def start_uploads(journal: BucketJournal) -> Uploads:
    """Uploads to the destination of a journal."""
    return _InlineUploads(journal) if scheme_of(journal.dst) == "memory" else Uploads(journal)


def _carry_out(journal: BucketJournal, upload: Upload) -> Uploaded:
    stored = put_file(f"{journal.dst}/{upload.path}", upload.file)
    journal.check_ours()
    journal.note(upload.number, {**upload.line, "nbytes": stored.nbytes, "version": stored.version})
    os.unlink(upload.file)
    return Uploaded(upload.path, stored)


class Uploads:
    """Concurrent uploads, in a separate process."""

    def __init__(self, journal: BucketJournal) -> None:
        import multiprocess

        close_connections()
        self._pending = 0
        context = multiprocess.get_context("fork" if hasattr(os, "fork") else "spawn")
        orders, self._orders = context.Pipe(duplex=False)
        self._reports, reports = context.Pipe(duplex=False)
        with undisturbed():
            self._process = context.Process(target=_serve, args=(journal, orders, reports, os.getpid()), daemon=True)
            self._process.start()
        orders.close()
        reports.close()

    def put(self, upload: Upload) -> None:
        """Start an upload. Raises UcpError, OSError."""
        try:
            self._orders.send(upload)
        except BrokenPipeError:
            raise _died() from None
        self._pending += 1

    def wait(self, *, block: bool = True) -> Uploaded | None:
        """The next file that was uploaded; None if there is none. Raises what made an upload fail."""
        if not self._pending or (not block and not self._reports.poll()):
            return None
        try:
            report = self._reports.recv()
        except EOFError:
            raise _died() from None
        self._pending -= 1
        if isinstance(report, BaseException):
            raise report
        assert isinstance(report, Uploaded)  # what `_serve` sends
        return report

    def close(self) -> None:
        """Stop; uploads that are not complete are lost."""
        self._process.kill()
        self._process.join()
        self._orders.close()
        self._reports.close()


class _InlineUploads(Uploads):
    """Uploads one after another, in this process."""

    def __init__(self, journal: BucketJournal) -> None:
        self._journal = journal
        self._uploaded: list[Uploaded] = []

    def put(self, upload: Upload) -> None:
        self._uploaded.append(_carry_out(self._journal, upload))

    def wait(self, *, block: bool = True) -> Uploaded | None:
        return self._uploaded.pop(0) if self._uploaded else None

    def close(self) -> None:
        pass


def _died() -> WorkerDiedError:
    return WorkerDiedError(
        "the process that uploads ended early; the machine may be out of memory. Try again with --resume"
    )


def _serve(journal: BucketJournal, orders: Any, reports: Any, parent: int) -> None:
    """Body of the process that uploads."""
    as_worker(parent)
    lock = Lock()

    def report(work: Callable[[], object]) -> None:
        try:
            result = work()
        except (UcpError, OSError) as error:
            result = error
        except BaseException:  # noqa: BLE001  # reported, and raised again by the parent
            result = WorkerDiedError(f"an upload failed unexpectedly:\n{traceback.format_exc()}")
        with lock:
            reports.send(result)

    parent_ended = suppress(EOFError)
    with parent_ended, ThreadPoolExecutor(UPLOADS) as large, ThreadPoolExecutor(SMALL_UPLOADS) as small:
        while True:
            upload: Upload = orders.recv()
            pool = small if upload.nbytes <= SMALL else large
            pool.submit(report, partial(_carry_out, journal, upload))
