"""Optimizer states in the buckets of the distributed optimizer (`dp_reshardable`, `fully_sharded_bucket_space`).

The default of megatron-core since 0.15. Neither names nor shapes of parameters are recorded: they are found by content
(`buffers.matcher`). A bucket is stored in chunks, one per parameter and data-parallel rank, and one per stretch of
padding, whose contents are arbitrary and which may reach past the bucket. So a parameter starts where a chunk starts.

What a rank of the model-parallel grid held of the model, the chunks of its tensors say: megatron-core writes one for
every local tensor, and the same chunk only once. So there are as many along a dim as there are ranks (a plain cut),
twice as many along dim 0 (gate and up projection of a gated MLP, each cut), or a single one (held by all).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.core.index import Fragment
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.dcp.checkpoint import StoredTensor
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.matcher import BufferMatches, BufferPlacement, Fingerprints, FlatBufferMatcher
from ucp_formats.megatron.buffers.state_buffer import Candidate, StateBuffer, StoredRange, cut_fragments
from ucp_formats.megatron.groups import expert_numbers, is_expert
from ucp_formats.megatron.torch_dist.keys import BucketKey
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, StoredBox


def find_local_tensor(whole: GlobalTensor, *, rank: int, ranks: int, kind: str) -> Candidate | None:
    """The tensor as rank `rank` of `ranks` held it; None when its chunks are no regular cut over so many ranks.

    `kind`: see `Candidate`.
    """
    chosen: list[StoredBox] = []
    start = 0
    for length in whole.parts or (whole.shape[0] if whole.shape else 1,):
        stop = start + length
        inside = [own for own in whole.boxes if not own.box.offsets or start <= own.box.offsets[0] < stop]
        own = _of_rank(inside, rank=rank, ranks=ranks)
        if own is None:
            return None
        chosen += own
        start = stop
    pairs, rows = [], 0  # the pieces lie end to end along dim 0
    for box, _ in chosen:
        pairs.append(RegionPair(box, Box((rows, *(0,) * (len(box.sizes) - 1)), box.sizes) if box.sizes else box))
        rows += box.sizes[0] if box.sizes else 0
    sizes = chosen[0].box.sizes
    return Candidate(
        name=whole.name,
        local_shape=(rows, *sizes[1:]) if sizes else (),
        pairs=tuple(pairs),
        refs=tuple(piece.ref for piece in chosen),
        kind=kind,
    )


def _of_rank(pieces: Sequence[StoredBox], *, rank: int, ranks: int) -> list[StoredBox] | None:
    """Pieces of a rank, in the order of the local tensor; None when they are no regular cut."""
    if not pieces or not all(piece.ref.is_contiguous for piece in pieces):
        return None
    if len(pieces) == 1:
        return list(pieces)
    cut = [dim for dim in range(len(pieces[0].box.sizes)) if len({piece.box.offsets[dim] for piece in pieces}) > 1]
    if len(cut) != 1 or len({piece.box.sizes for piece in pieces}) != 1:
        return None
    ordered = sorted(pieces, key=lambda piece: piece.box.offsets[cut[0]])
    if len(ordered) == ranks:
        return [ordered[rank]]
    if len(ordered) == 2 * ranks and cut[0] == 0:
        return [ordered[rank], ordered[ranks + rank]]
    return None


MASTER = "param"
"""State that holds the masters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Degrees of the run that matter for local tensors."""

    tp: int
    """Tensor-parallel ranks."""
    expert_tp: int
    """Tensor-parallel ranks of an expert."""
    ep: int
    """Expert-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRange:
    """A parameter in a bucket of which every data-parallel rank stored an equal share."""

    start: int
    """Element of the bucket where it starts."""
    stop: int
    """One past its last."""
    bucket: int
    """Elements of the bucket, without the padding at its end where the file leaves that out."""
    edges: frozenset[int]
    """Elements between `start` and `stop` where what is stored in one stretch starts."""

    def find_share(self, ranks: int, *, multiple: int) -> int | None:
        """Elements of the share of each of so many ranks, of a bucket that is padded to a multiple.

        None where the stored stretches are not parts of such shares.
        """
        share, rest = divmod(-(-self.bucket // multiple) * multiple, ranks)
        if rest or not share:
            return None
        inside = range((self.start // share + 1) * share, self.stop, share)
        return share if self.edges.issuperset(inside) else None


@dataclass(slots=True, kw_only=True)
class BucketStates:
    """What was found in the buckets."""

    fragments: dict[str, dict[str, list[Fragment]]] = field(default_factory=dict)
    """Parameter to state to its pieces."""
    placed: int = 0
    """Parameters found, each on every rank that holds it."""
    ties: list[str] = field(default_factory=list)
    """Parameters told from others of equal contents by their order."""
    chains: dict[str, int | None] = field(default_factory=dict)
    """Parameter to which of several optimizers it belongs to."""
    bucket_ranges: dict[str, BucketRange | None] = field(default_factory=dict)
    """Parameter to its place in a bucket that is stored cut; None where ranks of the grid differ in that."""
    gaps: list[str] = field(default_factory=list)
    """Stretches that are the master of no parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """All states of one bucket."""

    key: BucketKey
    """Which it is; the state is left empty."""
    states: dict[str, StateBuffer] = field(default_factory=dict)
    """State to its elements."""
    in_chunks: bool
    """Whether every parameter starts where a stretch starts."""


def place_buckets(
    buckets: Iterable[Bucket],
    weights: Mapping[str, GlobalTensor],
    orders: Sequence[Sequence[str]],
    grid: ParallelDegrees,
) -> BucketStates:
    """States of the parameters `weights` out of buckets; of those that several groups hold, the first is taken.

    `orders`: parameters in the order of registration, as it may be.

    Raises
    ------
    MalformedError
        Something in the buckets is no parameter, or is ambiguous; all of it is named, with the parameters left.
    UnsupportedError
        The chunks of a parameter are no regular cut over the tensor-parallel ranks.
    """
    found = BucketStates()
    with Prober() as prober:
        ranks = _Ranks(weights, orders, grid, prober)
        seen: dict[tuple[object, ...], int] = {}
        for bucket, placement in sorted(_placed(buckets, ranks, weights), key=lambda own: _position(own[0])):
            _, candidates = ranks.of_group(bucket.key.group)
            found.gaps += _gaps(bucket, placement.gaps)
            _take(found, bucket, placement, candidates, seen)
    _check_gaps(found.gaps, [name for name in weights if name not in found.fragments])
    return found


def _placed(buckets: Iterable[Bucket], ranks: _Ranks, names: Iterable[str]) -> Iterator[tuple[Bucket, BufferPlacement]]:
    """Buckets and where parameters are in them; those of all stages of a pipeline are told apart together."""
    found = [(bucket, ranks.find(bucket)) for bucket in sorted(buckets, key=_position)]
    fits = {held.name for _, own in found for spot in own.matches for held in spot.candidates}
    _check_gaps([gap for bucket, own in found for gap in _gaps(bucket, own.gaps)], [n for n in names if n not in fits])
    chains: dict[int | None, list[BufferMatches]] = {}
    for bucket, own in found:
        chains.setdefault(bucket.key.chain, []).append(own)
    of_stage = {number: ranks.of_stage(own) for number, own in chains.items()}
    runs: dict[tuple[object, ...], list[tuple[Bucket, BufferMatches]]] = {}
    for bucket, own in found:
        key = bucket.key
        runs.setdefault((key.chain, key.dtype, key.group % of_stage[key.chain]), []).append((bucket, own))
    for members in runs.values():
        turned = _backwards(members)
        matcher, _ = ranks.of_group(turned[0][0].key.group)
        placements = matcher.resolve([own for _, own in turned])
        yield from zip((bucket for bucket, _ in turned), placements, strict=True)


def _gaps(bucket: Bucket, gaps: Sequence[tuple[int, int]]) -> list[str]:
    master = bucket.states[MASTER]
    return [f"{master.where}: elements {low}:{high} of {master.numel}" for low, high in gaps]


def _backwards(members: Sequence[tuple[Bucket, BufferMatches]]) -> list[tuple[Bucket, BufferMatches]]:
    """Buckets from the end of the model to its start.

    Layers are in chunks; each stage has one of each. In a chunk, the last stage has the last layers. A buffer is of one
    chunk, and its first bucket holds what was registered last.
    """
    buffers: dict[int, list[int]] = {}
    for bucket, _ in members:
        numbers = buffers.setdefault(bucket.key.group, [])
        if bucket.key.buffer not in numbers:
            numbers.append(bucket.key.buffer)

    def order(member: tuple[Bucket, BufferMatches]) -> tuple[int, int, int]:
        key = member[0].key
        return -sorted(buffers[key.group]).index(key.buffer), -key.group, key.bucket

    return sorted(members, key=order)


def _take(
    found: BucketStates,
    bucket: Bucket,
    placement: BufferPlacement,
    candidates: Mapping[str, Candidate],
    seen: dict[tuple[object, ...], int],
) -> None:
    """Take in the parameters of one bucket; those that an earlier group holds too are copies."""
    found.ties += placement.ties
    found.placed += len(placement.starts)
    for name, start in placement.starts.items():
        held = candidates[name]
        boxes = (name, *(pair.global_box for pair in held.pairs))
        replica = seen[boxes] = seen.get(boxes, -1) + 1
        own = replace(held, replica=replica)
        found.chains.setdefault(name, bucket.key.chain)
        if bucket.in_chunks:
            master, stop = bucket.states[MASTER], start + held.numel
            edges = frozenset(low for low, _ in master.iter_stored(start, stop))
            place = BucketRange(start=start, stop=stop, bucket=master.numel, edges=edges)
            if found.bucket_ranges.setdefault(name, place) != place:
                found.bucket_ranges[name] = None
        states = found.fragments.setdefault(name, {})
        for state, buffer in bucket.states.items():
            states.setdefault(state, []).extend(cut_fragments(own, buffer, start))


class _Ranks:
    """Local tensors of every rank of the model-parallel grid, made when they are asked for."""

    def __init__(
        self,
        weights: Mapping[str, GlobalTensor],
        orders: Sequence[Sequence[str]],
        grid: ParallelDegrees,
        prober: Prober,
    ) -> None:
        self._weights = weights
        self._orders = orders
        self._grid = grid
        self._prober = prober
        self._experts = expert_numbers(weights)
        self._parts: dict[tuple[bool, int], tuple[Fingerprints, dict[str, Candidate]]] = {}
        self._elsewhere: dict[int, frozenset[str]] = {}

    def of_group(self, group: int) -> tuple[FlatBufferMatcher, dict[str, Candidate]]:
        """What the rank of a data-parallel group can hold: the tensor-parallel rank is the fastest in its number."""
        dense, dense_candidates = self._part(group % self._grid.tp, experts=False)
        expert, expert_candidates = self._part(group % self._grid.expert_tp, experts=True)
        return FlatBufferMatcher((dense, expert), orders=self._orders), {**dense_candidates, **expert_candidates}

    def _part(self, rank: int, *, experts: bool) -> tuple[Fingerprints, dict[str, Candidate]]:
        if (experts, rank) in self._parts:
            return self._parts[experts, rank]
        found: dict[str, Candidate] = {}
        irregular = []
        ranks = self._grid.expert_tp if experts else self._grid.tp
        kind = "expert" if experts else "dense"
        for name, whole in self._weights.items():
            if is_expert(name) != experts:
                continue
            local = find_local_tensor(whole, rank=rank, ranks=ranks, kind=kind)
            if local is None:
                boxes = ", ".join(str(piece.box) for piece in whole.boxes[:4])
                irregular.append(f"{name} {list(whole.shape)} over {ranks} ranks: {boxes}")
            else:
                found[name] = local
        if irregular:
            raise UnsupportedError(
                f"{counted(len(irregular), 'parameter is', 'parameters are')} "
                f"not cut evenly over the tensor-parallel ranks, so that their place "
                f"in the optimizer's buckets cannot be found:\n{listed(irregular)}\n"
                "Save the checkpoint with --dist-ckpt-optim-fully-reshardable"
            )
        self._parts[experts, rank] = Fingerprints(found.values(), self._prober), found
        return self._parts[experts, rank]

    def find(self, bucket: Bucket) -> BufferMatches:
        """Places of parameters in a bucket, and what fits them. Raises MalformedError."""
        matcher, _ = self.of_group(bucket.key.group)
        master = bucket.states.get(MASTER)
        if master is None:
            raise MalformedError(f"{describe(bucket.key)}: expected masters, the state {MASTER!r}; there are none")
        starts = [stored.start for stored in master.ranges] if bucket.in_chunks else None
        return matcher.find(master, starts=starts, unexpected=self.elsewhere(bucket.key.group))

    def of_stage(self, found: Sequence[BufferMatches]) -> int:
        """Ranks of a stage that have such buffers, all of one optimizer: dense parameters, or experts apart."""
        spots = [spot for own in found for spot in own.matches]
        certain = {spot.candidates[0].kind for spot in spots if len(spot.candidates) == 1}
        kinds = certain or {own.kind for spot in spots for own in spot.candidates}
        return self._grid.expert_tp * self._grid.ep if kinds == {"expert"} else self._grid.tp

    def elsewhere(self, group: int) -> frozenset[str]:
        """Experts that other expert-parallel ranks hold, by the number of the data-parallel group."""
        rank = group // self._grid.expert_tp % self._grid.ep
        if rank not in self._elsewhere:
            self._elsewhere[rank] = frozenset(
                name
                for name, (number, count) in self._experts.items()
                if count % self._grid.ep == 0 and number // (count // self._grid.ep) != rank
            )
        return self._elsewhere[rank]


def from_stored_tensors(tensors: Mapping[BucketKey, StoredTensor]) -> list[Bucket]:
    """Buckets that are stored as tensors."""
    buckets: dict[BucketKey, Bucket] = {}
    for key, tensor in tensors.items():
        base = replace(key, state="")
        bucket = buckets.setdefault(base, Bucket(key=base, in_chunks=True))
        bucket.states[key.state] = _stretches(tensor, f"{describe(base)}, {key.state}")
    return list(buckets.values())


def _position(bucket: Bucket) -> tuple[int, int, int, int]:
    key = bucket.key
    return -1 if key.chain is None else key.chain, key.group, key.buffer, key.bucket


def _stretches(tensor: StoredTensor, where: str) -> StateBuffer:
    """The stored chunks of one state as stretches of a buffer.

    Shape [numel], or [ranks, numel of a rank] where it was flattened to be saved (megatron-core 0.8 to 0.14).
    """
    shape = tensor.saved.shape
    if len(shape) not in (1, 2) or any(chunk.sizes[:-1] not in ((), (1,)) for chunk in tensor.chunks):
        raise MalformedError(f"{where}: expected a flat tensor; got {list(shape)}")
    numel = shape[0] * (shape[1] if len(shape) == 2 else 1)
    stretches = []
    for chunk in tensor.chunks:
        start = chunk.offsets[-1] + (chunk.offsets[0] * shape[1] if len(shape) == 2 else 0)
        length = min(chunk.sizes[-1], numel - start)  # padding may reach past the end (Megatron-LM issue 5898)
        if length > 0:
            ref = TensorRef(
                path=chunk.ref.path, offset=chunk.ref.offset, dtype=chunk.ref.dtype, shape=(length,), strides=(1,)
            )
            stretches.append(StoredRange(start, ref))
    stretches.sort(key=lambda stretch: stretch.start)
    return StateBuffer(where=where, ranges=tuple(stretches), numel=numel)


def describe(key: BucketKey) -> str:
    """Which bucket it is, for messages."""
    chain = "" if key.chain is None else f"optimizer {key.chain}, "
    return f"{chain}data-parallel group {key.group}, buffer {key.buffer}, bucket {key.bucket}"


def _check_gaps(gaps: Sequence[str], missing: Sequence[str]) -> None:
    if gaps and missing:
        raise MalformedError(
            f"in the optimizer's buckets {counted(len(gaps), 'stretch is', 'stretches are')} the master of no "
            f"parameter:\n{listed(gaps)}\n"
            f"{counted(len(missing), 'parameter')} of the model in no bucket:\n{listed(missing, most=100)}\n"
            "The weights and the optimizer are of different steps, or the weights are quantised. Save the checkpoint "
            "with --dist-ckpt-optim-fully-reshardable"
        )
