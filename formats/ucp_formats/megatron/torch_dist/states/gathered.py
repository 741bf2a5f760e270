"""Optimizer states that a data-parallel group gathered in one object (`dp_zero_gather_scatter`, megatron-core to 0.14).

    {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {"param": tensor, "exp_avg": tensor, ...}}}

Buffer, types, state: a flat tensor without the padding at the ends of buckets; before 2024-05 a list of tensors, one
per bucket with its padding. Where parameters lie in it is found by content, as for buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError
from ucp.io.pickle.fields import described, mapping
from ucp_formats.megatron.flat_buffer.boxes import FlatBuffer
from ucp_formats.megatron.torch_dist.keys import BucketKey, GroupObjectKey
from ucp_formats.megatron.torch_dist.states.buckets import Bucket, where_is

__all__ = ["gathered_buckets"]


def gathered_buckets(objects: Mapping[GroupObjectKey, object]) -> list[Bucket]:
    """Buckets in the objects `param_state` of data-parallel groups. Raises MalformedError."""
    return [bucket for key, value in objects.items() if key.what == "param_state" for bucket in _of_group(key, value)]


def _of_group(key: GroupObjectKey, value: object) -> Iterator[Bucket]:
    where = f"the optimizer states of data-parallel group {key.group}"
    for buffer, by_dtype in mapping(value, where).items():
        if type(buffer) is not int:
            continue
        for dtype, states in mapping(by_dtype, f"buffer {buffer} of {where}").items():
            base = BucketKey(key.chain, key.group, buffer, str(dtype), 0, "")
            yield from _of_buffer(base, mapping(states, f"buffer {buffer} of {where}"))


def _of_buffer(base: BucketKey, states: Mapping[object, object]) -> Iterator[Bucket]:
    found: dict[int, Bucket] = {}
    for state, value in states.items():
        tensors = value if isinstance(value, list) else [value]
        if not isinstance(value, list | TensorRef):
            continue  # numel_unpadded
        for number, tensor in enumerate(tensors):
            key = BucketKey(base.chain, base.group, base.buffer, base.dtype, number, "")
            bucket = found.setdefault(number, Bucket(key=key, in_chunks=False))
            bucket.states[str(state)] = _flat(tensor, f"{where_is(key)}, {state}")
    yield from found.values()


def _flat(tensor: object, where: str) -> FlatBuffer:
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.is_contiguous:
        raise MalformedError(f"{where}: expected a flat tensor; got {described(tensor)}")
    return FlatBuffer.of(tensor, where)
