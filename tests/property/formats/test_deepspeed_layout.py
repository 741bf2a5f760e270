"""Laws of DeepSpeed's flat layouts, against a plain imitation of the code that writes them.

The imitation flattens, pads and splits arrays as DeepSpeed 0.19.8 does, line by line (stage_1_and_2.py,
bf16_optimizer.py, partition_parameters.py); what a layout then says must put every parameter together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from ucp_formats.deepspeed.partition import optimizer_order, round_robin, shared_buffers, undo_round_robin
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, OptimizerPart, Shard, add_flat_group

from ucp.contract.layouts import Chunks, FlatLayout, WholeParameters
from ucp.contract.ranks import Checksums, Problems
from ucp.core.region import RegionPair, find_gaps
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import Union

GARBAGE = -1


@dataclass(frozen=True)
class Params:
    """Named arrays whose elements are all different."""

    arrays: dict[str, np.ndarray]

    @property
    def numels(self) -> dict[str, int]:
        return {name: array.size for name, array in self.arrays.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.arrays.items()}


SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
)


@st.composite
def params(draw, *, least: int = 1, most: int = 7) -> Params:
    shapes = draw(st.lists(SHAPES, min_size=least, max_size=most))
    assume(sum(prod(shape) for shape in shapes))
    start, arrays = 0, {}
    for at, shape in enumerate(shapes):
        arrays[f"p{at}"] = np.arange(start, start + prod(shape)).reshape(shape)
        start += prod(shape)
    return Params(arrays)


# ---- the imitation ----


def aligned(flat: np.ndarray, alignment: int) -> np.ndarray:
    """`align_dense_tensors`: pad the end to a multiple."""
    remaining = flat.size % alignment
    return np.concatenate([flat, np.full(alignment - remaining if remaining else 0, GARBAGE)])


def param_padding(numels: list[int], unit: int) -> list[int]:
    """`round_robin_bit16_padding`: all but the last start at a multiple of `unit`."""
    paddings, offset = [], 0
    for at, numel in enumerate(numels):
        offset += numel
        padding = 0 if at == len(numels) - 1 else -offset % unit
        paddings.append(padding)
        offset += padding
    return paddings


def zero12_partitions(arrays: list[np.ndarray], ranks: int, paddings: list[int]) -> list[np.ndarray]:
    """Flatten with padding after each, align to 2 * ranks, split in equal shares."""
    pieces = [np.concatenate([a.ravel(), np.full(p, GARBAGE)]) for a, p in zip(arrays, paddings, strict=True)]
    flat = aligned(np.concatenate(pieces), 2 * ranks)
    return np.split(flat, ranks)


def stripped(partitions: list[np.ndarray], used: int) -> list[np.ndarray]:
    """`_get_groups_without_padding` with `groups_padding` of versions since 2025."""
    found, left = [], 0
    for partition in partitions:
        found.append(partition[: min(max(used - left, 0), partition.size)])
        left += partition.size
    return found


def zero3_partitions(arrays: list[np.ndarray], ranks: int) -> list[np.ndarray]:
    """Each parameter in chunks of ceil(numel / ranks), what is past its end undefined."""
    shares: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for array in arrays:
        length = -(-array.size // ranks)
        whole = np.concatenate([array.ravel(), np.full(length * ranks - array.size, GARBAGE)])
        for rank in range(ranks):
            shares[rank].append(whole[rank * length : (rank + 1) * length])
    return [np.concatenate(share) for share in shares]


def muon_momentum(arrays: list[np.ndarray], ranks: int, share: int) -> list[np.ndarray]:
    """`_muon_momentum_buffer` over `get_partition_info`: the parameters that start or continue in the share, whole."""
    found = []
    for rank in range(ranks):
        first, last, at, own = rank * share, (rank + 1) * share, 0, []
        for array in arrays:
            if first <= at < last or at < first < at + array.size:
                own.append(array.ravel())
            at += array.size
        found.append(np.concatenate([np.zeros(0, int), *own]))
    return found


def rebuilt(source: Params, layout: FlatLayout, flats: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters put together from what `layout` says of each rank's flat array."""
    out = {name: np.full(array.size, -2) for name, array in source.arrays.items()}
    for rank, flat in enumerate(flats):
        for name, (offset, _) in layout.spans(rank).items():
            pair = pair_of(layout, rank, name, source.numels[name])
            span = slice(pair.global_box.offsets[0], pair.global_box.stops[0])
            if pair.copy == 0:
                assert (out[name][span] == -2).all(), "an element is held twice"
            out[name][span] = flat[offset : offset + pair.global_box.numel]
    return {name: flat.reshape(source.arrays[name].shape) for name, flat in out.items()}


def pair_of(layout: FlatLayout, rank: int, name: str, numel: int) -> RegionPair:
    (pair,) = layout.axes()[name].pattern.regions((numel,), layout.ranks, rank)
    return pair


def check_rebuilt(source: Params, layout: FlatLayout, flats: list[np.ndarray]) -> None:
    assert all(flat.size in layout.lengths(rank) for rank, flat in enumerate(flats))
    for name, array in rebuilt(source, layout, flats).items():
        np.testing.assert_array_equal(array, source.arrays[name], err_msg=name)


# ---- laws ----


@given(source=params(), ranks=st.integers(1, 9), unit=st.sampled_from([1, 4, 8]), data=st.data())
def test_shares_of_a_buffer_hold_every_element_once(source: Params, ranks: int, unit: int, data) -> None:
    names = list(source.arrays)
    if data.draw(st.booleans(), label="dealt"):
        names = list(round_robin(names, ranks=ranks))
    arrays = [source.arrays[name] for name in names]
    paddings = param_padding([array.size for array in arrays], unit)
    moments = zero12_partitions(arrays, ranks, paddings)
    masters = stripped(moments, sum(a.size + p for a, p in zip(arrays, paddings, strict=True)))
    if data.draw(st.booleans(), label="padding kept"):
        masters = moments
    numels = {name: source.arrays[name].size for name in names}
    buffer, *_ = shared_buffers(numels, ranks=ranks, paddings=paddings, first=masters[0].size, known_from="")
    check_rebuilt(source, buffer, masters)
    check_rebuilt(source, buffer, moments)


@given(source=params(), ranks=st.integers(1, 9))
def test_shares_of_other_alignments_are_told_by_the_length_of_the_first(source: Params, ranks: int) -> None:
    arrays = list(source.arrays.values())
    flat = aligned(np.concatenate([array.ravel() for array in arrays]), ranks)
    shares = np.split(flat, ranks)
    layouts = shared_buffers(source.numels, ranks=ranks, paddings=None, first=shares[0].size, known_from="")
    fitting = [own for own in layouts if all(share.size in own.lengths(rank) for rank, share in enumerate(shares))]
    check_rebuilt(source, fitting[0], shares)


@given(source=params(), ranks=st.integers(1, 9))
def test_chunks_hold_every_element_once(source: Params, ranks: int) -> None:
    flats = zero3_partitions(list(source.arrays.values()), ranks)
    check_rebuilt(source, Chunks(source.numels, ranks), flats)


@given(source=params(), ranks=st.integers(1, 9))
def test_whole_parameters_of_muon(source: Params, ranks: int) -> None:
    full = Params({name: array for name, array in source.arrays.items() if array.size})
    buffer, *_ = shared_buffers(full.numels, ranks=ranks, paddings=None, first=0, known_from="")
    flats = muon_momentum(list(full.arrays.values()), ranks, buffer.share)
    layout = WholeParameters(buffer)
    check_rebuilt(full, layout, flats)
    copies: dict[str, list[int]] = {}
    for rank in range(ranks):
        for name in layout.spans(rank):
            copies.setdefault(name, []).append(pair_of(layout, rank, name, full.numels[name]).copy)
    assert all(numbers == list(range(len(numbers))) for numbers in copies.values())


@given(count=st.integers(0, 12), ranks=st.integers(1, 9))
def test_dealing_back_undoes_dealing(count: int, ranks: int) -> None:
    names = tuple(f"p{at}" for at in range(count))
    assert undo_round_robin(round_robin(names, ranks=ranks), ranks=ranks) == names


@given(source=params(least=2), ranks=st.integers(2, 6), dealt=st.booleans())
def test_the_order_of_the_optimizer_is_found_from_the_mappings(source: Params, ranks: int, dealt: bool) -> None:
    """Whatever the configuration says, as DeepSpeed lists names in the optimizer's order."""
    full = {name: numel for name, numel in source.numels.items() if numel}
    assume(full)
    names = tuple(full)
    stored = round_robin(names, ranks=ranks) if dealt else names
    optimizer, *_ = shared_buffers(full, ranks=ranks, paddings=None, first=0, known_from="")
    mappings = [dict.fromkeys(optimizer.spans(rank)) for rank in range(ranks)]
    assert optimizer_order(stored, ranks=ranks, is_round_robin=dealt, mappings=mappings)[0] == names


@given(source=params(), ranks=st.integers(1, 6))
def test_states_of_a_flat_group_tile_every_parameter(source: Params, ranks: int) -> None:
    flats = zero3_partitions(list(source.arrays.values()), ranks)
    refs = [
        TensorRef(path=f"r{rank}", offset=0, dtype=DType.FLOAT32, shape=(flat.size,), strides=(1,))
        for rank, flat in enumerate(flats)
    ]
    shards = [Shard(rank=r, file=f"r{r}", weight=ref, states={"m": ref, "step": 3}) for r, ref in enumerate(refs)]
    layouts = (Chunks(source.numels, ranks),)
    problems = Problems()
    group = FlatGroupStates(label="b", shapes=source.shapes, layouts=layouts, shards=tuple(shards))
    found = OptimizerPart()
    add_flat_group(found, group, Checksums(()), problems)
    assert problems == Problems()
    placer = Union()
    for name, shape in source.shapes.items():
        assert list(found.states[name]) == ["weight", "m", "step"]
        assert found.states[name]["step"].global_shape == ()
        for state in ("weight", "m"):
            index = placer.build_state(found.states[name][state])
            assert index.global_shape == shape
            assert index.fragments, "even a parameter without elements has a piece"
            assert find_gaps(shape, [piece.box for piece in index.fragments]) == ()
