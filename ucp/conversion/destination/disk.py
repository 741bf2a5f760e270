"""A destination on a disk: it grows beside, and is put in place by one rename (`ucp.io.destination.staging`)."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.destination.place import Begun
from ucp.conversion.journal import Line, line_of, trusted
from ucp.conversion.parts.finalize import busy_text, vouched
from ucp.conversion.parts.journals import runs_in
from ucp.core.target import OutputFile, Receipts
from ucp.errors import BusyError, DestinationError
from ucp.io.destination.goal import Making, check_apart, check_destination
from ucp.io.destination.staging import Staging, Waiting
from ucp.io.destination.write import check_space
from ucp.transfer.output_files import create, cut_surplus, fill_checksums, receipts_of
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import nbytes_of, pick_tasks
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

__all__ = ["OnDisk", "taken_up", "why_unwritable"]

AGAIN = "continue with --resume"
"""How a conversion that failed goes on."""


class OnDisk:
    """A folder."""

    beside_bytes = 0
    scratch_bytes = 0

    def __init__(self, dst: Path, *, again: str = AGAIN) -> None:
        """`again`: how a command goes on that failed."""
        self._named = dst
        self._again = again
        self._staging = Staging(dst.resolve())
        self.shared: Staging | None = self._staging
        self._journal: Iterable[Line] = ()
        self._begun: Begun | None = None
        self._is_packed = False
        self.root = self._staging.data

    def check(self, src: Path) -> None:
        """Raise OverlapError where it could touch the source `src`, DestinationError where nothing can be written."""
        check_fits(self.root, ())
        check_destination(src, self._named)

    def scratch_for(self, job: Job) -> int:
        """None: files are where they will be."""
        del job
        return 0

    def check_job(self, job: Job) -> None:
        """The same, knowing what is read and written."""
        check_apart(self._named, job.index.path, (file.path for file in job.index.files))
        check_fits(self.root, (file.path for file in job.target.files))
        self._is_packed = job.target.compress
        self._nbytes = sum(file.nbytes for file in job.target.files)

    def is_complete(self, fingerprint: str, *, overwrite: bool) -> bool:
        """Whether the same conversion was made here, and finished. Raises DestinationError where it is damaged."""
        return self._staging.is_complete(fingerprint, overwrite=overwrite)

    def is_begun(self) -> bool:
        """Whether an unfinished conversion lies here."""
        return self._staging.folder.exists()

    def open(self, making: Making, *, resume: bool, overwrite: bool, waiting: Waiting) -> None:
        """Take the place. Raises DestinationError when something is in the way."""
        if not self.is_begun():
            check_space(self._nbytes, self._staging.dst.parent)
        try:
            own = self._staging.open(making, resume=resume, overwrite=overwrite, waiting=waiting)
        except BusyError as error:
            raise BusyError(busy_text(error, self._staging)) from error
        self._journal = chain(own, chain.from_iterable(run.lines() for run in runs_in(self._staging)))

    def begin(self, job: Job, observer: Observer, threads: int, *, believe: bool) -> Begun:
        """Go on with what is there, as far as it is what was reported; `threads` read it."""
        if not believe:
            self._staging.reopen()
        known = vouched(job, self._staging) if believe else {}
        self._begun = taken_up(job, self.root, self._journal, known=known, observer=observer, threads=threads)
        return self._begun

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All at once: every file is there. None where all was done before."""
        assert self._begun is not None
        for file in self._begun.job.target.files:
            create(self.root, file, afresh=not self._begun.done)
        if todo or not self._begun.done:
            yield todo

    def note(self, done: Done) -> None:
        """Add a line to the journal."""
        self._staging.note(line_of(done))

    def finish(self, job: Job, sums: Sequence[Sum]) -> Receipts:
        """Fill in the checksum fields of all files, which end where they were planned to."""
        cut_surplus(job, self.root, sums)
        fill_checksums(job, self.root, job.target.files, sums)
        return receipts_of(job, sums)

    def add_last(self, files: Sequence[OutputFile]) -> None:
        """Make the files that say what the others hold."""
        for file in files:
            create(self.root, file)

    def nbytes_of(self, file: OutputFile) -> int:
        """Bytes of a planned file; packs of encoded blocks alone have another length than was planned."""
        return (self.root / file.path).stat().st_size if self._is_packed else file.nbytes

    def as_written(self) -> AbstractContextManager[Path]:
        """The folder in which it grows."""
        return nullcontext(self.root)

    def commit(self, *, fsync: bool) -> None:
        """Put the destination in place, by a rename."""
        self._staging.commit(fsync=fsync)

    def discard(self) -> None:
        """Remove what was written."""
        self._staging.discard()

    def sweep(self) -> None:
        """Remove what a finished conversion that was cut off left behind."""
        self._staging.sweep()

    def release(self) -> None:
        """Let go of the place; what was written stays, to be resumed, if any of it was."""
        self._staging.give_up()

    def unwritable(self, error: OSError) -> DestinationError:
        """The error that a failure of the disk is."""
        why = why_unwritable(error, again=self._again if self.is_begun() else "run the command again")
        return DestinationError(f"cannot write {error.filename or self._staging.folder}: {why}")


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
        read_back=rest.nbytes - nbytes_of(todo),
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
