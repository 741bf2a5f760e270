"""Laws of `ucp advise`: figures of papers that follow from the formulas, and simulations that agree with these."""

from __future__ import annotations

from itertools import chain
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucp
from ucp.advice.models import METHODS, best_interval, ettr, partial_experts, sparse_window
from ucp.advice.plot import plot_advice
from ucp.advice.residency import plan_residency
from ucp.advice.run import Range, Run
from ucp.advice.simulate import draw_failures, simulate
from ucp.checks import floor
from ucp.errors import MalformedError, UsageError

HOURS = {"2H": 7200, "1H": 3600, "30M": 1800, "20M": 1200, "10M": 600}
TABLE_3 = {  # window, seconds of an iteration, stall of a save, progress at 2H to 10M
    "LLaVa": (3, 1.70, 0.01, (0.981, 0.979, 0.975, 0.971, 0.964)),
    "GPT": (3, 2.10, 0.03, (0.979, 0.976, 0.971, 0.966, 0.959)),
    "QWen": (5, 2.50, 0.04, (0.981, 0.977, 0.970, 0.963, 0.957)),
    "DeepSeek": (6, 2.90, 0.06, (0.975, 0.964, 0.965, 0.956, 0.951)),
}
TABLE_7 = [  # the same at 1H, 30M, 10M
    (3, 3.0, 0.06, (0.984, 0.979, 0.973)),
    (6, 2.3, 0.05, (0.952, 0.946, 0.941)),
    (4, 2.1, 0.04, (0.966, 0.958, 0.953)),
    (3, 1.9, 0.04, (0.976, 0.968, 0.965)),
    (3, 1.7, 0.03, (0.979, 0.976, 0.971)),
]


def test_progress_of_moetion_follows_from_its_formula() -> None:
    rows = [
        (window, seconds, stall, mtbf, stated)
        for window, seconds, stall, progress in chain(TABLE_3.values(), TABLE_7)
        for mtbf, stated in zip(HOURS.values() if len(progress) == 5 else (3600, 1800, 600), progress, strict=True)
    ]
    assert len(rows) == 35
    differences = [
        ettr(iter_time=seconds, interval=1, stall=stall, recovery=1.5 * window * seconds, mtbf=mtbf) - stated
        for window, seconds, stall, mtbf, stated in rows
    ]
    assert (round(min(differences), 3), round(max(differences), 3)) == (-0.014, 0.022)


def test_ranges_are_written_in_three_ways() -> None:
    assert Range.parse("3..12") == Range.parse("3-12") == Range(3, 12)
    assert Range.parse("1e-3..2e-3") == Range.parse("1e-3-2e-3") == Range(1e-3, 2e-3)
    assert Range.parse("2GB..4GiB") == Range(2e9, 4 * 1024**3)


@settings(max_examples=30)
@given(st.integers(2, 64), st.floats(1e9, 1e12))
def test_as_many_experts_are_saved_as_are_copied_without_a_stall(experts: int, copy_bandwidth: float) -> None:
    run = Run(
        iter_time=1, mtbf=1e6, params_dense=1e9, params_expert=64e9, experts=experts, bandwidth=1e12,
        copy_bandwidth=copy_bandwidth, max_plt=1,
    )  # fmt: skip

    def has_no_stall(k: int) -> bool:
        return (1e9 + 64e9 * k / experts) * 14 / copy_bandwidth <= run.overlap * run.iter_time

    expected = max((k for k in range(1, experts + 1) if has_no_stall(k)), default=1)
    assert partial_experts(run).detail == f"{expected} of {experts}"


@pytest.mark.parametrize(
    "extreme",
    [
        {"params_expert": "1e15", "experts": 1e12},
        {"params_expert": 1e18, "experts": 1e9, "moe_layers": 1e9},
        {"iter_time": 1e-9, "mtbf": 1e18, "bandwidth": 1},
        {"iter_time": 1e18, "mtbf": 1e-9, "restart": 1e18},
        {"params_dense": 1e18, "bandwidth": 1e-9, "state_nbytes": 1e18},
        {"copy_bandwidth": 1e-9, "overlap": 0, "max_plt": 1e-9, "params_expert": 1e18, "experts": 1e18},
    ],
)
@pytest.mark.timeout(60)
def test_extreme_numbers_are_answered_at_once(extreme: dict[str, float | str]) -> None:
    known = {"iter_time": 2, "mtbf": 3600, "params_dense": 1e9, "bandwidth": 1e9, **extreme}
    report = ucp.advise(**known)
    assert all(0 <= advice.low.ettr <= advice.high.ettr <= 1 for advice in report.methods)
    assert str(report)


@pytest.mark.parametrize(
    "text", ["", "# none\n", "nan\n", "-1\n2\n", "1\ninf\n", "1\n1e999\n", "0\n", "one\n", "3 4\n"]
)
def test_traces_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text(text)
    with pytest.raises(MalformedError):
        ucp.advise(iter_time=2, params_dense=1e9, bandwidth=1e9, trace=tmp_path / "trace.txt")


def test_bandwidth_is_measured_and_progress_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, sizes = floor.measure_writes, list[int]()

    def measure_less(folder: Path, nbytes: int) -> floor.Rate:
        sizes.append(nbytes)
        return measure(folder, floor.WINDOW)

    monkeypatch.setattr(floor, "measure_writes", measure_less)
    known: dict[str, float | str] = {
        "iter_time": 2,
        "mtbf": "3600..7200",
        "params_dense": 1e9,
        "params_expert": 7e9,
        "experts": 8,
    }
    report = ucp.advise(**known, measure=tmp_path)
    assert report.run["bandwidth"].low > 0
    assert (sizes, [*tmp_path.iterdir()]) == ([1 << 30], [])
    plot_advice(report, tmp_path / "ways.svg")
    text = (tmp_path / "ways.svg").read_text()
    assert all(advice.method in text for advice in report.methods if advice.low.ettr)
    assert ucp.advise(**known, bandwidth=1e9, measure=tmp_path).run["bandwidth"] == Range(1e9, 1e9)
    assert len(sizes) == 1


RUNS = st.builds(
    Run,
    iter_time=st.floats(0.5, 10),
    mtbf=st.floats(600, 1e5),
    params_dense=st.floats(1e8, 1e11),
    params_expert=st.sampled_from([0.0, 1e9, 1e12]),
    experts=st.integers(1, 64),
    moe_layers=st.integers(1, 8),
    bandwidth=st.floats(1e9, 1e12),
    copy_bandwidth=st.floats(1e10, 1e13),
    peer_bandwidth=st.floats(1e9, 1e12),
    restart=st.integers(0, 300),
)


@given(RUNS)
def test_the_interval_is_the_best_and_near_the_square_root(run: Run) -> None:
    stall = run.nbytes / run.bandwidth
    interval = best_interval(run, stall=stall, fixed=run.restart)

    def score(interval: int) -> float:
        recovery = run.restart + interval * run.iter_time / 2
        return ettr(iter_time=run.iter_time, interval=interval, stall=stall, recovery=recovery, mtbf=run.mtbf)

    assert score(interval) >= max(map(score, [max(interval // 2, 1), max(interval - 1, 1), interval + 1, interval * 2]))
    assert abs(interval - sqrt(2 * stall * (run.mtbf + run.restart)) / run.iter_time) <= 1


@given(RUNS)
def test_a_slower_machine_never_makes_more_progress(run: Run) -> None:
    from dataclasses import replace

    for method in METHODS:
        progress = method(run).ettr
        assert 0 <= progress <= 1
        for worse in (replace(run, mtbf=run.mtbf / 2), replace(run, restart=run.restart + 60)):
            assert method(worse).ettr <= progress + 1e-9


@settings(max_examples=15)
@given(
    st.floats(1, 5), st.integers(1, 40), st.floats(1, 5), st.floats(200, 600), st.floats(200, 600), st.integers(0, 3)
)
def test_a_simulation_agrees_with_the_formula(
    iter_time: float, interval: int, stall: float, restart: float, lag: float, seed: int
) -> None:
    mtbf, horizon = 2e4, 3000 * 2e4
    replay = simulate(
        iter_time=iter_time, interval=interval, stall=stall, restart=restart, lag=lag, horizon=horizon,
        failures=draw_failures(mtbf, horizon=horizon, seed=seed),
    )  # fmt: skip
    recovery = restart + lag + interval * iter_time / 2
    assert replay.ettr == pytest.approx(
        ettr(iter_time=iter_time, interval=interval, stall=stall, recovery=recovery, mtbf=mtbf), abs=4e-3
    )


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_simulated_window_costs_one_and_a_half_windows(window: int) -> None:
    mtbf, horizon = 2e4, 3000 * 2e4
    replay = simulate(
        iter_time=10, interval=1, stall=0, restart=0, window=window, horizon=horizon,
        failures=draw_failures(mtbf, horizon=horizon),
    )  # fmt: skip
    assert replay.ettr == pytest.approx(1 / (1 + 1.5 * window * 10 / mtbf), abs=1e-3)


def test_a_window_that_does_not_fit_is_said() -> None:
    run = Run(iter_time=1, mtbf=3600, params_dense=1e9, bandwidth=1e6)
    assert "does not fit" in sparse_window(run).problem


def test_memory_is_that_of_moesys() -> None:
    known = {"params_dense": 1.0e9, "params_expert": 12.9e9, "moe_layers": 12}
    plan = plan_residency(**known, gpu_nbytes=8 * 40e9, host_nbytes=1e12, disk_nbytes=1e12)
    assert plan.share == 1
    assert plan.gpu_nbytes == 16e9 + 4 * 12.9e9 / 12
    assert plan.disk_nbytes == 12 * 12.9e9
    half = plan_residency(**known, gpu_nbytes=8 * 40e9, host_nbytes=16 * 12.9e9 / 2, disk_nbytes=1e12)
    assert half.share == 0.5
    assert not plan_residency(**known, gpu_nbytes=1e9, host_nbytes=1e12, disk_nbytes=1e12).fits


def test_ranges_give_ranges_and_say_what_they_leave_open(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("1000 # first\n5000\n9000\n")
    known: dict[str, float | str] = {"iter_time": 2, "params_dense": "1G", "params_expert": "7G", "experts": 8}
    report = ucp.advise(**known, bandwidth="2GB-20GB", mtbf="3600-7200")
    assert all(advice.low.ettr <= advice.high.ettr for advice in report.methods)
    assert report.best.low.ettr == max(a.low.ettr for a in report.methods if not a.low.problem)
    assert "do not decide" in str(report)
    replayed = ucp.advise(**known, bandwidth="2GB", trace=tmp_path / "trace.txt")
    assert replayed.run["mtbf"] == Range(3000, 3000)
    assert replayed.best.replay is not None
    assert replayed.best.replay.failures <= 3
    (tmp_path / "trace.txt").write_text("5\n1\n")
    with pytest.raises(MalformedError):
        ucp.advise(**known, bandwidth="2GB", trace=tmp_path / "trace.txt")


@pytest.mark.parametrize(
    "wrong",
    [{"iter_time": "x"}, {"iter_time": 0}, {"bandwith": 3}, {"overlap": 2}, {"mtbf": "4-2"}, {"gpu_memory": 3},
     {"iter_time": float("nan")}, {"bandwidth": ""}, {"mtbf": "2...4"}, {"mtbf": "1..2..3"}, {"mtbf": "4..2"},
     {"bandwidth": 1e19}, {"bandwidth": float("inf")}, {"iter_time": 1e-10}, {"params_dense": 0}, {"experts": 0},
     {"params_expert": 7, "experts": 8}, {"overlap": -1}, {"iterations": 0}, {"max_plt": "1e400"}, {"experts": "1TT"},
     {"gpu_memory": 1, "disk": 1}],
)  # fmt: skip
def test_wrong_numbers_are_refused(wrong: dict[str, float | str]) -> None:
    with pytest.raises(UsageError):
        ucp.advise(**{"iter_time": 2, "mtbf": 3600, "params_dense": 1e9, "bandwidth": 1e9, **wrong})
