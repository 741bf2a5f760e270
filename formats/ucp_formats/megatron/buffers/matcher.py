"""Which parameter lies where in a flat buffer, found by content: no names are recorded in it.

The distributed optimizer lays the parameters of a rank end to end in one buffer per element type, which is then cut
over the data-parallel ranks without regard to them. A file may keep the buffer whole, or in stretches. The masters are
kept in fp32, and the model's weights are the masters cast to the type of the model, bit for bit. So the first elements
at a place of the buffer, cast, tell the parameter that starts there; further windows confirm it.

1. Walk over the places where a parameter can start, and find for each the parameters that fit it. Where the order of
   registration is known for sure, walk in that order, and prove every place by its contents (`layouts`).
2. Else a place that one parameter fits is known. Norms that are all one and biases that are all zero have the same
   contents in every layer: places that several fit are matched in the order of the buffer, which is that of
   registration or its reverse, over as many parameters as may be frozen or on other ranks. Where the earliest and the
   latest that each place can have are not the same (`ucp.core.assign.bounds`), the checkpoint does not say: an error.
3. What no parameter fits is named; nothing is filled in by guessing.

(megatron-core 0.16 core/distributed/param_and_grad_buffer.py lays the buffers out.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from ucp.core.assign import bounds
from ucp.core.index import Fragment
from ucp.core.region import RegionPair, local_flat_pairs
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.union import taken
from ucp.errors import MalformedError, counted, listed
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.layout import ALIGNMENT, BufferPosition, walk


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Consecutive elements of a buffer."""

    start: int
    """First element, in the buffer."""
    ref: TensorRef
    """Where they are stored; 1-D, consecutive."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.ref.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterBuffer:
    """One state of all parameters of a rank, end to end."""

    where: str
    """What it is, for messages."""
    ranges: tuple[StoredRange, ...]
    """Its stored elements, in increasing start."""
    numel: int
    """Elements, gaps counted."""

    @classmethod
    def from_tensor(cls, ref: TensorRef, where: str) -> MasterBuffer:
        """The elements of a tensor that are stored consecutively, end to end."""
        return cls(where=where, ranges=(StoredRange(0, ref.strided(0, (ref.numel,), (1,))),), numel=ref.numel)

    @property
    def starts(self) -> tuple[int, ...]:
        """First elements of its stretches."""
        return tuple(stretch.start for stretch in self.ranges)

    def iter_stored(self, start: int, stop: int) -> Iterator[tuple[int, TensorRef]]:
        """What is stored of the elements `start` to `stop`: (first element, in the buffer; where)."""
        at = max(bisect_right(self.ranges, start, key=lambda stretch: stretch.start) - 1, 0)
        for number in range(at, len(self.ranges)):
            stretch = self.ranges[number]
            low, high = max(start, stretch.start), min(stop, stretch.stop)
            if stretch.start >= stop:
                return
            if low < high:
                yield low, stretch.ref.narrow((low - stretch.start,), (high - low,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parameter as one rank of the model-parallel grid holds it."""

    name: str
    """Its name."""
    local_shape: tuple[int, ...]
    """Elements per dim on that rank."""
    pairs: tuple[RegionPair, ...]
    """Which boxes of the whole the local tensor is made of."""
    refs: tuple[TensorRef, ...]
    """The model's own elements: row-major stretches that, end to end, are the local tensor."""
    kind: str = "dense"
    """Parameters of different kinds do not share a buffer where experts are parallel: "dense" or "expert"."""
    replica: int = 0
    """0 where this rank is the first to hold the parameter; above, it holds a copy."""

    @property
    def numel(self) -> int:
        """Elements on that rank."""
        return sum(ref.numel for ref in self.refs)

    @property
    def dtype(self) -> DType:
        """Type in which the model computes with it."""
        return self.refs[0].dtype


def cut_fragments(held: Candidate, buffer: MasterBuffer, start: int) -> Iterator[Fragment]:
    """Pieces of the parameter that lies in `buffer` from element `start` on."""
    strides = contiguous_strides(held.local_shape)
    for low, ref in buffer.iter_stored(start, start + held.numel):
        first = low - start
        for run, position in local_flat_pairs(held.local_shape, first, first + ref.numel):
            stored = ref.strided(position, run.sizes, strides)
            piece = Fragment(box=run, ref=stored, replica=held.replica)
            yield from filter(None, (taken(RegionPair(pair.local, pair.whole), piece) for pair in held.pairs))


_WINDOW = 64
"""Elements by which a parameter is recognised."""

_REMEDY = (
    "Which of them is trained, and which frozen, is recorded nowhere, so that their states would be guessed. Take the "
    "checkpoint of a later step, where their contents differ, or load this one in Megatron and save it with "
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, which records names. Where the states are not "
    "needed, save it with --no-save-optim: the weights are read without them"
)


@dataclass(slots=True, kw_only=True)
class ContentMatch:
    """A place where a parameter starts."""

    where: str
    """The buffer, for messages."""
    start: int
    """Its first element."""
    candidates: list[Candidate]
    """Parameters whose contents stand there, all of one length."""

    @property
    def stop(self) -> int:
        """One past the last element of a parameter there."""
        return self.start + self.candidates[0].numel


@dataclass(slots=True)
class BufferPlacement:
    """Where the parameters of one buffer are."""

    starts: dict[str, int] = field(default_factory=dict)
    """Parameter to its first element, in the order of the buffer."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Elements (first, one past the last) that no parameter fits and that are no padding."""
    ties: list[str] = field(default_factory=list)
    """Parameters told from others of equal contents by their order alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferMatches:
    """What stands in a buffer, before parameters of equal contents are told apart."""

    buffer: MasterBuffer
    """The buffer."""
    matches: list[ContentMatch]
    """Where parameters start, in its order."""
    gaps: list[tuple[int, int]]
    """Elements (first, one past the last) that no parameter fits and that are no padding."""
    narrowed: list[str]
    """Parameters that are there because the others that fit are not expected."""


class Fingerprints:
    """Parameters by the elements of three windows of their weights: at the start, in the middle and at the end.

    All elements are compared later, as copies.
    """

    def __init__(self, candidates: Iterable[Candidate], prober: Prober) -> None:
        self.candidates = tuple(candidates)
        """Those that are told by them."""
        self.zeros: set[str] = set()
        """Names of those that start with zeros, as padding is."""
        self._prober = prober
        self._by_first: dict[tuple[int, DType, bytes], list[Candidate]] = {}
        for own in self.candidates:
            length = min(own.numel, _WINDOW)
            first = prober.joined(own.refs, 0, length, dtype=own.dtype)
            self._by_first.setdefault((length, own.dtype, first), []).append(own)
            if not any(first):
                self.zeros.add(own.name)
        self._lengths = sorted({(length, dtype) for length, dtype, _ in self._by_first}, reverse=True)

    def find_candidates(self, buffer: MasterBuffer, start: int) -> list[Candidate]:
        """Candidates whose contents stand in `buffer` from element `start` on."""
        found = []
        for length, dtype in self._lengths:
            first = self._read(buffer, start, start + length, dtype)
            fits = () if first is None else self._by_first.get((length, dtype, first), ())
            found += [own for own in fits if self.is_stored_at(buffer, start, own, first=False)]
        return found

    def is_stored_at(self, buffer: MasterBuffer, start: int, own: Candidate, *, first: bool = True) -> bool:
        """Whether the contents of `own` stand there. `first`: whether the first window has to be compared, too."""
        if start + own.numel > buffer.numel:
            return False
        last = max(own.numel - _WINDOW, 0)
        windows = ((low, min(low + _WINDOW, own.numel)) for low in {0, last // 2, last} if low or first)
        return all(
            self._read(buffer, start + low, start + high, own.dtype)
            == self._prober.joined(own.refs, low, high, dtype=own.dtype)
            for low, high in windows
        )

    def _read(self, buffer: MasterBuffer, start: int, stop: int, dtype: DType) -> bytes | None:
        """Elements of the buffer, cast; None where it does not store all of them."""
        parts, at = [], start
        for low, ref in buffer.iter_stored(start, stop):
            if low != at:
                return None
            parts.append(self._prober.window(ref, 0, ref.numel, dtype=dtype))
            at += ref.numel
        return b"".join(parts) if at == stop else None


class FlatBufferMatcher:
    """Finds the parameters of one rank in flat buffers, by content."""

    def __init__(self, parts: Sequence[Fingerprints], *, orders: Sequence[Sequence[str]]) -> None:
        """`parts`: parameters that may be in them, each in one part. `orders`: in which they may be registered."""
        self._parts = parts
        self._orders = orders
        self._candidates = [own for part in parts for own in part.candidates if own.numel]

    def find(
        self,
        buffer: MasterBuffer,
        *,
        starts: Iterable[int] | None = None,
        alignment: int = ALIGNMENT,
        unexpected: Collection[str] = frozenset(),
    ) -> BufferMatches:
        """Places of parameters in `buffer`, and what fits them.

        Parameters
        ----------
        buffer
            Masters (fp32) of the parameters of the rank; it need not hold all of them.
        starts
            Elements at which a parameter can start, when they are known; else the walk goes from the end of a
            parameter to the next aligned element, or to the very end where a bucket ended.
        unexpected
            Parameters that the rank does not hold by the rules of the grid: where others fit too, it is not these.

        Raises MalformedError when the lengths of what fits differ and nothing tells which is right.
        """
        if starts is None:
            spots = self._from_end_to_end(buffer, alignment)
            end = spots[-1].stop if spots else 0
            shortest = min((own.numel for own in self._candidates), default=1)
            gaps = [(end, buffer.numel)] if buffer.numel - end >= shortest else []  # another one could be there
        else:
            spots = self._among(buffer, sorted(set(starts)))
            gaps, end = [], 0
            for start, stop in (*((own.start, own.stop) for own in spots), (buffer.numel,) * 2):
                # what aligns the next parameter is padding
                is_padding = start - end < alignment and (start % alignment == 0 or start == buffer.numel)
                if start > end and not is_padding:
                    gaps.append((end, start))
                end = stop
        narrowed = []
        for spot in spots:
            expected = [own for own in spot.candidates if own.name not in unexpected]
            if expected and len(expected) < len(spot.candidates):
                spot.candidates = expected
                narrowed += [own.name for own in expected if len(expected) == 1]
        return BufferMatches(buffer=buffer, matches=spots, gaps=gaps, narrowed=narrowed)

    def place(
        self, buffer: MasterBuffer, *, starts: Iterable[int] | None = None, alignment: int = ALIGNMENT
    ) -> BufferPlacement:
        """Where the parameters in `buffer` are. Parameters and errors: those of `find` and `settled`."""
        return self.resolve([self.find(buffer, starts=starts, alignment=alignment)])[0]

    def resolve(self, found: Sequence[BufferMatches]) -> list[BufferPlacement]:
        """Where the parameters are in buffers that follow one another in the order of the model, last layers first.

        Raises MalformedError when parameters of equal contents cannot be told apart by their order either, or one of
        them is in a buffer twice; all are named.
        """
        spots = [spot for own in found for spot in own.matches]
        kinds = {spot.candidates[0].kind for spot in spots if len(spot.candidates) == 1}
        inside = {own.name for own in self._candidates if not kinds or own.kind in kinds}
        orders = [[name for name in reversed(order) if name in inside] for order in self._orders]
        chosen = iter(resolve_ties([own.matches for own in found], orders))
        placements = []
        for own in found:
            held = [next(chosen).name for _ in own.matches]
            twice = {name for name in held if held.count(name) > 1} if len(set(held)) < len(held) else ()
            if twice:
                raise MalformedError(
                    f"{own.buffer.where}: expected each parameter once; the contents of {len(twice)} stand in it "
                    f"twice:\n{listed(sorted(twice))}"
                )
            starts = {name: spot.start for name, spot in zip(held, own.matches, strict=True)}
            ties = [name for name, spot in zip(held, own.matches, strict=True) if len(spot.candidates) > 1]
            placements.append(BufferPlacement(starts=starts, gaps=own.gaps, ties=[*own.narrowed, *ties]))
        return placements

    def find_layouts(self, segments: Sequence[MasterBuffer], *, slack: int) -> list[dict[str, BufferPosition]]:
        """The first and the last layout that one order of registration and the contents allow; one if they are equal.

        A buffer is stored in `segments`, with at most `slack` elements of padding at the end of each. None where there
        is no such layout, or one without any parameter.
        """
        (order,), (part,) = self._orders, self._parts
        numbers = {name: number for number, name in enumerate(order)}
        numels = {own.name: own.numel for own in part.candidates}

        @cache
        def fitting(at: BufferPosition) -> list[int]:
            return [numbers[own.name] for own in part.find_candidates(segments[at.segment], at.start)]

        def walked(*, last: bool) -> tuple[BufferPosition | None, ...] | None:
            return walk(
                [numels[name] for name in order],
                [segment.numel for segment in segments],
                fitting,
                slack=slack,
                zeros={numbers[name] for name in part.zeros},
                last=last,
            )

        first = walked(last=False)
        if first is None or all(place is None for place in first):
            return []
        return [
            {name: place for name, place in zip(order, places, strict=True) if place is not None}
            for places in dict.fromkeys((first, walked(last=True)))
            if places is not None
        ]

    def _fitting(self, buffer: MasterBuffer, start: int) -> list[Candidate]:
        return [own for part in self._parts for own in part.find_candidates(buffer, start) if own.numel]

    def _among(self, buffer: MasterBuffer, starts: list[int]) -> list[ContentMatch]:
        """Parameters at known starts; those inside a parameter that was found are cuts between ranks."""
        spots: list[ContentMatch] = []
        edges = {*starts, buffer.numel}
        end = 0
        for start in starts:
            if start < end:
                continue
            fits = [own for own in self._fitting(buffer, start) if start + own.numel in edges]
            fits = _of_one_length(buffer, start, fits, edges)
            if fits:
                spots.append(ContentMatch(where=buffer.where, start=start, candidates=fits))
                end = spots[-1].stop
        return spots

    def _from_end_to_end(self, buffer: MasterBuffer, alignment: int) -> list[ContentMatch]:
        """Parameters one after the other, until none fits."""
        spots: list[ContentMatch] = []
        bucket = end = 0
        while True:
            aligned = bucket + -(-(end - bucket) // alignment) * alignment
            for start in dict.fromkeys((aligned, end)):
                fits = _of_one_length(buffer, start, self._fitting(buffer, start), None)
                if fits:
                    bucket = bucket if start == aligned else start
                    spots.append(ContentMatch(where=buffer.where, start=start, candidates=fits))
                    end = spots[-1].stop
                    break
            else:
                return spots


def _of_one_length(
    buffer: MasterBuffer, start: int, fits: list[Candidate], edges: Collection[int] | None
) -> list[Candidate]:
    """Those that end first, where something ends, by the `edges`.

    Raises MalformedError when the lengths differ and nothing tells which is right.
    """
    lengths = sorted({own.numel for own in fits})
    if len(lengths) > 1 and (edges is None or any(start < edge < start + lengths[0] for edge in edges)):
        raise MalformedError(
            f"{buffer.where}: parameters of different lengths have the contents from element {start} on:\n"
            f"{listed(f'{own.name} {list(own.local_shape)}' for own in fits)}\n"
            "Save the checkpoint with --dist-ckpt-optim-fully-reshardable"
        )
    return [own for own in fits if own.numel == lengths[0]]


def ambiguity_error(where: str, places: Sequence[str]) -> MalformedError:
    """The error that names places which several parameters of equal contents can have."""
    return MalformedError(
        f"{where}{counted(len(places), 'parameter has', 'parameters have')} the same contents as others, and their "
        f"order does not tell them apart:\n{listed(places)}\n{_REMEDY}"
    )


def resolve_ties(runs: Sequence[Sequence[ContentMatch]], orders: Sequence[Sequence[str]]) -> list[Candidate]:
    """The parameter at every place of `runs`, one after the other.

    `runs`: places of buffers, each in its order; the buffers in that of the model, where that is known. `orders`: names
    in the order of the buffers, as they may be. Raises MalformedError naming all places that stay open.
    """
    places = list(chain.from_iterable(runs))
    if all(len(place.candidates) == 1 for place in places):
        return [place.candidates[0] for place in places]
    answers = [answer for order in orders for answer in _answers(places, order)]
    if not answers and len(runs) > 1:  # buffers are not in the order of the model: each by itself
        return [own for run in runs for own in resolve_ties([run], orders)]
    names = [{answer[number].name for answer in answers} for number in range(len(places))]
    open_ = [
        f"{place.where}, element {place.start}: {', '.join(own.name for own in place.candidates[:4])}"
        for place, found in zip(places, names, strict=True)
        if len(place.candidates) > 1 and len(found) != 1
    ]
    if open_:
        raise ambiguity_error("", open_)
    return answers[0]


def _answers(places: Sequence[ContentMatch], order: Sequence[str]) -> list[list[Candidate]]:
    """The earliest and the latest answer that an order allows; none where known places contradict it."""
    ranks = {name: number for number, name in enumerate(order)}
    known = Counter(place.candidates[0].name for place in places if len(place.candidates) == 1)
    bound = [
        place for place in places if len(place.candidates) > 1 or known[place.candidates[0].name] == 1
    ]  # no copies
    found = bounds([sorted(ranks[own.name] for own in place.candidates if own.name in ranks) for place in bound])
    if found is None:
        return []
    answers = []
    for numbers in found:
        names = {id(place): order[number] for place, number in zip(bound, numbers, strict=True)}
        of_names = ({own.name: own for own in place.candidates} for place in places)
        answers.append(
            [
                by_name.get(names.get(id(place), ""), place.candidates[0])
                for place, by_name in zip(places, of_names, strict=True)
            ]
        )
    return answers
