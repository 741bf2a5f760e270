"""A destination on disk: files are written to `DST.ucp-partial`, and one rename puts them in place (`staging`)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Self

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.destination.existing import ConversionId, check_apart, check_destination
from ucp.conversion.destination.protocol import Destination, ResumePoint, show_waiting
from ucp.conversion.destination.staging import Staging
from ucp.conversion.journal import Line, check_noted, to_line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.finalize import check_started, describe_busy, find_trusted, make_unfinished_error
from ucp.conversion.parts.journals import list_runs
from ucp.conversion.prepare import Prepared
from ucp.core.target import OutputFile, Receipts
from ucp.errors import BusyError, ChangedError, CorruptError, DestinationError, ReplicaError, UsageError
from ucp.io.folder import is_url
from ucp.io.provenance import is_complete
from ucp.io.writing import check_space
from ucp.transfer.output_files import create_file, fill_checksums, make_receipts, truncate_files
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import count_bytes, pick_tasks
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

WRONG_SOURCE = (ChangedError, CorruptError, ReplicaError)
"""Failures after which the files written so far are removed: they hold wrong values."""


def open_destination(dst: Path, options: ConvertOptions) -> Destination:
    """The destination at a path or a URL. Raises UsageError."""
    if is_url(str(dst)):
        from ucp.conversion.destination.bucket import BucketDestination  # imports fsspec

        return BucketDestination(str(dst), options)
    if options.scratch is not None:
        raise UsageError(f"--scratch is for a destination in a bucket, and {dst} is a local path: drop --scratch")
    return DiskDestination(dst, options)


def is_begun(dst: Path) -> bool:
    """Whether an unfinished conversion to `dst` exists."""
    if is_url(str(dst)):
        from ucp.conversion.destination.bucket_journal import BucketJournal

        return BucketJournal(str(dst)).exists()
    return Staging(dst.resolve()).folder.exists()


class DiskDestination:
    """A folder on disk."""

    upload_memory = 0
    scratch_bytes = 0

    def __init__(self, dst: Path, options: ConvertOptions) -> None:
        self.staging = Staging(dst.resolve())
        self.root = self.staging.data
        self._dst = dst
        self._options = options
        self._is_locked = False

    def check(self, src: Path, job: Job | None = None) -> int:
        """Raise OverlapError if writing could change the source, DestinationError if nothing can be written."""
        check_fits(self.root, () if job is None else (file.path for file in job.target.files))
        if job is None:
            check_destination(src, self._dst)
        else:
            check_apart(self._dst, job.index.path, (file.path for file in job.index.files))
        return 0

    def begin(self, prepared: Prepared, observer: Observer) -> ResumePoint | None:
        """Lock the destination, and read what an earlier run finished. Raises DestinationError, OSError."""
        options, staging, job = self._options, self.staging, prepared.job
        resume_wanted = options.resume or options.finalize
        if resume_wanted and is_complete(staging.dst, prepared.fingerprint, overwrite=options.overwrite):
            staging.cleanup()
            return None
        if options.finalize:
            check_started(job, staging)
        if not staging.folder.exists():
            check_space(sum(file.nbytes for file in job.target.files), staging.dst.parent)
        conversion, waiting = ConversionId(prepared.fingerprint, prepared.facts), partial(show_waiting, observer)
        try:
            journal = staging.open(conversion, resume=resume_wanted, overwrite=options.overwrite, waiting=waiting)
        except BusyError as error:
            raise BusyError(describe_busy(error, staging)) from error
        except DestinationError:
            if resume_wanted and is_complete(staging.dst, prepared.fingerprint):  # finished while this run waited
                staging.cleanup()
                return None
            raise
        self._is_locked = True
        trust_parts = options.finalize and not options.verify
        if not trust_parts:
            staging.reopen()
        resume_point = resume(
            job,
            self.root,
            chain(journal, chain.from_iterable(run.read_lines() for run in list_runs(staging))),
            known=find_trusted(job, staging) if trust_parts else {},
            observer=observer,
            threads=prepared.workers * prepared.threads,
        )
        if options.finalize and resume_point.todo:
            raise make_unfinished_error(job, staging, resume_point.todo)
        self._files, self._has_finished_tasks = job.target.files, bool(resume_point.done)
        return resume_point

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All tasks at once, unless an earlier run finished them."""
        for file in self._files:
            create_file(self.root, file, afresh=not self._has_finished_tasks)
        if todo or not self._has_finished_tasks:
            yield todo

    def note(self, done: Done) -> None:
        """Add a line to the journal."""
        self.staging.note(to_line(done))

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Cut the files to their planned length and fill in their checksum fields."""
        truncate_files(job, self.root, sums)
        fill_checksums(job, self.root, job.target.files, sums)
        files, compress = job.target.files, job.target.compress  # the size of a compressed pack is known only now
        sizes = {file.path: (self.root / file.path).stat().st_size if compress else file.nbytes for file in files}
        return make_receipts(job, sums), sizes

    def commit(self, files: Sequence[OutputFile], *, fsync: bool, verify: Callable[[Path], None] | None) -> None:
        """Write the metadata files, and rename the folder to its place."""
        for file in files:
            create_file(self.root, file)
        if verify is not None:
            verify(self.root)
        self.staging.commit(fsync=fsync)
        self._is_locked = False

    def __enter__(self) -> Self:
        """The destination itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Unlock; keep what was written for --resume, unless no task is finished or the bytes are wrong."""
        if self._is_locked and isinstance(error, WRONG_SOURCE):
            self.staging.discard()
        elif self._is_locked:
            self.staging.abandon()
        else:
            self.staging.release()
        if isinstance(error, OSError):
            again = "run the command again"
            if self.staging.folder.exists():
                part = "this part" if self._options.part else "--finalize" if self._options.finalize else ""
                again = f"run {part} again" if part else "continue with --resume"
            why = explain_write_failure(error, again=again)
            raise DestinationError(f"cannot write {error.filename or self.staging.folder}: {why}") from error


def resume(
    job: Job,
    root: Path,
    journal: Iterable[Line],
    *,
    known: Mapping[int, Done] = MappingProxyType({}),
    observer: Observer,
    threads: int,
) -> ResumePoint:
    """Find the tasks whose output below `root` is as `journal` says; the others are left to do.

    `known`: reports that are trusted, by task number; their output is not read back.
    """
    rest = replace(job, tasks=_without(job.tasks, known))
    finished = check_noted(rest, root, journal, observer=observer, threads=threads) if rest.tasks else {}
    todo = _without(rest.tasks, finished)
    return ResumePoint(
        job=job,
        done=(*known.values(), *finished.values()),
        todo=todo,
        trusted_nbytes=job.nbytes - rest.nbytes,
        read_back_nbytes=rest.nbytes - count_bytes(todo),
    )


def _without(tasks: Sequence[Task], numbers: Collection[int]) -> Sequence[Task]:
    """Tasks except those with the given numbers. Without numbers the same list, so that no task is created here."""
    if not numbers:
        return tasks
    return pick_tasks(tasks, (position for position, task in enumerate(tasks) if task.number not in numbers))


def explain_write_failure(error: OSError, *, again: str = "continue with --resume") -> str:
    """Why the disk refused a write, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left; free some, then {again}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}; check the permissions, then {again}"
    return f"{error.strerror or error}; correct that, then {again}"
