"""Optimizer states of a torch_dist checkpoint, per parameter, in any of the six layouts.

| layout | keys |
|---|---|
| no distributed optimizer | optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<parameter> |
| fully_reshardable (0.14 on) | optimizer.state.{param,exp_avg,exp_avg_sq}.<parameter> |
| fully_sharded_model_space (0.8 to 0.14) | the same, but flattened: see `unstack` |
| dp_reshardable (default since 0.15), fully_sharded_bucket_space (0.6 to 0.14) | flat buckets: see `buckets` |
| dp_zero_gather_scatter (0.6 to 0.14) | an object per data-parallel group: see `buckets` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ucp.core.index import WEIGHT, Fragment
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import MalformedError, format_count, format_list
from ucp.io.dcp.checkpoint import StoredTensor
from ucp_formats.megatron.torch_dist.keys import ModelKey, StateKey
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, OriginalShape, StoredBox, unstack

_MASTERS = frozenset({"param", "fp32_param", "master_param"})
"""Names of the state that holds the masters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRange:
    """The range of a parameter in a bucket that the data-parallel ranks stored in equal shares."""

    start: int
    """First element, in the bucket."""
    stop: int
    """One past its last element."""
    bucket: int
    """Elements of the bucket; without the padding at its end if the file leaves that out."""
    edges: frozenset[int]
    """Elements between `start` and `stop` where a stored range starts."""

    def find_share(self, ranks: int, *, multiple: int) -> int | None:
        """Elements of each rank's share of the bucket, which is padded to `multiple`.

        None unless a stored range starts wherever a share starts.
        """
        share, rest = divmod(-(-self.bucket // multiple) * multiple, ranks)
        if rest or not share:
            return None
        ends = range((self.start // share + 1) * share, self.stop, share)
        return share if self.edges.issuperset(ends) else None


@dataclass(slots=True, kw_only=True)
class DistStates:
    """Optimizer states, by parameter."""

    layout: str
    """Name of the layout; empty if there is no optimizer."""
    fragments: dict[str, dict[str, list[Fragment]]] = field(default_factory=dict)
    """Parameter to state (`weight` for the master) to its fragments."""
    chains: dict[str, int | None] = field(default_factory=dict)
    """Parameter to the number of its optimizer in a chain, if recorded."""
    bucket_ranges: dict[str, BucketRange | None] = field(default_factory=dict)
    """Parameter to its range in a bucket that is stored in data-parallel shares; None if it differs between groups."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""

    def merge(self, other: DistStates) -> DistStates:
        """These states, and the states that `other` has of other parameters.

        With a layer-wise optimizer, matrices have states under their own keys; the distributed optimizer has the rest.
        """
        if not self.layout:
            return other
        counts = format_count(len(self.fragments), "parameter"), format_count(len(other.fragments), "other")
        return DistStates(
            layout=other.layout,
            fragments=self.fragments | other.fragments,
            chains=self.chains | other.chains,
            bucket_ranges=self.bucket_ranges | other.bucket_ranges,
            notes=[
                *self.notes,
                *other.notes,
                f"states of {counts[0]} have keys with the name of the parameter, those of {counts[1]} are in buckets",
            ],
        )


def from_state_keys(
    tensors: Mapping[StateKey, StoredTensor],
    weights: Mapping[str, GlobalTensor],
    parse: Callable[[str], ModelKey],
    original_shape: OriginalShape,
) -> DistStates:
    """States that are saved in the shape of their parameter.

    Raises MalformedError when a state belongs to no parameter or has another shape.
    """
    by_state: dict[str, list[tuple[StateKey, StoredTensor]]] = {}
    for key, tensor in tensors.items():
        by_state.setdefault(key.state, []).append((key, tensor))
    is_flat = any(original_shape(tensor.saved.key) is not None for tensor in tensors.values())
    layout = "fully_sharded_model_space" if is_flat else "not distributed"
    states = DistStates(layout="fully_reshardable" if "param" in by_state else layout)
    problems: list[str] = []
    transposed = 0
    for state, entries in by_state.items():
        params = unstack(((key.model, tensor) for key, tensor in entries), parse, original_shape)
        for name, param in params.items():
            weight, boxes, shape = weights.get(name), param.boxes, param.shape
            if weight is None:
                problems.append(f"{state} of {name} {list(shape)}: no parameter of the model")
                continue
            if shape != weight.shape:
                if len(shape) != 2 or shape[::-1] != weight.shape:
                    problems.append(f"{state} of {name} {list(shape)}: the parameter is {list(weight.shape)}")
                    continue
                transposed += 1
                boxes = [_transpose(box) for box in boxes]
            fragments = [Fragment(box=box, ref=ref) for box, ref in boxes]
            states.fragments.setdefault(name, {})[WEIGHT if state in _MASTERS else state] = fragments
    if problems:
        raise MalformedError(f"{len(problems)} optimizer states do not fit the model:\n{format_list(problems)}")
    if transposed:
        states.notes.append(
            f"{format_count(transposed, 'expert state is', 'expert states are')} stored transposed (GroupedMLP of "
            "megatron-core up to 0.15)"
        )
    return states


def _transpose(stored: StoredBox) -> StoredBox:
    box, ref = stored
    return StoredBox(Box(box.offsets[::-1], box.sizes[::-1]), ref.strided(0, ref.shape[::-1], ref.strides[::-1]))


def state_dtype(fragments: Iterable[Fragment]) -> DType:
    """Element type of the fragments that are read, which are not replicas."""
    return next(fragment.ref.dtype for fragment in fragments if fragment.replica == 0)
