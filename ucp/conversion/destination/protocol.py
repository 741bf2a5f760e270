"""What a conversion asks of the place that it writes to: a folder on disk, or a prefix of a bucket.

    check()  ->  begin()  ->  tasks of each of rounds(), note() after each  ->  finish()  ->  commit()

Tasks write files below `root`, a folder on this machine's disk. At any moment the destination is either as it was or
refused as unfinished. Leaving the `with` block unlocks it; after a failure, what was written stays for --resume, unless
it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from ucp.contract.protocols import WAITING, Observer
from ucp.conversion.prepare import Prepared
from ucp.core.target import OutputFile, Receipts
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """What an earlier run did, and what is left to do."""

    job: Job
    """The work; its tasks may be in another order, which suits this destination."""
    done: tuple[Done, ...]
    """Reports of the tasks whose output is complete."""
    todo: Sequence[Task]
    """Tasks that are left."""
    trusted_nbytes: int = 0
    """Bytes of finished tasks that were trusted from the journals of parts."""
    read_back_nbytes: int = 0
    """Bytes of finished tasks that were read back and compared."""


class WorkFolder(Protocol):
    """Where tasks write, and where finished tasks are recorded."""

    root: Path
    """Folder that tasks write below."""

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """Groups of tasks to carry out one after another; their files are created before each."""

    def note(self, done: Done) -> None:
        """Record that a task is finished."""


class Destination(WorkFolder, Protocol):
    """The place for the files of one conversion."""

    upload_memory: int
    """Bytes of memory that uploads take; 0 on disk."""
    scratch_bytes: int
    """Most bytes of disk that files waiting for upload took at once; 0 on disk."""

    def check(self, src: Path, job: Job | None = None) -> int:
        """Bytes of scratch space that the conversion needs; 0 as long as no `job` is given.

        Raises OverlapError if writing could change the source, DestinationError if nothing can be written.
        """

    def begin(self, prepared: Prepared, observer: Observer) -> ResumePoint | None:
        """Lock the destination and find out what is left to do; None if the conversion is finished already.

        Raises DestinationError when something else is there.
        """

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Complete the files that tasks write. Returns their checksums, and the bytes of each file."""

    def commit(self, files: Sequence[OutputFile], *, fsync: bool, verify: Callable[[Path], None] | None) -> None:
        """Write the metadata files and put the destination in place: the last of `files` makes it complete.

        `verify` is called first with the path to read everything back from.
        """

    def __enter__(self) -> Self:
        """The destination itself."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Unlock the destination. Raises DestinationError in place of an OSError."""


@contextmanager
def show_waiting(observer: Observer, holder: str) -> Iterator[None]:
    """Show that this process waits for another one, described by `holder`."""
    observer.begin(title=f"{WAITING} {holder}", nbytes=0)
    try:
        yield
    finally:
        observer.end()
