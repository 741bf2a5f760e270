"""A part of a plan as JSON, and back: tasks, and of source and destination what carrying them out takes.

What is read is put together from numbers and strings by the classes below alone, so nothing of a file is ever run.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Slice
from ucp.core.target import OutputFile, Placement, RawCopy
from ucp.core.tensor import InlineTensor, Record, Tensor, TensorRef
from ucp.transfer.job import Job
from ucp.transfer.tasks import Fill, Section, Share, Task

__all__ = ["Chunk", "Encoder"]

_VALUES = (Box, RegionPair, TensorRef, InlineTensor, Fragment, Slice, Placement, RawCopy, Section, Fill, Task, Record)
_LISTED: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*(own.name for own in fields(kind))) for kind in _VALUES
}


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

    def add(self, text: bytes, start: int, share: Share, total: int) -> None:
        """Take in what `Encoder.chunk` made: of its tasks, which begin at byte `start` of `total`, those of `share`.

        Raises ValueError, KeyError, TypeError, IndexError for anything else.
        """
        said = json.loads(text)
        for task in map(_task, said["tasks"]):
            stop = start + task.nbytes
            if Share.at(start, stop, total=total, parts=share.parts) == share.number:
                self.tasks.append(task)
            start = stop
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


class Encoder:
    """Makes chunks of a plan."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._nbytes = {file.path: file.nbytes for file in job.target.files}
        self._records: dict[str, list[Record]] = {}
        for record in sorted(job.index.records, key=lambda record: (record.path, record.offset)):
            self._records.setdefault(record.path, []).append(record)
        self._starts = {path: [record.offset for record in own] for path, own in self._records.items()}

    def chunk(self, tasks: Sequence[Task]) -> bytes:
        """Tasks with all that they refer to."""
        job, base = self._job, len(self._job.target.placements)
        numbers = sorted({section.placement for task in tasks for fill in task.fills for section in fill.sections})
        placements = {number: job.target.placements[number] for number in numbers if number < base}
        raw = {number - base: job.target.raw[number - base] for number in numbers if number >= base}
        states: dict[str, dict[str, StateIndex]] = {}
        for own in placements.values():
            name, state = own.slice.param, own.slice.state
            states.setdefault(name, {})[state] = job.index.atoms[name].states[state]
        refs = [piece.ref for own in states.values() for state in own.values() for piece in state.fragments]
        said = {
            "tasks": tasks,
            "placements": placements,
            "raw": raw,
            "atoms": [_described(job.index.atoms[name], own) for name, own in states.items()],
            "files": {fill.path: self._nbytes[fill.path] for task in tasks for fill in task.fills},
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


def _task(said: list[Any]) -> Task:
    number, fills, nbytes, projected = said
    own = tuple(Fill(path=path, sections=tuple(map(_section, sections))) for path, sections in fills)
    return Task(number=number, fills=own, nbytes=nbytes, projected_bytes=projected)


def _section(said: list[int]) -> Section:
    placement, start, stop, offset, nbytes = said
    return Section(placement=placement, start=start, stop=stop, offset=offset, nbytes=nbytes)


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
