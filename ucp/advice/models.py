"""What a way of saving costs, in closed form: the stall of each save, and the time that a failure costs.

ETTR, the effective training time ratio, is the share of time in which the run makes progress (MoEtion, section 5):

    ETTR = 1 / (1 + stall / (iteration time x interval)) x 1 / (1 + recovery / MTBF)

A failure costs half an interval with full saves, and one and a half windows with sparse ones. A save that is being
written when the run fails is lost, too: the time to write it is added to the paper's half interval.

>>> round(ettr(iter_time=1.7, interval=1, stall=0.01, recovery=1.5 * 3 * 1.7, mtbf=7200), 3)
0.993
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, sqrt

from ucp.advice.run import Run
from ucp.errors import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One way of saving, at its best interval."""

    method: str
    """Name."""
    interval: int
    """Iterations between saves; between windows, for a sparse one."""
    detail: str
    """What else is chosen."""
    lag: float = 0.0
    """Seconds from the stall until a save can be used."""
    window: int = 0
    """Saves of a window; 0 if it is not sparse."""
    nbytes: float
    """Bytes of one save; the largest, for a sparse one."""
    stall: float
    """Seconds that one save holds up training."""
    recovery: float
    """Seconds that a failure costs, the mean: restart, loading, and iterations that are done again."""
    ettr: float
    """Share of time in which the run makes progress."""
    plt: float = 0.0
    """Proportion of tokens that experts lose over the run."""
    problem: str = ""
    """Why it is not to be used; empty if it is. If it cannot be used at all, the numbers are 0."""


def ettr(*, iter_time: float, interval: float, stall: float, recovery: float, mtbf: float) -> float:
    """Effective training time ratio. `interval`: iterations between saves; `stall`: seconds of each."""
    return 1 / (1 + stall / (iter_time * interval)) / (1 + recovery / mtbf)


def best_interval(run: Run, *, stall: float, fixed: float, least: int = 1) -> int:
    """The interval with the highest ETTR, `least` or more, if a failure costs half of it and `fixed` seconds.

    The ratio has one maximum, at sqrt(2 x stall x (MTBF + fixed)) / iteration time (Young, Daly).
    """

    def score(interval: int) -> float:
        return ettr(
            iter_time=run.iter_time,
            interval=interval,
            stall=stall,
            recovery=fixed + interval * run.iter_time / 2,
            mtbf=run.mtbf,
        )

    below = max(least, int(sqrt(2 * stall * (run.mtbf + fixed)) / run.iter_time))
    return max(below, below + 1, key=score)


def full(run: Run) -> Estimate:
    """Training waits until everything is in storage (torch.save)."""
    stall = run.nbytes / run.bandwidth
    return _dense(run, "full", stall=stall, least=1, load=stall, detail="training waits for storage")


def checkfreq(run: Run) -> Estimate:
    """A copy in host memory, which is written while training goes on (CheckFreq): one save at a time."""
    persist = run.nbytes / run.bandwidth
    stall = max(0.0, run.copy_time(run.nbytes) - run.overlap * run.iter_time)
    least = max(1, ceil(persist / run.iter_time))
    return _dense(run, "asynchronous", stall=stall, least=least, load=persist, lag=persist, detail="one save at a time")


def gemini(run: Run) -> Estimate:
    """Copies in the memory of other hosts, sent while the network is idle (Gemini)."""
    if not run.peer_bandwidth:
        return _impossible("peer memory", "no bandwidth to other hosts is given")
    send = run.nbytes / run.peer_bandwidth
    stall = max(0.0, send - run.overlap * run.iter_time)
    return _dense(run, "peer memory", stall=stall, least=1, load=send, lag=send, detail="lost if all copies are")


def partial_experts(run: Run) -> Estimate:
    """All but the experts, and K experts of every layer, in the background (MoC-System, as `ucp.save` does it).

    K is the largest with which a copy takes no longer than the overlap, or 1. A failure takes an expert back to its
    last save: (N/K - 1)/2 saves ago on average, beyond what all parameters lose.
    """
    if run.params_expert == 0 or run.experts < 2:
        return _impossible("some experts", "the model has no experts")
    budget = run.overlap * run.iter_time

    def nbytes(k: int) -> float:
        per_param = run.weight_nbytes + run.state_nbytes
        return (run.params_dense + run.params_expert * k / run.experts) * per_param

    k = max(1, bisect_right(range(1, run.experts + 1), budget, key=lambda k: run.copy_time(nbytes(k))))
    estimate = _of_experts(run, k, nbytes(k))
    while estimate.plt > run.max_plt and k < run.experts:
        k = min(2 * k, run.experts)  # Dynamic-K
        estimate = _of_experts(run, k, nbytes(k))
    return estimate


def _of_experts(run: Run, k: int, nbytes: float) -> Estimate:
    stall = max(0.0, run.copy_time(nbytes) - run.overlap * run.iter_time)
    least = max(1, ceil(nbytes / run.bandwidth / run.iter_time))
    estimate = _dense(
        run, "some experts", stall=stall, least=least, load=run.nbytes / run.bandwidth, lag=nbytes / run.bandwidth,
        detail=f"{k} of {run.experts}", nbytes=nbytes,
    )  # fmt: skip
    faults = run.iterations * run.iter_time / run.mtbf
    plt = min(1.0, faults * (run.experts / k - 1) / 2 * estimate.interval / run.iterations)
    problem = f"experts lose {plt:.1%} of their tokens, above {run.max_plt:.2%}" if plt > run.max_plt else ""
    return replace(estimate, plt=plt, problem=problem)


def sparse_window(run: Run) -> Estimate:
    """Every iteration the full states of some operators, and the compute weights of later ones (MoEtion).

    Operators are equal here: experts of their mean size, and the rest cut into pieces of that size. The window is the
    shortest whose largest save is written in an iteration.
    """
    operators = run.experts * run.moe_layers if run.params_expert else 0
    size = run.params_expert / operators if operators else run.params_dense
    count = operators + ceil(run.params_dense / size) if operators else 1
    mean = run.params / count
    budget = run.bandwidth * run.iter_time

    def largest(active: int) -> float:
        return mean * (run.state_nbytes * active + run.weight_nbytes * (count - active))

    spare = budget / mean - run.weight_nbytes * count
    active = min(count, int(spare / max(run.state_nbytes - run.weight_nbytes, 1)))
    if active < 1:
        return _impossible("sparse window", "does not fit: one operator takes longer than an iteration to write")
    window = ceil(count / active)
    stall = max(0.0, run.copy_time(largest(active)) - run.overlap * run.iter_time)
    recovery = run.restart + run.params * run.state_nbytes / run.bandwidth + 1.5 * window * run.iter_time
    return Estimate(
        method="sparse window",
        interval=1,
        detail=f"window of {format_count(window, 'save')}",
        window=window,
        nbytes=largest(active),
        stall=stall,
        recovery=recovery,
        ettr=ettr(iter_time=run.iter_time, interval=1, stall=stall, recovery=recovery, mtbf=run.mtbf),
    )


METHODS: tuple[Callable[[Run], Estimate], ...] = (full, checkfreq, gemini, partial_experts, sparse_window)
"""Ways of saving."""


def _dense(
    run: Run,
    method: str,
    *,
    stall: float,
    least: int,
    load: float,
    detail: str,
    lag: float = 0.0,
    nbytes: float | None = None,
) -> Estimate:
    """A way in which a failure costs half an interval, at its best interval. `load`, `lag`: seconds."""
    fixed = run.restart + load + lag
    interval = best_interval(run, stall=stall, fixed=fixed, least=least)
    recovery = fixed + interval * run.iter_time / 2
    return Estimate(
        method=method,
        interval=interval,
        detail=detail,
        lag=lag,
        nbytes=run.nbytes if nbytes is None else nbytes,
        stall=stall,
        recovery=recovery,
        ettr=ettr(iter_time=run.iter_time, interval=interval, stall=stall, recovery=recovery, mtbf=run.mtbf),
    )


def _impossible(method: str, problem: str) -> Estimate:
    return Estimate(method=method, interval=0, detail="", nbytes=0, stall=0, recovery=0, ettr=0.0, problem=problem)
