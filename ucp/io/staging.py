"""Nothing half-written looks whole: everything is prepared beside the destination and put in place by one rename.

DST.ucp-partial/
    lock            held while a conversion runs; parts of one conversion hold it together
    journal.jsonl   first line: fingerprint and facts of the conversion; then one line per finished task
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucp.errors import BusyError, DestinationError, IncompleteError, OverlapError, counted, listed
from ucp.io.folder import files_below, is_url, path_of, url_scheme

__all__ = [
    "MARK",
    "PARTIAL",
    "TEMPORARY",
    "Making",
    "Staging",
    "begun_otherwise",
    "check_apart",
    "check_destination",
    "check_distinct",
    "check_goal",
    "is_begun",
    "marked",
    "read_lines",
    "refuse_partial",
]

PARTIAL = ".ucp-partial"
"""Suffix of the folder in which a destination grows."""

MARK = "ucp-conversion.json"
"""File in every destination that says how it was made; only destinations that have it may be overwritten."""

TEMPORARY = "temporary-"
"""Prefix of files beside the growing destination that a run needs while it goes on."""

_PATIENCE = 10.0
"""Seconds to wait for the workers of a conversion that was killed to notice it."""


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


def check_destination(src: Path, dst: Path) -> None:
    """Raise OverlapError where writing `dst` could touch the source `src`, DestinationError where it cannot be."""
    check_distinct(src, dst)
    goal = dst.resolve()
    if os.path.ismount(goal):
        raise DestinationError(f"{dst} is a mount point: it cannot be put in place by a rename. Name a folder in it")
    if dst.exists() and not dst.is_dir():
        raise DestinationError(f"expected a folder, or nothing, at {dst}; a file is there")
    if _holds_current_folder(goal):
        raise DestinationError(f"{dst} is, or holds, the current folder, which a rename would replace; go elsewhere")
    parent = goal.parent
    scheme = url_scheme(dst)
    if scheme:
        raise DestinationError(
            f"expected a folder, or the URL of a bucket such as s3://bucket/run; got {dst} of {scheme}://"
        )
    if not parent.is_dir():
        raise DestinationError(f"parent directory {parent} does not exist; create it first")


def check_distinct(src: Path, dst: Path) -> None:
    """Raise OverlapError where `dst` is the source `src`, or one lies in the other."""
    source, goal = src.resolve(), dst.resolve()
    if goal == source or source in goal.parents:
        raise OverlapError(f"the destination {dst} is the source {src} or lies inside it; choose another folder")
    if goal in source.parents:
        raise OverlapError(f"the source {src} lies inside the destination {dst}; choose another folder")


def _holds_current_folder(goal: Path) -> bool:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed by somebody
        return False
    return goal == here or goal in here.parents


def check_apart(dst: Path, root: str, paths: Iterable[str]) -> None:
    """Raise OverlapError where `dst` would lie in the source, or take the place of what it consists of.

    `root`: what the source was resolved to (the tag folder that `latest` names, the store that a manifest is of);
    readers of it take what lies there for a part of it. Beside it, in the folder that it was saved to, there is room
    for others. `paths`: files that it refers to.
    """
    goal = dst.resolve()
    source = path_of(root).resolve()
    if source.is_dir() and source in goal.parents:
        raise OverlapError(
            f"the destination {dst} lies inside the source {source}, whose readers would take it for a part of it; "
            "choose a folder beside it"
        )
    inside = [path for path in paths if goal in path_of(path).resolve().parents]
    if inside:
        raise OverlapError(
            f"the source refers to {counted(len(inside), 'file')} in the destination {dst}, such as {inside[0]}; "
            "choose another folder"
        )


@dataclass(frozen=True, slots=True)
class Making:
    """Which conversion it is."""

    fingerprint: str
    """Equal for conversions that write the same bytes."""
    facts: Mapping[str, str]
    """What is made from what, and how, by name (source, target, topology, ...): what messages tell of it."""

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """How the conversion that left `recorded` is another: a line for each fact."""
        there = recorded.get("made")
        if not isinstance(there, dict):
            return []
        files = (
            "files of the source: not those that were read then, or changed since; or those of --rename, --patterns, "
            "--shapes-from or --set config"
        )
        return list(self._apart(there)) or [files]

    def _apart(self, there: Mapping[str, Any]) -> Iterator[str]:
        for name in dict.fromkeys((*self.facts, *there)):
            own, other = self.facts.get(name), there.get(name)
            if own != other:
                yield f"{name}: {other or 'by default'} then, {own or 'by default'} now"


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

    def is_complete(self, fingerprint: str) -> bool:
        """Whether `dst` is there and was made by the same conversion."""
        return marked(self.dst).get("fingerprint") == fingerprint

    def open(self, making: Making, *, resume: bool, overwrite: bool) -> list[dict[str, object]]:
        """Take the place, and return the journal lines of tasks an earlier run finished (none unless `resume`).

        Raises DestinationError when something is in the way.
        """
        self._check_links()
        check_goal(self.dst, making, resume=resume, overwrite=overwrite)
        if self.folder.exists() and not (resume or overwrite):
            raise DestinationError(
                f"an unfinished conversion lies at {self.folder}; continue it with --resume, or discard it and start "
                "over with --overwrite"
            )
        self._take_lock()
        try:
            return self._begin(making, resume=resume, overwrite=overwrite)
        except BaseException:
            if self._journal.exists() or self._has_parts():
                self.release()
            else:
                self.discard()
            raise

    def join(self, making: Making, *, overwrite: bool) -> list[dict[str, object]]:
        """Take the place together with other parts of the same conversion, and begin it if none of them has.

        Returns the lines of the journal, as `open` does. Raises DestinationError when something is in the way, or when
        what was begun here is another conversion.
        """
        self._check_links()
        check_goal(self.dst, making, resume=True, overwrite=overwrite)
        self._take_lock(shared=True)
        try:
            check_goal(self.dst, making, resume=True, overwrite=overwrite)
            return self._begin_together(making)
        except BaseException:
            self.release()
            raise

    def _begin_together(self, making: Making) -> list[dict[str, object]]:
        """`join`, once nobody is at work here but parts: one of them writes the first line, and all read it."""
        for folder in (self.data, self.parts):
            folder.mkdir(exist_ok=True)
        if self._has_parts() and not self._journal.exists():  # in this order: parts begin once it is there
            raise self._damaged()
        if not self._journal.exists():
            own = self._new_journal(making)
            with suppress(FileExistsError):  # another part was first
                os.link(own, self._journal)
            own.unlink()
        lines, _ = _whole_lines(self._journal.read_bytes())
        if not lines:
            raise self._damaged()
        if lines[0].get("fingerprint") != making.fingerprint:
            raise self._begun_otherwise(making, lines[0])
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
        then = (
            "All parts, and --finalize, take the same source and options; to start over, end the parts that run and "
            f"remove {self.folder}"
        )
        return begun_otherwise(self.folder, making, recorded, then=then)

    def _new_journal(self, making: Making) -> Path:
        """A journal with its first line, under a name of its own."""
        path = self.folder / f"begin-{secrets.token_hex(8)}"
        path.write_text(json.dumps({"fingerprint": making.fingerprint, "made": dict(making.facts)}) + "\n")
        return path

    def _begin(self, making: Making, *, resume: bool, overwrite: bool) -> list[dict[str, object]]:
        """`open`, once nobody else is at work here."""
        self._check_links()
        for left in self.folder.glob(f"{TEMPORARY}*"):
            left.unlink()
        self._put_back()
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

    def _put_back(self) -> None:
        """Undo the first half of a commit that was cut off between its two renames."""
        for old in sorted(self.folder.glob("old-*")):
            if not self.dst.exists():
                os.rename(old, self.dst)

    def note(self, line: dict[str, object]) -> None:
        """Add a line to the journal."""
        self._is_begun = True
        with self._journal.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def commit(self, *, fsync: bool = True) -> None:
        """Put the destination in place. Its files must be complete.

        `fsync`: first wait until they are on the disk, so that they are whole after a loss of power too; without it a
        process that is killed at any moment does no harm still, as what it wrote is with the system already.
        """
        self._is_begun = True  # what is replaced lies in the folder between the renames
        if fsync:
            _sync_tree(self.data)
        if self.dst.exists():
            os.rename(self.dst, self.folder / f"old-{time.time_ns()}")
        os.rename(self.data, self.dst)
        if fsync:
            _sync_folder(self.dst.parent)
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
            os.close(self._lock)
            self._lock = None

    def give_up(self) -> None:
        """`release`; and `discard` where this run began, and had finished no task: there is nothing to continue."""
        if self._is_begun:
            self.release()
        else:
            self.discard()

    def _take_lock(self, *, shared: bool = False) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self._try_lock(shared=shared):
            if time.monotonic() > deadline:
                raise BusyError(f"another conversion to {self.dst} is running")
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


def read_lines(path: Path) -> list[dict[str, object]]:
    """The lines of a journal, as far as they can be read; none where it is gone."""
    try:
        return _whole_lines(path.read_bytes())[0]
    except FileNotFoundError:
        return []


def _whole_lines(text: bytes) -> tuple[list[dict[str, object]], int]:
    """The lines of a journal up to the first that cannot be read, and their bytes."""
    lines, nbytes = [], 0
    for own in text.splitlines(keepends=True):
        line = _line(own)
        if line is None:
            break
        lines.append(line)
        nbytes += len(own)
    return lines, nbytes


def check_goal(dst: Path, making: Making, *, resume: bool, overwrite: bool) -> None:
    """Raise DestinationError where what lies at `dst` is not to be replaced, or not by this conversion."""
    if not dst.exists() or not any(dst.iterdir()):
        return
    if not (dst / MARK).exists():
        raise DestinationError(
            f"{dst} is not empty, and was not written by ucp (it has no {MARK}); choose another folder, or "
            "remove it yourself"
        )
    if not overwrite and resume:
        raise DestinationError(
            f"{dst} is a finished conversion, made differently{_told(making.differences(marked(dst)))}"
            "--resume continues what was begun from the same source with the same options. Choose another folder, "
            "or replace this one with --overwrite"
        )
    if not overwrite:
        raise DestinationError(f"{dst} is not empty; choose another folder, or pass --overwrite")
    foreign = sorted({str(file.relative_to(dst)) for file in files_below(dst)} - set(marked(dst).get("files", ())))
    if foreign:
        raise DestinationError(
            f"{dst} holds {counted(len(foreign), 'file')} that ucp did not write there; move them away "
            f"first:\n{listed(foreign)}"
        )


def begun_otherwise(
    place: Path | str,
    making: Making,
    recorded: Mapping[str, Any],
    *,
    then: str = "Start over with --overwrite, without --resume",
) -> DestinationError:
    """The error for an unfinished conversion at `place` that is another than the one that is asked for."""
    return DestinationError(
        f"{place} was begun from another source, another version of it, or with other options"
        f"{_told(making.differences(recorded))}{then}"
    )


def _told(lines: list[str]) -> str:
    """Lines between what goes before and the advice that follows."""
    return f":\n{listed(lines)}\n" if lines else ". "


def _line(text: bytes) -> dict[str, object] | None:
    """A line of the journal; None when it was cut short."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and text.endswith(b"\n") else None


def marked(dst: Path) -> dict[str, Any]:
    """What the destination says of how it was made; empty when it says nothing."""
    try:
        document = json.loads((dst / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_folder(Path(folder) / name)
        _sync_folder(Path(folder))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
