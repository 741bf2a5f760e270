"""`distrib_optim.pt`: masters and moments of a rank's data-parallel group, all parameters end to end in flat buffers.

| since | structure |
|---|---|
| 2023-05 | {chunk: {dtype: {param, exp_avg, exp_avg_sq: one tensor}}}, padded at the end |
| 2023-10 | the same with a list of tensors, one per bucket, each padded at its end |
| 2024-04 | {buckets_coalesced: True, buffer: {(param dtype, grad dtype): {..., numel_unpadded}}}, no padding at ends |
| 2024-07 | the same, parameters aligned to 64 elements |

Where experts are parallel the file is a list: dense parameters, then experts; None for what another rank saved. No name
is recorded. The order is that of registration, reversed; where a parameter starts is found by walking, and every place
is proved by the contents (`buffer_layout`). Where the order is another, contents alone decide (`placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ucp.core.dtypes import DType
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import described, mapping, sequence
from ucp.transfer.probe import Prober
from ucp_formats.megatron.flat_buffer.boxes import Candidate, FlatBuffer, Stretch
from ucp_formats.megatron.flat_buffer.layout import Place, bucket_multiple, walk
from ucp_formats.megatron.flat_buffer.matcher import Fingerprints, Recogniser
from ucp_formats.megatron.flat_buffer.ties import ambiguous
from ucp_formats.megatron.legacy.model import Held
from ucp_formats.megatron.legacy.optimizer.masters import WINDOW, is_master_of
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates, Population

__all__ = ["Buffer", "add_buffers", "read_buffers"]

_MASTER = "param"
_COALESCED = "buckets_coalesced"
_SIZES = ("numel_unpadded", "per_bucket_numel", "per_bucket_numel_unpadded")
"""Numbers in the file that are no states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One flat buffer: all states of some parameters of one rank."""

    where: str
    """The buffer, for messages."""
    number: int
    """Its number among those of its optimizer: chunks in order, in each one buffer per type."""
    dtype: DType | None
    """Type in which the model computes with its parameters; None where the file does not say."""
    states: Mapping[str, tuple[TensorRef, ...]]
    """State name to its tensors, one or one per bucket; the master is `weight`."""
    is_padded: bool
    """Whether padding at the ends of buckets is in the file."""

    @property
    def masters(self) -> tuple[TensorRef, ...]:
        """The masters."""
        return self.states[WEIGHT]


def read_buffers(saved: object, where: str) -> list[list[Buffer] | None]:
    """Buffers of every optimizer in the file; None for one that another rank saved. Raises MalformedError."""
    members = saved if isinstance(saved, list) else [saved]
    return [None if own is None else list(_buffers(mapping(own, where), where)) for own in members]


def _buffers(saved: Mapping[object, object], where: str) -> Iterator[Buffer]:
    numbered = {key: own for key, own in saved.items() if isinstance(key, int) and not isinstance(key, bool)}
    odd = [repr(key) for key in saved if key not in numbered and key not in (_COALESCED, *_SIZES)]
    if odd:
        raise UnsupportedError(f"expected numbered buffers in {where}; got {', '.join(odd[:5])}")
    for count, (number, by_dtype) in enumerate(sorted(numbered.items(), key=lambda item: int(str(item[0])))):
        for own, (dtype, states) in enumerate(mapping(by_dtype, f"buffer {number} of {where}").items()):
            label = f"buffer {number} of {where}"
            yield Buffer(
                where=label,
                number=count + own,
                dtype=_param_dtype(dtype),
                states=dict(_states(mapping(states, label), label)),
                is_padded=not saved.get(_COALESCED),
            )


def _states(saved: Mapping[object, object], where: str) -> Iterator[tuple[str, tuple[TensorRef, ...]]]:
    for key, value in saved.items():
        if key in _SIZES:
            continue
        tensors = sequence(value, f"{key!r} in {where}") if isinstance(value, list | tuple) else (value,)
        refs = tuple(own for own in tensors if isinstance(own, TensorRef))
        if len(refs) != len(tensors) or any(len(own.shape) != 1 or not own.is_contiguous for own in refs):
            raise MalformedError(f"expected flat tensors for {key!r} in {where}; got {described(value)}")
        yield WEIGHT if key == _MASTER else str(key), refs
    if _MASTER not in saved:
        raise MalformedError(f"expected {_MASTER!r} in {where}; got {', '.join(map(str, saved))}")


def _param_dtype(key: object) -> DType | None:
    """Type of the parameters out of (param dtype, grad dtype); before 2024-03 the key was that of the gradients."""
    first = key[0] if isinstance(key, tuple) and key else None
    name = first.qualname if isinstance(first, GlobalName) else None
    return next((own for own in DType if own.value == name), None)


def add_buffers(
    buffers: Sequence[Buffer], population: Population, dp: int, states: LegacyStates, prober: Prober
) -> None:
    """Add the states of the parameters in `buffers` to `states`.

    Raises MalformedError naming what could not be placed.
    """
    left = {held.slot: held for held in population.held}
    problems: list[str] = []
    for buffer in buffers:
        chunks = {held.slot.chunk for held in population.held if buffer.dtype in (None, held.ref.dtype)}
        guesses = _guesses(buffer, list(left.values()), buffers)
        each_has_one = [own.dtype for own in buffers].count(buffer.dtype) == len(chunks)
        slack = bucket_multiple(dp) - 1 if buffer.is_padded else 0
        found = _placed(buffer, guesses, slack, prober, only_first=each_has_one)
        if found is None:
            found, unplaced = _by_contents(buffer, list(left.values()), states, prober)
            problems += unplaced
        for held, place in found:
            states.tensors[held.slot] = {
                key: _part(refs[place.segment], place.start, held.ref.shape) for key, refs in buffer.states.items()
            }
            del left[held.slot]
    if left and not problems:
        named = ", ".join(held.name for held in list(left.values())[:3]) + (", ..." if len(left) > 3 else "")
        what = f"{counted(len(left), 'parameter')} not trained: {named}"
        states.notes.append(f"{population.where} has no states of {what}")
    if problems:
        names = (f"{held.slot.key} {list(held.ref.shape)}" for held in left.values())
        raise MalformedError(
            f"{population.where}: {counted(len(problems), 'stretch', 'stretches')} of its buffers without a "
            "parameter of the model:\n"
            f"{listed(problems)}\nparameters that were not found:\n{listed(names)}\n"
            "The file is of another run than the model, or its weights were changed after it was saved"
        )


def _placed(
    buffer: Buffer, guesses: Iterable[Sequence[Held]], slack: int, prober: Prober, *, only_first: bool
) -> list[tuple[Held, Place]] | None:
    """Parameters of the buffer in the order of the model, each proved; None when there is no such layout.

    `only_first`: the first guess that holds is right, because every chunk has a buffer. Raises MalformedError where
    several guesses hold else, or several layouts of one.
    """
    found: list[list[tuple[Held, Place]]] = []
    for candidates in guesses:
        found += _layouts(buffer, candidates, slack, prober)
        if found and only_first:
            break
    if len(found) > 1:
        raise ambiguous(f"{buffer.where}: ", _differences(found))
    return found[0] if found else None


def _layouts(buffer: Buffer, candidates: Sequence[Held], slack: int, prober: Prober) -> list[list[tuple[Held, Place]]]:
    """The first and the last layout that order and contents allow; one when they are the same, none, or two."""
    numels = [own.ref.numel for own in candidates]
    segments = [ref.numel for ref in buffer.masters]
    contents = _Contents(buffer, candidates, prober)
    first = walk(numels, segments, contents.fitting, slack=slack, zeros=contents.zeros)
    if first is None or all(place is None for place in first):
        return []
    last = walk(numels, segments, contents.fitting, slack=slack, zeros=contents.zeros, last=True)
    return [
        [(own, place) for own, place in zip(candidates, places, strict=True) if place is not None]
        for places in dict.fromkeys((first, last))
        if places is not None
    ]


def _differences(layouts: Sequence[Sequence[tuple[Held, Place]]]) -> list[str]:
    """Places that hold another parameter in one layout than in the next, with what they may hold."""
    at: dict[Place, list[str]] = {}
    for held, place in chain.from_iterable(layouts):
        at.setdefault(place, []).append(f"{held.name} {list(held.ref.shape)}")
    named = {place: list(dict.fromkeys(names)) for place, names in sorted(at.items())}
    sure = {place for place, names in at.items() if len(names) == len(layouts) and len(named[place]) == 1}
    return [f"element {place.start}: {', '.join(names)}" for place, names in named.items() if place not in sure]


class _Contents:
    """Which parameters stand where in a buffer: by their first elements, confirmed in windows."""

    def __init__(self, buffer: Buffer, candidates: Sequence[Held], prober: Prober) -> None:
        self._masters = buffer.masters
        self._candidates = candidates
        self._prober = prober
        self._by_first: dict[tuple[int, DType, bytes], list[int]] = {}
        self._known: dict[Place, tuple[int, ...]] = {}
        self.zeros: set[int] = set()
        """Numbers of the parameters that start with zeros."""
        for number, held in enumerate(candidates):
            length = min(held.ref.numel, WINDOW)
            first = prober.window(held.ref, 0, length, dtype=held.ref.dtype)
            self._by_first.setdefault((length, held.ref.dtype, first), []).append(number)
            if not any(first):
                self.zeros.add(number)
        self._lengths = {(length, dtype) for length, dtype, _ in self._by_first}

    def fitting(self, place: Place) -> tuple[int, ...]:
        """Numbers of the parameters whose contents stand there."""
        if place not in self._known:
            self._known[place] = tuple(self._found(place))
        return self._known[place]

    def _found(self, place: Place) -> Iterator[int]:
        flat = self._masters[place.segment]
        for length, dtype in self._lengths:
            if place.start + length <= flat.numel:
                first = self._prober.window(flat, place.start, place.start + length, dtype=dtype)
                for number in self._by_first.get((length, dtype, first), ()):
                    weight = self._candidates[number].ref
                    inside = place.start + weight.numel <= flat.numel
                    if inside and is_master_of(_part(flat, place.start, weight.shape), weight, self._prober):
                        yield number


def _guesses(buffer: Buffer, left: Sequence[Held], buffers: Sequence[Buffer]) -> Iterator[list[Held]]:
    """Parameters that the buffer may consist of: of one chunk and type; likeliest first."""
    chunks = sorted({own.slot.chunk for own in left})
    dtypes = [own.dtype for own in buffers]
    fitting = [own for own in left if buffer.dtype in (None, own.ref.dtype)]
    # as many buffers before this one have its type as there are chunks before its own
    before = dtypes[: buffer.number].count(buffer.dtype)
    for chunk in sorted(chunks, key=lambda own: (own != before, own)):
        yield [own for own in fitting if own.slot.chunk == chunk]


def _part(flat: TensorRef, start: int, shape: tuple[int, ...]) -> TensorRef:
    return TensorRef(
        path=flat.path,
        offset=flat.offset + start * flat.dtype.itemsize,
        dtype=flat.dtype,
        shape=shape,
        strides=contiguous_strides(shape),
    )


def _by_contents(
    buffer: Buffer, left: Sequence[Held], states: LegacyStates, prober: Prober
) -> tuple[list[tuple[Held, Place]], list[str]]:
    """Parameters of the buffer wherever they are, and the stretches that hold none."""
    found: list[tuple[Held, Place]] = []
    unplaced: list[str] = []
    by_label = {f"{own.slot.chunk}/{own.slot.key}": own for own in left if buffer.dtype in (None, own.ref.dtype)}
    fingerprints = Fingerprints([_candidate(label, own) for label, own in by_label.items()], prober)
    recogniser = Recogniser([fingerprints], prober, orders=[list(by_label)])
    for segment, ref in enumerate(buffer.masters):
        flat = FlatBuffer(where=buffer.where, stretches=(Stretch(0, ref),), numel=ref.numel)
        placement = recogniser.place(flat, alignment=1)
        if placement.gaps and not buffer.is_padded:  # aligned since 2024-07, which the file does not say
            placement = recogniser.place(flat)
        found += [(by_label[label], Place(segment, start)) for label, start in placement.starts.items()]
        unplaced += [f"{buffer.where}: elements {low}:{high}" for low, high in placement.gaps]
    if not unplaced:
        states.notes.append(f"{buffer.where}: parameters are not in the usual order; found by their contents")
    return found, unplaced


def _candidate(label: str, held: Held) -> Candidate:
    shape = held.ref.shape
    whole = Box.whole(shape)
    return Candidate(name=label, local_shape=shape, pairs=(RegionPair(whole, whole),), refs=(held.ref,), kind="dense")
