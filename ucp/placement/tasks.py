"""How many GPUs each task of a multi-task run gets, by load, so that the busiest GPU has least (MoESys, elastic tasks).

Heavy tasks are split over GPUs: the next GPU always goes to the task with the largest load per GPU. The lightest tasks
share GPUs if that lowers the load of the busiest one; a GPU that is shared is not split.

>>> [allot_gpus([1, 1, 2], gpus=gpus).gpus for gpus in (2, 4)]  # 2:2, then 1:1:1:1
[((1,), (1,), (0,)), ((0,), (1,), (2, 3))]
>>> allot_gpus([512, 256, 128, 128], gpus=8).counts
(4, 2, 1, 1)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from math import isfinite

from ucp.core.text.page import Page, Report, facts, table
from ucp.errors import UsageError

_MOST_GPUS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGpus(Report):
    """Which GPUs run which tasks."""

    loads: tuple[float, ...]
    """Load of each task, in any unit: samples, tokens, seconds on one GPU."""
    gpus: tuple[tuple[int, ...], ...]
    """GPUs of each task; tasks that share one have its number."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of GPUs of each task."""
        return tuple(map(len, self.gpus))

    @property
    def load_by_gpu(self) -> tuple[float, ...]:
        """Load of each GPU."""
        by_gpu: dict[int, float] = defaultdict(float)
        for load, gpus in zip(self.loads, self.gpus, strict=True):
            for gpu in gpus:
                by_gpu[gpu] += load / len(gpus)
        return tuple(by_gpu[gpu] for gpu in range(max(by_gpu) + 1))

    def page(self) -> Page:
        """The busiest GPU, and a row for each task."""
        busiest, mean = max(self.load_by_gpu), sum(self.loads) / len(self.load_by_gpu)
        yield facts([("GPUs", f"{len(self.load_by_gpu):,}"), ("busiest GPU", f"{busiest / mean:.2f} times the mean")])
        rows = [
            (str(task), f"{load:g}", ", ".join(map(str, gpus)), f"{load / len(gpus):g}")
            for task, (load, gpus) in enumerate(zip(self.loads, self.gpus, strict=True))
        ]
        yield table("Tasks", (">task", ">load", "GPUs", ">load per GPU"), rows, most=128, all_in="--json")


def allot_gpus(loads: Sequence[float], *, gpus: int) -> TaskGpus:
    """The GPUs of tasks with these loads.

    The busiest GPU has the least that is possible if no tasks share a GPU, and at most a third more if some do (Graham:
    heaviest first). Raises UsageError for loads that are not positive numbers, or no GPU.
    """
    if not 1 <= gpus <= _MOST_GPUS or not loads or not all(load > 0 for load in loads) or not isfinite(sum(loads)):
        raise UsageError(
            f"expected 1 to {_MOST_GPUS:,} GPUs, and loads above 0, such as 1:1:2; got {gpus:,} and {list(loads)}"
        )
    order = sorted(range(len(loads)), key=lambda task: (loads[task], task))  # lightest first
    sums = [*accumulate((loads[task] for task in order), initial=0.0)]
    plans = [  # the least that the busiest GPU can have, tasks that share GPUs, these GPUs
        (max(sums[light] / max(shared, 1), (sums[-1] - sums[light]) / max(gpus - shared, 1)), light, shared)
        for light in range(max(0, len(loads) - gpus + 1), len(loads) + 1)
        for shared in range(min(light, 1), min(light, gpus - len(loads) + light) + 1)
    ]
    best: TaskGpus | None = None
    for least, light, shared in sorted(plans):
        if best is not None and least >= max(best.load_by_gpu):
            break
        plan = _allot(loads, order[:light], order[light:], shared, gpus)
        best = plan if best is None or max(plan.load_by_gpu) < max(best.load_by_gpu) else best
    assert best is not None
    return best


def _allot(loads: Sequence[float], light: Sequence[int], heavy: Sequence[int], shared: int, gpus: int) -> TaskGpus:
    """`shared` GPUs for the tasks `light`, one each; the rest for `heavy`, if there are any."""
    counts = dict.fromkeys(heavy, 1)
    heap = [(-loads[task], task) for task in heavy]
    heapify(heap)
    for _ in range(gpus - shared - len(heavy) if heavy else 0):
        task = heap[0][1]
        counts[task] += 1
        heapreplace(heap, (-loads[task] / counts[task], task))
    ends = accumulate((counts[task] for task in sorted(heavy)), initial=0)
    by_task = {task: tuple(range(end, end + counts[task])) for task, end in zip(sorted(heavy), ends, strict=False)}
    bins = [(0.0, sum(counts.values()) + number) for number in range(shared)]
    for task in reversed(light):
        load, gpu = bins[0]
        heapreplace(bins, (load + loads[task], gpu))
        by_task[task] = (gpu,)
    return TaskGpus(loads=tuple(loads), gpus=tuple(by_task[task] for task in range(len(loads))))
