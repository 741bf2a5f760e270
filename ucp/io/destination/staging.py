"""Nothing half-written looks whole: everything is prepared beside the destination and put in place by one rename.

DST.ucp-partial/
    lock            held while a conversion runs, and names its process; parts of one conversion hold it together
    journal.jsonl   first line: fingerprint and facts of the conversion, and a token; then one line per finished task
    parts/          what each part has to itself: journals
    data/           the destination, growing; renamed to DST at the end
    temporary-*     what a run needs while it goes on
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import xxhash

from ucp.errors import BusyError, DestinationError, IncompleteError, listed
from ucp.io.destination.goal import Making, begun_otherwise, check_goal, describe_process, this_process
from ucp.io.destination.mark import is_complete
from ucp.io.destination.write import write_at
from ucp.io.folder import PARTIAL, is_url

TEMPORARY = "temporary-"
"""Prefix of files beside the growing destination that a run needs while it goes on."""

_PATIENCE = 10.0
"""Seconds to wait for a conversion that runs to end, and for the workers of one that was killed to notice it."""

_MOMENT = 1.0
"""Seconds to wait for such workers, where nobody asked to go on."""

Waiting = Callable[[str], AbstractContextManager[object]]
"""Is entered while a process is waited for, and gets its name."""


def is_begun(dst: Path) -> bool:
    """Whether an unfinished conversion to `dst` lies there."""
    if is_url(str(dst)):
        from ucp.io.remote.unfinished import Unfinished

        return Unfinished(str(dst)).is_there()
    return Staging(dst.resolve()).folder.exists()


def refuse_partial(path: Path) -> None:
    """Raise IncompleteError when `path` is, or lies in, the growing part of an unfinished conversion."""
    if is_url(str(path)):
        from ucp.io.remote.unfinished import refuse_unfinished

        refuse_unfinished(str(path))
        return
    for folder in (path, *path.parents):
        if folder.name.endswith(PARTIAL) and (folder / "journal.jsonl").exists():
            goal = folder.with_name(folder.name.removesuffix(PARTIAL))
            raise IncompleteError(
                f"{folder} is an unfinished conversion to {goal}; finish it with `ucp convert ... {goal} --resume`"
            )


class Staging:
    """The place beside `dst` where it grows."""

    def __init__(self, dst: Path) -> None:
        self.dst = dst
        self.folder = dst.parent / (dst.name + PARTIAL)
        self.data = self.folder / "data"
        self.parts = self.folder / "parts"
        self._journal = self.folder / "journal.jsonl"
        self._lock: int | None = None
        self._is_begun = False

    def is_complete(self, fingerprint: str, *, overwrite: bool = False) -> bool:
        """Whether `dst` is there and was made by the same conversion. Raises DestinationError where it is damaged."""
        return is_complete(self.dst, fingerprint, overwrite=overwrite)

    def open(
        self, making: Making, *, resume: bool, overwrite: bool, waiting: Waiting = nullcontext
    ) -> list[dict[str, object]]:
        """Take the place, and return the journal lines of tasks an earlier run finished (none unless `resume`).

        Raises DestinationError when something is in the way, BusyError where a conversion runs and does not end soon.
        """
        self._check_links()
        check_goal(self.dst, making, resume=resume, overwrite=overwrite)
        if self.folder.exists() and not (resume or overwrite):
            self._take_lock(patience=_MOMENT)
            self.release()
            raise DestinationError(
                f"an unfinished conversion lies at {self.folder}; continue it with --resume, or discard it and start "
                "over with --overwrite"
            )
        self._take_lock(waiting=waiting)
        try:
            return self._begin(making, resume=resume, overwrite=overwrite)
        except BaseException:
            if self._journal.exists() or self._has_parts():
                self.release()
            else:
                self.discard()
            raise

    def join(self, making: Making, *, overwrite: bool, waiting: Waiting = nullcontext) -> list[dict[str, object]]:
        """Take the place together with other parts of the same conversion, and begin it if none of them has.

        Returns the lines of the journal, as `open` does. Raises DestinationError when something is in the way, or when
        what was begun here is another conversion.
        """
        self._check_links()
        check_goal(self.dst, making, resume=True, overwrite=overwrite)
        self._take_lock(shared=True, waiting=waiting)
        try:
            check_goal(self.dst, making, resume=True, overwrite=overwrite)
            for folder in (self.data, self.parts):
                folder.mkdir(exist_ok=True)
            if self._has_parts() and not self._journal.exists():  # in this order: parts begin once it is there
                raise self._damaged()
            if not self._journal.exists():  # one of the parts writes the first line, and all read it
                draft = self._new_journal(making)
                with suppress(FileExistsError):  # another part was first
                    os.link(draft, self._journal)
                draft.unlink()
            lines, _ = _whole_lines(self._journal.read_bytes())
            if not lines:
                raise self._damaged()
            if lines[0].get("fingerprint") != making.fingerprint:
                raise self._begun_otherwise(making, lines[0])
        except BaseException:
            self.release()
            raise
        return lines[1:]

    def _has_parts(self) -> bool:
        """Whether parts of a conversion were at work here."""
        return any(self.parts.glob("*"))

    def _damaged(self) -> DestinationError:
        """The error for what parts did where nothing says any more of which conversion it is."""
        return DestinationError(
            f"{self._journal} is damaged, or gone: it says which conversion parts worked on. Remove {self.folder}, and "
            "start over"
        )

    def _begun_otherwise(self, making: Making, recorded: Mapping[str, Any]) -> DestinationError:
        """The error for another conversion that was begun here, by parts or by one run."""
        if not self._has_parts():
            return begun_otherwise(self.folder, making, recorded)
        advice = (
            "All parts, and --finalize, take the same source and options; to start over, end the parts that run and "
            f"remove {self.folder}"
        )
        return begun_otherwise(self.folder, making, recorded, advice=advice)

    def _new_journal(self, making: Making) -> Path:
        """A journal with its first line, under a name of its own."""
        path = self.folder / f"begin-{secrets.token_hex(8)}"
        head = {"fingerprint": making.fingerprint, "made": dict(making.facts), "begun": secrets.token_hex(8)}
        path.write_text(json.dumps(head) + "\n")
        return path

    def _begin(self, making: Making, *, resume: bool, overwrite: bool) -> list[dict[str, object]]:
        """`open`, once nobody else is at work here."""
        self._check_links()
        for left in self.folder.glob(f"{TEMPORARY}*"):
            left.unlink()
        for old in sorted(self.folder.glob("old-*")):  # of a commit that was cut off between its two renames
            if not self.dst.exists():
                os.rename(old, self.dst)
        check_goal(self.dst, making, resume=resume, overwrite=overwrite)
        lines = self._read_journal() if resume else []
        self._is_begun = bool(lines)
        if resume and self._has_parts() and not lines and self.data.is_dir():
            raise self._damaged()
        if lines and lines[0].get("fingerprint") != making.fingerprint:
            raise self._begun_otherwise(making, lines[0])
        if not lines:
            self._empty()
            os.replace(self._new_journal(making), self._journal)
        return lines[1:]

    def _check_links(self) -> None:
        """Raise DestinationError where what would be written to or cleared is a link, and lies somewhere else."""
        places = [self.folder]
        if self.folder.is_dir() and not self.folder.is_symlink():
            places += self.folder.iterdir()
            places += (Path(at) / name for at, folders, files in os.walk(self.data) for name in (*folders, *files))
        links = [f"{path} -> {os.readlink(path)}" for path in places if path.is_symlink()]
        if links:
            raise DestinationError(
                f"expected no link at {self.folder}, where {self.dst.name} grows and what is left of an earlier try is "
                f"cleared; got\n{listed(links)}\nremove what should not be there, or choose another destination"
            )

    def _empty(self) -> None:
        """Begin with nothing; by a descriptor of the folder, which a link that takes its place does not lead astray."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in (self.data.name, self.parts.name):
                shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
            os.mkdir("data", dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def note(self, line: dict[str, object]) -> None:
        """Add a line to the journal."""
        self._is_begun = True
        with self._journal.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def reopen(self) -> None:
        """Say that another run than parts is at work here, before it is; if that was begun before."""
        if self._is_begun:
            self.note({"resumed": True})
            sync(self._journal)

    def identity(self) -> str:
        """Digest of all that was noted here but by parts: another one once it is begun anew, or reopened."""
        text = self._journal.read_bytes()
        _, nbytes = _whole_lines(text)
        return xxhash.xxh3_64_hexdigest(text[:nbytes])

    def commit(self, *, fsync: bool = True) -> None:
        """Put the destination in place. Its files must be complete.

        `fsync`: first wait until they are on the disk, so that they are whole after a loss of power too; without it a
        process that is killed at any moment does no harm still, as what it wrote is with the system already.
        """
        self._is_begun = True  # what is replaced lies in the folder between the renames
        if fsync:
            for folder, _, names in os.walk(self.data):
                for name in (*names, ""):
                    sync(Path(folder, name))
        if self.dst.exists():
            os.rename(self.dst, self.folder / f"old-{time.time_ns()}")
        os.rename(self.data, self.dst)
        if fsync:
            sync(self.dst.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the growing part."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def sweep(self) -> None:
        """Remove what a run that was cut off left behind, unless another run is at work there."""
        if self.folder.is_dir() and not self.folder.is_symlink() and self._try_lock():
            self.discard()

    def release(self) -> None:
        """Let go of the lock; the growing part stays for a later --resume."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def give_up(self) -> None:
        """`release`; and `discard` where this run began, and had finished no task: there is nothing to continue."""
        if self._is_begun:
            self.release()
        else:
            self.discard()

    def _take_lock(
        self, *, shared: bool = False, patience: float | None = None, waiting: Waiting = nullcontext
    ) -> None:
        """Lock the place. Raises BusyError where it is still locked after `patience` seconds (`_PATIENCE`)."""
        if self._try_lock(shared=shared):
            return
        try:
            holder = describe_process((self.folder / "lock").read_bytes())
        except OSError:  # it has ended since
            holder = describe_process(b"")
        deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
        with waiting(holder):
            while not self._try_lock(shared=shared):
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another conversion to {self.dst} is running: {holder} writes it now. Wait until it has "
                        "ended, or end it; or choose another folder"
                    )
                time.sleep(0.05)

    def _try_lock(self, *, shared: bool = False) -> bool:
        """Lock the place, unless it is locked, or was removed by who had it before."""
        path = self.folder / "lock"
        self.folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            is_ours = os.fstat(descriptor).st_ino == os.stat(path).st_ino
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if is_ours:
            self._lock = descriptor
            if not shared:
                os.ftruncate(descriptor, 0)
                write_at(descriptor, json.dumps(this_process()).encode(), 0)
        else:
            os.close(descriptor)
        return is_ours

    def _read_journal(self) -> list[dict[str, object]]:
        """Whole lines, as far as they can be read; whatever follows them is cut off, so that lines can be added."""
        if not self.data.is_dir() or not self._journal.exists():
            return []
        lines, kept = _whole_lines(self._journal.read_bytes())
        os.truncate(self._journal, kept)
        return lines


def lines_of(texts: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """Lines of a journal up to the first that cannot be read."""
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(line, dict) or not text.endswith(b"\n"):
            return
        yield line


def _whole_lines(text: bytes) -> tuple[list[dict[str, object]], int]:
    """The lines of a journal up to the first that cannot be read, and their bytes."""
    texts = text.splitlines(keepends=True)
    lines = list(lines_of(texts))
    return lines, sum(map(len, texts[: len(lines)]))


def sync(path: Path) -> None:
    """Wait until a file, or which names a folder has, is on the disk: as far as this machine wrote it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
