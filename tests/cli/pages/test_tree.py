"""Names as a tree: nothing is lost, equal layers are one line."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_cli.pages.tree import Line, collapse

PARTS = st.sampled_from(["a", "b", "weight", "0", "1", "2", "10", "07", "-1"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
LEAVES = st.dictionaries(NAMES, st.sampled_from(["4", "4x4"]), max_size=30)


def _numbers(ranges: str) -> list[list[str]]:
    """Numbers that each "#" of a line stands for."""
    found = []
    for group in ranges.split():
        numbers: list[str] = []
        for run in group.split(","):
            low, _, high = run.partition("-")
            numbers += map(str, range(int(low), int(high or low) + 1))
        found.append(numbers)
    return found


def expanded(lines: list[Line[str]]) -> dict[str, str]:
    """Names that the lines stand for."""
    names: dict[str, str] = {}
    above: list[list[str]] = [[""]]
    for line in lines:
        del above[line.depth + 1 :]
        choices = iter(_numbers(line.ranges))
        parts = [next(choices) if part == "#" else [part] for part in line.label.split(".")]
        here = [f"{head}.{'.'.join(tail)}" for head in above[-1] for tail in itertools.product(*parts)]
        above.append(here)
        if line.leaf is not None:
            names |= {name.removeprefix("."): line.leaf for name in here}
    return names


@settings(max_examples=40, deadline=None)
@given(LEAVES)
def test_expanding_the_lines_gives_the_names_back(leaves: dict[str, str]) -> None:
    assert expanded(list(collapse(leaves))) == leaves


@settings(max_examples=40, deadline=None)
@given(LEAVES)
def test_counts_of_the_outermost_lines_add_up(leaves: dict[str, str]) -> None:
    assert sum(line.count for line in collapse(leaves) if line.depth == 0) == len(leaves)


def test_a_mixture_of_experts_is_a_few_lines() -> None:
    dense = {f"model.layers.{n}.mlp.{p}.weight": "8x8" for n in range(3) for p in ("up", "down")}
    sparse = {f"model.layers.{n}.mlp.experts.{e}.up.weight": "2x8" for n in range(3, 61) for e in range(256)}
    lines = list(collapse({**dense, **sparse}))
    assert [(line.label, line.ranges, line.count) for line in lines] == [
        ("model.layers.#.mlp", "0-2", 6),
        ("up.weight", "", 3),
        ("down.weight", "", 3),
        ("model.layers.#.mlp.experts.#.up.weight", "3-60 0-255", 58 * 256),
    ]


def test_a_name_that_is_also_a_prefix_is_a_line_of_its_own() -> None:
    lines = list(collapse({"a": "4", "a.b": "4x4"}))
    assert [(line.depth, line.label, line.leaf) for line in lines] == [(0, "a", "4"), (1, "b", "4x4")]
