"""Optimizer states in the buckets of the distributed optimizer (`dp_reshardable`, `fully_sharded_bucket_space`).

This is the default of megatron-core since 0.15. Names and shapes of parameters are not recorded: parameters are found
by content (`buffers.matcher`). A bucket is stored in chunks: one per parameter and data-parallel rank, and one per
range of padding. Padding has arbitrary values and may reach past the end of the bucket. So every parameter starts where
a chunk starts.

The chunks of the model's tensors show what a rank of the model-parallel grid held: megatron-core writes a chunk per
local tensor, and only one chunk for copies on several ranks. So a dim has as many chunks as tensor-parallel ranks
(sharded), twice as many in dim 0 (gate and up projection of a gated MLP, each sharded), or one (replicated).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.core.index import WEIGHT
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.dcp.checkpoint import StoredTensor
from ucp.io.pickle.fields import describe_value, require_mapping
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.matcher import BufferMatches, BufferPlacement, Fingerprints, FlatBufferMatcher
from ucp_formats.megatron.buffers.state_buffer import Candidate, StateBuffer, StoredRange, cut_fragments
from ucp_formats.megatron.groups import expert_numbers, is_expert
from ucp_formats.megatron.torch_dist.keys import BucketKey, GroupObjectKey
from ucp_formats.megatron.torch_dist.states import BucketRange, DistStates
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, StoredBox

MASTER = "param"
"""State that holds the masters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Degrees of the run that determine local tensors."""

    tp: int
    """Tensor-parallel ranks."""
    expert_tp: int
    """Tensor-parallel ranks of an expert."""
    ep: int
    """Expert-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """All states of one bucket."""

    key: BucketKey
    """Key of the bucket, without the name of a state."""
    states: dict[str, StateBuffer] = field(default_factory=dict)
    """State to its elements."""
    in_chunks: bool
    """Whether every parameter starts where a stored range starts."""


def place_buckets(
    buckets: Iterable[Bucket],
    weights: Mapping[str, GlobalTensor],
    orders: Sequence[Sequence[str]],
    degrees: ParallelDegrees,
    *,
    layout: str,
) -> DistStates:
    """States of the parameters `weights`, found in `buckets`.

    If several data-parallel groups hold a parameter, the states of the first are taken, the others are replicas.

    `orders`: possible orders of registration. `layout`: name of the layout of the states.

    Raises
    ------
    MalformedError
        Ranges of the buckets match no parameter, or are ambiguous; names all of them, and the parameters not found.
    UnsupportedError
        A parameter is not split evenly over the tensor-parallel ranks.
    """
    states = DistStates(layout=layout)
    gaps: list[str] = []
    ties: list[str] = []
    count = 0
    copies: Counter[tuple[object, ...]] = Counter()
    with Prober() as prober:
        ranks = _Ranks(weights, orders, degrees, prober)
        for bucket, placement in sorted(_match(buckets, ranks, weights), key=lambda pair: _sort_key(pair[0])):
            _, candidates = ranks.of_group(bucket.key.group)
            gaps += _describe_gaps(bucket, placement.gaps)
            ties += placement.ties
            count += len(placement.starts)
            for name, start in placement.starts.items():
                boxes = (name, *(pair.global_box for pair in candidates[name].pairs))
                _add(states, bucket, replace(candidates[name], replica=copies[boxes]), start)
                copies[boxes] += 1
    _check_gaps(gaps, [name for name in weights if name not in states.fragments])
    states.notes.append(
        f"{count} masters were found in the buckets of the optimizer by content: cast to the dtype of the model, they "
        "equal the weights"
    )
    if gaps:
        states.notes.append(f"ranges of the buckets that match no parameter are left out: {'; '.join(gaps[:4])}")
    if ties:
        shown = ", ".join(ties[:4]) + (", ..." if len(ties) > 4 else "")
        states.notes.append(
            f"{len(ties)} of these masters have identical contents; told apart by registration order: {shown}"
        )
    return states


def _add(states: DistStates, bucket: Bucket, candidate: Candidate, start: int) -> None:
    """Add the states of a parameter that starts at element `start` of a bucket."""
    name, stop = candidate.name, start + candidate.numel
    states.chains.setdefault(name, bucket.key.chain)
    if bucket.in_chunks:
        master = bucket.states[MASTER]
        edges = frozenset(low for low, _ in master.iter_stored(start, stop))
        bucket_range = BucketRange(start=start, stop=stop, bucket=master.numel, edges=edges)
        if states.bucket_ranges.setdefault(name, bucket_range) != bucket_range:
            states.bucket_ranges[name] = None
    by_state = states.fragments.setdefault(name, {})
    for state, buffer in bucket.states.items():
        fragments = by_state.setdefault(WEIGHT if state == MASTER else state, [])
        fragments.extend(cut_fragments(candidate, buffer, start))


def _match(buckets: Iterable[Bucket], ranks: _Ranks, names: Iterable[str]) -> Iterator[tuple[Bucket, BufferPlacement]]:
    """Buckets and where parameters are in them; ties are resolved over all stages of a pipeline together."""
    matches = [(bucket, ranks.find(bucket)) for bucket in sorted(buckets, key=_sort_key)]
    matching = {
        candidate.name for _, positions in matches for match in positions.matches for candidate in match.candidates
    }
    gaps = [gap for bucket, positions in matches for gap in _describe_gaps(bucket, positions.gaps)]
    _check_gaps(gaps, [name for name in names if name not in matching])
    chains: dict[int | None, list[BufferMatches]] = {}
    for bucket, positions in matches:
        chains.setdefault(bucket.key.chain, []).append(positions)
    stage_sizes = {chain: ranks.stage_size(positions) for chain, positions in chains.items()}
    pipelines: dict[tuple[object, ...], list[tuple[Bucket, BufferMatches]]] = {}
    for bucket, positions in matches:
        key = bucket.key
        pipelines.setdefault((key.chain, key.dtype, key.group % stage_sizes[key.chain]), []).append((bucket, positions))
    for pipeline in pipelines.values():
        reverse = _sort_backwards(pipeline)
        matcher, _ = ranks.of_group(reverse[0][0].key.group)
        placements = matcher.resolve([positions for _, positions in reverse])
        yield from zip((bucket for bucket, _ in reverse), placements, strict=True)


def _sort_backwards(pipeline: Sequence[tuple[Bucket, BufferMatches]]) -> list[tuple[Bucket, BufferMatches]]:
    """Buckets from the end of the model to its start.

    Layers are split into chunks, and each chunk over all stages: in a chunk, the last stage has the last layers. A
    buffer belongs to one chunk, and its first bucket holds what was registered last.
    """
    buffers: dict[int, set[int]] = {}
    for bucket, _ in pipeline:
        buffers.setdefault(bucket.key.group, set()).add(bucket.key.buffer)

    def order(member: tuple[Bucket, BufferMatches]) -> tuple[int, int, int]:
        key = member[0].key
        return -sorted(buffers[key.group]).index(key.buffer), -key.group, key.bucket

    return sorted(pipeline, key=order)


def _sort_key(bucket: Bucket) -> tuple[int, int, int, int]:
    key = bucket.key
    return -1 if key.chain is None else key.chain, key.group, key.buffer, key.bucket


def _describe_gaps(bucket: Bucket, gaps: Sequence[tuple[int, int]]) -> list[str]:
    master = bucket.states[MASTER]
    return [f"{master.where}: elements {low}:{high} of {master.numel}" for low, high in gaps]


def _check_gaps(gaps: Sequence[str], missing: Sequence[str]) -> None:
    if gaps and missing:
        raise MalformedError(
            "expected masters of the model's parameters in all of the optimizer's buckets; "
            f"{format_count(len(gaps), 'range matches', 'ranges match')} no parameter:\n{format_list(gaps)}\n"
            f"{format_count(len(missing), 'parameter is', 'parameters are')} in no bucket:\n"
            f"{format_list(missing, most=100)}\n"
            "The weights and the optimizer are from different steps, or the weights are quantised. Save the checkpoint "
            "with --dist-ckpt-optim-fully-reshardable"
        )


class _Ranks:
    """Local tensors of the ranks of the model-parallel grid, computed when they are needed."""

    def __init__(
        self,
        weights: Mapping[str, GlobalTensor],
        orders: Sequence[Sequence[str]],
        degrees: ParallelDegrees,
        prober: Prober,
    ) -> None:
        self._weights = weights
        self._orders = orders
        self._degrees = degrees
        self._prober = prober
        self._experts = expert_numbers(weights)
        self._fingerprints: dict[tuple[bool, int], Fingerprints] = {}
        self._other_experts: dict[int, frozenset[str]] = {}
        self._matchers: dict[tuple[int, int], tuple[FlatBufferMatcher, dict[str, Candidate]]] = {}

    def of_group(self, group: int) -> tuple[FlatBufferMatcher, dict[str, Candidate]]:
        """A matcher for the parameters that a data-parallel group can hold, and these parameters by name.

        `group`: its position in the model-parallel grid; the tensor-parallel rank varies fastest.
        """
        ranks = group % self._degrees.tp, group % self._degrees.expert_tp
        if ranks not in self._matchers:
            parts = [self._take_fingerprints(ranks[0], experts=False), self._take_fingerprints(ranks[1], experts=True)]
            candidates = {candidate.name: candidate for part in parts for candidate in part.candidates}
            self._matchers[ranks] = FlatBufferMatcher(parts, orders=self._orders), candidates
        return self._matchers[ranks]

    def _take_fingerprints(self, rank: int, *, experts: bool) -> Fingerprints:
        if (experts, rank) in self._fingerprints:
            return self._fingerprints[experts, rank]
        candidates, irregular = [], []
        ranks = self._degrees.expert_tp if experts else self._degrees.tp
        for name, tensor in self._weights.items():
            if is_expert(name) != experts:
                continue
            candidate = _find_local_tensor(tensor, rank=rank, ranks=ranks, kind="expert" if experts else "dense")
            if candidate is None:
                boxes = ", ".join(str(stored.box) for stored in tensor.boxes[:4])
                irregular.append(f"{name} {list(tensor.shape)} over {ranks} ranks: {boxes}")
            else:
                candidates.append(candidate)
        if irregular:
            raise UnsupportedError(
                f"{format_count(len(irregular), 'parameter is', 'parameters are')} not split evenly over the "
                "tensor-parallel ranks, so ucp cannot find them in the optimizer's buckets:\n"
                f"{format_list(irregular)}\nSave the checkpoint with --dist-ckpt-optim-fully-reshardable"
            )
        return self._fingerprints.setdefault((experts, rank), Fingerprints(candidates, self._prober))

    def find(self, bucket: Bucket) -> BufferMatches:
        """Positions of parameters in a bucket. Raises MalformedError."""
        master, degrees = bucket.states.get(MASTER), self._degrees
        if master is None:
            raise MalformedError(f"{bucket.key.label}: expected masters, the state {MASTER!r}; there are none")
        rank = bucket.key.group // degrees.expert_tp % degrees.ep
        if rank not in self._other_experts:
            self._other_experts[rank] = frozenset(
                name
                for name, (number, count) in self._experts.items()
                if count % degrees.ep == 0 and number // (count // degrees.ep) != rank
            )
        starts = [stored.start for stored in master.ranges] if bucket.in_chunks else None
        return self.of_group(bucket.key.group)[0].find(master, starts=starts, unexpected=self._other_experts[rank])

    def stage_size(self, buffers: Sequence[BufferMatches]) -> int:
        """Number of data-parallel groups in a stage, for an optimizer of dense parameters or one of experts.

        `buffers`: the buffers of the optimizer, whose contents show which of the two it is.
        """
        matches = [match for buffer in buffers for match in buffer.matches]
        certain = {match.candidates[0].kind for match in matches if len(match.candidates) == 1}
        kinds = certain or {candidate.kind for match in matches for candidate in match.candidates}
        return self._degrees.expert_tp * self._degrees.ep if kinds == {"expert"} else self._degrees.tp


def _find_local_tensor(tensor: GlobalTensor, *, rank: int, ranks: int, kind: str) -> Candidate | None:
    """The tensor as rank `rank` of `ranks` held it; None if its chunks do not split it evenly over these ranks."""
    local: list[StoredBox] = []
    start = 0
    for length in tensor.parts or (tensor.shape[0] if tensor.shape else 1,):
        stop = start + length
        part = [stored for stored in tensor.boxes if not stored.box.offsets or start <= stored.box.offsets[0] < stop]
        boxes = _find_boxes(part, rank=rank, ranks=ranks)
        if boxes is None:
            return None
        local += boxes
        start = stop
    pairs, rows = [], 0  # the boxes lie end to end along dim 0
    for box, _ in local:
        pairs.append(RegionPair(box, Box((rows, *(0,) * (len(box.sizes) - 1)), box.sizes) if box.sizes else box))
        rows += box.sizes[0] if box.sizes else 0
    sizes = local[0].box.sizes
    return Candidate(
        name=tensor.name,
        local_shape=(rows, *sizes[1:]) if sizes else (),
        pairs=tuple(pairs),
        refs=tuple(stored.ref for stored in local),
        kind=kind,
    )


def _find_boxes(boxes: Sequence[StoredBox], *, rank: int, ranks: int) -> list[StoredBox] | None:
    """Boxes of a rank, in the order of the local tensor; None if the split is not even."""
    if not boxes or not all(stored.ref.is_contiguous for stored in boxes):
        return None
    if len(boxes) == 1:
        return list(boxes)
    first = boxes[0].box
    split = [dim for dim in range(len(first.sizes)) if len({stored.box.offsets[dim] for stored in boxes}) > 1]
    if len(split) != 1 or any(stored.box.sizes != first.sizes for stored in boxes):
        return None
    ordered = sorted(boxes, key=lambda stored: stored.box.offsets[split[0]])
    if len(ordered) == ranks:
        return [ordered[rank]]
    return [ordered[rank], ordered[ranks + rank]] if len(ordered) == 2 * ranks and split[0] == 0 else None


def from_stored_tensors(tensors: Mapping[BucketKey, StoredTensor]) -> list[Bucket]:
    """Buckets that are stored as tensors."""
    buckets: dict[BucketKey, Bucket] = {}
    for key, tensor in tensors.items():
        base = key._replace(state="")
        bucket = buckets.setdefault(base, Bucket(key=base, in_chunks=True))
        bucket.states[key.state] = _read_chunks(tensor, f"{key.label}, {key.state}")
    return list(buckets.values())


def _read_chunks(tensor: StoredTensor, where: str) -> StateBuffer:
    """The stored chunks of one state as ranges of a buffer.

    The tensor has shape [numel], or [ranks, numel per rank] if it was flattened for saving (megatron-core 0.8 to 0.14).
    """
    shape = tensor.saved.shape
    if len(shape) not in (1, 2) or any(chunk.sizes[:-1] not in ((), (1,)) for chunk in tensor.chunks):
        raise MalformedError(f"{where}: expected a flat tensor; got {list(shape)}")
    numel = shape[0] * (shape[1] if len(shape) == 2 else 1)
    ranges = []
    for chunk in tensor.chunks:
        start = chunk.offsets[-1] + (chunk.offsets[0] * shape[1] if len(shape) == 2 else 0)
        length = min(chunk.sizes[-1], numel - start)  # padding may reach past the end (Megatron-LM issue 5898)
        if length > 0:
            ref = TensorRef(
                path=chunk.ref.path, offset=chunk.ref.offset, dtype=chunk.ref.dtype, shape=(length,), strides=(1,)
            )
            ranges.append(StoredRange(start, ref))
    ranges.sort(key=lambda stored: stored.start)
    return StateBuffer(where=where, ranges=tuple(ranges), numel=numel)


def from_gathered_objects(objects: Mapping[GroupObjectKey, object]) -> list[Bucket]:
    """Buckets in the objects `param_state` of data-parallel groups. Raises MalformedError."""
    buckets: dict[BucketKey, Bucket] = {}
    for group, value in objects.items():
        where = f"the optimizer states of data-parallel group {group.group}"
        for buffer, by_dtype in require_mapping(value, where).items() if group.kind == "param_state" else ():
            if type(buffer) is not int:
                continue
            for dtype, saved in require_mapping(by_dtype, f"buffer {buffer} of {where}").items():
                for state, tensors in require_mapping(saved, f"buffer {buffer} of {where}").items():
                    if not isinstance(tensors, list | TensorRef):
                        continue  # numel_unpadded
                    for number, tensor in enumerate(tensors if isinstance(tensors, list) else [tensors]):
                        key = BucketKey(group.chain, group.group, buffer, str(dtype), number, "")
                        label = f"{key.label}, {state}"
                        if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.is_contiguous:
                            raise MalformedError(f"{label}: expected a flat tensor; got {describe_value(tensor)}")
                        bucket = buckets.setdefault(key, Bucket(key=key, in_chunks=False))
                        bucket.states[str(state)] = StateBuffer.from_tensor(tensor, label)
    return list(buckets.values())
