"""Files on their way to a store while others still grow.

Uploads need threads and connections, and processes that have these must not be forked; but engines fork workers again
for every round. So one process, forked before them, uploads: it is told of a file, and tells when the file is there
and what the store says of it is noted. What is stored in the memory of a process (memory://, in tests) is put there by
this one, file after file.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from ucp.errors import UcpError, WorkerDiedError
from ucp.io.files import let_go
from ucp.io.remote.unfinished import Unfinished
from ucp.io.remote.url import scheme_of
from ucp.io.remote.write import SMALL, SMALL_UPLOADS, UPLOADS, Stored, put_file
from ucp.transfer.engines.processes import as_worker, undisturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file that is ready."""

    number: int
    """Position in the plan."""
    path: str
    """Relative to the destination."""
    file: str
    """Where it lies; it is removed once it is uploaded."""
    nbytes: int
    """Its bytes."""
    line: dict[str, object]
    """What is known of it."""


class Uploaded(NamedTuple):
    """A file that is there."""

    path: str
    """Relative to the destination."""
    stored: Stored
    """What the store says of it."""


def uploads_to(unfinished: Unfinished) -> Uploads:
    """What uploads to the place of an unfinished conversion."""
    return _Here(unfinished) if scheme_of(unfinished.dst) == "memory" else Uploads(unfinished)


def _carry_out(unfinished: Unfinished, upload: Upload) -> Uploaded:
    found = put_file(f"{unfinished.dst}/{upload.path}", upload.file)
    unfinished.check_ours()
    unfinished.note(upload.number, {**upload.line, "nbytes": found.nbytes, "version": found.version})
    os.unlink(upload.file)
    return Uploaded(upload.path, found)


class Uploads:
    """Several side by side, by a process of their own."""

    def __init__(self, unfinished: Unfinished) -> None:
        import multiprocess

        let_go()
        self._under_way = 0
        context = multiprocess.get_context("fork" if hasattr(os, "fork") else "spawn")
        theirs, self._orders = context.Pipe(duplex=False)
        self._reports, back = context.Pipe(duplex=False)
        with undisturbed():
            self._process = context.Process(target=_serve, args=(unfinished, theirs, back, os.getpid()), daemon=True)
            self._process.start()
        theirs.close()
        back.close()

    def put(self, upload: Upload) -> None:
        """Begin, or do it. Raises UcpError, OSError for what went wrong so far."""
        try:
            self._orders.send(upload)
        except BrokenPipeError:
            raise self._gone() from None
        self._under_way += 1

    def wait(self, *, at_once: bool = False) -> Uploaded | None:
        """The next file that is there; None where none is, with `at_once`, or none is under way."""
        if not self._under_way or (at_once and not self._reports.poll()):
            return None
        try:
            report = self._reports.recv()
        except EOFError:
            raise self._gone() from None
        self._under_way -= 1
        if isinstance(report, BaseException):
            raise report
        assert isinstance(report, Uploaded)  # what `_serve` sends
        return report

    def close(self) -> None:
        """End, with what is under way."""
        self._process.kill()
        self._process.join()
        self._orders.close()
        self._reports.close()

    def _gone(self) -> WorkerDiedError:
        return WorkerDiedError(
            "the process that uploads ended early; the machine may be out of memory. Try again with --resume"
        )


class _Here(Uploads):
    """One after another, by this process."""

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished
        self._done: list[Uploaded] = []

    def put(self, upload: Upload) -> None:
        self._done.append(_carry_out(self._unfinished, upload))

    def wait(self, *, at_once: bool = False) -> Uploaded | None:
        return self._done.pop(0) if self._done else None

    def close(self) -> None:
        pass


def _serve(unfinished: Unfinished, orders: Any, reports: Any, parent: int) -> None:
    """Body of the process."""
    as_worker(parent)
    lock = Lock()

    def report(work: Callable[[], object]) -> None:
        try:
            result = work()
        except (UcpError, OSError) as error:
            result = error
        except BaseException:  # noqa: BLE001  # reported, and raised again by the parent
            result = WorkerDiedError(f"an upload failed in a way that was not foreseen:\n{traceback.format_exc()}")
        with lock:
            reports.send(result)

    nobody_left = suppress(EOFError)
    with nobody_left, ThreadPoolExecutor(UPLOADS) as large, ThreadPoolExecutor(SMALL_UPLOADS) as small:
        while True:
            upload: Upload = orders.recv()
            pool = small if upload.nbytes <= SMALL else large
            pool.submit(report, partial(_carry_out, unfinished, upload))
