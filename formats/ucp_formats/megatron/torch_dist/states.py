"""Optimizer states of a torch_dist checkpoint, per parameter, whichever of the six layouts it has.

| layout | keys |
|---|---|
| no distributed optimizer | optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<parameter> |
| fully_reshardable (0.14 on) | optimizer.state.{param,exp_avg,exp_avg_sq}.<parameter> |
| fully_sharded_model_space (0.8 to 0.14) | as without, but flattened: see `unstack` |
| dp_reshardable (default since 0.15), fully_sharded_bucket_space (0.6 to 0.14) | flat buckets: see `states/buckets` |
| dp_zero_gather_scatter (0.6 to 0.14) | an object per data-parallel group: see `gathered_buckets` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ucp.core.index import WEIGHT, Fragment
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, counted, listed
from ucp.io.dcp.checkpoint import StoredTensor
from ucp.io.pickle.fields import described, mapping
from ucp_formats.megatron.buffers.state_buffer import StateBuffer
from ucp_formats.megatron.torch_dist.buckets import Bucket, BucketRange, BucketStates, describe
from ucp_formats.megatron.torch_dist.keys import BucketKey, GroupObjectKey, ModelKey, StateKey
from ucp_formats.megatron.torch_dist.unstack import Flattened, GlobalTensor, StoredBox, unstack

_MASTERS = frozenset({"param", "fp32_param", "master_param"})
"""Names of the state that holds the masters."""


@dataclass(slots=True, kw_only=True)
class DistStates:
    """States found."""

    layout: str
    """Name of the layout."""
    fragments: dict[str, dict[str, list[Fragment]]] = field(default_factory=dict)
    """Parameter to state (`weight` for the master) to its pieces."""
    chains: dict[str, int | None] = field(default_factory=dict)
    """Parameter to which of several optimizers it belongs to, where that is recorded."""
    bucket_ranges: dict[str, BucketRange | None] = field(default_factory=dict)
    """Parameter to where it lies in a bucket whose data-parallel shares are in the files; None where ranks differ."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""

    def merge(self, other: DistStates) -> DistStates:
        """These and those of `other`, which are of other parameters.

        With a layer-wise optimizer, matrices have states under their own keys; the distributed optimizer has the rest.
        """
        if not self.layout:
            return other
        counts = counted(len(self.fragments), "parameter"), counted(len(other.fragments), "other")
        return DistStates(
            layout=other.layout,
            fragments=self.fragments | other.fragments,
            chains=self.chains | other.chains,
            bucket_ranges=self.bucket_ranges | other.bucket_ranges,
            notes=[*self.notes, *other.notes, f"{counts[0]} have states of their own keys, {counts[1]} lie in buckets"],
        )


def from_state_keys(
    tensors: Mapping[StateKey, StoredTensor],
    weights: Mapping[str, GlobalTensor],
    understood: Callable[[str], ModelKey],
    flattened: Flattened,
) -> DistStates:
    """States that are saved in the shape of their parameter.

    Raises MalformedError when a state does not have the shape of its parameter, or belongs to none.
    """
    keys: dict[str, list[tuple[StateKey, StoredTensor]]] = {}
    for key, tensor in tensors.items():
        keys.setdefault(key.state, []).append((key, tensor))
    flat = any(flattened(tensor.saved.key) is not None for tensor in tensors.values())
    own = "fully_reshardable" if "param" in keys else "fully_sharded_model_space" if flat else "not distributed"
    found = DistStates(layout=own)
    problems: list[str] = []
    turned: list[str] = []
    for state, entries in keys.items():
        wholes = unstack(((key.model, tensor) for key, tensor in entries), understood, flattened)
        for name, whole in wholes.items():
            fitted = _fitted(whole, weights.get(name), turned)
            if fitted is None:
                weight = weights.get(name)
                shape = "no parameter of the model" if weight is None else f"a parameter of {list(weight.shape)}"
                problems.append(f"{state} of {name} {list(whole.shape)}: {shape}")
                continue
            pieces = [Fragment(box=piece.box, ref=piece.ref) for piece in fitted.boxes]
            found.fragments.setdefault(name, {})[WEIGHT if state in _MASTERS else state] = pieces
    if problems:
        raise MalformedError(f"{len(problems)} optimizer states do not fit the model:\n{listed(problems)}")
    if turned:
        found.notes.append(
            f"states of {counted(len(turned), 'expert')} "
            f"are stored transposed, as GroupedMLP of megatron-core up to 0.15 does: "
            f"they are read so"
        )
    return found


def _fitted(whole: GlobalTensor, weight: GlobalTensor | None, turned: list[str]) -> GlobalTensor | None:
    """The state in the shape of the weight: as it is, or transposed (GroupedMLP up to megatron-core 0.15)."""
    if weight is None:
        return None
    if whole.shape == weight.shape:
        return whole
    if whole.shape[::-1] != weight.shape or len(whole.shape) != 2:
        return None
    turned.append(whole.name)
    pieces = []
    for box, ref in whole.boxes:
        transposed = ref.strided(0, ref.shape[::-1], ref.strides[::-1])
        pieces.append(StoredBox(Box(box.offsets[::-1], box.sizes[::-1]), transposed))
    return GlobalTensor(name=whole.name, shape=weight.shape, dtype=whole.dtype, boxes=pieces)


def from_buckets(buckets: BucketStates, layout: str) -> DistStates:
    """States that were found in flat buckets."""
    found = DistStates(layout=layout, chains=dict(buckets.chains), bucket_ranges=buckets.bucket_ranges)
    for name, states in buckets.fragments.items():
        found.fragments[name] = {WEIGHT if key in _MASTERS else key: own for key, own in states.items()}
    found.notes.append(
        f"{buckets.placed} masters were found in the buckets of the optimizer by content: cast, they equal the weights"
    )
    if buckets.gaps:
        found.notes.append(
            f"stretches of the buckets that are of no parameter, left out: {'; '.join(buckets.gaps[:4])}"
        )
    if buckets.ties:
        found.notes.append(
            f"{len(buckets.ties)} of them have the contents of others and were told apart by their order: "
            + ", ".join(buckets.ties[:4])
            + (", ..." if len(buckets.ties) > 4 else "")
        )
    return found


def state_dtype(fragments: Iterable[Fragment]) -> DType:
    """Element type of the pieces that are taken."""
    return next(fragment.ref.dtype for fragment in fragments if fragment.replica == 0)


def from_gathered_objects(objects: Mapping[GroupObjectKey, object]) -> list[Bucket]:
    """Buckets in the objects `param_state` of data-parallel groups. Raises MalformedError."""
    buckets: dict[BucketKey, Bucket] = {}
    for key, value in objects.items():
        where = f"the optimizer states of data-parallel group {key.group}"
        for buffer, by_dtype in mapping(value, where).items() if key.kind == "param_state" else ():
            if type(buffer) is not int:
                continue
            for dtype, saved in mapping(by_dtype, f"buffer {buffer} of {where}").items():
                for state, tensors in mapping(saved, f"buffer {buffer} of {where}").items():
                    if not isinstance(tensors, list | TensorRef):
                        continue  # numel_unpadded
                    for number, tensor in enumerate(tensors if isinstance(tensors, list) else [tensors]):
                        at = BucketKey(key.chain, key.group, buffer, str(dtype), number, "")
                        label = f"{describe(at)}, {state}"
                        if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.is_contiguous:
                            raise MalformedError(f"{label}: expected a flat tensor; got {described(tensor)}")
                        bucket = buckets.setdefault(at, Bucket(key=at, in_chunks=False))
                        bucket.states[str(state)] = StateBuffer.from_tensor(tensor, label)
    return list(buckets.values())
