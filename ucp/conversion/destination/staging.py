"""The working folder of a conversion to disk; a rename puts its result in place: nothing half-written looks complete.

DST.ucp-partial/
    lock            held while a conversion runs, and names its process; parts of one conversion share it
    journal.jsonl   first line: fingerprint and facts of the conversion, and a token; then one line per finished task
    parts/          journals of parts
    data/           the destination, growing; renamed to DST at the end
    temporary-*     scratch files of a running conversion
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import xxhash

from ucp.conversion.destination.existing import ConversionId, check_replaceable, other_conversion
from ucp.conversion.journal import Line
from ucp.errors import BusyError, DestinationError, format_list
from ucp.io.folder import JOURNAL, PARTIAL
from ucp.io.writing import TEMPORARY, describe_process, sync, this_process, write_at

_PATIENCE = 10.0
"""Seconds to wait for a running conversion to end, and for the workers of a killed one to notice it."""

_MOMENT = 1.0
"""The same without --resume and --overwrite, where the conversion is refused in any case."""

Waiting = Callable[[str], AbstractContextManager[object]]
"""Called with the name of another process; its result is entered while this run waits for that process."""


class Staging:
    """The working folder beside `dst`."""

    def __init__(self, dst: Path) -> None:
        self.dst = dst
        self.folder = dst.parent / (dst.name + PARTIAL)
        self.data = self.folder / "data"
        self.parts = self.folder / "parts"
        self._journal = self.folder / JOURNAL
        self._lock: int | None = None
        self._has_progress = False

    def open(
        self, conversion: ConversionId, *, resume: bool, overwrite: bool, waiting: Waiting = nullcontext
    ) -> list[Line]:
        """Lock the folder. Returns the lines of tasks that an earlier run finished; none unless `resume`.

        Raises DestinationError when something else is there, BusyError when another conversion runs and does not end.
        """
        self._check_links()
        check_replaceable(self.dst, conversion, resume=resume, overwrite=overwrite)
        if self.folder.exists() and not (resume or overwrite):
            self._take_lock(patience=_MOMENT)
            self.release()
            raise DestinationError(
                f"an unfinished conversion lies at {self.folder}; continue it with --resume, or discard it and start "
                "over with --overwrite"
            )
        self._take_lock(waiting=waiting)
        try:
            return self._begin(conversion, resume=resume, overwrite=overwrite)
        except BaseException:
            if self._journal.exists() or self._has_parts():
                self.release()
            else:
                self.discard()
            raise

    def join(self, conversion: ConversionId, *, overwrite: bool, waiting: Waiting = nullcontext) -> list[Line]:
        """Lock the folder together with other parts of the conversion; the first part begins it.

        Returns the lines of the journal. Raises DestinationError when something else is there.
        """
        self._check_links()
        check_replaceable(self.dst, conversion, resume=True, overwrite=overwrite)
        self._take_lock(shared=True, waiting=waiting)
        try:
            check_replaceable(self.dst, conversion, resume=True, overwrite=overwrite)
            for folder in (self.data, self.parts):
                folder.mkdir(exist_ok=True)
            if self._has_parts() and not self._journal.exists():  # in this order: parts begin after the journal
                raise self._damaged()
            if not self._journal.exists():  # one of the parts writes the first line, and all read it
                draft = self._new_journal(conversion)
                with suppress(FileExistsError):  # another part was first
                    os.link(draft, self._journal)
                draft.unlink()
            lines, _ = _parse_lines(self._journal.read_bytes())
            if not lines:
                raise self._damaged()
            self._check_same(conversion, lines)
        except BaseException:
            self.release()
            raise
        return lines[1:]

    def _has_parts(self) -> bool:
        return any(self.parts.glob("*"))

    def _damaged(self) -> DestinationError:
        return DestinationError(
            f"{self._journal} is damaged or missing: it says which conversion the parts belong to. Remove "
            f"{self.folder}, and start over"
        )

    def _check_same(self, conversion: ConversionId, lines: list[Line]) -> None:
        """Raise DestinationError if the journal belongs to another conversion."""
        if not lines or lines[0].get("fingerprint") == conversion.fingerprint:
            return
        if not self._has_parts():
            raise other_conversion(self.folder, conversion, lines[0])
        advice = (
            "All parts, and --finalize, take the same source and options; to start over, end the parts that run and "
            f"remove {self.folder}"
        )
        raise other_conversion(self.folder, conversion, lines[0], advice=advice)

    def _new_journal(self, conversion: ConversionId) -> Path:
        """A journal with its first line, under a unique name."""
        path = self.folder / f"begin-{secrets.token_hex(8)}"
        head = {"fingerprint": conversion.fingerprint, "made": dict(conversion.facts), "begun": secrets.token_hex(8)}
        path.write_text(json.dumps(head) + "\n")
        return path

    def _begin(self, conversion: ConversionId, *, resume: bool, overwrite: bool) -> list[Line]:
        """`open`, once the folder is locked."""
        self._check_links()
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            leftover.unlink()
        for replaced in sorted(self.folder.glob("old-*")):  # of a commit that was killed between its two renames
            if not self.dst.exists():
                os.rename(replaced, self.dst)
        check_replaceable(self.dst, conversion, resume=resume, overwrite=overwrite)
        lines = self._read_journal() if resume else []
        self._has_progress = bool(lines)
        if resume and self._has_parts() and not lines and self.data.is_dir():
            raise self._damaged()
        self._check_same(conversion, lines)
        if not lines:
            self._empty()
            os.replace(self._new_journal(conversion), self._journal)
        return lines[1:]

    def _check_links(self) -> None:
        """Raise DestinationError for links: through them, files outside the folder would be written or removed."""
        places = [self.folder]
        if self.folder.is_dir() and not self.folder.is_symlink():
            places += self.folder.iterdir()
            places += (Path(top) / name for top, folders, files in os.walk(self.data) for name in (*folders, *files))
        links = [f"{path} -> {os.readlink(path)}" for path in places if path.is_symlink()]
        if links:
            raise DestinationError(
                f"expected no link in {self.folder}, where ucp writes and removes files; "
                f"got\n{format_list(links)}\nremove the links, or choose another destination"
            )

    def _empty(self) -> None:
        """Remove what an earlier run wrote; by the folder's descriptor, so that no link can take its place."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in (self.data.name, self.parts.name):
                shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
            os.mkdir("data", dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def note(self, line: Line) -> None:
        """Add a line to the journal."""
        self._has_progress = True
        with self._journal.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def reopen(self) -> None:
        """Record that a run without --part continues an earlier one, before it writes."""
        if self._has_progress:
            self.note({"resumed": True})
            sync(self._journal)

    def identity(self) -> str:
        """Digest of the journal: changes when the conversion is restarted, or continued by a run without --part."""
        text = self._journal.read_bytes()
        _, nbytes = _parse_lines(text)
        return xxhash.xxh3_64_hexdigest(text[:nbytes])

    def commit(self, *, fsync: bool = True) -> None:
        """Put the destination in place. Its files must be complete.

        `fsync`: wait first until they are on the disk, so that they survive a loss of power. Without it a process
        that is killed at any moment still does no harm, as the system has the bytes.
        """
        self._has_progress = True  # between the renames the folder holds the destination that is replaced
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
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def cleanup(self) -> None:
        """Remove what a killed run left, unless another run is active."""
        if self.folder.is_dir() and not self.folder.is_symlink() and self._try_lock():
            self.discard()

    def release(self) -> None:
        """Unlock the folder, and keep it for --resume."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def abandon(self) -> None:
        """Unlock the folder; remove it if there is nothing to resume."""
        if self._has_progress:
            self.release()
        else:
            self.discard()

    def _take_lock(
        self, *, shared: bool = False, patience: float | None = None, waiting: Waiting = nullcontext
    ) -> None:
        """Lock the folder. Raises BusyError when it is still locked after `patience` seconds (`_PATIENCE`)."""
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
        """Lock the folder, unless it is locked, or its last holder removed it meanwhile."""
        path = self.folder / "lock"
        self.folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            is_locked = os.fstat(descriptor).st_ino == os.stat(path).st_ino
        except (BlockingIOError, FileNotFoundError):
            is_locked = False
        if is_locked:
            self._lock = descriptor
            if not shared:
                os.ftruncate(descriptor, 0)
                write_at(descriptor, json.dumps(this_process()).encode(), 0)
        else:
            os.close(descriptor)
        return is_locked

    def _read_journal(self) -> list[Line]:
        """The readable lines; what follows them is cut off, so that lines can be added."""
        if not self.data.is_dir() or not self._journal.exists():
            return []
        lines, nbytes = _parse_lines(self._journal.read_bytes())
        os.truncate(self._journal, nbytes)
        return lines


def lines_of(texts: Iterable[bytes]) -> Iterator[Line]:
    """Lines of a journal up to the first that cannot be read."""
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(line, dict) or not text.endswith(b"\n"):
            return
        yield line


def _parse_lines(text: bytes) -> tuple[list[Line], int]:
    """The lines of a journal up to the first that cannot be read, and their bytes."""
    texts = text.splitlines(keepends=True)
    lines = list(lines_of(texts))
    return lines, sum(map(len, texts[: len(lines)]))
