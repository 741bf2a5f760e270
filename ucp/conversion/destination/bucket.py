"""A destination in a bucket, where nothing is renamed or written in place.

Files grow in a scratch folder, few at a time (`ucp.transfer.plan.rounds`), and are uploaded when they are complete.
What is known of each is noted in the bucket beside them (`ucp.io.remote.unfinished`), so that any machine can go on.
The files by which the framework, and `ucp`, know a finished checkpoint are uploaded at the end, one after another.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.destination.disk import WRONG, why_unwritable
from ucp.conversion.destination.place import Begun
from ucp.conversion.destination.scratch import Scratch, scratch_folder
from ucp.conversion.destination.uploads import Upload, Uploads, uploads_to
from ucp.conversion.journal import done_of, line_of
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Prepared
from ucp.core.target import OutputFile, Receipts
from ucp.errors import DestinationError, UcpError, UsageError, counted, listed
from ucp.io.destination.goal import (
    Making,
    begun_otherwise,
    check_apart,
    check_distinct,
    check_foreign,
    check_goal,
)
from ucp.io.destination.mark import is_complete, read_mark
from ucp.io.folder import MARK, path_of
from ucp.io.remote.link import link_of, preview
from ucp.io.remote.listing import forget
from ucp.io.remote.unfinished import FOLDER, Unfinished
from ucp.io.remote.url import key_of
from ucp.io.remote.write import MEMORY, Stored, check_writable, put_file, remove, stored_below
from ucp.transfer.output_files import create_file, fill_checksums, make_receipts
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.rounds import Room, Round, plan_room, split_rounds
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

_NAME = f"ucp-scratch-{'0' * 25}"
"""As long as the name of a scratch folder."""

_MOST_KEY = 1024
"""Bytes of a key that S3 and Google's store allow."""


class InBucket:
    """A prefix of a bucket."""

    beside_bytes = MEMORY

    def __init__(self, dst: str, options: ConvertOptions) -> None:
        """Raises UsageError for a store that is only read, DestinationError for no scratch folder."""
        check_writable(dst)
        self.dst = dst
        self.root = self._parent = scratch_folder(options.scratch)
        self.scratch_bytes = 0
        self._options = options
        self._is_taken = False
        self._unfinished = Unfinished(dst)
        self._scratch: Scratch | None = None
        self._uploads: Uploads | None = None
        self._room = Room(limit=0, nbytes=0)
        self._numbers: dict[str, int] = {}
        self._rounds: tuple[Round, ...] = ()
        self._growing: dict[str, _Growing] = {}
        self._stored: dict[str, Stored] = {}
        self._last: tuple[OutputFile, ...] = ()

    def check(self, src: Path, job: Job | None = None) -> None:
        """Raise OverlapError where it could touch the source `src`.

        Raises DestinationError where keys are too long, or a file has no room to grow; UsageError for a part.
        """
        if job is None:
            if self._options.part is not None or self._options.finalize:
                raise UsageError(
                    "parts of a conversion share a folder of a disk, and the destination is in a bucket: write to a "
                    "folder that all of them see, and upload that; or leave out --part and --finalize"
                )
            check_distinct(src, path_of(self.dst))
            return
        check_apart(path_of(self.dst), job.index.path, (file.path for file in job.index.files))
        check_fits(self._parent / f"{_NAME}/data", (file.path for file in job.target.files))
        prefix = len(key_of(self.dst).partition("/")[2].encode()) + 1
        long = [file.path for file in job.target.files if prefix + len(file.path.encode()) > _MOST_KEY]
        if long:
            raise DestinationError(
                f"expected keys of at most {_MOST_KEY} bytes below {self.dst}; got "
                f"{counted(len(long), 'longer one')}:\n{listed(long)}\nchoose a shorter destination, or a layout or "
                "target that makes no files of names"
            )
        self.scratch_for(job)

    def scratch_for(self, job: Job) -> int:
        """Bytes of the scratch folder that files take at most before they are uploaded.

        Raises DestinationError where one has no room there.
        """
        free = shutil.disk_usage(self._parent).free
        self._room = plan_room(job, _grown(job), free=free, place=str(self._parent))
        return self._room.nbytes

    def begin(self, prepared: Prepared, observer: Observer) -> Begun | None:
        """Take the place, and go on with the objects that are there, as far as they are as noted: none is read.

        Nobody is waited for. None where all is done. Raises DestinationError, OSError.
        """
        options, job, unfinished = self._options, prepared.job, self._unfinished
        self._job, self._observer = job, observer
        self._numbers = {file.path: number for number, file in enumerate(job.target.files)}
        making = Making(prepared.fingerprint, prepared.facts)
        forget(self.dst)
        is_done = options.resume and not unfinished.is_there()
        if is_done and is_complete(path_of(self.dst), making.fingerprint, overwrite=options.overwrite):
            return None
        self._scratch = Scratch(self._parent, self.dst)
        self.root = self._scratch.root
        self._take(making)
        self._is_taken = True
        finished = self._finished(job)
        job = replace(job, fsync=False)  # what is uploaded need not reach the disk
        self._job, self._rounds = split_rounds(job, _grown(job), limit=self._room.limit, finished=finished)
        self._uploads = uploads_to(unfinished)
        todo = self._job.tasks[len(self._job.tasks) - sum(len(each.tasks) for each in self._rounds) :]
        return Begun(job=self._job, done=tuple(finished.values()), todo=todo)

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """The tasks of each round, when there is room for its files."""
        del todo  # those of the rounds
        for each in self._rounds:
            while self._taken() + each.nbytes > self._room.nbytes and self._collect():
                pass
            self._make(each)
            if each.tasks:
                yield each.tasks

    def note(self, done: Done) -> None:
        """Take in what a task says of its files; those that are complete are uploaded."""
        sums: dict[str, list[Sum]] = {fill.path: [] for fill in self._job.tasks[done.task].fills}
        for one in done.sums:
            sums[_path_of(self._job, one.placement)].append(one)
        for path, written in sums.items():
            own = self._growing[path]
            own.add(done, written)
            if not own.missing:
                self._upload(own)
        while self._collect(at_once=True):
            pass

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Wait until all is uploaded."""
        left = self._taken()
        if left:
            self._observer.begin(title="upload", nbytes=left)
            try:
                while self._collect():
                    self._observer.advance(left - self._taken())
                    left = self._taken()
            finally:
                self._observer.end()
        self._stop()
        sizes = {file.path: file.nbytes for file in job.target.files}
        return make_receipts(job, sums), sizes | {path: stored.nbytes for path, stored in self._stored.items()}

    def seal(self, files: Sequence[OutputFile]) -> None:
        """Make the last files here; they are uploaded by `commit`."""
        planned = [file for file in self._job.target.files if file.path in self._job.target.last]
        self._last = (files[0], *planned, *files[1:])
        for file in self._last:
            create_file(self.root, file)
        fill_checksums(self._job, self.root, planned, ())

    @contextmanager
    def as_written(self) -> Iterator[Path]:
        """The destination as it will be, with the last files."""
        forget(self.dst)
        with preview(self.dst, {file.path: self.root / file.path for file in self._last}, hidden=FOLDER):
            yield path_of(self.dst)
        forget(self.dst)

    def commit(self, *, fsync: bool) -> None:
        """Upload the last files, in order: with the last one it is there. Then nothing marks it as unfinished."""
        self._unfinished.check_ours()
        there = stored_below(self.dst)
        changed = [path for path, stored in self._stored.items() if there.get(path) != stored]
        if changed:  # somebody else wrote there too
            raise DestinationError(
                f"{counted(len(changed), 'object')} below {self.dst} changed after they were uploaded, by another "
                f"conversion or by hand:\n{listed(changed)}\nSee that nothing else writes there, then continue with "
                "--resume"
            )
        self._unfinished.note_last([file.path for file in self._last])
        for file in self._last:
            put_file(f"{self.dst}/{file.path}", str(self.root / file.path))
        self._unfinished.clear()

    def __enter__(self) -> Self:
        """The place itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let go of the place; what was uploaded stays, to be resumed, unless it is wrong and still ours."""
        self._stop()
        if self._is_taken and isinstance(error, WRONG):
            with suppress(UcpError):
                self._unfinished.check_ours()
                link_of(self.dst).abort_uploads(self.dst)
                remove(f"{self.dst}/{name}" for name in self._names())
                self._unfinished.clear()
        forget(self.dst)
        if self._scratch is not None:
            self._scratch.close()
        if isinstance(error, OSError):
            raise DestinationError(
                f"cannot write {error.filename or self.root}, where files grow before they are uploaded (--scratch "
                f"names another folder): {why_unwritable(error)}"
            ) from error

    def _take(self, making: Making) -> None:
        """Say that this conversion is at work, in place of what is there or on with it, and clear what is to go."""
        unfinished, resume, overwrite = self._unfinished, self._options.resume, self._options.overwrite
        before = unfinished.first()
        if before and not resume and not overwrite:
            raise DestinationError(
                f"an unfinished conversion lies at {self.dst}, last written by {unfinished.owner()}. If that still "
                "runs, wait for it; if not, continue with --resume, or discard it and start over with --overwrite"
            )
        if before and resume and before.get("fingerprint") != making.fingerprint:
            raise begun_otherwise(self.dst, making, before)
        just_begun = DestinationError(f"another conversion to {self.dst} has just begun. Run one at a time")
        forget(self.dst)
        there = stored_below(self.dst)
        if there and not before:
            if unfinished.is_there():
                raise just_begun
            check_goal(path_of(self.dst), making, resume=resume, overwrite=overwrite)
        mark = read_mark(path_of(self.dst))
        if before:
            # a run that was ended while it removed what it had said of its last files had written them all
            last = unfinished.last() or (mark.files if mark.fingerprint == before.get("fingerprint") else ())
            clears = [
                *(() if resume else last),
                *before.get("clears", ()),
                *(() if resume else before.get("files", ())),
            ]
            known = {*clears, *last, *(self._names() if resume else ())}
            check_foreign(self.dst, {name for name in there if not name.startswith(f"{FOLDER}/")} - known)
        else:
            clears = [*(name for name in mark.files if name in self._job.target.last), *reversed(list(mark.files))]
        if not (before and resume):
            made = {"fingerprint": making.fingerprint, "made": dict(making.facts)}
            if not unfinished.begin({**made, "clears": clears, "files": self._names()}, anew=bool(before)):
                raise just_begun
        unfinished.take()
        if before:
            link_of(self.dst).abort_uploads(self.dst)
        if before and not resume:
            unfinished.forget_files()
        self._clear(clears)

    def _clear(self, names: Sequence[str]) -> None:
        """Remove what is replaced: first the file that made it a checkpoint."""
        there = stored_below(self.dst) if names else {}
        known = {str(line.get("file")) for line in self._unfinished.lines()} if names else set()
        urls = [f"{self.dst}/{name}" for name in dict.fromkeys(names) if name in there and name not in known]
        remove(urls[:1])
        remove(urls[1:])

    def _names(self) -> list[str]:
        """What this conversion writes, as far as it is known."""
        planned = [file.path for file in self._job.target.files]
        return list(dict.fromkeys([*(file.path for file in self._last), MARK, *planned]))

    def _finished(self, job: Job) -> dict[str, Done]:
        """Reports of files whose objects are there as they were noted, by path."""
        lines = list(self._unfinished.lines())
        there = stored_below(self.dst) if lines else {}
        wanted: dict[str, set[tuple[int, int, int]]] = {file.path: set() for file in job.target.files}
        for fill in (fill for task in (job.tasks if lines else ()) for fill in task.fills):
            wanted[fill.path].update((section.placement, section.start, section.nbytes) for section in fill.sections)
        found: dict[str, Done] = {}
        for line in lines:
            path, done = str(line.get("file")), done_of(line)
            own = there.get(path)
            if done is None or own is None or (own.nbytes, own.version) != (line.get("nbytes"), line.get("version")):
                continue
            if path in wanted and {(s.placement, s.start, s.nbytes) for s in done.sums} == wanted[path]:
                found[path] = done
                self._stored[path] = own
        return found

    def _make(self, own: Round) -> None:
        """Make the files of a round; those that nothing is written to are complete."""
        missing: dict[str, set[int]] = defaultdict(set)
        for task in own.tasks:
            for fill in task.fills:
                missing[fill.path].add(task.number)
        for file in own.files:
            create_file(self.root, file)
            number = self._numbers[file.path]
            self._growing[file.path] = _Growing(number, file, own.room[file.path], missing[file.path])
        self.scratch_bytes = max(self.scratch_bytes, self._taken())
        for file in own.files:
            if not missing[file.path]:
                self._upload(self._growing[file.path])

    def _upload(self, own: _Growing) -> None:
        path = own.file.path
        fill_checksums(self._job, self.root, [own.file], own.done.sums)
        line = {"file": path, **line_of(own.done)}
        assert self._uploads is not None  # `begin` was called
        file = self.root / path
        nbytes = file.stat().st_size  # of packs of encoded blocks it was not known before
        self._uploads.put(Upload(number=own.number, path=path, file=str(file), nbytes=nbytes, line=line))

    def _collect(self, *, at_once: bool = False) -> bool:
        """Take in that a file is uploaded; whether there was one."""
        found = self._uploads.wait(at_once=at_once) if self._uploads is not None else None
        if found is None:
            return False
        self._stored[found.path] = found.stored
        del self._growing[found.path]
        return True

    def _taken(self) -> int:
        return sum(own.room for own in self._growing.values())

    def _stop(self) -> None:
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None


class _Growing:
    """A file that is not uploaded yet."""

    def __init__(self, number: int, file: OutputFile, room: int, missing: set[int]) -> None:
        self.number = number
        self.file = file
        self.room = room
        self.missing = missing
        """Tasks that are still to write to it."""
        self.done = Done(task=number, sums=(), spans=(), drift=())
        """What those reported that did."""

    def add(self, done: Done, sums: Iterable[Sum]) -> None:
        """Take in the report of a task; of what it wrote, perhaps to several files, these are the sums of this one."""
        self.missing.discard(done.task)
        self.done = Done(
            task=self.number,
            sums=(*self.done.sums, *sums),
            spans=(*self.done.spans, *done.spans),
            drift=(*self.done.drift, *done.drift),
        )


def _grown(job: Job) -> list[OutputFile]:
    """Files that grow; the others are written last."""
    return [file for file in job.target.files if file.path not in job.target.last]


def _path_of(job: Job, number: int) -> str:
    """File of a placement, or of a raw copy counted on from these."""
    placements = job.target.placements
    return placements[number].path if number < len(placements) else job.target.raw[number - len(placements)].path
