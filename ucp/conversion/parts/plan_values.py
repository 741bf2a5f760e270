"""A part of a plan as JSON, and back: tasks, and of source and destination what carrying them out takes.

What is read is put together from numbers and strings by the classes below alone, so nothing of a file is ever run.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeVar, overload

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Slice
from ucp.core.target import OutputFile, Placement, RawCopy, TargetPlan
from ucp.core.tensor import InlineTensor, Record, Tensor, TensorRef
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import TaskList, extent_of
from ucp.transfer.plan.tasks import Share, Task

__all__ = ["Chunk", "Encoder", "Known"]

T = TypeVar("T")

_VALUES = (Box, RegionPair, TensorRef, InlineTensor, Fragment, Slice, Placement, RawCopy, Record)
_LISTED: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*(own.name for own in fields(kind))) for kind in _VALUES
}


@dataclass(frozen=True, slots=True)
class Known(Sequence[T]):
    """A sequence of which some items are known, each at its place."""

    length: int
    """How many there are."""
    items: Mapping[int, T]
    """Those that are known."""

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            raise TypeError("expected a number; got a slice: not all items are known")
        return self.items[at]


@dataclass(slots=True)
class Chunk:
    """Tasks that follow one another, and all that they refer to."""

    tasks: list[Task] = field(default_factory=list)
    """The tasks."""
    placements: dict[int, Placement] = field(default_factory=dict)
    """Those that the tasks write, by number."""
    raw: dict[int, RawCopy] = field(default_factory=dict)
    """The same of raw copies, not counted on."""
    atoms: dict[str, AtomIndex] = field(default_factory=dict)
    """States that they are filled from."""
    files: dict[str, OutputFile] = field(default_factory=dict)
    """Files that they are written to, without what stands there beside tensors."""
    records: list[Record] = field(default_factory=list)
    """Stretches of the source, with a recorded checksum, that are read from."""
    checking: set[int] = field(default_factory=set)
    """See `Job`."""
    crosswise: set[int] = field(default_factory=set)
    """See `Job`."""

    def add(self, text: bytes, share: Share, total: int) -> None:
        """Take in what `Encoder.chunk` made: of its tasks those of `share`, where all write `total` bytes.

        Raises ValueError, KeyError, TypeError, IndexError for anything else.
        """
        said = json.loads(text)
        self.placements |= {int(number): _placement(own) for number, own in said["placements"].items()}
        self.raw |= {
            int(number): RawCopy(src=_ref(src), path=p, offset=o) for number, (src, p, o) in said["raw"].items()
        }
        for name, shape, kind, states in said["atoms"]:
            known = self.atoms[name].states if name in self.atoms else {}
            new = {state: _state(own) for state, own in states.items()}
            self.atoms[name] = AtomIndex(name=name, global_shape=tuple(shape), kind=Kind(kind), states={**known, **new})
        self.files |= {path: OutputFile(path=path, nbytes=nbytes) for path, nbytes in said["files"].items()}
        self.records += [Record(path=p, name=n, offset=o, nbytes=b, crc32=c) for p, n, o, b, c in said["records"]]
        self.checking |= set(said["checking"])
        self.crosswise |= set(said["crosswise"])
        placed = Known(said["base"], self.placements), Known(said["base"], self.raw)
        tasks = _tasks(said["tasks"], TargetPlan(files=(), placements=placed[0], raw=placed[1]))
        starts = tasks.starts
        self.tasks += [
            replace(task, number=said["first"] + task.number)
            for task in tasks
            if Share.at(*starts[task.number : task.number + 2], total=total, parts=share.parts) == share.number
        ]


class Encoder:
    """Makes chunks of a plan."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._nbytes = {file.path: file.nbytes for file in job.target.files}
        self._records: dict[str, list[Record]] = {}
        for record in sorted(job.index.records, key=lambda record: (record.path, record.offset)):
            self._records.setdefault(record.path, []).append(record)
        self._starts = {path: [record.offset for record in own] for path, own in self._records.items()}

    def chunk(self, every: TaskList, wanted: range) -> bytes:
        """Tasks that follow one another, with all that they refer to."""
        job, base, tasks = self._job, len(self._job.target.placements), every.cut(wanted)
        numbers = sorted({*tasks.bundled, *(number for own in tasks.whole for _, part in own for number in part)})
        placements = {number: job.target.placements[number] for number in numbers if number < base}
        raw = {number - base: job.target.raw[number - base] for number in numbers if number >= base}
        states: dict[str, dict[str, StateIndex]] = {}
        for own in placements.values():
            name, state = own.slice.param, own.slice.state
            states.setdefault(name, {})[state] = job.index.atoms[name].states[state]
        refs = [piece.ref for own in states.values() for state in own.values() for piece in state.fragments]
        said = {
            "first": wanted.start,
            "base": base,
            "tasks": [tasks.block, tasks.whole, *map(list, (tasks.bundled, tasks.begins, tasks.blocks, tasks.starts))],
            "placements": placements,
            "raw": raw,
            "atoms": [_described(job.index.atoms[name], own) for name, own in states.items()],
            "files": {path: self._nbytes[path] for path in (extent_of(job.target, number).path for number in numbers)},
            "records": list(self._met([*refs, *(own.src for own in raw.values())])),
            "checking": [number for number in numbers if number in job.checking],
            "crosswise": [number for number in numbers if number in job.crosswise],
        }
        return json.dumps(said, default=_listed, separators=(",", ":")).encode()

    def _met(self, refs: Iterable[Tensor]) -> Iterator[Record]:
        """Records that some of these lie in, each once."""
        met: dict[str, set[int]] = {}
        for ref in refs:
            if not isinstance(ref, TensorRef) or ref.path not in self._records:
                continue
            own, starts = self._records[ref.path], self._starts[ref.path]
            stop = ref.offset + (ref.codec_nbytes if ref.codec else ref.extent)
            at = max(0, bisect_right(starts, ref.offset) - 1)
            while at < len(own) and own[at].offset < stop:
                met.setdefault(ref.path, set()).add(at)
                at += 1
        for path, numbers in met.items():
            yield from (self._records[path][number] for number in sorted(numbers))


def _listed(value: object) -> object:
    """A value in terms of JSON, one level deep."""
    if isinstance(value, bytes):
        return value.hex()
    return _LISTED[type(value)](value)


def _described(atom: AtomIndex, states: Mapping[str, StateIndex]) -> object:
    said = {name: [own.dtype, own.global_shape, own.fragments, own.overlap] for name, own in states.items()}
    return [atom.name, atom.global_shape, atom.kind, said]


def _tasks(said: list[Any], target: TargetPlan) -> TaskList:
    block, whole, *numbers = said
    bundled, begins, blocks, starts = (array("q", own) for own in numbers)
    return TaskList(
        target=target,
        block=block,
        whole=tuple(tuple((path, tuple(part)) for path, part in own) for own in whole),
        bundled=bundled,
        begins=begins,
        blocks=blocks,
        starts=starts,
        listed=range(len(starts) - 1),
    )


def _placement(said: list[Any]) -> Placement:
    (param, state, dtype, pairs, shape, start, stop), path, offset = said
    own = Slice(
        param=param,
        state=state,
        dtype=DType(dtype),
        pairs=tuple(RegionPair(_box(whole), _box(local), copy) for whole, local, copy in pairs),
        local_shape=tuple(shape),
        start=start,
        stop=stop,
    )
    return Placement(slice=own, path=path, offset=offset)


def _state(said: list[Any]) -> StateIndex:
    dtype, shape, pieces, overlap = said
    return StateIndex(
        dtype=DType(dtype), global_shape=tuple(shape), fragments=tuple(map(_fragment, pieces)), overlap=Overlap(overlap)
    )


def _fragment(said: list[Any]) -> Fragment:
    box, ref, replica, term, derived = said
    return Fragment(
        box=_box(box),
        ref=_inline(ref) if len(ref) == len(fields(InlineTensor)) else _ref(ref),
        replica=replica,
        term=term,
        derived=derived,
    )


def _box(said: list[list[int]]) -> Box:
    offsets, sizes = said
    return Box(tuple(offsets), tuple(sizes))


def _inline(said: list[Any]) -> InlineTensor:
    data, dtype, shape, repeats = said
    return InlineTensor(data=bytes.fromhex(data), dtype=DType(dtype), shape=tuple(shape), repeats=repeats)


def _ref(said: list[Any]) -> TensorRef:
    path, offset, dtype, shape, strides, codec, nbytes, start = said
    return TensorRef(
        path=path,
        offset=offset,
        dtype=DType(dtype),
        shape=tuple(shape),
        strides=tuple(strides),
        codec=codec,
        codec_nbytes=nbytes,
        codec_start=start,
    )
