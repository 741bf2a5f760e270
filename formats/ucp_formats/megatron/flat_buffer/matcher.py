"""Which parameter lies where in a flat buffer, found by content: no names are recorded in it.

The masters are kept in fp32, and the model's weights are the masters cast to the type of the model, bit for bit. So the
first elements at a place of the buffer, cast, tell the parameter that starts there; further windows confirm it.

1. Walk over the places where a parameter can start, and find for each the parameters that fit it.
2. A place that one parameter fits is known. Places that several fit (norms that are all one, biases that are all zero)
   are matched in the order of the buffer, which is that of registration, reversed (`ties`).
3. What no parameter fits is named; nothing is filled in by guessing.

(megatron-core 0.16 core/distributed/param_and_grad_buffer.py lays the buffers out.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ucp.core.dtypes import DType
from ucp.errors import MalformedError, listed
from ucp.transfer.probe import Prober
from ucp_formats.megatron.flat_buffer.boxes import Candidate, FlatBuffer
from ucp_formats.megatron.flat_buffer.ties import Place, settle

__all__ = ["ALIGNMENT", "Fingerprints", "Found", "Placement", "Recogniser"]

ALIGNMENT = 64
"""Elements to which the start of a parameter is aligned in its bucket, since 2024-07."""
_WINDOW = 64
"""Elements by which a parameter is recognised."""
_INNER_WINDOWS = 2
"""Further windows that must agree: the last elements, and some in the middle."""


@dataclass(slots=True)
class Placement:
    """Where the parameters of one buffer are."""

    starts: dict[str, int] = field(default_factory=dict)
    """Parameter to its first element, in the order of the buffer."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Elements (first, one past the last) that no parameter fits and that are no padding."""
    ties: list[str] = field(default_factory=list)
    """Parameters told from others of equal contents by their order alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What stands in a buffer, before parameters of equal contents are told apart."""

    buffer: FlatBuffer
    """The buffer."""
    places: list[Place]
    """Places where parameters start, in its order."""
    gaps: list[tuple[int, int]]
    """Elements (first, one past the last) that no parameter fits and that are no padding."""
    narrowed: list[str]
    """Parameters that are there because the others that fit are not expected."""


class Fingerprints:
    """Parameters by the first elements of their weights."""

    def __init__(self, candidates: Sequence[Candidate], prober: Prober) -> None:
        self.candidates = candidates
        """Those that are told by them."""
        self.lengths: list[tuple[int, DType]] = []
        """How many elements are compared, and as what type, longest first."""
        self._by_first: dict[tuple[int, DType, bytes], list[Candidate]] = {}
        for own in candidates:
            length = min(own.numel, _WINDOW)
            if length:
                first = prober.joined(own.refs, 0, length, dtype=own.dtype)
                self._by_first.setdefault((length, own.dtype, first), []).append(own)
        self.lengths = sorted({(length, dtype) for length, dtype, _ in self._by_first}, reverse=True)

    def find(self, length: int, dtype: DType, first: bytes) -> Sequence[Candidate]:
        """Parameters whose first `length` elements are these."""
        return self._by_first.get((length, dtype, first), ())


class Recogniser:
    """Finds the parameters of one rank in flat buffers, by content."""

    def __init__(self, parts: Sequence[Fingerprints], prober: Prober, *, orders: Sequence[Sequence[str]]) -> None:
        """`parts`: parameters that may be in them, each in one part. `orders`: in which they may be registered."""
        self._parts = parts
        self._registered = orders
        self._prober = prober
        self._candidates = [own for part in parts for own in part.candidates]
        self.shortest = min((own.numel for own in self._candidates), default=1)

    def place(
        self,
        buffer: FlatBuffer,
        *,
        starts: Iterable[int] | None = None,
        alignment: int = ALIGNMENT,
        unexpected: Collection[str] = frozenset(),
    ) -> Placement:
        """Where the parameters in `buffer` are. Parameters and errors: those of `find` and `settled`."""
        return self.settled([self.find(buffer, starts=starts, alignment=alignment, unexpected=unexpected)])[0]

    def find(
        self,
        buffer: FlatBuffer,
        *,
        starts: Iterable[int] | None = None,
        alignment: int = ALIGNMENT,
        unexpected: Collection[str] = frozenset(),
    ) -> Found:
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
        walk = _Walk(buffer, self, None if starts is None else sorted(set(starts)), alignment)
        places, gaps = walk.places()
        narrowed = [name for place in places for name in _narrow(place, unexpected)]
        return Found(buffer=buffer, places=places, gaps=gaps, narrowed=narrowed)

    def settled(self, found: Sequence[Found]) -> list[Placement]:
        """Where the parameters are in buffers that follow one another in the order of the model, last layers first.

        Raises MalformedError when parameters of equal contents cannot be told apart by their order either, or one of
        them is in a buffer twice; all are named.
        """
        chosen = iter(settle([own.places for own in found], self._orders([p for own in found for p in own.places])))
        placements = []
        for own in found:
            placement = Placement(gaps=own.gaps, ties=list(own.narrowed))
            placed = [(place, next(chosen)) for place in own.places]
            placement.ties += [held.name for place, held in placed if len(place.fits) > 1]
            _fill(placement, own.buffer, [(place.start, held) for place, held in placed])
            placements.append(placement)
        return placements

    def _orders(self, places: Sequence[Place]) -> list[list[str]]:
        """Possible orders of the buffer, without kinds of parameters that are not in it; none without ties."""
        if all(len(place.fits) == 1 for place in places):
            return []
        kinds = {place.fits[0].kind for place in places if len(place.fits) == 1}
        inside = {own.name for own in self._candidates if not kinds or own.kind in kinds}
        return [[name for name in reversed(order) if name in inside] for order in self._registered]

    def fitting(self, buffer: FlatBuffer, start: int) -> list[Candidate]:
        """Candidates whose contents stand in `buffer` from element `start` on."""
        found = []
        for part in self._parts:
            for length, dtype in part.lengths:
                first = self._read(buffer, start, start + length, dtype)
                fits = part.find(length, dtype, first) if first else ()
                found += [own for own in fits if self._agrees(buffer, start, own)]
        return found

    def _agrees(self, buffer: FlatBuffer, start: int, own: Candidate) -> bool:
        if start + own.numel > buffer.numel:
            return False
        for number in range(1, _INNER_WINDOWS + 1):
            low = max(own.numel - _WINDOW, 0) * number // _INNER_WINDOWS
            high = min(low + _WINDOW, own.numel)
            held = self._read(buffer, start + low, start + high, own.dtype)
            if held != self._prober.joined(own.refs, low, high, dtype=own.dtype):
                return False
        return True

    def _read(self, buffer: FlatBuffer, start: int, stop: int, dtype: DType) -> bytes:
        """Elements of the buffer, cast; empty where it does not store all of them."""
        parts, at = [], start
        for low, ref in buffer.between(start, stop):
            if low != at:
                return b""
            parts.append(self._prober.window(ref, 0, ref.numel, dtype=dtype))
            at += ref.numel
        return b"".join(parts) if at == stop else b""


def _fill(placement: Placement, buffer: FlatBuffer, placed: Sequence[tuple[int, Candidate]]) -> None:
    """Note where parameters start. Raises MalformedError when one starts twice."""
    twice: set[str] = set()
    for start, own in placed:
        if own.name in placement.starts:
            twice.add(own.name)
        placement.starts[own.name] = start
    if twice:
        raise MalformedError(
            f"{buffer.where}: expected each parameter once; the contents of {len(twice)} stand in it twice:\n"
            f"{listed(sorted(twice))}"
        )


def _narrow(place: Place, unexpected: Collection[str]) -> Iterator[str]:
    """Leave out candidates that are not expected, where others are left; gives the one that is left alone."""
    expected = [own for own in place.fits if own.name not in unexpected]
    if expected and len(expected) < len(place.fits):
        place.fits = expected
        if len(expected) == 1:
            yield expected[0].name


class _Walk:
    """Goes through a buffer from parameter to parameter."""

    def __init__(self, buffer: FlatBuffer, recogniser: Recogniser, starts: list[int] | None, alignment: int) -> None:
        self._buffer = buffer
        self._recogniser = recogniser
        self._starts = starts
        self._alignment = alignment

    def places(self) -> tuple[list[Place], list[tuple[int, int]]]:
        """Places where parameters start, and what none fits."""
        return self._among(self._starts) if self._starts is not None else self._from_end_to_end()

    def _among(self, starts: list[int]) -> tuple[list[Place], list[tuple[int, int]]]:
        """Among known starts; those inside a parameter that was found are cuts between ranks."""
        places: list[Place] = []
        edges = {*starts, self._buffer.numel}
        end = 0
        for start in starts:
            if start < end:
                continue
            fits = self._of_one_length(start, self._recogniser.fitting(self._buffer, start), edges)
            if fits:
                places.append(Place(where=self._buffer.where, start=start, fits=fits))
                end = start + fits[0].numel
        return places, list(self._between(places))

    def _of_one_length(self, start: int, fits: list[Candidate], edges: Collection[int] | None) -> list[Candidate]:
        """Those that end where something ends; when their lengths differ, those that end first.

        Raises MalformedError when the lengths differ and nothing tells which is right.
        """
        if edges is not None:
            fits = [own for own in fits if start + own.numel in edges]
        lengths = sorted({own.numel for own in fits})
        if len(lengths) > 1 and (edges is None or any(start < edge < start + lengths[0] for edge in edges)):
            raise MalformedError(
                f"{self._buffer.where}: parameters of different lengths have the contents from element {start} on:\n"
                f"{listed(f'{own.name} {list(own.local_shape)}' for own in fits)}\n"
                "Save the checkpoint with --dist-ckpt-optim-fully-reshardable"
            )
        return [own for own in fits if own.numel == lengths[0]]

    def _between(self, places: list[Place]) -> Iterator[tuple[int, int]]:
        """What lies between parameters and is more than the padding that aligns the next one."""
        end = 0
        for start, stop in (*((p.start, p.start + p.fits[0].numel) for p in places), (self._buffer.numel,) * 2):
            is_padding = start - end < self._alignment and (start % self._alignment == 0 or start == self._buffer.numel)
            if start > end and not is_padding:
                yield end, start
            end = stop

    def _from_end_to_end(self) -> tuple[list[Place], list[tuple[int, int]]]:
        places: list[Place] = []
        bucket = end = 0
        while self._buffer.numel - end >= self._recogniser.shortest:
            aligned = bucket + -(-(end - bucket) // self._alignment) * self._alignment
            for start in (aligned, end) if aligned != end else (end,):
                fits = self._of_one_length(start, self._recogniser.fitting(self._buffer, start), None)
                if fits:
                    bucket = bucket if start == aligned else start
                    places.append(Place(where=self._buffer.where, start=start, fits=fits))
                    end = start + fits[0].numel
                    break
            else:
                return places, [(end, self._buffer.numel)]
        return places, []
