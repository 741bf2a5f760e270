"""What a conversion asks of the place that its files go to.

A task writes at any offset of a file below `root`, a folder of a disk. What becomes of the file when its last task is
done is for the place to say: it lies where it will be (`OnDisk`), or is uploaded and removed (`InBucket`).

    begin(prepared)  ->  tasks of each of rounds(), note() for each  ->  finish()  ->  seal()
    ->  as_written(), to verify  ->  commit()

At any moment between, the destination is as it was, or is refused as unfinished. A place is entered before `begin`, and
let go of when it is left: after a failure what was written stays, to be resumed, unless it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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


class Place(Protocol):
    """Where the files of a destination grow, and what is done there is noted."""

    root: Path
    """Folder of a disk that tasks write below."""

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """Tasks that may be carried out together, in turn; the files that they write are made."""

    def note(self, done: Done) -> None:
        """Remember that a task is done."""


class Destination(Place, Protocol):
    """A place for the files of one conversion, begun, resumed or replaced as the options say."""

    beside_bytes: int
    """Memory that it takes beside the workers'."""
    scratch_bytes: int
    """Bytes of the disk that were taken at most by files which are uploaded; 0 where none is."""

    def check(self, src: Path, job: Job | None = None) -> None:
        """Raise OverlapError where it could touch the source `src`, DestinationError where nothing can be written.

        `job`: what is read and written, once that is known.
        """

    def scratch_for(self, job: Job) -> int:
        """Bytes of the disk that files take at most before they are uploaded. Raises DestinationError for no room."""

    def begin(self, prepared: Prepared, observer: Observer) -> Begun | None:
        """Take the place, and go on with what is there, as far as it is what was reported; None where all is done.

        Raises DestinationError when something is in the way.
        """

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Complete all files that tasks write, with their checksum fields; what is known of them, and their bytes."""

    def seal(self, files: Sequence[OutputFile]) -> None:
        """Make the files that say what the others hold, in order: the presence of the last is the commit."""

    def as_written(self) -> AbstractContextManager[Path]:
        """The path to read back what was written from, before it is there for others."""

    def commit(self, *, fsync: bool) -> None:
        """Put the destination in place."""

    def __enter__(self) -> Self:
        """The place itself."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let go of the place. Raises DestinationError in place of a failure of the disk."""


@contextmanager
def waiting_for(observer: Observer, holder: str) -> Iterator[None]:
    """Say that `holder`, another process, is waited for, and that it no longer is: a stage of no bytes."""
    observer.begin(title=f"{WAITING} {holder}", nbytes=0)
    try:
        yield
    finally:
        observer.end()
