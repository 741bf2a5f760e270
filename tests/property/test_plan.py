"""Laws of the plan: every byte once, no write above the limit, order kept, one giant tensor shared out."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.shard import Shard

from tests.strategies import cuts
from ucp.core.index import AtomIndex, Fragment, Index, Kind, StateIndex
from ucp.core.region import Box, RegionPair
from ucp.core.target import Literal, OutputFile, Placement, RawCopy, Slice, TargetPlan
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.errors import CoverError, MemoryBudgetError, MissingStateError, UsageError
from ucp.transfer.plan.job import check_target, choose_checking, make_job
from ucp.transfer.plan.tasks import BLOCK, SCRATCH, Share, bundle, fit_workers

PLAN = import_module("ucp.transfer.plan.job")  # `ucp.plan` is the function
ITEM = 4


class Item:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"Item({self.nbytes})"


@given(st.lists(st.integers(0, 50).map(Item)), st.integers(1, 30))
def test_bundles_keep_order_and_limit(items, limit):
    bundles = list(bundle(items, limit=limit))
    assert [item for own in bundles for item in own] == items
    assert all(bundles)
    for own in bundles:
        assert len(own) == 1 or sum(item.nbytes for item in own) <= limit
    for own, following in itertools.pairwise(bundles):
        assert sum(item.nbytes for item in own) + following[0].nbytes > limit, "two bundles would have been one"


def ref_of(shape, dtype=DType.FLOAT32, path="/src/shard"):
    return TensorRef(path=path, offset=0, dtype=dtype, shape=shape, strides=contiguous_strides(shape))


def state_of(numel: int, dtype=DType.FLOAT32) -> StateIndex:
    box = Box.full((numel,))
    return StateIndex(dtype=dtype, global_shape=(numel,), fragments=(Fragment(box=box, ref=ref_of((numel,), dtype)),))


def index_of(**states: StateIndex) -> Index:
    atoms = {
        name: AtomIndex(name=name, global_shape=state.global_shape, kind=Kind.PARAMETER, states={"weight": state})
        for name, state in states.items()
    }
    return Index(
        path="/src", format="f", evidence=(), producer="p", topology=Topology(), step=None, atoms=atoms, files=()
    )


def slice_of(param: str, numel: int, start: int, stop: int, *, state="weight", dtype=DType.FLOAT32) -> Slice:
    whole = Box.full((numel,))
    return Slice(
        param=param,
        state=state,
        dtype=dtype,
        pairs=(RegionPair(whole, whole),),
        local_shape=(numel,),
        start=start,
        stop=stop,
    )


@st.composite
def plans(draw):
    """Placements and raw copies in a few files, with gaps and without."""
    numel = draw(st.integers(0, 60))
    files, placements, raw = [], [], []
    for number in range(draw(st.integers(1, 3))):
        path, at = f"{number}.bin", draw(st.integers(0, 9))
        edges = draw(cuts(numel))
        for low, high in itertools.pairwise(edges):
            placements.append(Placement(slice=slice_of("p", numel, low, high), path=path, offset=at))
            at += (high - low) * ITEM + draw(st.sampled_from((0, 0, 0, 5)))
        for shape in draw(st.lists(st.tuples(st.integers(0, 20)), max_size=2)):
            raw.append(RawCopy(src=ref_of(shape), path=path, offset=at))
            at += shape[0] * ITEM
        files.append(OutputFile(path=path, nbytes=at + draw(st.integers(0, 3))))
    order = draw(st.permutations(placements))
    return index_of(p=state_of(numel)), TargetPlan(files=tuple(files), placements=tuple(order), raw=tuple(raw))


@given(plans(), st.sampled_from([(16, 64), (4, 4), (40, 100), (1 << 20, 1 << 22)]))
def test_every_byte_is_in_exactly_one_section(case, limits):
    index, target = case
    block, task = limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLAN, "BLOCK", block)
        patch.setattr(PLAN, "TASK", task)
        job = make_job(index, target)
    written: dict[tuple[str, int], tuple[int, int]] = {}
    for own in job.tasks:
        assert own.nbytes == sum(fill.nbytes for fill in own.fills)
        assert len(own.fills) == 1 or own.nbytes <= task
        for fill in own.fills:
            assert 0 < fill.nbytes <= block
            at = fill.offset
            for section in fill.sections:
                assert section.offset == at, "a fill has a gap"
                at += section.nbytes
                for byte in range(section.nbytes):
                    key = (fill.path, section.offset + byte)
                    assert key not in written
                    written[key] = (section.placement, section.start * ITEM + byte)
    wanted = {}
    for number, placement in enumerate(target.placements):
        for byte in range(placement.slice.nbytes):
            wanted[placement.path, placement.offset + byte] = (number, placement.slice.start * ITEM + byte)
    for number, raw in enumerate(target.raw, len(target.placements)):
        for byte in range(raw.src.nbytes):
            wanted[raw.path, raw.offset + byte] = (number, byte)
    assert written == wanted
    assert job.nbytes == len(wanted)
    assert [own.number for own in job.tasks] == list(range(len(job.tasks)))
    assert [job.tasks[number] for number in range(len(job.tasks))] == [*job.tasks]
    _check_joined(job.tasks, block=block, task=task)


def _check_joined(tasks, *, block, task):
    for before, after in itertools.pairwise(tasks):
        assert before.nbytes + after.fills[0].nbytes > task, "two tasks would have been one"
    for one, other in itertools.pairwise(fill for own in tasks for fill in own.fills):
        apart = one.path != other.path or one.offset + one.nbytes != other.offset
        assert apart or one.nbytes + other.nbytes > block, "two fills would have been one"


@given(plans(), st.sampled_from([(16, 64), (4, 4), (40, 100), (1 << 20, 1 << 22)]), st.integers(1, 70), st.booleans())
def test_shares_of_any_number_are_all_the_work_and_about_equal(case, limits, parts, encoded):
    index, target = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLAN, "BLOCK", limits[0])
        patch.setattr(PLAN, "TASK", limits[1])
        target = replace(target, compress=encoded)
        whole = make_job(index, target)
        shares = [make_job(index, target, Share(number, parts)) for number in range(1, parts + 1)]
    assert [task for job in shares for task in job.tasks] == list(whole.tasks)
    largest = max((task.nbytes for task in whole.tasks), default=0)
    assert all(abs(job.nbytes - whole.nbytes / parts) <= largest for job in shares)
    assert {job.checking for job in shares} == {whole.checking}


def test_of_a_list_of_tasks_only_where_each_begins_is_held():
    giant = 20_000 * BLOCK // ITEM
    placement = Placement(slice=slice_of("giant", giant, 0, giant), path="pack", offset=0)
    target = TargetPlan(files=(OutputFile(path="pack", nbytes=giant * ITEM),), placements=(placement,))
    index = index_of(giant=state_of(giant))

    tracemalloc.start()
    try:
        whole = make_job(index, target)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(whole.tasks)
    finally:
        tracemalloc.stop()
    own = make_job(index, target, Share(33, 64)).tasks
    assert abs(len(own) - len(whole.tasks) / 64) <= 1
    assert own[-1] == whole.tasks[own[-1].number]
    assert list(own) == [task for task in whole.tasks if own[0].number <= task.number <= own[-1].number]


@pytest.mark.parametrize(("number", "parts"), [(0, 4), (5, 4), (1, 0), (-1, 3)])
def test_a_share_that_is_none(number, parts):
    with pytest.raises(ValueError, match=f"1 to {parts}; got {number}"):
        Share(number, parts)


class TestTargetsThatDoNotFit:
    def plan(self, *placements, nbytes=40, **more):
        return TargetPlan(files=(OutputFile(path="f", nbytes=nbytes, **more),), placements=placements)

    def test_states_that_the_source_lacks_are_all_named(self):
        lacking = [slice_of("p", 4, 0, 4, state="exp_avg"), slice_of("q", 4, 0, 4)]
        target = self.plan(*(Placement(slice=own, path="f", offset=0) for own in lacking))
        with pytest.raises(MissingStateError, match=r"(?s)p/exp_avg.*q/weight"):
            check_target(index_of(p=state_of(4)), target)

    @pytest.mark.parametrize(
        ("offsets", "literals", "span"),
        [
            ((0, 12), (), "12:28"),
            ((0, 15), (), "15:31"),
            ((0, 0), (), "0:16"),
            ((4,), (Literal(0, b"12345"),), "4:20"),
            ((25,), (), "25:41"),
        ],
    )
    def test_bytes_that_are_planned_twice_or_past_the_end(self, offsets, literals, span):
        placements = (Placement(slice=slice_of("p", 4, 0, 4), path="f", offset=offset) for offset in offsets)
        with pytest.raises(CoverError, match=f"bytes {span} of f"):
            check_target(index_of(p=state_of(4)), self.plan(*placements, literals=literals))

    @pytest.mark.parametrize(("own", "asked"), [(DType.INT64, DType.FLOAT32), (DType.FLOAT32, DType.INT32)])
    def test_casts_that_are_none(self, own, asked):
        target = self.plan(Placement(slice=slice_of("p", 4, 0, 4, dtype=asked), path="f", offset=0))
        with pytest.raises(UsageError, match=f"p/weight is {own}: .*{asked}"):
            check_target(index_of(p=state_of(4, own)), target)


class TestOutputFiles:
    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".."])
    def test_paths_stay_below_the_destination(self, path):
        with pytest.raises(ValueError, match=re.escape(repr(path))):
            OutputFile(path=path, nbytes=0)

    def test_literals_lie_in_the_file(self):
        with pytest.raises(ValueError, match="literal of 'f'"):
            OutputFile(path="f", nbytes=3, literals=(Literal(1, b"abc"),))


class TestCheckingPlacements:
    def placed(self, *slices):
        return choose_checking([Placement(slice=own, path="f", offset=0) for own in slices])

    def test_flat_ranges_of_one_tensor_check_their_own_parts(self):
        own = [slice_of("p", 9, low, high) for low, high in ((0, 3), (3, 9))]
        assert self.placed(*own) == {0, 1}

    def test_what_is_stored_twice_is_checked_once(self):
        own = [slice_of("p", 9, 0, 9), slice_of("p", 9, 0, 9), slice_of("p", 9, 2, 4)]
        assert self.placed(*own) == {0}

    def test_shards_of_a_tensor_check_their_own_parts(self):
        shards = [self.shard(Shard(1, (4, 2)), (3, 6), index) for index in range(2)]
        assert self.placed(*shards) == {0, 1}

    def test_shards_that_overlap_are_checked_once(self):
        whole, part = self.shard(Shard(0), (4, 6), 0, parts=1), self.shard(Shard(0), (4, 6), 1)
        assert self.placed(whole, part) == {0}
        assert self.placed(part, whole) == {0}

    def shard(self, pattern, shape, index, *, parts=2):
        pairs = pattern.regions(shape, parts, index)
        local = tuple(max(stops) for stops in zip(*(pair.local.stops for pair in pairs), strict=True))
        numel = sum(pair.global_box.numel for pair in pairs)
        return Slice(
            param="p", state="weight", dtype=DType.FLOAT32, pairs=pairs, local_shape=local, start=0, stop=numel
        )


class TestMemory:
    LANE = BLOCK + SCRATCH

    @pytest.mark.parametrize("lanes", [1, 2, 3, 7, 32])
    @pytest.mark.parametrize("workers", [1, 2, 5, 64])
    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_threads_fit_the_budget(self, lanes, workers, threads):
        fitted = fit_workers(lanes * self.LANE + 1, workers=workers, threads=threads)
        assert fitted[0] * fitted[1] <= lanes
        assert 1 <= fitted[0] <= workers
        assert 1 <= fitted[1] <= threads

    def test_what_is_asked_for_is_given_where_it_fits(self):
        assert fit_workers(1 << 30, workers=8, threads=2) == (8, 2)

    def test_less_than_one_thread_is_refused(self):
        with pytest.raises(MemoryBudgetError, match="at least 32 MiB"):
            fit_workers(self.LANE - 1, workers=1, threads=1)
