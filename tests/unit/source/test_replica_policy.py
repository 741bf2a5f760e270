"""Copies that drifted: refused, or settled as asked, and said."""

from __future__ import annotations

import numpy as np
import pytest

import ucp
from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import ReplicaError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

SHAPE = (5, 4)


@pytest.fixture
def shards(tmp_path) -> Shards:
    return Shards(tmp_path / "source")


def copies(shards: Shards, *arrays: np.ndarray, half: bool = False) -> StateIndex:
    """A state with one whole copy per array; `half`: and a rounded copy of the first."""
    box = Box.full(SHAPE)
    fragments = [Fragment(box=box, ref=shards.put(own), replica=number) for number, own in enumerate(arrays)]
    if half:
        rounded = shards.put((arrays[0] + 1).astype(np.float16), file="half.bin")
        fragments.append(Fragment(box=box, ref=rounded, replica=len(arrays)))
    return StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=tuple(fragments))


def converted(shards: Shards, state: StateIndex, tmp_path, drift: str):
    """Report, and the written tensor of the parameter that drifted and of one that did not."""
    same = np.full(SHAPE, 0.1, np.float32)
    states = {("drifted", "weight"): state, ("same", "weight"): copies(shards, same, same, same)}
    source = write_checkpoint(make_index(shards.folder, states))
    report = ucp.convert(source, tmp_path / "out", drift=drift, verify=True)
    found = ucp.open(tmp_path / "out")
    return report, found.read("drifted", "weight").numpy(), found.read("same", "weight").numpy()


@pytest.fixture
def arrays() -> list[np.ndarray]:
    first = np.arange(20, dtype=np.float32).reshape(SHAPE)
    return [first, first + 3, first - 1.5]


def test_by_default_it_is_an_error(shards, arrays, tmp_path):
    with pytest.raises(ReplicaError, match=r"drifted/weight.*\n.*--drift"):
        converted(shards, copies(shards, *arrays), tmp_path, "error")


def test_the_first_is_taken(shards, arrays, tmp_path):
    report, drifted, same = converted(shards, copies(shards, *arrays, half=True), tmp_path, "first")
    assert np.array_equal(drifted, arrays[0])
    assert np.array_equal(same, np.full(SHAPE, 0.1, np.float32))
    assert any("drifted/weight" in note and "first rank's value was taken" in note for note in report.notes)
    assert not any("same/weight" in note for note in report.notes)


def test_the_mean_is_taken(shards, arrays, tmp_path):
    report, drifted, same = converted(shards, copies(shards, *arrays), tmp_path, "mean")
    assert np.array_equal(drifted, arrays[0] + 0.5)
    assert np.array_equal(same, np.full(SHAPE, 0.1, np.float32)), "copies that agree are not averaged"
    assert any("drifted/weight" in note and "mean was taken" in note for note in report.notes)


def test_what_a_rank_computed_from_its_master_is_no_term_of_the_mean(shards, arrays, tmp_path):
    masters = copies(shards, *arrays[:2])
    box = Box.full(SHAPE)
    derived = (Fragment(box=box, ref=shards.put(arrays[0]), replica=number, derived=True) for number in (2, 3))
    state = StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=(*masters.fragments, *derived))
    _, drifted, _ = converted(shards, state, tmp_path, "mean")
    assert np.array_equal(drifted, arrays[0] + 1.5)


def test_a_rounded_copy_has_no_mean(shards, arrays, tmp_path):
    with pytest.raises(ReplicaError, match=r"drifted/weight: .*got 1"):
        converted(shards, copies(shards, arrays[0], half=True), tmp_path, "mean")


def test_a_copy_of_a_part_has_no_mean(shards, arrays, tmp_path):
    part = Fragment(box=Box((0, 0), (2, 4)), ref=shards.put(arrays[1][:2]), replica=1)
    whole = copies(shards, arrays[0])
    state = StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=(*whole.fragments, part))
    with pytest.raises(ReplicaError, match=r"drifted/weight: copy 1 .*\[2:5, 0:4\]"):
        converted(shards, state, tmp_path, "mean")
