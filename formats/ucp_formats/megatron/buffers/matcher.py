"""Finds parameters in the flat buffers of the distributed optimizer by content, because files do not record names.

The optimizer lays the parameters of a rank end to end in one buffer per dtype, and cuts the buffer over the
data-parallel ranks without regard to parameters. A file holds the whole buffer, or ranges of it. The model's weights
are the fp32 masters cast to the dtype of the model, bit for bit. So the elements at a position of the buffer, cast,
tell which parameter starts there.

1. At every position where a parameter can start, find the parameters whose weights are stored there.
2. A position that only one parameter matches is decided. Several match where contents are identical (norms of ones,
   biases of zeros). These positions are assigned in the order of registration or its reverse; parameters may be missing
   from that order (frozen, or on other ranks). If the earliest and the latest assignment differ
   (`ucp.core.assign.bounds`), the checkpoint is ambiguous: an error.
3. Elements that match no parameter are reported as gaps.

Where the order of registration is certain, `FlatBufferMatcher.find_layouts` follows it and checks every position.

(megatron-core 0.16 core/distributed/param_and_grad_buffer.py lays the buffers out.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

from ucp.core.assign import bounds
from ucp.core.tensor import DType
from ucp.errors import MalformedError, format_count, format_list
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.layout import ALIGNMENT, BufferPosition, walk
from ucp_formats.megatron.buffers.state_buffer import Candidate, StateBuffer

_WINDOW = 64
"""Length of a compared window, in elements."""

_REMEDY = (
    "The checkpoint does not record which of them are trained and which are frozen. Take the checkpoint of a later "
    "step, where their contents differ; or load this one in Megatron and save it with --ckpt-format torch_dist "
    "--dist-ckpt-optim-fully-reshardable, which records names. To convert the weights alone, save it with "
    "--no-save-optim"
)


@dataclass(slots=True, kw_only=True)
class ContentMatch:
    """A position of a buffer, and the parameters whose contents are stored there."""

    where: str
    """The buffer, for messages."""
    start: int
    """First element."""
    candidates: list[Candidate]
    """Parameters, all of one length."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.candidates[0].numel


@dataclass(frozen=True, slots=True)
class BufferPlacement:
    """Where the parameters of one buffer are."""

    starts: dict[str, int]
    """Parameter to its first element, in the order of the buffer."""
    gaps: list[tuple[int, int]]
    """Elements (first, one past the last) that match no parameter and are no padding."""
    ties: list[str]
    """Parameters whose contents equal those of others, so that only their order tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferMatches:
    """Positions of a buffer with matching parameters, before ties are resolved."""

    buffer: StateBuffer
    """The buffer."""
    matches: list[ContentMatch]
    """Positions where parameters start, in increasing order."""
    gaps: list[tuple[int, int]]
    """Elements (first, one past the last) that match no parameter and are no padding."""
    preferred: list[str]
    """Parameters that were chosen because the rank does not hold the others that match."""


class Fingerprints:
    """Finds parameters by three windows of their weights: at the start, in the middle and at the end.

    The windows only identify a parameter. All elements are compared later, when masters are compared with the weights.
    """

    def __init__(self, candidates: Iterable[Candidate], prober: Prober) -> None:
        self.candidates = tuple(candidates)
        """All parameters."""
        self.zeros: set[str] = set()
        """Names of those that start with zeros, as padding does."""
        self._prober = prober
        self._by_first: dict[tuple[int, DType, bytes], list[Candidate]] = {}
        for candidate in self.candidates:
            length = min(candidate.numel, _WINDOW)
            first = prober.read_joined(candidate.refs, 0, length, dtype=candidate.dtype)
            self._by_first.setdefault((length, candidate.dtype, first), []).append(candidate)
            if not any(first):
                self.zeros.add(candidate.name)
        self._lengths = sorted({(length, dtype) for length, dtype, _ in self._by_first}, reverse=True)

    def find_candidates(self, buffer: StateBuffer, start: int) -> list[Candidate]:
        """Parameters whose contents are stored in `buffer` from element `start` on."""
        matching = []
        for length, dtype in self._lengths:
            first = self._read(buffer, start, start + length, dtype)
            candidates = () if first is None else self._by_first.get((length, dtype, first), ())
            matching += [
                candidate
                for candidate in candidates
                if self.is_stored_at(buffer, start, candidate, compare_first=False)
            ]
        return matching

    def is_stored_at(
        self, buffer: StateBuffer, start: int, candidate: Candidate, *, compare_first: bool = True
    ) -> bool:
        """Whether the contents of `candidate` are stored from element `start` on.

        `compare_first`: compare the first window, too.
        """
        numel, dtype = candidate.numel, candidate.dtype
        if start + numel > buffer.numel:
            return False
        last = max(numel - _WINDOW, 0)
        windows = ((low, min(low + _WINDOW, numel)) for low in {0, last // 2, last} if low or compare_first)
        return all(
            self._read(buffer, start + low, start + high, dtype)
            == self._prober.read_joined(candidate.refs, low, high, dtype=dtype)
            for low, high in windows
        )

    def _read(self, buffer: StateBuffer, start: int, stop: int, dtype: DType) -> bytes | None:
        """Elements of the buffer, cast; None if some of them are not stored."""
        windows, end = [], start
        for low, ref in buffer.iter_stored(start, stop):
            if low != end:
                return None
            windows.append(self._prober.window(ref, 0, ref.numel, dtype=dtype))
            end += ref.numel
        return b"".join(windows) if end == stop else None


class FlatBufferMatcher:
    """Finds the parameters of one rank in flat buffers, by content."""

    def __init__(self, parts: Sequence[Fingerprints], *, orders: Sequence[Sequence[str]]) -> None:
        """`parts`: disjoint sets of parameters. `orders`: orders in which these may have been registered."""
        self._parts = parts
        self._orders = orders
        self._candidates = [candidate for part in parts for candidate in part.candidates if candidate.numel]

    def find(
        self,
        buffer: StateBuffer,
        *,
        starts: Iterable[int] | None = None,
        alignment: int = ALIGNMENT,
        unexpected: Collection[str] = frozenset(),
    ) -> BufferMatches:
        """Positions of parameters in `buffer`.

        Parameters
        ----------
        buffer
            Masters (fp32) of parameters of the rank; not necessarily of all.
        starts
            Elements at which a parameter can start, if known. Otherwise a parameter starts at the next aligned
            element after the previous one or, if a bucket ended there, directly after it.
        unexpected
            Parameters that a rank at this position of the grid should not hold: other matches are preferred.

        Raises MalformedError if parameters of different lengths match at one position and nothing decides between them.
        """
        if starts is None:
            matches = self._match_end_to_end(buffer, alignment)
            end = matches[-1].stop if matches else 0
            shortest = min((candidate.numel for candidate in self._candidates), default=1)
            gaps = [(end, buffer.numel)] if buffer.numel - end >= shortest else []  # room for another parameter
        else:
            matches = self._match_at(buffer, sorted(set(starts)))
            gaps, end = [], 0
            for start, stop in (*((match.start, match.stop) for match in matches), (buffer.numel,) * 2):
                # elements that align the next parameter are padding
                is_padding = start - end < alignment and (start % alignment == 0 or start == buffer.numel)
                if start > end and not is_padding:
                    gaps.append((end, start))
                end = stop
        preferred = []
        for match in matches:
            expected = [candidate for candidate in match.candidates if candidate.name not in unexpected]
            if expected and len(expected) < len(match.candidates):
                match.candidates = expected
                preferred += [expected[0].name] if len(expected) == 1 else []
        return BufferMatches(buffer=buffer, matches=matches, gaps=gaps, preferred=preferred)

    def place(
        self, buffer: StateBuffer, *, starts: Iterable[int] | None = None, alignment: int = ALIGNMENT
    ) -> BufferPlacement:
        """Where the parameters in `buffer` are. For arguments and errors see `find` and `resolve`."""
        return self.resolve([self.find(buffer, starts=starts, alignment=alignment)])[0]

    def resolve(self, buffers: Sequence[BufferMatches]) -> list[BufferPlacement]:
        """Where the parameters in `buffers` are. The buffers are in the order of the model, last layers first.

        Raises MalformedError if not even the order tells parameters of identical contents apart, or if a buffer holds a
        parameter twice. The error names all of them.
        """
        matches = [match for buffer in buffers for match in buffer.matches]
        kinds = {match.candidates[0].kind for match in matches if len(match.candidates) == 1}
        names = {candidate.name for candidate in self._candidates if not kinds or candidate.kind in kinds}
        orders = [[name for name in reversed(order) if name in names] for order in self._orders]
        chosen = iter(resolve_ties([buffer.matches for buffer in buffers], orders))
        placements = []
        for buffer in buffers:
            params = [next(chosen).name for _ in buffer.matches]
            duplicates = (
                sorted({name for name in params if params.count(name) > 1}) if len(set(params)) < len(params) else ()
            )
            if duplicates:
                raise MalformedError(
                    f"{buffer.buffer.where}: expected each parameter once; {len(duplicates)} are stored "
                    f"twice:\n{format_list(duplicates)}"
                )
            starts = {name: match.start for name, match in zip(params, buffer.matches, strict=True)}
            ties = [name for name, match in zip(params, buffer.matches, strict=True) if len(match.candidates) > 1]
            placements.append(BufferPlacement(starts=starts, gaps=buffer.gaps, ties=[*buffer.preferred, *ties]))
        return placements

    def find_layouts(self, segments: Sequence[StateBuffer], *, slack: int) -> list[dict[str, BufferPosition]]:
        """The first and the last layout that fit the order of registration and the contents; one if they are equal.

        `segments`: tensors that store the buffer, each with at most `slack` elements of padding at its end. The result
        is empty if no layout fits, or only one without parameters.
        """
        (order,), (part,) = self._orders, self._parts
        numbers = {name: number for number, name in enumerate(order)}
        numels = {candidate.name: candidate.numel for candidate in part.candidates}

        @cache
        def find_params(position: BufferPosition) -> list[int]:
            candidates = part.find_candidates(segments[position.segment], position.start)
            return [numbers[candidate.name] for candidate in candidates]

        walk_in_order = partial(
            walk,
            [numels[name] for name in order],
            [segment.numel for segment in segments],
            find_params,
            slack=slack,
            zeros={numbers[name] for name in part.zeros},
        )
        first = walk_in_order()
        if first is None or all(position is None for position in first):
            return []
        return [
            {name: position for name, position in zip(order, positions, strict=True) if position is not None}
            for positions in dict.fromkeys((first, walk_in_order(last=True)))
            if positions is not None
        ]

    def _find_candidates(self, buffer: StateBuffer, start: int) -> list[Candidate]:
        return [
            candidate for part in self._parts for candidate in part.find_candidates(buffer, start) if candidate.numel
        ]

    def _match_at(self, buffer: StateBuffer, starts: list[int]) -> list[ContentMatch]:
        """Parameters at known starts; starts inside a parameter are cuts between ranks."""
        matches: list[ContentMatch] = []
        edges = {*starts, buffer.numel}
        end = 0
        for start in starts:
            if start < end:
                continue
            candidates = [
                candidate for candidate in self._find_candidates(buffer, start) if start + candidate.numel in edges
            ]
            candidates = _require_one_length(buffer, start, candidates, edges)
            if candidates:
                matches.append(ContentMatch(where=buffer.where, start=start, candidates=candidates))
                end = matches[-1].stop
        return matches

    def _match_end_to_end(self, buffer: StateBuffer, alignment: int) -> list[ContentMatch]:
        """Parameters one after another, until none matches."""
        matches: list[ContentMatch] = []
        bucket = end = 0
        while True:
            aligned = bucket + -(-(end - bucket) // alignment) * alignment
            for start in dict.fromkeys((aligned, end)):
                candidates = _require_one_length(buffer, start, self._find_candidates(buffer, start), None)
                if candidates:
                    bucket = bucket if start == aligned else start
                    matches.append(ContentMatch(where=buffer.where, start=start, candidates=candidates))
                    end = matches[-1].stop
                    break
            else:
                return matches


def _require_one_length(
    buffer: StateBuffer, start: int, candidates: list[Candidate], edges: Collection[int] | None
) -> list[Candidate]:
    """The shortest candidates. `edges`: elements where stored ranges start or the buffer ends, if known.

    Raises MalformedError if the lengths differ, unless the shortest candidates end at the next edge.
    """
    lengths = sorted({candidate.numel for candidate in candidates})
    if len(lengths) > 1 and (edges is None or any(start < edge < start + lengths[0] for edge in edges)):
        raise MalformedError(
            f"{buffer.where}: the contents from element {start} on fit parameters of different lengths:\n"
            f"{format_list(f'{candidate.name} {list(candidate.local_shape)}' for candidate in candidates)}\n"
            "Save the checkpoint with --dist-ckpt-optim-fully-reshardable"
        )
    return [candidate for candidate in candidates if candidate.numel == lengths[0]]


def ambiguity_error(where: str, lines: Sequence[str]) -> MalformedError:
    """The error for positions that fit several parameters of identical contents. `lines`: one per position."""
    return MalformedError(
        f"{where}{format_count(len(lines), 'parameter has', 'parameters have')} the same contents as others, and their "
        f"order does not tell them apart:\n{format_list(lines)}\n{_REMEDY}"
    )


def resolve_ties(buffers: Sequence[Sequence[ContentMatch]], orders: Sequence[Sequence[str]]) -> list[Candidate]:
    """The parameter at every position of `buffers`, in order.

    `buffers`: positions of each buffer; the buffers are in the order of the model, if that is known. `orders`: possible
    orders of names in the buffers. Raises MalformedError naming all positions that stay ambiguous.
    """
    matches = list(chain.from_iterable(buffers))
    if all(len(match.candidates) == 1 for match in matches):
        return [match.candidates[0] for match in matches]
    assignments = [assignment for order in orders for assignment in _assign_in_order(matches, order)]
    if not assignments and len(buffers) > 1:  # the buffers are not in the order of the model: resolve each alone
        return [candidate for buffer in buffers for candidate in resolve_ties([buffer], orders)]
    ambiguous = [
        f"{match.where}, element {match.start}: {', '.join(candidate.name for candidate in match.candidates[:4])}"
        for number, match in enumerate(matches)
        if len(match.candidates) > 1 and len({assignment[number].name for assignment in assignments}) != 1
    ]
    if ambiguous:
        raise ambiguity_error("", ambiguous)
    return assignments[0]


def _assign_in_order(matches: Sequence[ContentMatch], order: Sequence[str]) -> list[list[Candidate]]:
    """The earliest and the latest assignment that an order allows; none if decided positions contradict it."""
    numbers = {name: number for number, name in enumerate(order)}
    decided = Counter(match.candidates[0].name for match in matches if len(match.candidates) == 1)
    bound = [match for match in matches if len(match.candidates) > 1 or decided[match.candidates[0].name] == 1]
    limits = bounds(
        [
            sorted(numbers[candidate.name] for candidate in match.candidates if candidate.name in numbers)
            for match in bound
        ]
    )
    assignments = []
    for assigned in limits or ():
        names = {id(match): order[number] for match, number in zip(bound, assigned, strict=True)}
        assignments.append(
            [
                next(
                    (candidate for candidate in match.candidates if candidate.name == names.get(id(match))),
                    match.candidates[0],
                )
                for match in matches
            ]
        )
    return assignments
