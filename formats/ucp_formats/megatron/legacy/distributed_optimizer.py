"""`distrib_optim.pt`: masters and moments of a rank's data-parallel group, in flat buffers.

| since | structure |
|---|---|
| 2023-05 | {chunk: {dtype: {param, exp_avg, exp_avg_sq: one tensor}}}, padded at the end |
| 2023-10 | the same with a list of tensors, one per bucket, each padded at its end |
| 2024-04 | {buckets_coalesced: True, buffer: {(param dtype, grad dtype): {..., numel_unpadded}}}, no padding at ends |
| 2024-07 | the same, parameters aligned to 64 elements |

With expert parallelism the file is a list: dense parameters, then experts; None for what another rank saved. Names are
not recorded. Parameters are in reverse order of registration; `FlatBufferMatcher.find_layouts` verifies every position
by its contents. If they are in another order, contents alone give the positions (`FlatBufferMatcher.place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ucp.core.index import WEIGHT
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import describe_value, require_mapping, require_sequence
from ucp.io.pickle.values import GlobalName
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.layout import BufferPosition, bucket_multiple
from ucp_formats.megatron.buffers.matcher import Fingerprints, FlatBufferMatcher, ambiguity_error
from ucp_formats.megatron.buffers.state_buffer import StateBuffer
from ucp_formats.megatron.legacy.atoms import LegacyStates, RankOptimizer, to_candidate
from ucp_formats.megatron.legacy.model import RankParam

_MASTER = "param"
_COALESCED = "buckets_coalesced"
_SIZES = ("numel_unpadded", "per_bucket_numel", "per_bucket_numel_unpadded")
"""Entries of a buffer that are not states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBuffer:
    """One flat buffer: all states of some parameters of one rank."""

    where: str
    """The buffer, for messages."""
    number: int
    """Its number within its optimizer: by chunk, then by type."""
    dtype: DType | None
    """Type of its parameters in the model; None if the file does not record it."""
    states: Mapping[str, tuple[TensorRef, ...]]
    """State name to its tensors: a single one, or one per bucket. The name of the master is `weight`."""
    is_padded: bool
    """Whether the file contains the padding at the ends of buckets."""


def read_buffers(root: object, where: str) -> list[list[SavedBuffer] | None]:
    """Buffers of every optimizer in the file; None for one that another rank saved. Raises MalformedError."""
    optimizers = root if isinstance(root, list) else [root]
    return [
        None if saved is None else list(_read_buffers(require_mapping(saved, where), where)) for saved in optimizers
    ]


def _read_buffers(saved: Mapping[object, object], where: str) -> Iterator[SavedBuffer]:
    unknown = [repr(key) for key in saved if type(key) is not int and key not in (_COALESCED, *_SIZES)]
    if unknown:
        raise UnsupportedError(f"expected numbered buffers in {where}; got {', '.join(unknown[:5])}")
    for count, number in enumerate(sorted(key for key in saved if type(key) is int)):
        label = f"buffer {number} of {where}"
        for position, (key, states) in enumerate(require_mapping(saved[number], label).items()):
            first = key[0] if isinstance(key, tuple) and key else None  # (param dtype, grad dtype) since 2024-03
            name = first.qualname if isinstance(first, GlobalName) else None
            yield SavedBuffer(
                where=label,
                number=count + position,
                dtype=next((dtype for dtype in DType if dtype.value == name), None),
                states=dict(_read_states(require_mapping(states, label), label)),
                is_padded=not saved.get(_COALESCED),
            )


def _read_states(saved: Mapping[object, object], where: str) -> Iterator[tuple[str, tuple[TensorRef, ...]]]:
    if _MASTER not in saved:
        raise MalformedError(f"expected {_MASTER!r} in {where}; got {', '.join(map(str, saved))}")
    for key, value in saved.items():
        if key in _SIZES:
            continue
        tensors = require_sequence(value, f"{key!r} in {where}") if isinstance(value, list | tuple) else (value,)
        refs = tuple(tensor for tensor in tensors if isinstance(tensor, TensorRef))
        if len(refs) != len(tensors) or any(len(ref.shape) != 1 or not ref.is_contiguous for ref in refs):
            raise MalformedError(f"expected flat tensors for {key!r} in {where}; got {describe_value(value)}")
        yield WEIGHT if key == _MASTER else str(key), refs


def add_buffers(
    buffers: Sequence[SavedBuffer], optimizer: RankOptimizer, dp: int, states: LegacyStates, prober: Prober
) -> None:
    """Add the states in `buffers` to `states`. Raises MalformedError naming all ranges that match no parameter."""
    remaining = {_label(param): param for param in optimizer.params}
    problems: list[str] = []
    for buffer in buffers:
        chunks = {param.slot.chunk for param in optimizer.params if buffer.dtype in (None, param.ref.dtype)}
        has_one_per_chunk = [other.dtype for other in buffers].count(buffer.dtype) == len(chunks)
        slack = bucket_multiple(dp) - 1 if buffer.is_padded else 0
        fitting = [param for param in remaining.values() if buffer.dtype in (None, param.ref.dtype)]
        # a buffer belongs to one chunk: most likely to chunk n, if n buffers of its type come before it
        likely = [other.dtype for other in buffers][: buffer.number].count(buffer.dtype)
        numbers = sorted({param.slot.chunk for param in remaining.values()}, key=lambda n: (n != likely, n))
        guesses = [[param for param in fitting if param.slot.chunk == number] for number in numbers]
        places = _place_in_order(buffer, guesses, slack, prober, only_first=has_one_per_chunk)
        if places is None:
            places, gaps = _place_by_contents(buffer, _matcher(fitting, prober))
            problems += gaps
            if not gaps:
                states.notes.append(f"{buffer.where}: parameters are not in the usual order; found by their contents")
        for label, place in places.items():
            param = remaining.pop(label)
            shape, strides = param.ref.shape, contiguous_strides(param.ref.shape)
            states.tensors[param.slot] = {
                key: refs[place.segment].strided(place.start, shape, strides) for key, refs in buffer.states.items()
            }
    if problems:
        names = (f"{param.slot.key} {list(param.ref.shape)}" for param in remaining.values())
        raise MalformedError(
            f"expected parameters of the model in all buffers of {optimizer.where}; "
            f"{format_count(len(problems), 'range matches', 'ranges match')} none:\n{format_list(problems)}\n"
            f"parameters that were not found:\n{format_list(names)}\n"
            "The optimizer and the model are from different runs, or the weights were changed after the last step"
        )
    if remaining:
        shown = ", ".join(param.name for param in list(remaining.values())[:3]) + (
            ", ..." if len(remaining) > 3 else ""
        )
        untrained = f"{format_count(len(remaining), 'parameter')}, which count as not trained: {shown}"
        states.notes.append(f"{optimizer.where} has no states of {untrained}")


def _label(param: RankParam) -> str:
    return f"{param.slot.chunk}/{param.slot.key}"


def _matcher(params: Sequence[RankParam], prober: Prober) -> FlatBufferMatcher:
    candidates = [to_candidate(_label(param), param) for param in params]
    return FlatBufferMatcher([Fingerprints(candidates, prober)], orders=[[entry.name for entry in candidates]])


def _place_in_order(
    buffer: SavedBuffer, guesses: Iterable[Sequence[RankParam]], slack: int, prober: Prober, *, only_first: bool
) -> dict[str, BufferPosition] | None:
    """Positions of parameters, if they are in the order of the model and the contents match; None if no guess fits.

    `guesses`: parameters that may be in the buffer, by chunk. `only_first`: take the first guess that fits, because
    every chunk has a buffer. Raises MalformedError if several guesses fit, or one has several layouts.
    """
    layouts: list[dict[str, BufferPosition]] = []
    names: dict[str, str] = {}
    segments = [StateBuffer.from_tensor(ref, buffer.where) for ref in buffer.states[WEIGHT]]
    for params in guesses:
        names |= {_label(param): f"{param.name} {list(param.ref.shape)}" for param in params}
        layouts += _matcher(params, prober).find_layouts(segments, slack=slack)
        if layouts and only_first:
            break
    if len(layouts) > 1:
        names_by_place: dict[BufferPosition, list[str]] = {}
        for label, place in chain.from_iterable(layout.items() for layout in layouts):
            names_by_place.setdefault(place, []).append(names[label])
        lines = [
            f"element {place.start}: {', '.join(dict.fromkeys(at_place))}"
            for place, at_place in sorted(names_by_place.items())
            if len(at_place) < len(layouts) or len(set(at_place)) > 1  # only where layouts differ
        ]
        raise ambiguity_error(f"{buffer.where}: ", lines)
    return layouts[0] if layouts else None


def _place_by_contents(buffer: SavedBuffer, matcher: FlatBufferMatcher) -> tuple[dict[str, BufferPosition], list[str]]:
    """Positions of parameters in any order, and a line for each range that matches none."""
    places: dict[str, BufferPosition] = {}
    gaps: list[str] = []
    for number, ref in enumerate(buffer.states[WEIGHT]):
        segment = StateBuffer.from_tensor(ref, buffer.where)
        placement = matcher.place(segment, alignment=1)
        if placement.gaps and not buffer.is_padded:  # since 2024-07 aligned to 64: not recorded
            placement = matcher.place(segment)
        places |= {label: BufferPosition(number, start) for label, start in placement.starts.items()}
        gaps += [f"{buffer.where}: elements {low}:{high}" for low, high in placement.gaps]
    return places, gaps
