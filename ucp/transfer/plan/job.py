"""A conversion as a job: its tasks, after a check that they can fill the target from the source."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ucp.core.index import Index, StateIndex
from ucp.core.region import RegionPair, intersect
from ucp.core.slices import Locator
from ucp.core.target import Placement, Slice, TargetPlan, full_slice
from ucp.core.tensor import TensorRef
from ucp.errors import CoverError, MissingStateError, UsageError, format_list
from ucp.transfer.plan.task_list import count_bytes, list_tasks
from ucp.transfer.plan.tasks import BLOCK, TASK, Share, Task
from ucp.transfer.plan.tiles import needs_tiles

_Claims = dict[tuple[RegionPair, ...], list[tuple[int, int]]]
"""Regions of a slice's local tensor to the ranges of its elements that are claimed, in increasing order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A conversion, or a share of one, ready to be carried out."""

    index: Index
    """The source."""
    target: TargetPlan
    """The destination."""
    tasks: Sequence[Task]
    """The tasks; those of all shares together write every placement once."""
    checking: frozenset[int]
    """Placements whose bytes are compared with the copies in the source, so that each copy is compared once."""
    tiled: frozenset[int] = frozenset()
    """Placements (and raw copies, numbered after them) that are read in tiles (`ucp.transfer.plan.tiles`)."""
    fsync: bool = True
    """Whether bytes must be on the disk at the end; workers then start writing them back early."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tasks write."""
        return count_bytes(self.tasks)


def make_job(index: Index, target: TargetPlan, share: Share | None = None) -> Job:
    """Plan the work; with `share`, only the tasks of that share, with the numbers that they have among all.

    Raises CoverError, MissingStateError or UsageError if source and target do not fit.
    """
    check_target(index, target)
    tiled = _find_tiled(index, target)
    tasks = list_tasks(target, tiled, block=BLOCK, limit=TASK)
    if share is not None:
        tasks = tasks.select_share(share)
    checking = choose_checking(target.placements)
    return Job(index=index, target=target, tasks=tasks, checking=checking, tiled=tiled)


def _find_tiled(index: Index, target: TargetPlan) -> frozenset[int]:
    """Placements and raw copies that must be read in tiles, because their blocks are spread over the source."""
    numbers = set()
    known: dict[object, bool] = {}
    for number, placement in enumerate(target.placements):
        tensor_slice = placement.slice
        if needs_tiles(
            tensor_slice, index.atoms[tensor_slice.param].states[tensor_slice.state], nbytes=BLOCK, cache=known
        ):
            numbers.add(number)
    for number, raw in enumerate(target.raw, len(target.placements)):
        tensor_slice, locator = locate_raw(raw.src)
        if needs_tiles(tensor_slice, locator.state, nbytes=BLOCK):
            numbers.add(number)
    return frozenset(numbers)


def locate_raw(ref: TensorRef) -> tuple[Slice, Locator]:
    """A tensor of an extra as a slice, and the locator of its pieces."""
    state = StateIndex.from_tensor(ref)
    return full_slice("extra", "", state), Locator(state)


def check_target(index: Index, target: TargetPlan) -> None:
    """Check that every slice can be filled from the source, and that no two slices write the same bytes."""
    slices = (placement.slice for placement in target.placements)
    missing = [s for s in slices if s.param not in index.atoms or s.state not in index.atoms[s.param].states]
    if missing:
        names = sorted({f"{s.param}/{s.state}" for s in missing})
        raise MissingStateError(f"the target needs states that {index.path} does not have:\n{format_list(names)}")
    for placement in target.placements:
        param, state, dtype = placement.slice.param, placement.slice.state, placement.slice.dtype
        source = index.atoms[param].states[state]
        is_number = source.dtype.is_floating or (source.numel == 1 and index.atoms[param].is_count(state))
        if dtype is not source.dtype and not (dtype.is_floating and is_number):
            raise UsageError(f"{param}/{state} is {source.dtype}: it cannot be cast to {dtype}")
    _check_disjoint(target)


def _check_disjoint(target: TargetPlan) -> None:
    limits = {file.path: file.nbytes for file in target.files}
    spans = [(p.path, p.offset, p.slice.nbytes) for p in target.placements]
    spans += [(raw.path, raw.offset, raw.src.nbytes) for raw in target.raw]
    spans += [(f.path, part.offset, len(part.data)) for f in target.files for part in f.literals]
    before: tuple[str, int] = ("", 0)
    for path, offset, nbytes in sorted(span for span in spans if span[2]):
        if (path == before[0] and offset < before[1]) or (offset + nbytes > limits[path] and not target.compress):
            raise CoverError(f"bytes {offset}:{offset + nbytes} of {path} are planned twice, or are past its end")
        before = (path, offset + nbytes)


def choose_checking(placements: Sequence[Placement]) -> frozenset[int]:
    """Placements that compare copies: chosen so that together they have every element of a state at most once."""
    chosen: set[int] = set()
    claimed: dict[tuple[str, str], _Claims] = {}
    for number, placement in enumerate(placements):
        tensor_slice = placement.slice
        if _claim(claimed.setdefault((tensor_slice.param, tensor_slice.state), {}), tensor_slice):
            chosen.add(number)
    return frozenset(chosen)


def _claim(claims: _Claims, tensor_slice: Slice) -> bool:
    """Claim the elements of a slice; False if some of them were claimed before."""
    ranges = claims.get(tensor_slice.pairs)
    if ranges is None:
        if any(intersect(a.global_box, b.global_box) for pairs in claims for a in pairs for b in tensor_slice.pairs):
            return False
        ranges = claims[tensor_slice.pairs] = []
    if tensor_slice.start == tensor_slice.stop:
        return True
    at = bisect_right(ranges, (tensor_slice.start, tensor_slice.stop))
    if (at and tensor_slice.start < ranges[at - 1][1]) or (at < len(ranges) and ranges[at][0] < tensor_slice.stop):
        return False
    ranges.insert(at, (tensor_slice.start, tensor_slice.stop))
    return True
