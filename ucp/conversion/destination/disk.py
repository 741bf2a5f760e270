"""A destination on a disk: it grows beside, and is put in place by one rename (`ucp.io.destination.staging`)."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Self

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.destination.place import Begun, Destination, waiting_for
from ucp.conversion.journal import Line, line_of, trusted
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.finalize import busy_text, check_begun, unfinished, vouched
from ucp.conversion.parts.journals import runs_in
from ucp.conversion.prepare import Prepared
from ucp.core.target import OutputFile, Receipts
from ucp.errors import BusyError, ChangedError, CorruptError, DestinationError, ReplicaError, UsageError
from ucp.io.destination.goal import Making, check_apart, check_destination
from ucp.io.destination.staging import Staging
from ucp.io.destination.write import check_space
from ucp.io.folder import is_url
from ucp.transfer.output_files import create_file, fill_checksums, make_receipts, truncate_files
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import count_bytes, pick_tasks
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

AGAIN = "continue with --resume"
"""How a conversion that failed goes on."""

WRONG = (ChangedError, CorruptError, ReplicaError)
"""Failures after which what was written is not continued."""


def destination_at(dst: Path, options: ConvertOptions) -> Destination:
    """The place at a path or a URL. Raises UsageError."""
    if is_url(str(dst)):
        from ucp.conversion.destination.bucket import InBucket  # with fsspec

        return InBucket(str(dst), options)
    if options.scratch is not None:
        raise UsageError(f"a scratch folder is for destinations in a bucket, and {dst} is none: drop --scratch")
    return OnDisk(dst, options)


class OnDisk:
    """A folder."""

    beside_bytes = 0
    scratch_bytes = 0

    def __init__(self, dst: Path, options: ConvertOptions) -> None:
        self.staging = Staging(dst.resolve())
        self.root = self.staging.data
        self._named = dst
        self._options = options
        self._is_taken = False

    def check(self, src: Path, job: Job | None = None) -> None:
        """Raise OverlapError where it could touch the source `src`, DestinationError where nothing can be written."""
        check_fits(self.root, () if job is None else (file.path for file in job.target.files))
        if job is None:
            check_destination(src, self._named)
        else:
            check_apart(self._named, job.index.path, (file.path for file in job.index.files))

    def scratch_for(self, job: Job) -> int:
        """None: files are where they will be."""
        del job
        return 0

    def begin(self, prepared: Prepared, observer: Observer) -> Begun | None:
        """Take the place, and go on with what is there; None where all is done. Raises DestinationError, OSError."""
        options, staging, self._job = self._options, self.staging, prepared.job
        resume = options.resume or options.finalize
        if resume and staging.is_complete(prepared.fingerprint, overwrite=options.overwrite):
            staging.sweep()
            return None
        if options.finalize:
            check_begun(self._job, staging)
        if not staging.folder.exists():
            check_space(sum(file.nbytes for file in self._job.target.files), staging.dst.parent)
        making, waiting = Making(prepared.fingerprint, prepared.facts), partial(waiting_for, observer)
        try:
            noted = staging.open(making, resume=resume, overwrite=options.overwrite, waiting=waiting)
        except BusyError as error:
            raise BusyError(busy_text(error, staging)) from error
        except DestinationError:
            if resume and staging.is_complete(prepared.fingerprint):  # by another run, which was waited for
                staging.sweep()
                return None
            raise
        self._is_taken = True
        believe = options.finalize and not options.verify
        if not believe:
            staging.reopen()
        self._begun = taken_up(
            self._job,
            self.root,
            chain(noted, chain.from_iterable(run.lines() for run in runs_in(staging))),
            known=vouched(self._job, staging) if believe else {},
            observer=observer,
            threads=prepared.workers * prepared.threads,
        )
        if options.finalize and self._begun.todo:
            raise unfinished(self._job, staging, self._begun.todo)
        return self._begun

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All at once: every file is there. None where all was done before."""
        for file in self._job.target.files:
            create_file(self.root, file, afresh=not self._begun.done)
        if todo or not self._begun.done:
            yield todo

    def note(self, done: Done) -> None:
        """Add a line to the journal."""
        self.staging.note(line_of(done))

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Fill in the checksum fields of all files, which end where they were planned to."""
        truncate_files(job, self.root, sums)
        fill_checksums(job, self.root, job.target.files, sums)
        files, is_packed = job.target.files, job.target.compress  # packs of encoded blocks are as long as they came out
        sizes = {file.path: (self.root / file.path).stat().st_size if is_packed else file.nbytes for file in files}
        return make_receipts(job, sums), sizes

    def seal(self, files: Sequence[OutputFile]) -> None:
        """Make the files that say what the others hold."""
        for file in files:
            create_file(self.root, file)

    def as_written(self) -> AbstractContextManager[Path]:
        """The folder in which it grows."""
        return nullcontext(self.root)

    def commit(self, *, fsync: bool) -> None:
        """Put the destination in place, by a rename."""
        self.staging.commit(fsync=fsync)
        self._is_taken = False

    def __enter__(self) -> Self:
        """The place itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let go of the place; what was written stays, to be resumed, if any of it was and it is not wrong."""
        if self._is_taken and isinstance(error, WRONG):
            self.staging.discard()
        elif self._is_taken:
            self.staging.give_up()
        else:
            self.staging.release()
        if isinstance(error, OSError):
            again = "run the command again"
            if self.staging.folder.exists():
                part = "this part" if self._options.part else "--finalize" if self._options.finalize else ""
                again = f"run {part} again" if part else AGAIN
            why = why_unwritable(error, again=again)
            raise DestinationError(f"cannot write {error.filename or self.staging.folder}: {why}") from error


def taken_up(
    job: Job,
    root: Path,
    journal: Iterable[Line],
    *,
    known: Mapping[int, Done] = MappingProxyType({}),
    observer: Observer,
    threads: int,
) -> Begun:
    """What earlier runs wrote below `root`, and the tasks that are left: what is there as `journal` says.

    `known`: reports that are believed, by task; what they speak of is not read.
    """
    rest = replace(job, tasks=_without(job.tasks, known))
    finished = trusted(rest, root, journal, observer=observer, threads=threads) if rest.tasks else {}
    todo = _without(rest.tasks, finished)
    return Begun(
        job=job,
        done=(*known.values(), *finished.values()),
        todo=todo,
        believed=job.nbytes - rest.nbytes,
        read_back=rest.nbytes - count_bytes(todo),
    )


def _without(tasks: Sequence[Task], numbers: Collection[int]) -> Sequence[Task]:
    """Tasks but those of some numbers; as they are where there are none, so that no task is made here."""
    if not numbers:
        return tasks
    return pick_tasks(tasks, (position for position, task in enumerate(tasks) if task.number not in numbers))


def why_unwritable(error: OSError, *, again: str = AGAIN) -> str:
    """Why the disk takes no more, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left; free some, then {again}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}; check the permissions, then {again}"
    return f"{error.strerror or error}; when that is put right, {again}"
