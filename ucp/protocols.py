"""The extension contract, on one page.

A *format* says where the bytes of a checkpoint lie (`detect`, `read`). A *target* says what files a checkpoint
consists of (`plan`, `seal`). An *engine* carries out tasks. An *observer* is told how far they are. None of them sees
another's insides, and none reads a tensor but the engine. Formats, targets and engines are found by entry point
(groups `ucp.formats`, `ucp.targets`, `ucp.engines`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp.atom import Index
from ucp.layout import Pattern
from ucp.plan import Job, Task
from ucp.target import OutputFile, Receipt, TargetOptions, TargetPlan
from ucp.topology import Topology
from ucp.union import Done

__all__ = ["Engine", "Evidence", "Format", "Observer", "Pattern", "Target"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a path is thought to be of a format."""

    root: Path
    """The directory or file that the format would read: what `latest`, a tag or a parent folder resolves to."""
    reasons: tuple[str, ...]
    """What was seen, e.g. "zero_pp_rank_*_optim_states.pt"."""


class Format(Protocol):
    """Reads the indexes of one kind of checkpoint."""

    name: str
    """Name on the command line, e.g. "deepspeed"."""

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is such a checkpoint, from names alone; None if not."""

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path` (as given by the user). Raises SourceError; reads no tensor."""


class Target(Protocol):
    """Lays a checkpoint out as files of one kind."""

    name: str
    """Name on the command line, e.g. "deepspeed-universal"."""

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files, and which slice of which state goes where. Writes nothing. Raises UsageError, MissingStateError."""

    def seal(self, index: Index, plan: TargetPlan, receipts: Sequence[Receipt]) -> tuple[OutputFile, ...]:
        """Files to write last, in order, once all bytes are down: the presence of the last is the commit."""


class Observer(Protocol):
    """Is told about the progress of a run."""

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts, of so many bytes to write (or to read, when nothing is written)."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""

    def end(self) -> None:
        """The stage is over."""


class Engine(Protocol):
    """Carries out tasks."""

    name: str
    """Name, e.g. "processes"."""

    def run(
        self, job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int
    ) -> Generator[Done, None, None]:
        """Reports of `tasks`, in the order they finish. Raises what a worker raised; then the rest is not done.

        Closing the generator ends the work.
        """
