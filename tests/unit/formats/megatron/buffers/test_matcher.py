"""Parameters found in flat buffers by content; ties by order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ucp_formats.megatron.buffers.matcher import Fingerprints, FlatBufferMatcher
from ucp_formats.megatron.buffers.state_buffer import Candidate, StateBuffer, StoredRange

from ucp.core.region import Box, RegionPair
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError
from ucp.transfer.probe import Prober, cast_bits


class Rank:
    """A file with the weights of a rank and a buffer of their masters."""

    def __init__(self, folder, masters, *, kinds=None):
        self.masters = {name: np.asarray(values, dtype=np.float32) for name, values in masters.items()}
        self.path = str(folder / "x")
        self.data = bytearray()
        kinds = kinds or {}
        self.candidates = [self._candidate(name, kinds.get(name, "dense")) for name in self.masters]

    def _candidate(self, name, kind):
        values = self.masters[name]
        ref = self._stored(cast_bits(values.tobytes(), DType.FLOAT32, DType.BFLOAT16), DType.BFLOAT16, values.size)
        box = Box.full(values.shape)
        return Candidate(name=name, local_shape=values.shape, pairs=(RegionPair(box, box),), refs=(ref,), kind=kind)

    def _stored(self, data, dtype, numel):
        start = len(self.data)
        self.data += data
        with open(self.path, "wb") as file:
            file.write(self.data)
        return TensorRef(path=self.path, offset=start, dtype=dtype, shape=(numel,), strides=(1,))

    def buffer(self, order, *, alignment=64, buckets=(), cuts=()):
        """Masters in `order`; a bucket ends after those in `buckets`, and the next starts right there."""
        flat, starts, bucket = np.zeros(0, np.float32), {}, 0
        for name in order:
            start = bucket + -(-(flat.size - bucket) // alignment) * alignment
            flat = np.concatenate([flat, np.full(start - flat.size, 99, np.float32), self.masters[name].ravel()])
            starts[name] = start
            if name in buckets:
                bucket = flat.size
        edges = sorted({0, *cuts, flat.size})
        stretches = tuple(
            StoredRange(low, self._stored(flat[low:high].tobytes(), DType.FLOAT32, high - low))
            for low, high in pairwise(edges)
        )
        return StateBuffer(where="b", ranges=stretches, numel=flat.size), starts, flat


def matcher(candidates, prober):
    """Candidates are listed in the order of registration."""
    return FlatBufferMatcher([Fingerprints(candidates, prober)], orders=[[own.name for own in candidates]])


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path, {"a": noise(3, 50), "b": noise(7, seed=1), "c": noise(200, seed=2), "d": noise(65, seed=3)})


@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("buckets", [(), ("c",), ("d", "b")])
def test_walk_from_end_to_end(rank, alignment, buckets):
    buffer, starts, _ = rank.buffer("dcba", alignment=alignment, buckets=buckets, cuts=(100, 333))
    with Prober() as prober:
        found = matcher(rank.candidates, prober).place(buffer, alignment=alignment)
    assert found.starts == starts
    assert (found.gaps, found.ties) == ([], [])


def test_equal_parameters_follow_their_neighbours(tmp_path):
    ones = np.ones(64)
    own = Rank(tmp_path, {"n0": ones, "w0": noise(64), "n1": ones, "w1": noise(64, seed=1), "last": ones})
    buffer, starts, _ = own.buffer(["last", "w1", "n1", "w0", "n0"])
    with Prober() as prober:
        found = matcher(own.candidates, prober).place(buffer)
    assert found.starts == starts
    assert set(found.ties) == {"n0", "n1", "last"}


def layers(folder):
    """Four layers of a norm that is all one and a weight."""
    ones = np.ones(64)
    masters = {f"{kind}{layer}": ones if kind == "n" else noise(64, seed=layer) for layer in range(4) for kind in "nw"}
    return Rank(folder, masters)


def test_stages_tell_each_other_which_of_equal_parameters_they_hold(tmp_path):
    own = layers(tmp_path)
    stages = [own.buffer(order) for order in (["w3", "n3", "w2", "n2"], ["w1", "n1", "w0", "n0"])]
    with Prober() as prober:
        finder = matcher(own.candidates, prober)
        found = finder.resolve([finder.find(buffer) for buffer, _, _ in stages])
    assert [placement.starts for placement in found] == [starts for _, starts, _ in stages]


@pytest.mark.parametrize("trained", ["q", "k"])
def test_one_of_two_equal_neighbours_is_frozen(tmp_path, trained):
    """Norms of queries and keys are all one; whichever is frozen, the buffer looks the same."""
    own = Rank(tmp_path, {"w": noise(64), "q": np.ones(64), "k": np.ones(64), "v": noise(64, seed=1)})
    buffer, _, _ = own.buffer(["v", trained, "w"])
    with Prober() as prober, pytest.raises(MalformedError, match=r"(?s)element 64: q, k.*fully-reshardable"):
        matcher(own.candidates, prober).place(buffer)


def test_a_frozen_parameter_between_others_is_passed_over(tmp_path):
    own = layers(tmp_path)
    buffer, starts, _ = own.buffer(["w3", "n3", "w2", "w1", "n1", "w0", "n0"])
    with Prober() as prober:
        assert matcher(own.candidates, prober).place(buffer).starts == starts


def test_buffers_out_of_order_are_settled_each_by_itself(tmp_path):
    own = layers(tmp_path)
    stages = [own.buffer(order) for order in (["w1", "n1", "w0", "n0"], ["w3", "n3", "w2"])]
    with Prober() as prober:
        finder = matcher(own.candidates, prober)
        found = finder.resolve([finder.find(buffer) for buffer, _, _ in stages])
    assert [placement.starts for placement in found] == [starts for _, starts, _ in stages]


def test_parameters_of_a_kind_that_is_not_there_do_not_stand_between(tmp_path):
    ones = np.ones(64)
    masters = {"w0": noise(64), "e0": noise(64, seed=5), "n1": ones, "e1": noise(64, seed=6), "n2": ones}
    own = Rank(tmp_path, masters, kinds={"e0": "expert", "e1": "expert"})
    buffer, starts, _ = own.buffer(["n2", "n1", "w0"])
    with Prober() as prober:
        assert matcher(own.candidates, prober).place(buffer).starts == starts


def test_unexpected_parameters_give_way(tmp_path):
    same = noise(64)
    own = Rank(tmp_path, {"here": same, "elsewhere": same})
    buffer, starts, _ = own.buffer(["here"])
    with Prober() as prober:
        finder = matcher(own.candidates, prober)
        (found,) = finder.resolve([finder.find(buffer, unexpected={"elsewhere"})])
    assert found.starts == starts
    assert found.ties == ["here"]


def test_what_cannot_be_told_apart_is_an_error_that_names_it(tmp_path):
    same = np.zeros(64)
    own = Rank(tmp_path, {"x": same, "y": same, "z": same})
    buffer, _, _ = own.buffer(["z", "x"])
    with Prober() as prober, pytest.raises(MalformedError, match=r"(?s)2 parameters .*element 0: x, y, z\n"):
        matcher(own.candidates, prober).place(buffer)


def test_a_buffer_of_nothing_but_equal_parameters_goes_by_order(tmp_path):
    own = Rank(tmp_path, {name: np.zeros(64) for name in "xyz"})
    buffer, starts, _ = own.buffer("zyx")
    with Prober() as prober:
        assert matcher(own.candidates, prober).place(buffer).starts == starts


def test_unknown_elements_are_a_gap(rank):
    buffer, starts, _ = rank.buffer("dcba")
    some = [own for own in rank.candidates if own.name != "c"]
    with Prober() as prober:
        finder = matcher(some, prober)
        walked = finder.place(buffer)
        known = finder.place(buffer, starts=[*starts.values(), 65, starts["c"] + 200, starts["b"] + 7])
    assert set(walked.starts) == {"d"}
    assert walked.gaps == [(65, buffer.numel)]
    assert known.starts == {name: start for name, start in starts.items() if name != "c"}
    assert known.gaps == [(65, starts["b"])]


def test_a_master_that_differs_late_is_not_taken(tmp_path):
    own = Rank(tmp_path, {"w": noise(500)})
    own.masters["w"][-1] += 1
    buffer, _, _ = own.buffer(["w"])
    with Prober() as prober:
        found = matcher(own.candidates, prober).place(buffer)
    assert found.gaps == [(0, 500)]


def test_the_known_places_choose_among_orders(tmp_path):
    """The same buffer, with the norm registered before the projection, or (Transformer Engine) after it."""
    ones = np.ones(64)
    local, fused = [], []
    for layer in range(3):
        local += [f"n{layer}", f"p{layer}", f"q{layer}"]
        fused += [f"p{layer}", f"n{layer}", f"q{layer}"]
    own = Rank(
        tmp_path, {name: ones if name[0] == "n" else noise(64, seed=ord(name[1]) + ord(name[0])) for name in local}
    )
    for order in (local, fused):
        buffer, starts, _ = own.buffer(list(reversed(order)))
        with Prober() as prober:
            parts = [Fingerprints(own.candidates, prober)]
            assert FlatBufferMatcher(parts, orders=[local, fused]).place(buffer).starts == starts


def test_two_orders_that_both_fit_are_an_error(tmp_path):
    own = Rank(tmp_path, {"a": np.ones(64), "b": np.ones(64), "w": noise(64)})
    buffer, _, _ = own.buffer(["w", "b", "a"])
    with Prober() as prober:
        finder = FlatBufferMatcher([Fingerprints(own.candidates, prober)], orders=[["a", "b", "w"], ["b", "a", "w"]])
        with pytest.raises(MalformedError, match=r"(?s)2 parameters .*element 64: a, b\n"):
            finder.place(buffer)


def test_equal_contents_of_different_lengths(tmp_path):
    own = Rank(tmp_path, {"short": np.zeros(64), "long": np.zeros(192), "w": noise(64)})
    buffer, starts, _ = own.buffer(["w", "long", "short"])
    with Prober() as prober:
        finder = matcher(own.candidates, prober)
        with pytest.raises(MalformedError, match=r"(?s)element 64 .*lengths.*short \[64\].*long \[192\]"):
            finder.place(buffer)
        assert finder.place(buffer, starts=starts.values()).starts == starts
