"""A conversion as work: its tasks, and the proof that they can fill the target from the source."""

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
"""Claimed element ranges, in increasing order, by the regions of the local tensor that they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A whole conversion, ready to be carried out."""

    index: Index
    """The source."""
    target: TargetPlan
    """The destination."""
    tasks: Sequence[Task]
    """The work; those of all shares together write every placement once."""
    checking: frozenset[int]
    """Placements whose bytes are compared with the source's copies of them (each copy once in all)."""
    tiled: frozenset[int] = frozenset()
    """Placements (and raw copies, counted on) that are filled in the order of the source, as `tiles` says."""
    fsync: bool = True
    """Whether the bytes must be on the disk at the end, so that bringing them there may as well begin early."""

    @property
    def nbytes(self) -> int:
        """Bytes the tasks write."""
        return count_bytes(self.tasks)


def make_job(index: Index, target: TargetPlan, share: Share | None = None) -> Job:
    """Plan the work; with `share`, the tasks of this part of it alone, numbered as among all.

    Raises CoverError, MissingStateError or UsageError when source and target do not fit.
    """
    check_target(index, target)
    tiled = _find_tiled(index, target)
    tasks = list_tasks(target, tiled, block=BLOCK, limit=TASK)
    if share is not None:
        tasks = tasks.select_share(share)
    checking = choose_checking(target.placements)
    return Job(index=index, target=target, tasks=tasks, checking=checking, tiled=tiled)


def _find_tiled(index: Index, target: TargetPlan) -> frozenset[int]:
    """Placements and raw copies whose blocks are spread over the source."""
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
    """A tensor of an extra as a slice, and where its pieces are found."""
    state = StateIndex.from_tensor(ref)
    return full_slice("extra", "", state), Locator(state)


def check_target(index: Index, target: TargetPlan) -> None:
    """Prove that every slice can be filled from the source, and that no two write the same bytes."""
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
            raise CoverError(f"bytes {offset}:{offset + nbytes} of {path} are planned twice, or past its end")
        before = (path, offset + nbytes)


def choose_checking(placements: Sequence[Placement]) -> frozenset[int]:
    """Placements that between them hold every element of a state at most once: those that check the copies."""
    chosen: set[int] = set()
    claimed: dict[tuple[str, str], _Claims] = {}
    for number, placement in enumerate(placements):
        tensor_slice = placement.slice
        if _claim(claimed.setdefault((tensor_slice.param, tensor_slice.state), {}), tensor_slice):
            chosen.add(number)
    return frozenset(chosen)


def _claim(claims: _Claims, tensor_slice: Slice) -> bool:
    """Claim a slice; False if a part of it was claimed before."""
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
