"""The tasks of a plan as a lazy list: only where each task begins is stored, about 24 bytes per task.

1. `list_tasks` goes through the placements in the order of the files, and counts blocks, fills and bundles without
   making objects for them: a plan can have millions of blocks.
2. `TaskList` makes a task when it is accessed.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple, overload

from ucp.core.slices import block_ranges
from ucp.core.target import TargetPlan
from ucp.transfer.plan.tasks import Fill, Section, Share, Task


class LazyTasks(Sequence[Task]):
    """A sequence that makes each task when it is accessed; slicing makes none."""

    __slots__ = ()

    @abstractmethod
    def task_at(self, position: int) -> Task:
        """Make the task at `position`."""

    def __iter__(self) -> Iterator[Task]:
        return map(self.task_at, range(len(self)))

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Task]: ...
    def __getitem__(self, at: int | slice) -> Task | Sequence[Task]:
        positions = range(len(self))[at]
        return self.task_at(positions) if isinstance(positions, int) else pick_tasks(self, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList(LazyTasks):
    """Tasks in the order of their numbers, each made when it is accessed.

    There are two kinds: first *single* tasks, each of which writes certain placements completely; then *bundles* of the
    blocks of all other placements, in the order of the files. Raw copies are numbered after the placements.
    """

    target: TargetPlan
    """What all tasks write."""
    block: int
    """Bytes of a block."""
    single: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """For each single task: the output files, and the numbers of the placements that it writes to each."""
    bundled: array[int]
    """Numbers of the placements and raw copies that bundles write, in order."""
    begins: array[int]
    """For each bundle, the position in `bundled` of its first placement; then the position after the last bundle."""
    blocks: array[int]
    """For each bundle, the number of its first block in that placement; then the same for the end."""
    starts: array[int]
    """For each task, the bytes that the tasks before it write; then the bytes of all tasks."""
    listed: range
    """Numbers of the tasks that are in this list."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tasks in this list write."""
        return self.starts[self.listed.stop] - self.starts[self.listed.start]

    def select_share(self, share: Share) -> TaskList:
        """The tasks of one share of the work."""

        def part(number: int) -> int:
            low, high = self.starts[number : number + 2]
            return Share.find_part(low, high, total=self.starts[-1], parts=share.parts)

        every = range(len(self.starts) - 1)
        low = bisect_left(every, share.number, key=part)
        return replace(self, listed=range(low, bisect_left(every, share.number + 1, lo=low, key=part)))

    def __len__(self) -> int:
        return len(self.listed)

    def task_at(self, position: int) -> Task:
        """Make the task at `position`."""
        number = self.listed[position]
        if number < len(self.single):
            fills = [
                Fill(
                    path=path,
                    sections=tuple(
                        section
                        for placement in placements
                        for section in _cut_blocks(find_output(self.target, placement), placement, self.block)
                    ),
                )
                for path, placements in self.single[number]
            ]
        else:
            fills = [*self._bundle(number - len(self.single))]
        return Task(number=number, fills=tuple(fills), nbytes=self.starts[number + 1] - self.starts[number])

    def _bundle(self, number: int) -> Iterator[Fill]:
        first, last = self.begins[number : number + 2]
        begin, end = self.blocks[number : number + 2]
        for path, positions in groupby(range(first, last + bool(end)), key=lambda at: self._output(at).path):
            sections = (
                _cut_blocks(
                    self._output(at),
                    self.bundled[at],
                    self.block,
                    begin if at == first else 0,
                    end if at == last else None,
                )
                for at in positions
            )
            yield from _join_fills(path, chain.from_iterable(sections), self.block)

    def _output(self, at: int) -> OutputRange:
        return find_output(self.target, self.bundled[at])


@dataclass(frozen=True, slots=True)
class _PickedTasks(LazyTasks):
    """Some of the tasks of a sequence, each taken from it when it is accessed: 8 bytes per task."""

    tasks: Sequence[Task]
    """The sequence."""
    positions: array[int]
    """Position of each picked task in the sequence."""

    def __len__(self) -> int:
        return len(self.positions)

    def task_at(self, position: int) -> Task:
        """Take the task at `position` from the sequence."""
        return self.tasks[self.positions[position]]


def pick_tasks(tasks: Sequence[Task], positions: Iterable[int]) -> Sequence[Task]:
    """The tasks at `positions`, in that order; each is made only when it is accessed."""
    return _PickedTasks(tasks, array("q", positions))


def count_bytes(tasks: Iterable[Task]) -> int:
    """Bytes that tasks write."""
    return tasks.nbytes if isinstance(tasks, TaskList) else sum(task.nbytes for task in tasks)


def list_tasks(target: TargetPlan, tiled: Collection[int], *, block: int, limit: int) -> TaskList:
    """All tasks that fill a target. `tiled`: placements that are read in tiles (see `ucp.transfer.plan.tiles`).

    `block`: bytes of a block, a multiple of every itemsize. `limit`: bytes of a bundle.
    """
    files = _group_by_path(target)
    packs = {placement.path for placement in target.placements} if target.compress else frozenset()
    plain = [(path, numbers) for path, numbers in files if path not in packs]
    spread: dict[object, list[tuple[str, tuple[int, ...]]]] = {}
    for path, numbers in plain:
        for number in numbers:
            if number in tiled:  # one task reads a state once, for all placements with the same dtype
                tensor_slice = target.placements[number].slice if number < len(target.placements) else None
                key = number if tensor_slice is None else (tensor_slice.param, tensor_slice.state, tensor_slice.dtype)
                spread.setdefault(key, []).append((path, (number,)))
    single = [tuple(writes) for writes in spread.values()]
    single += [((path, tuple(numbers)),) for path, numbers in files if path in packs]
    cut = _TaskCutter(target, block=block, limit=limit)
    for writes in single:
        cut.add_single(number for _, numbers in writes for number in numbers)
    for _, numbers in plain:
        for number in numbers:
            if number not in tiled:
                cut.add(number)
    return cut.finish(tuple(single))


class _TaskCutter:
    """Finds where bundles begin, by counting blocks instead of making them.

    A full block is a separate fill, because nothing can be joined to it. The rest of a placement, and small placements,
    are joined to one fill as long as they follow one another in a file.
    """

    def __init__(self, target: TargetPlan, *, block: int, limit: int) -> None:
        """`block`: bytes of a block. `limit`: bytes of a bundle, a multiple of `block`."""
        self._target, self._block, self._limit = target, block, limit
        self._bundled, self._begins, self._blocks = array("q"), array("q"), array("q")
        self._starts = array("q")
        self._nbytes = 0
        """Bytes of all tasks so far."""
        self._room = -1
        """Bytes that the last bundle can still take; negative if there is no bundle yet."""
        self._fill: _OpenFill | None = None

    def add_single(self, numbers: Iterable[int]) -> None:
        """Add a task that writes these placements completely, and nothing else; all such tasks come first."""
        self._starts.append(self._nbytes)
        self._nbytes += sum(find_output(self._target, number).nbytes for number in numbers)

    def add(self, number: int) -> None:
        """Add the next placement to the bundles."""
        output, position = find_output(self._target, number), len(self._bundled)
        self._bundled.append(number)
        if self._fill is not None and self._fill.accepts(output, self._block):
            self._fill = self._fill._replace(nbytes=self._fill.nbytes + output.nbytes)
            return
        self._close()
        full, rest = divmod(output.nbytes, self._block)
        self._add_full(position, full)
        if rest:
            self._fill = _OpenFill(output.path, output.offset + full * self._block, rest, position, full)

    def _add_full(self, at: int, blocks: int) -> None:
        done = min(blocks, max(self._room, 0) // self._block)
        self._room -= done * self._block
        self._nbytes += done * self._block
        while done < blocks:
            count = min(blocks - done, max(1, self._limit // self._block))
            self._begin(at, done)
            self._room -= count * self._block
            self._nbytes += count * self._block
            done += count

    def _begin(self, at: int, block: int) -> None:
        self._begins.append(at)
        self._blocks.append(block)
        self._starts.append(self._nbytes)
        self._room = self._limit

    def _close(self) -> None:
        """Put the open fill into a bundle."""
        fill, self._fill = self._fill, None
        if fill is None:
            return
        if fill.nbytes > self._room:
            self._begin(fill.position, fill.block)
        self._room -= fill.nbytes
        self._nbytes += fill.nbytes

    def finish(self, single: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]) -> TaskList:
        """The list of all tasks."""
        self._close()
        self._begin(len(self._bundled), 0)
        return TaskList(
            target=self._target,
            block=self._block,
            single=single,
            bundled=self._bundled,
            begins=self._begins,
            blocks=self._blocks,
            starts=self._starts,
            listed=range(len(self._starts) - 1),
        )


class _OpenFill(NamedTuple):
    """A fill to which further placements may be joined."""

    path: str
    """Output file."""
    offset: int
    """First byte of the fill in that file."""
    nbytes: int
    """Bytes of the fill so far."""
    position: int
    """Position in `bundled` of the placement with which the fill begins."""
    block: int
    """Number of its first block in that placement."""

    def accepts(self, output: OutputRange, block: int) -> bool:
        """Whether a placement can be joined to the fill."""
        follows = self.path == output.path and self.offset + self.nbytes == output.offset
        return follows and self.nbytes + output.nbytes <= block


def _group_by_path(target: TargetPlan) -> list[tuple[str, list[int]]]:
    """Output files with the numbers of the placements and raw copies that go there, in the order of their bytes.

    Raw copies are numbered after the placements. Empty placements and copies are left out.
    """
    rank = {file.path: position for position, file in enumerate(target.files)}
    sized = [(rank[p.path], p.offset, n) for n, p in enumerate(target.placements) if p.slice.start < p.slice.stop]
    raw = enumerate(target.raw, len(target.placements))
    sized += [(rank[group.path], group.offset, number) for number, group in raw if group.src.numel]
    by_file = groupby(sorted(sized), key=lambda item: item[0])
    return [(target.files[position].path, [number for _, _, number in group]) for position, group in by_file]


class OutputRange(NamedTuple):
    """Where a placement or a raw copy is written."""

    path: str
    """Output file."""
    offset: int
    """Byte in that file where the first element goes."""
    start: int
    """First element of the slice's local tensor."""
    stop: int
    """One past the last."""
    itemsize: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return (self.stop - self.start) * self.itemsize


def find_output(target: TargetPlan, number: int) -> OutputRange:
    """Where placement `number` is written; raw copies are numbered after the placements."""
    if number < len(target.placements):
        placement = target.placements[number]
        tensor_slice = placement.slice
        return OutputRange(
            placement.path, placement.offset, tensor_slice.start, tensor_slice.stop, tensor_slice.dtype.itemsize
        )
    raw = target.raw[number - len(target.placements)]
    return OutputRange(raw.path, raw.offset, 0, raw.src.numel, raw.src.dtype.itemsize)


def _cut_blocks(
    output: OutputRange, placement: int, block: int, first: int = 0, last: int | None = None
) -> Iterator[Section]:
    """Blocks `first` to `last` of a placement."""
    step = max(1, block // output.itemsize)
    stop = output.stop if last is None else min(output.stop, output.start + last * step)
    for low, high in block_ranges(output.start + first * step, stop, step):
        offset = output.offset + (low - output.start) * output.itemsize
        yield Section(placement=placement, start=low, stop=high, offset=offset, nbytes=(high - low) * output.itemsize)


def _join_fills(path: str, sections: Iterable[Section], block: int) -> Iterator[Fill]:
    run: list[Section] = []
    for section in sections:
        joins = bool(run) and run[-1].offset + run[-1].nbytes == section.offset
        if run and not (joins and section.offset + section.nbytes - run[0].offset <= block):
            yield Fill(path=path, sections=tuple(run))
            run = []
        run.append(section)
    if run:
        yield Fill(path=path, sections=tuple(run))
