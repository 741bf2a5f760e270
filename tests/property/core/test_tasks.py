"""Laws of elastic tasks: compared with all ways to share out GPUs, and the figures of MoESys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp.errors import UsageError
from ucp.placement.tasks import allot_gpus

LOADS = st.lists(st.integers(1, 40).map(float), min_size=1, max_size=5)


def least_by_trying(loads: list[float], gpus: int, *, shared: bool = True) -> float:
    """The least that the busiest GPU can have. A task has GPUs of its own, or is on one that it shares."""

    def splits(left: int, tasks: int) -> Iterator[tuple[int, ...]]:
        if tasks == 0:
            yield ()
        for first in range(1, left - tasks + 2) if tasks else ():
            yield from ((first, *rest) for rest in splits(left - first, tasks - 1))

    best = inf
    for kinds in product((False, True) if shared else (False,), repeat=len(loads)):
        light = [load for load, is_light in zip(loads, kinds, strict=True) if is_light]
        heavy = [load for load, is_light in zip(loads, kinds, strict=True) if not is_light]
        for count in range(1 if light else 0, min(len(light), gpus) + 1):
            busiest = inf if light else 0.0
            for places in product(range(count), repeat=len(light)):
                bins = [0.0] * count
                for load, place in zip(light, places, strict=True):
                    bins[place] += load
                busiest = min(busiest, max(bins, default=0.0))
            for split in splits(gpus - count, len(heavy)):
                most = max((load / n for load, n in zip(heavy, split, strict=True)), default=0.0)
                best = min(best, max(most, busiest))
    return best


@settings(max_examples=150)
@given(LOADS, st.integers(1, 7))
def test_the_busiest_gpu_has_the_least_or_a_third_more_if_tasks_share(loads: list[float], gpus: int) -> None:
    allotted = allot_gpus(loads, gpus=gpus)
    busiest, best = max(allotted.load_by_gpu), least_by_trying(loads, gpus)
    assert best - 1e-9 <= busiest <= best * 4 / 3 + 1e-9
    if len(set(sum(allotted.gpus, ()))) == sum(allotted.counts):  # no task shares a GPU
        assert busiest == pytest.approx(least_by_trying(loads, gpus, shared=False))


@given(LOADS, st.integers(1, 12))
def test_every_gpu_is_used_and_all_load_is_there(loads: list[float], gpus: int) -> None:
    allotted = allot_gpus(loads, gpus=gpus)
    assert sum(allotted.load_by_gpu) == pytest.approx(sum(loads))
    assert {gpu for of_task in allotted.gpus for gpu in of_task} == set(range(len(allotted.load_by_gpu)))
    assert len(allotted.load_by_gpu) == gpus
    for of_task in allotted.gpus:
        holders = [task for task in allotted.gpus if set(task) & set(of_task)]
        assert len(of_task) == 1 or holders == [of_task]


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=200), st.integers(1, 500))
def test_one_more_gpu_makes_the_busiest_a_third_busier_at_most(loads: list[float], gpus: int) -> None:
    fewer, more = (max(allot_gpus(loads, gpus=count).load_by_gpu) for count in (gpus, gpus + 1))
    assert more <= fewer * 4 / 3 + 1e-6


@pytest.mark.parametrize(
    ("loads", "gpus", "counts", "busiest"),
    [([512, 256, 128, 128], 8, (4, 2, 1, 1), 128), ([1, 1, 2], 2, (1, 1, 1), 2), ([1, 1, 2], 4, (1, 1, 2), 1)],
)
def test_figures_of_moesys(loads: list[float], gpus: int, counts: tuple[int, ...], busiest: float) -> None:
    """Table 3: 8 GPUs for four tasks; and the examples of the text, 2:2 and 1:1:1:1."""
    allotted = allot_gpus(loads, gpus=gpus)
    assert (allotted.counts, max(allotted.load_by_gpu)) == (counts, busiest)


@pytest.mark.parametrize(
    ("loads", "gpus"), [([], 1), ([1.0], 0), ([0.0], 1), ([-1.0, 2.0], 2), ([inf], 1), ([float("nan")], 1)]
)
def test_what_cannot_be_allotted_is_refused(loads: list[float], gpus: int) -> None:
    with pytest.raises(UsageError):
        allot_gpus(loads, gpus=gpus)
