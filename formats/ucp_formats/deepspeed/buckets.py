"""A bucket is what the optimizer steps as one tensor: many parameters, flat, in pieces on the ranks.

Every rank has a weight and named states for a bucket. A state is

- one number for all (`step`): a Python number, which must agree, or a 0-d tensor, of which ranks hold copies;
- one number per element: a tensor as long as a layout of the bucket says;
- nothing of a parameter (a flag, a list): kept as an extra.

Anything else cannot be given to parameters, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from struct import pack

from ucp.atom import Extra, StateIndex
from ucp.dtypes import DType
from ucp.fragment import Fragment
from ucp.region import Box, local_flat_pairs
from ucp.state import WEIGHT
from ucp.tensor import InlineTensor, TensorRef, contiguous_strides
from ucp_formats.deepspeed.fields import Shape, described
from ucp_formats.deepspeed.flat_layout import FlatLayout
from ucp_formats.deepspeed.partition import Held
from ucp_formats.deepspeed.problems import Problems
from ucp_formats.deepspeed.sameness import Checksums

__all__ = ["Bucket", "BucketStates", "Shard", "bucket_states", "inline_number", "pieces_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a bucket."""

    rank: int
    """The rank."""
    file: str
    """Name of its file, for messages."""
    weight: TensorRef
    """The weights, one-dimensional."""
    states: Mapping[str, object]
    """State name to value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are flat together."""

    label: str
    """Name for messages, e.g. "group 0"."""
    shapes: Mapping[str, Shape]
    """Parameter to global shape, in the order of the flat tensor."""
    layouts: tuple[FlatLayout, ...]
    """Layouts its tensors can have; the first that fits all ranks is taken."""
    shards: tuple[Shard, ...]
    """One per rank."""


@dataclass(slots=True)
class BucketStates:
    """States of the parameters of a bucket."""

    states: dict[str, dict[str, StateIndex]]
    """Parameter to state name to its pieces."""
    extras: list[Extra] = field(default_factory=list)
    """States that say nothing of a parameter."""
    dropped: list[str] = field(default_factory=list)
    """States without a value."""
    names: set[str] = field(default_factory=set)
    """Names of the states found, the weight not among them."""


def bucket_states(bucket: Bucket, checksums: Checksums, problems: Problems) -> BucketStates:
    """States of every parameter of `bucket`; what cannot be understood goes to `problems`."""
    found = BucketStates(states={name: {} for name in bucket.shapes})
    _add_elementwise(bucket, WEIGHT, {shard.rank: shard.weight for shard in bucket.shards}, found, problems)
    names = dict.fromkeys(name for shard in bucket.shards for name in shard.states)
    for name in names:
        values = {shard.rank: shard.states[name] for shard in bucket.shards if shard.states.get(name) is not None}
        kind = next(iter(values.values()), None)
        if kind is None:
            found.dropped.append(f"{bucket.label}: state {name} is None everywhere")
            continue
        found.names.add(name)
        if isinstance(kind, TensorRef) and kind.shape:
            tensors = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
            if len(tensors) == len(values):
                _add_elementwise(bucket, name, tensors, found, problems)
            else:
                problems.wrong.append(f"{bucket.label}: state {name} is a tensor on some ranks only")
        elif isinstance(kind, TensorRef) or type(kind) in (int, float):
            _add_scalar(bucket, name, values, found, checksums, problems)
        else:
            found.extras.append(Extra(name=f"optimizer_state/{bucket.label}/{name}", value=kind))
    return found


def inline_number(number: float) -> InlineTensor:
    """A Python number as a 0-d tensor: int64 or float64, so that no bit is lost.

    >>> inline_number(3).dtype, inline_number(3.0).dtype
    (<DType.INT64: 'int64'>, <DType.FLOAT64: 'float64'>)
    """
    if isinstance(number, float):
        return InlineTensor(data=pack("<d", number), dtype=DType.FLOAT64)
    return InlineTensor(data=number.to_bytes(8, "little", signed=True), dtype=DType.INT64)


def pieces_of(held: Held, shape: Shape, flat: TensorRef, *, replica: int = 0) -> Iterator[Fragment]:
    """Boxes of a parameter of `shape` that a stretch of the flat tensor `flat` holds, and where they lie."""
    strides = contiguous_strides(shape)
    origin = flat.offset + held.offset * flat.dtype.itemsize
    for box, position in local_flat_pairs(shape, held.start, held.stop):
        ref = TensorRef(
            path=flat.path,
            offset=origin + position * flat.dtype.itemsize,
            dtype=flat.dtype,
            shape=box.sizes,
            strides=strides,
        )
        yield Fragment(box=box, ref=ref, replica=replica)


def _add_elementwise(
    bucket: Bucket, name: str, tensors: Mapping[int, TensorRef], found: BucketStates, problems: Problems
) -> None:
    if not _check_tensors(bucket, name, tensors, problems):
        return
    layout = _layout(bucket, tensors)
    if layout is None:
        problems.unsupported.append(_misfit(bucket, name, tensors))
        return
    missing = [shard.file for shard in bucket.shards if shard.rank not in tensors and layout.held(shard.rank)]
    if missing:
        problems.wrong += [f"{file}: {bucket.label} has no state {name}, other ranks have" for file in missing]
        return
    pieces: dict[str, list[Fragment]] = {}
    for rank, flat in tensors.items():
        for held in layout.held(rank):
            replica = layout.replica(held.name, rank)
            pieces.setdefault(held.name, []).extend(pieces_of(held, bucket.shapes[held.name], flat, replica=replica))
    first = next(iter(tensors.values()))
    for param, shape in bucket.shapes.items():
        fragments = pieces.get(param) or _of_nothing(shape, first)
        found.states[param][name] = StateIndex(dtype=first.dtype, global_shape=shape, fragments=tuple(fragments))


def _of_nothing(shape: Shape, flat: TensorRef) -> Sequence[Fragment]:
    """The piece of a parameter without elements."""
    ref = TensorRef(
        path=flat.path, offset=flat.offset, dtype=flat.dtype, shape=shape, strides=contiguous_strides(shape)
    )
    return [Fragment(box=Box.whole(shape), ref=ref)]


def _check_tensors(bucket: Bucket, name: str, tensors: Mapping[int, TensorRef], problems: Problems) -> bool:
    """Whether all are one-dimensional, without gaps, and of one type."""
    odd = {rank: ref for rank, ref in tensors.items() if len(ref.shape) != 1 or not ref.is_contiguous}
    if odd:
        problems.unsupported.append(_misfit(bucket, name, odd))
        return False
    dtypes = {_file(bucket, rank): str(ref.dtype) for rank, ref in tensors.items()}
    if len(set(dtypes.values())) > 1:
        problems.agree(f"the type of {name} of {bucket.label}", dtypes)
        return False
    return True


def _layout(bucket: Bucket, tensors: Mapping[int, TensorRef]) -> FlatLayout | None:
    """The layout that fits the length of every tensor; None when none does, or several that differ."""
    fitting = [
        layout for layout in bucket.layouts if all(layout.accepts(rank, ref.shape[0]) for rank, ref in tensors.items())
    ]
    if not fitting:
        return None
    held = [[(h.name, h.start, h.stop, h.offset) for r in tensors for h in fit.held(r)] for fit in fitting[:3]]
    return fitting[0] if all(other == held[0] for other in held) else None


def _misfit(bucket: Bucket, name: str, tensors: Mapping[int, TensorRef]) -> str:
    expected = [sum(held.stop - held.start for held in bucket.layouts[0].held(rank)) for rank in tensors]
    lengths = ", ".join(str(list(ref.shape)) for ref in tensors.values())
    return (
        f"{bucket.label} ({', '.join(list(bucket.shapes)[:3])}, ...): state {name} has the shape {lengths} on the ranks; "
        f"expected {', '.join(map(str, expected))} elements and padding. Its elements cannot be told to belong to "
        "parameters"
    )


def _file(bucket: Bucket, rank: int) -> str:
    return next(shard.file for shard in bucket.shards if shard.rank == rank)


def _add_scalar(  # noqa: PLR0913, PLR0917  # all of them are needed
    bucket: Bucket,
    name: str,
    values: Mapping[int, object],
    found: BucketStates,
    checksums: Checksums,
    problems: Problems,
) -> None:
    lost = [shard.file for shard in bucket.shards if shard.rank not in values and shard.weight.numel]
    problems.wrong += [f"{file}: {bucket.label} has no state {name}, other ranks have" for file in lost]
    numbers = {rank: value for rank, value in values.items() if isinstance(value, int | float)}
    tensors = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
    if numbers and tensors:
        shown = {_file(bucket, rank): described(value) for rank, value in values.items()}
        problems.agree(f"{name} of {bucket.label}", shown)
        return
    if numbers:
        problems.agree(f"{name} of {bucket.label}", {_file(bucket, rank): value for rank, value in numbers.items()})
        ref: InlineTensor = inline_number(next(iter(numbers.values())))
        state = StateIndex(dtype=ref.dtype, global_shape=(), fragments=(Fragment(box=Box((), ()), ref=ref),))
    else:
        _check_copies(bucket, name, tensors, checksums, problems)
        state = _copied(tensors.values())
    for param in bucket.shapes:
        found.states[param][name] = state


def _copied(tensors: Iterable[TensorRef]) -> StateIndex:
    refs = [ref for ref in tensors if not ref.shape]
    fragments = [Fragment(box=Box((), ()), ref=ref, replica=replica) for replica, ref in enumerate(refs)]
    return StateIndex(dtype=refs[0].dtype, global_shape=(), fragments=tuple(fragments))


def _check_copies(
    bucket: Bucket, name: str, tensors: Mapping[int, TensorRef], checksums: Checksums, problems: Problems
) -> None:
    """Note ranks whose number is known to differ from that of the first: their bytes have other checksums."""
    rank, first = next(iter(tensors.items()))
    problems.wrong += [
        f"{_file(bucket, other)}: of another run: {name} of {bucket.label} differs from that in {_file(bucket, rank)}"
        for other, ref in tensors.items()
        if checksums.same_bytes(first, ref) is False
    ]
