"""What a conversion asks of the place that its files go to.

A task writes at any offset of a file below `root`, a folder of a disk. What becomes of the file when its last task is
done is for the place to say: it lies where it will be (`OnDisk`), or is uploaded and removed (`InBucket`).

    open(making)  ->  begin(job)  ->  tasks of each of rounds(), note() for each  ->  finish()  ->  add_last()
    ->  as_written(), to verify  ->  commit()

At any moment between, the destination is as it was, or is refused as unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp.contract.protocols import WAITING, Observer
from ucp.core.target import OutputFile, Receipts
from ucp.errors import DestinationError
from ucp.io.destination.goal import Making
from ucp.io.destination.staging import Staging, Waiting
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

__all__ = ["Begun", "Destination", "waiting_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What there is to do, and what an earlier run did."""

    job: Job
    """The work, cut as it is best done here."""
    done: tuple[Done, ...]
    """Reports of what an earlier run wrote and is there."""
    todo: Sequence[Task]
    """Tasks that are left."""
    believed: int = 0
    """Bytes of what was done that were not read back, as parts vouch for them."""
    read_back: int = 0
    """Bytes of what was done that were read back."""


class Destination(Protocol):
    """A place for the files of one conversion."""

    root: Path
    """Folder of a disk that tasks write below."""
    shared: Staging | None
    """What processes share that do a part each; None where they cannot."""
    beside_bytes: int
    """Memory that it takes beside the workers'."""
    scratch_bytes: int
    """Bytes of the disk that were taken at most by files which are uploaded; 0 where none is."""

    def check(self, src: Path) -> None:
        """Raise OverlapError where it could touch the source `src`, DestinationError where nothing can be written."""

    def scratch_for(self, job: Job) -> int:
        """Bytes of the disk that files take at most before they are uploaded. Raises DestinationError for no room."""

    def check_job(self, job: Job) -> None:
        """The same, knowing what is read and written."""

    def is_complete(self, fingerprint: str, *, overwrite: bool) -> bool:
        """Whether the same conversion was made here, and finished.

        Raises DestinationError where files are no longer as it wrote them, unless they may be overwritten.
        """

    def is_begun(self) -> bool:
        """Whether an unfinished conversion lies here."""

    def open(self, making: Making, *, resume: bool, overwrite: bool, waiting: Waiting) -> None:
        """Take the place. Raises DestinationError when something is in the way.

        `waiting`: entered while another process, which it names, is waited for.
        """

    def begin(self, job: Job, observer: Observer, threads: int, *, believe: bool) -> Begun:
        """Go on with what is there, as far as it is what was reported; `threads` read it.

        `believe`: without a look at it, where parts vouch for it (`ucp.conversion.parts.finalize`).
        """

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """Tasks that may be carried out together, in turn; the files that they write are made."""

    def note(self, done: Done) -> None:
        """Remember that a task is done."""

    def finish(self, job: Job, sums: Sequence[Sum]) -> Receipts:
        """Complete all files that tasks write, with their checksum fields; what is known of them."""

    def add_last(self, files: Sequence[OutputFile]) -> None:
        """Make the files that say what the others hold, in order: the presence of the last is the commit."""

    def nbytes_of(self, file: OutputFile) -> int:
        """Bytes of a planned file as it was written."""

    def as_written(self) -> AbstractContextManager[Path]:
        """The path to read back what was written from, before it is there for others."""

    def commit(self, *, fsync: bool) -> None:
        """Put the destination in place."""

    def discard(self) -> None:
        """Remove what was written."""

    def sweep(self) -> None:
        """Remove what a finished conversion that was cut off left behind."""

    def release(self) -> None:
        """Let go of the place; what was written stays, to be resumed, if any of it was."""

    def unwritable(self, error: OSError) -> DestinationError:
        """The error that a failure of the disk is."""


@contextmanager
def waiting_for(observer: Observer, holder: str) -> Iterator[None]:
    """Say that `holder`, another process, is waited for, and that it no longer is: a stage of no bytes."""
    observer.begin(title=f"{WAITING} {holder}", nbytes=0)
    try:
        yield
    finally:
        observer.end()
