"""Splits the work into rounds, for a disk that has room for only some of the files at a time.

1. The files of a plan, in order, are grouped into rounds of limited size.
2. A task that writes files of several rounds is split into one task per round; tasks are ordered by round.
3. The tasks of a round run together. After the last task that writes a file, the file can be uploaded and removed.

A state that is read in tiles (`ucp.transfer.plan.tiles`) is read once for all files of a round that need it, and once
more in each later round. So rounds are larger if there are such states and the disk has room.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from ucp.core.target import OutputFile
from ucp.errors import DestinationError
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import LazyTasks, pick_tasks
from ucp.transfer.plan.tasks import BLOCK, Task

ROUND = 4 << 30
"""Bytes of the files of a round, unless a single file is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of the disk is in use at any time."""

    limit: int
    """The most bytes of the files of one round."""
    nbytes: int
    """The most bytes that files take on the disk at any time: those of a round, and those being uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Files that are written at the same time."""

    files: tuple[OutputFile, ...]
    """The files."""
    room: Mapping[str, int]
    """Bytes of disk that each file needs while it is written, by path."""
    tasks: Sequence[Task]
    """The tasks that write the files."""

    @property
    def nbytes(self) -> int:
        """Bytes of disk that the files need together."""
        return sum(self.room.values())


def plan_room(job: Job, files: Sequence[OutputFile], *, free: int, place: str) -> Room:
    """How much of `free` bytes at `place` rounds use. Raises DestinationError if a file does not fit."""
    sizes = _measure_files(job, files)
    largest = max(sizes, key=lambda path: sizes[path], default="")
    least, total = sizes.get(largest, 0), sum(sizes.values())
    if least > free:
        raise DestinationError(
            f"expected {least:,} free bytes for {largest} at {place}, where a file is written before it is uploaded; "
            f"got {free:,}. Free space there, or name a folder with more space by --scratch or UCP_SCRATCH, or choose "
            "a target with smaller files (more ranks, or another layout)"
        )
    limit = max(least, ROUND)
    number_of = {file.path: number for number, group in enumerate(_group_files(files, sizes, limit)) for file in group}
    is_cut = any(  # a tiled state, read once for several files, would have to be read again in another round
        len({number_of[fill.path] for fill in task.fills}) > 1
        for task in job.tasks
        if task.fills[0].sections[0].placement in job.tiled
    )
    if is_cut:
        limit = max(least, min(total, free // 2))
    return Room(limit=limit, nbytes=min(total, 2 * limit, free))


@dataclass(frozen=True, slots=True)
class _RoundTasks(LazyTasks):
    """Tasks split by round, in the order of the rounds; each is made when it is accessed."""

    tasks: Sequence[Task]
    """The tasks before they are split."""
    number_of: Mapping[str, int]
    """Path of a file to its round; finished files have none."""
    positions: array[int]
    """For each split task, the position of the task that it is a part of."""
    begins: array[int]
    """For each round, from -1 (finished files) on, the position of its first task; then the number of all tasks."""

    @classmethod
    def split(cls, tasks: Sequence[Task], number_of: Mapping[str, int], rounds: int) -> _RoundTasks:
        """Split `tasks`; only positions are stored."""
        positions = [array("q") for _ in range(rounds + 1)]
        for position, task in enumerate(tasks):
            for number in {number_of.get(fill.path, -1) for fill in task.fills}:
                positions[number + 1].append(position)
        begins = array("q", accumulate(map(len, positions), initial=0))
        return cls(tasks, number_of, array("q", chain.from_iterable(positions)), begins)

    def select_round(self, number: int) -> Sequence[Task]:
        """The tasks of a round."""
        return pick_tasks(self, range(self.begins[number + 1], self.begins[number + 2]))

    def __len__(self) -> int:
        return len(self.positions)

    def task_at(self, position: int) -> Task:
        """Make the task at `position`: the part of a task that writes files of one round."""
        number = bisect_right(self.begins, position) - 2
        task = self.tasks[self.positions[position]]
        fills = [fill for fill in task.fills if self.number_of.get(fill.path, -1) == number]
        return Task(number=position, fills=tuple(fills), nbytes=sum(fill.nbytes for fill in fills))


def split_rounds(
    job: Job, files: Sequence[OutputFile], *, limit: int, finished: Collection[str] = ()
) -> tuple[Job, tuple[Round, ...]]:
    """`job` with its tasks split and ordered by rounds, and the rounds; their `files` have at most `limit` bytes each.

    Tasks of files that are `finished` come first, and belong to no round.
    """
    sizes = _measure_files(job, files)
    groups = _group_files([file for file in files if file.path not in finished], sizes, limit)
    number_of = {file.path: number for number, group in enumerate(groups) for file in group}
    tasks = _RoundTasks.split(job.tasks, number_of, len(groups))
    rounds = tuple(
        Round(
            files=tuple(alike), room={file.path: sizes[file.path] for file in alike}, tasks=tasks.select_round(number)
        )
        for number, alike in enumerate(groups)
    )
    return replace(job, tasks=tasks), rounds


def _group_files(files: Sequence[OutputFile], sizes: Mapping[str, int], limit: int) -> list[list[OutputFile]]:
    """Groups of neighbouring files with at most `limit` bytes together; a larger file is a separate group."""
    groups: list[list[OutputFile]] = []
    room = 0
    for file in files:
        if not groups or sizes[file.path] > room:
            groups.append([])
            room = limit
        groups[-1].append(file)
        room -= sizes[file.path]
    return groups


def _measure_files(job: Job, files: Sequence[OutputFile]) -> dict[str, int]:
    """Bytes of disk that each file needs while it is written; encoded files can be a little longer than their data."""
    packed: dict[str, int] = defaultdict(int)
    if job.target.compress:
        for task in job.tasks:
            for fill in task.fills:
                rows = sum(section.nbytes for section in fill.sections if section.placement in job.tiled)
                packed[fill.path] += fill.nbytes + rows + fill.nbytes // 256 + BLOCK // 64
    return {file.path: max(file.nbytes, packed.get(file.path, 0)) for file in files}
