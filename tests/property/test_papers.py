"""Figures of papers that no other test computes: whether each reproduces, as docs/explanation/papers.md says.

`ORACLES` marks every figure: yes (within rounding), near (of the same size; a setting is not stated), no. A figure that
becomes better or worse than its mark fails. The last tests compare the marks with the page, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import comb, isclose, sqrt
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.advice.models import ettr
from ucp.placement.survival import LostNodes

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "papers.md"
Mark = Literal["yes", "near", "no"]


class Oracle(NamedTuple):
    """A figure of a paper."""

    row: str
    """Start of its row in the page."""
    reproduces: Mark
    """Whether it follows from what the paper states."""
    stated: Sequence[float]
    """Numbers in the paper."""
    computed: Sequence[float]
    """The same, computed."""
    rounding: float
    """Largest difference that is rounding, relative to the number."""
    near: float = 0.5
    """Largest relative difference of a figure that is near."""


class Gpt(NamedTuple):
    """Parameters of a GPT with experts: two layer norms a layer, biases, a tied head."""

    modules: list[int]
    """Of each module outside experts."""
    expert: int
    """Of an expert."""
    moe_layers: int
    """Layers with experts."""
    experts: int
    """Experts of a layer."""

    @classmethod
    def of(cls, hidden: int, layers: int, moe_layers: int, experts: int, positions: int = 2048) -> Gpt:
        expert = 8 * hidden * hidden + 5 * hidden
        attention = 4 * hidden * hidden + 6 * hidden
        modules = [50304 * hidden, positions * hidden, 2 * hidden] + [attention] * layers
        modules += [expert + 2 * hidden] * (layers - moe_layers) + [(experts + 2) * hidden] * moe_layers
        return cls(modules, expert, moe_layers, experts)

    @property
    def params(self) -> int:
        return sum(self.modules) + self.moe_layers * self.experts * self.expert


MODEL = Gpt.of(1024, 24, 12, 16)
CASES = ((8, 8), (16, 16), (16, 8))


def deal(sizes: Iterable[float], loads: Iterable[float]) -> list[float]:
    """Loads of ranks after each item, largest first, went to the rank with the least."""
    by_rank = list(loads)
    for size in sorted(sizes, reverse=True):
        rank = min(range(len(by_rank)), key=by_rank.__getitem__)
        by_rank[rank] += size
    return by_rank


def save_by_rank(k: int, dp: int, ep: int) -> tuple[float, float, float]:
    """Bytes of the busiest rank: before sharding, with modules dealt evenly, and with experts counted, too (MoC)."""
    dense, sparse = sum(MODEL.modules), 192 * MODEL.expert
    saved = [0] * ep
    for layer in range(12):
        for turn in range(k):
            saved[(layer * k + turn) % 16 % ep] += 1
    zero = [12 * dense / dp + 4 * sparse / dp + 8 * saved[r % ep] * MODEL.expert * ep / dp for r in range(dp)]
    weights = [2 * saved[r % ep] * MODEL.expert for r in range(dp)]
    before = max(zero[r] + 2 * dense * (r == 0) + weights[r] * (r < ep) for r in range(dp))
    rest = [zero[r] + weights[r] * ep / dp for r in range(dp)]
    items = [2 * module for module in MODEL.modules]
    by_modules = max(map(sum, zip(deal(items, [0] * dp), rest, strict=True)))
    return before, by_modules, max(deal(items, rest))


def save_less(k: int) -> list[float]:
    """Per cent less that the busiest rank writes in each case, if modules are written whole."""
    return [100 * (1 - sharded / before) for before, sharded, _ in (save_by_rank(k, *case) for case in CASES)]


def adapt_less(k: int) -> list[float]:
    """Per cent less if modules are dealt beside the bytes of experts."""
    return [100 * (1 - adaptive / plain) for _, plain, adaptive in (save_by_rank(k, *case) for case in CASES)]


MTBF = (7200, 3600, 1800, 1200, 600)
Row = tuple[float, ...]
"""Gemini: interval, stall; MoC: stall, and in per cent; recovery of CheckFreq, Gemini, MoC, MoEtion; their ETTR."""
TABLE_3_TEXT = """
LLaVa 2.9 3 57 .03 .01
46 .02  .14   8  1265  938  10  11 .945 .959 .922 .981
38 .07 2.14 124  2530 1551  20  24 .914 .939 .375 .979
27 .13 3.41 201  5059 2203  41  57 .853 .897 .328 .975
21 .21 5.39 318  7589 2570  61  74 .792 .852 .231 .971
17 .31 5.88 347 11178 4161  98 117 .712 .764 .184 .964
GPT 7.3 3 78 .03 .03
64 .03  .18   9  1424 1121  13  18 .937 .947 .919 .979
49 .06 3.32 158  2848 1718  25  28 .903 .923 .384 .976
36 .15 4.54 216  4486 2160  50  78 .834 .868 .326 .971
31 .22 7.90 376  8543 3259  76 105 .765 .815 .220 .966
22 .33 8.36 397 13086 4627 132 161 .687 .722 .179 .959
QWen 14.3 5 113 .05 .04
89 .04  .19   9  1170  961  15  17 .927 .934 .927 .981
65 .05 4.25 170  2340 1402  30  33 .898 .915 .380 .977
48 .11 7.10 284  4680 2114  60  83 .841 .868 .325 .970
36 .19 9.23 369  7020 2331  90 140 .783 .819 .205 .963
27 .25 9.68 386 10040 3495 146 207 .703 .717 .162 .957
DeepSeek 16.4 6 124 .08 .06
92 .07   .22   8  992  800  17  22 .902 .910 .933 .975
70 .09  5.75 198 1984 1218  35  51 .877 .894 .349 .964
54 .19  8.58 293 3967 1879  70 104 .827 .853 .324 .965
38 .25 12.87 444 5951 1983 104 167 .777 .814 .168 .956
31 .38 13.65 470 9402 3236 176 241 .672 .728 .134 .951
"""
"""A model: billions of parameters, window, interval and stall of CheckFreq, stall of MoEtion; then a row per MTBF."""


class Trained(NamedTuple):
    """A model of table 3."""

    billions: float
    """Parameters."""
    window: int
    """Window of MoEtion."""
    interval: float
    """Iterations between saves of CheckFreq."""
    stall: float
    """Seconds that one of these costs."""
    rows: list[Row]
    """One per time between failures."""


def parse_table(text: str) -> list[Trained]:
    models: list[Trained] = []
    for line in text.split("\n"):
        words = line.split()
        if words and words[0].isalpha():
            models.append(Trained(float(words[1]), int(words[2]), float(words[3]), float(words[4]), []))
        elif words:
            models[-1].rows.append(tuple(map(float, words)))
    return models


TABLE_3 = parse_table(TABLE_3_TEXT)


def iter_time(rows: Sequence[Row]) -> float:
    """Seconds of an iteration: MoC's stall in seconds, over that in per cent."""
    return sum(row[2] / row[3] * 100 for row in rows[-3:]) / 3


def deviations(method: int) -> list[float]:
    """ETTR of the formula less that in table 3, for CheckFreq (0), Gemini (1) or MoC (2), with their recovery times."""
    found = []
    for model in TABLE_3:
        seconds = iter_time(model.rows)
        for row, mtbf in zip(model.rows, MTBF, strict=True):
            stall, recovery = (model.stall, row[1], row[2])[method], row[4 + method] * mtbf / 43200
            computed = ettr(iter_time=seconds, interval=1, stall=stall, recovery=recovery, mtbf=mtbf)
            found.append(computed - row[8 + method])
    return found


def recovery_ratios(method: int) -> list[float]:
    """Recovery time of a method over MoEtion's, in each row of table 3."""
    return [row[4 + method] / row[7] for model in TABLE_3 for row in model.rows]


def iterations_per_failure() -> list[float]:
    """Recovery time of MoEtion, in windows."""
    return [
        row[7] / (43200 / mtbf) / iter_time(model.rows) / model.window
        for model in TABLE_3
        for row, mtbf in zip(model.rows, MTBF, strict=True)
    ]


def window_bandwidths() -> list[tuple[float, float]]:
    """GB/s that give each model its window: 2 bytes of frozen parameters and 12 of active ones in an iteration."""
    found = []
    for model in TABLE_3:
        ends = (model.window, model.window - 1)
        low, high = ((2 + 10 / window) * model.billions / iter_time(model.rows) for window in ends)
        found.append((low, high))
    return found


def bandwidths_apart() -> float:
    """The largest bandwidth that a model needs over the smallest that another one allows: above 1 if none fits all."""
    return max(low for low, _ in window_bandwidths()) / min(high for _, high in window_bandwidths())


def gemini_intervals() -> Iterator[tuple[float, float]]:
    """Interval of Gemini in table 3, and sqrt(2 C MTBF) / T with the C that fits each model best."""
    for model in TABLE_3:
        rows, seconds = model.rows, iter_time(model.rows)

        def intervals(c: float, seconds: float = seconds) -> list[float]:
            return [sqrt(2 * c * mtbf) / seconds for mtbf in MTBF]

        def worst(c: float, rows: Sequence[Row] = rows) -> float:
            return max(abs(computed / row[0] - 1) for computed, row in zip(intervals(c), rows, strict=True))

        c = min((number / 100 for number in range(10, 1000)), key=worst)
        yield from ((row[0], computed) for row, computed in zip(rows, intervals(c), strict=True))


def grouped_survival() -> float:
    """Per cent of sets of 4 lost nodes of 10 that groups of two nodes each survive: the fewest of one layer."""
    masks = [0b11, 0b1100, 0b110000]
    sets = LostNodes.of(10)
    fatal = sets.fatal(masks)
    return 100 * (1 - sum(int(f) for f, size in zip(fatal, sets.sizes, strict=True) if size == 4) / comb(10, 4))


EVEN = (
    (26.85, 58.22, 49.09, 54.77, 36.83, 13, 24.21, 20.54), (26.92, 58.16, 49.72, 57.52, 37.84, 12.8, 24.69, 20.84),
    (26.93, 58, 48.54, 61.28, 37.21, 13.4, 25.26, 19.97), (26.91, 58.38, 49.33, 61.31, 37.33, 13.2, 24.5, 20.2),
    (26.96, 58.49, 50.12, 61.74, 37.12, 13.2, 24.4, 20.13),
)  # fmt: skip
"""Scores in table 3 of MoC."""
PARAMS = [model.billions for model in TABLE_3]
GEMINI_GB, MOETION_GB = (75.4, 189.8, 371.6, 426.4), (81.2, 205.2, 420.8, 478.7)
EXTRA = [(own - gemini) / billions for own, gemini, billions in zip(MOETION_GB, GEMINI_GB, PARAMS, strict=True)]
GEMINI_PAIRS = [*gemini_intervals()]

ORACLES = (
    Oracle("the same, for saves of some experts", "near", (22, 29), (min(save_less(1)), max(save_less(1))), 0.02),
    Oracle(
        "how much less if sharding also counts", "near", (3.7, 6.1), (min(adapt_less(1)), max(adapt_less(1))), 0.05, 0.8
    ),
    Oracle(
        "averages that table 3 prints", "yes", (35.44, 36.06, 36.32, 36.40, 36.52), [sum(row) / 8 for row in EVEN], 2e-4
    ),
    Oracle("a replay computes no weight gradients", "yes", (33,), (100 / 3,), 0.02),
    Oracle("with FP8 weights and states", "yes", (66,), (100 * (1 - 4 / 12),), 0.02),
    Oracle(
        "Dirichlet parameter",
        "yes",
        (0.0469, 0.0156, 0.0052, 0.000158),
        [(1 / s - 1) / 64 for s in (0.25, 0.5, 0.75, 0.99)],
        0.005,
    ),
    Oracle("saves 26 times as often", "yes", (26,), (max(model.interval / model.window for model in TABLE_3),), 0.005),
    Oracle(
        "effective training time (the share",
        "yes",
        (7.1, 1.3, 1.4, 8),
        (0.951 / 0.134, 0.951 / 0.728, 0.951 / 0.672, 0.941 / 0.115),
        0.025,
    ),
    Oracle(
        "effective training times of CheckFreq, Gemini", "no", (1, 1), [1 + max(deviations(m)) for m in (0, 1)], 0.03
    ),
    Oracle("effective training time of 671", "yes", (1.55,), (0.86 / 0.55,), 0.01),
    Oracle("host memory, Gemini", "yes", GEMINI_GB, [26 * billions for billions in PARAMS], 0.005),
    Oracle("host memory, MoEtion", "near", [model.window - 1 for model in TABLE_3], EXTRA, 0.06),
    Oracle("windows of table 3", "no", (1,), (bandwidths_apart(),), 0.1, 0.9),
    Oracle("replay of one stage of 3", "no", (23, 23), (100 * 2 / 8, 100 * 2 / 9), 0.03, 0.0),
    Oracle("recovery is faster", "no", (31, 17), (max(recovery_ratios(0)), max(recovery_ratios(1))), 0.1),
    Oracle(
        "recovery time of MoEtion",
        "no",
        (1.5, 1.5),
        (min(iterations_per_failure()), max(iterations_per_failure())),
        0.1,
    ),
    Oracle(
        "iterations between saves of Gemini",
        "near",
        [own for own, _ in GEMINI_PAIRS],
        [computed for _, computed in GEMINI_PAIRS],
        0.02,
    ),
    Oracle("mean time between 24 failures", "no", (19,), (360 / 24,), 0.05, 0.0),
    Oracle("MoC makes the training of DeepSeek", "no", (4.7,), (1 + 13.65 / 2.904,), 0.05, 0.0),
    Oracle("the same, grouped", "no", (41,), (grouped_survival(),), 0.05, 0.2),
    Oracle(
        "states of an expert", "yes", (63, 112), [14 * Gpt.of(h, 12, 12, 8).expert / 2**20 for h in (768, 1024)], 0.002
    ),
    Oracle(
        "parameters of GPT-S, M, L",
        "yes",
        (521, 1312, 1715),
        [Gpt.of(h, 12, 12, e, 1024).params / 1e6 for h, e in ((768, 8), (1024, 12), (1024, 16))],
        0.001,
    ),
    Oracle(
        "parameters of table 2",
        "yes",
        (13.9, 26.8, 52.6, 104.1, 207.2),
        [Gpt.of(4096, 12, 12, e).params / 1e9 for e in (8, 16, 32, 64, 128)],
        0.002,
    ),
    Oracle("faster than DeepSpeed", "yes", (28, 33), (100 * (31085 / 24165 - 1), 100 * (376968 / 283706 - 1)), 0.025),
    Oracle("embedding tables", "no", (72, 180, 400), [50304 * h / 1e6 for h in (2048, 4096, 8192)], 0.01),
    Oracle("UFO, other speeds", "yes", (13, 64), (100 * (40059 / 35310 - 1), 100 * (697 / 425 - 1)), 0.04),
)
MEASURED = {
    "a placement takes less than 100 ms",
    "transfers after failures, and their time",
    "changed experts are written back",
}
"""Rows that are no computation: a time, a trace that is not published, and what is not built."""
LAWS = {"a pass through a ring"}
"""Rows with a law of their own in this module."""


@pytest.mark.parametrize("oracle", ORACLES, ids=[oracle.row for oracle in ORACLES])
def test_a_figure_reproduces_as_it_is_marked(oracle: Oracle) -> None:
    differences = [abs(c / s - 1) for s, c in zip(oracle.stated, oracle.computed, strict=True)]
    match oracle.reproduces:
        case "yes":
            assert max(differences) <= oracle.rounding
        case "near":
            assert oracle.rounding < max(differences) <= oracle.near
        case "no":
            assert max(differences) > max(oracle.rounding, oracle.near if len(differences) == 1 else 0)


@given(st.integers(2, 40), st.floats(0.1, 2), st.floats(0.1, 4), st.data())
def test_a_pass_through_a_ring_takes_what_the_formula_says(
    layers: int, compute: float, load: float, data: st.DataObject
) -> None:
    slots = data.draw(st.integers(2, layers))
    ready, clock, channel = [0.0] * layers, 0.0, 0.0
    for layer in range(layers):
        clock = max(clock, ready[layer]) + compute
        if layer + slots < layers:
            channel = max(channel, clock) + load
            ready[layer + slots] = channel
    expected = max(layers * compute, 2 * compute + (layers - slots) * load) if slots < layers else layers * compute
    assert isclose(clock, expected)


def read_rows() -> dict[str, str]:
    """Figure to verdict, of every row of the page."""
    rows = [
        line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return {row[0].strip(): row[-1].strip() for row in rows if row[0].strip() != "figure"}


def test_every_row_of_the_page_has_a_test() -> None:
    marked = [oracle.row for oracle in ORACLES] + [*MEASURED, *LAWS]
    rows = read_rows()
    untested = [
        row for row, verdict in rows.items()
        if not re.search(r"\[\d", verdict) and not any(row.startswith(start) for start in marked)
    ]  # fmt: skip
    assert untested == []
    assert [start for start in marked if not any(row.startswith(start) for row in rows)] == []


WORDS: dict[Mark, str] = {"yes": "follow|ratio only", "near": "near|for W = 3 only", "no": "no|an error|wording"}


def test_the_page_says_what_the_marks_say() -> None:
    rows = read_rows()
    wrong = [
        f"{oracle.row}: {verdict}"
        for oracle in ORACLES
        for row, verdict in rows.items()
        if row.startswith(oracle.row) and not re.match(WORDS[oracle.reproduces], verdict)
    ]
    assert wrong == []
