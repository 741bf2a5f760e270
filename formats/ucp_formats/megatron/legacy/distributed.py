"""`distrib_optim.pt`: masters and moments of a rank's data-parallel group, all parameters end to end in flat buffers.

| since | structure |
|---|---|
| 2023-05 | {chunk: {dtype: {param, exp_avg, exp_avg_sq: one tensor}}}, padded at the end |
| 2023-10 | the same with a list of tensors, one per bucket, each padded at its end |
| 2024-04 | {buckets_coalesced: True, buffer: {(param dtype, grad dtype): {..., numel_unpadded}}}, no padding at ends |
| 2024-07 | the same, parameters aligned to 64 elements |

Where experts are parallel the file is a list: dense parameters, then experts; None for what another rank saved. No name
is recorded. The order is that of registration, reversed; where a parameter starts is found by walking, and every place
is proved by the contents (`flat_buffer.layout`). Where the order is another, contents alone decide (`matcher`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ucp.core.index import WEIGHT
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import described, mapping, sequence
from ucp.io.pickle.values import GlobalName
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.layout import BufferPosition, bucket_multiple
from ucp_formats.megatron.buffers.matcher import Fingerprints, FlatBufferMatcher, ambiguity_error
from ucp_formats.megatron.buffers.state_buffer import StateBuffer
from ucp_formats.megatron.legacy.atoms import LegacyStates, Optimizer, candidate
from ucp_formats.megatron.legacy.model import Held

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
    def segments(self) -> list[StateBuffer]:
        """The masters."""
        return [StateBuffer.from_tensor(ref, self.where) for ref in self.states[WEIGHT]]


def read_buffers(saved: object, where: str) -> list[list[Buffer] | None]:
    """Buffers of every optimizer in the file; None for one that another rank saved. Raises MalformedError."""
    members = saved if isinstance(saved, list) else [saved]
    return [None if own is None else list(_buffers(mapping(own, where), where)) for own in members]


def _buffers(saved: Mapping[object, object], where: str) -> Iterator[Buffer]:
    odd = [repr(key) for key in saved if type(key) is not int and key not in (_COALESCED, *_SIZES)]
    if odd:
        raise UnsupportedError(f"expected numbered buffers in {where}; got {', '.join(odd[:5])}")
    for count, number in enumerate(sorted(key for key in saved if type(key) is int)):
        label = f"buffer {number} of {where}"
        for own, (key, states) in enumerate(mapping(saved[number], label).items()):
            first = key[0] if isinstance(key, tuple) and key else None  # (param dtype, grad dtype) since 2024-03
            name = first.qualname if isinstance(first, GlobalName) else None
            yield Buffer(
                where=label,
                number=count + own,
                dtype=next((dtype for dtype in DType if dtype.value == name), None),
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


def add_buffers(buffers: Sequence[Buffer], optimizer: Optimizer, dp: int, states: LegacyStates, prober: Prober) -> None:
    """Add the states of the parameters in `buffers` to `states`.

    Raises MalformedError naming what could not be placed.
    """
    left = {_label(held): held for held in optimizer.held}
    problems: list[str] = []
    for buffer in buffers:
        chunks = {held.slot.chunk for held in optimizer.held if buffer.dtype in (None, held.ref.dtype)}
        each_has_one = [own.dtype for own in buffers].count(buffer.dtype) == len(chunks)
        slack = bucket_multiple(dp) - 1 if buffer.is_padded else 0
        fitting = [held for held in left.values() if buffer.dtype in (None, held.ref.dtype)]
        # of one chunk; as many buffers before this one have its type as there are chunks before its own
        likely = [own.dtype for own in buffers][: buffer.number].count(buffer.dtype)
        numbers = sorted({held.slot.chunk for held in left.values()}, key=lambda number: (number != likely, number))
        guesses = [[held for held in fitting if held.slot.chunk == number] for number in numbers]
        found = _placed(buffer, guesses, slack, prober, only_first=each_has_one)
        if found is None:
            found, gaps = _by_contents(buffer, _matcher(fitting, prober))
            problems += gaps
            if not gaps:
                states.notes.append(f"{buffer.where}: parameters are not in the usual order; found by their contents")
        for label, place in found.items():
            held = left.pop(label)
            strides = contiguous_strides(held.ref.shape)
            states.tensors[held.slot] = {
                key: refs[place.segment].strided(place.start, held.ref.shape, strides)
                for key, refs in buffer.states.items()
            }
    if problems:
        names = (f"{held.slot.key} {list(held.ref.shape)}" for held in left.values())
        raise MalformedError(
            f"{optimizer.where}: {counted(len(problems), 'stretch', 'stretches')} of its buffers without a "
            "parameter of the model:\n"
            f"{listed(problems)}\nparameters that were not found:\n{listed(names)}\n"
            "The file is of another run than the model, or its weights were changed after it was saved"
        )
    if left:
        named = ", ".join(held.name for held in list(left.values())[:3]) + (", ..." if len(left) > 3 else "")
        what = f"{counted(len(left), 'parameter')} not trained: {named}"
        states.notes.append(f"{optimizer.where} has no states of {what}")


def _label(held: Held) -> str:
    return f"{held.slot.chunk}/{held.slot.key}"


def _matcher(held: Sequence[Held], prober: Prober) -> FlatBufferMatcher:
    """That of these parameters, in their order."""
    candidates = [candidate(_label(own), own) for own in held]
    return FlatBufferMatcher([Fingerprints(candidates, prober)], orders=[[own.name for own in candidates]])


def _placed(
    buffer: Buffer, guesses: Iterable[Sequence[Held]], slack: int, prober: Prober, *, only_first: bool
) -> dict[str, BufferPosition] | None:
    """Parameters of the buffer in the order of the model, each proved; None when there is no such layout.

    `only_first`: the first guess that holds is right, because every chunk has a buffer. Raises MalformedError where
    several guesses hold else, or several layouts of one.
    """
    found: list[dict[str, BufferPosition]] = []
    shown: dict[str, str] = {}
    for guess in guesses:
        shown |= {_label(held): f"{held.name} {list(held.ref.shape)}" for held in guess}
        found += _matcher(guess, prober).find_layouts(buffer.segments, slack=slack)
        if found and only_first:
            break
    if len(found) > 1:
        at: dict[BufferPosition, list[str]] = {}  # places that hold another parameter in one layout than in the next
        for label, place in chain.from_iterable(own.items() for own in found):
            at.setdefault(place, []).append(shown[label])
        lines = [
            f"element {place.start}: {', '.join(dict.fromkeys(names))}"
            for place, names in sorted(at.items())
            if len(names) < len(found) or len(set(names)) > 1
        ]
        raise ambiguity_error(f"{buffer.where}: ", lines)
    return found[0] if found else None


def _by_contents(buffer: Buffer, matcher: FlatBufferMatcher) -> tuple[dict[str, BufferPosition], list[str]]:
    """Parameters of the buffer wherever they are, and the stretches that hold none."""
    found: dict[str, BufferPosition] = {}
    unplaced: list[str] = []
    for number, segment in enumerate(buffer.segments):
        placement = matcher.place(segment, alignment=1)
        if placement.gaps and not buffer.is_padded:  # aligned since 2024-07, which the file does not say
            placement = matcher.place(segment)
        found |= {label: BufferPosition(number, start) for label, start in placement.starts.items()}
        unplaced += [f"{buffer.where}: elements {low}:{high}" for low, high in placement.gaps]
    return found, unplaced
