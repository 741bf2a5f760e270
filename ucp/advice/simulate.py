"""Replays failures one by one: how much of the time a run makes progress, without the closed forms.

>>> simulate(iter_time=1, interval=10, stall=0, restart=5, failures=[25.0], horizon=105).iterations
95
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ucp.errors import MalformedError
from ucp.store.manifest import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of a run."""

    iterations: int
    """Iterations that are part of the run at its end."""
    repeated: int
    """Iterations that failures undid."""
    failures: int
    """Failures."""
    ettr: float
    """Share of the time in which the run made progress."""


def simulate(
    *,
    iter_time: float,
    interval: int,
    stall: float,
    restart: float,
    failures: Iterable[float],
    horizon: float,
    lag: float = 0.0,
    window: int = 0,
) -> Replay:
    """Run iterations, saves and failures in the order of time.

    `interval`: iterations between saves; `stall`, `restart`: seconds; `failures`: times of failures, increasing, in
    seconds; `horizon`: when the run ends; `lag`: seconds until a save can be used. `window`: saves of a sparse window,
    0 for full saves; the run then goes back to the last window that peers hold, which is one window later.
    """
    clock, saved, lost, count = 0.0, 0, 0, 0
    for failure in [*failures, horizon]:
        end = min(failure, horizon)
        if end < clock:  # a failure during a restart costs nothing more
            continue
        done = saved + _count(end - clock, interval, iter_time, stall)
        if failure >= horizon:
            return Replay(iterations=done, repeated=lost, failures=count, ettr=done * iter_time / horizon)
        written = saved + _count(end - clock - lag, interval, iter_time, stall)
        restored = max(saved, _last_saved(written, interval, window))
        count, lost, saved, clock = count + 1, lost + done - restored, restored, failure + restart
    return Replay(iterations=saved, repeated=lost, failures=count, ettr=saved * iter_time / horizon)


def _count(seconds: float, interval: int, iter_time: float, stall: float) -> int:
    """Iterations in some time that begins with a save."""
    if seconds <= 0:
        return 0
    cycles, rest = divmod(seconds, interval * iter_time + stall)
    return int(cycles) * interval + min(int(rest // iter_time), interval - 1)


def _last_saved(done: int, interval: int, window: int) -> int:
    """The iteration that a failure after iteration `done` goes back to."""
    if not window:
        return done // interval * interval
    return max((done // window - 1) * window, 0)


def draw_failures(mtbf: float, *, horizon: float, seed: int = 0) -> Iterator[float]:
    """Times of failures, seconds, whose gaps have the mean `mtbf` and no memory (a Poisson process)."""
    generator, clock = random.Random(seed), 0.0
    while (clock := clock + generator.expovariate(1 / mtbf)) < horizon:
        yield clock


def parse_trace(path: str) -> list[float]:
    """Times of failures, seconds from the start of the run, in a file with one per line; `#` begins a remark.

    Raises MissingFileError, MalformedError.
    """
    lines = read_text(path).decode("utf-8", "replace").splitlines()
    try:
        times = [float(text) for line in lines if (text := line.partition("#")[0].strip())]
    except ValueError as error:
        raise MalformedError(f"expected seconds, one number per line, in {path}; {error}") from error
    if not times or times != sorted(times) or times[0] < 0 or not 0 < times[-1] < inf:
        raise MalformedError(f"expected times of failures that increase, 0 or more, in {path}; the last above 0")
    return times


def mean_gap(times: Sequence[float]) -> float:
    """Seconds between failures, the mean; the first counts from 0."""
    return times[-1] / len(times)
