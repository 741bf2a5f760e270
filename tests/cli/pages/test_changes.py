"""Differences as a table: those of numbered layers are one row."""

from __future__ import annotations

import math

import pytest

from ucp.checks.changes import make_tables
from ucp.transfer.differences import Change
from ucp_cli.pages.render import write


def shown(capsys: pytest.CaptureFixture[str], *changes: Change) -> list[str]:
    write(*make_tables(changes, a="A", b="B"))
    return capsys.readouterr().out.splitlines()


def values(param: str, state: str = "weight", numel: int = 1, largest: float = 0.5) -> Change:
    return Change(param=param, state=state, what="values", a="?", b="?", numel=numel, largest=largest)


def test_layers_are_one_row_with_sums_and_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, *(values(f"layers.{n}.up.weight", numel=1000, largest=n / 4) for n in range(1, 4)))
    assert rows[-1].split() == ["layers.#.up.weight", "[1-3]", "×3", "weight", "3,000", "0.75"]


def test_a_row_of_one_has_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, values("layers.7.up.weight"))[-1].split()[0] == "layers.7.up.weight"


def test_states_are_rows_and_have_sums(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, values("a.0"), values("a.1"), values("a.0", "exp_avg"))
    at = rows.index("Values, by state") + 2
    assert [row.split() for row in rows[at : at + 2]] == [["weight", "2", "2", "0.5"], ["exp_avg", "1", "1", "0.5"]]
    assert [row.split()[-3] for row in rows[-2:]] == ["weight", "exp_avg"]


def test_hyper_parameters_are_grouped_by_value(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, *(Change(param=p, state="lr", what="group", a="0.1", b="0.2") for p in ("x", "y")))
    assert rows[-1].split() == ["lr", "0.1", "0.2", "2", "parameters"]


def test_what_is_in_a_group_on_one_side_only_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lone = Change(param="head.weight", state="", what="group", a="in a group", b="-")
    layers = [Change(param=f"layers.{n}.weight", state="", what="group", a="in a group", b="-") for n in (1, 2)]
    rows = shown(capsys, lone, *layers)
    assert rows[-2].split() == ["head.weight", "in", "a", "group", "-", "1", "parameter"]
    assert rows[-1].split() == ["layers.#.weight", "[1-2]", "in", "a", "group", "-", "2", "parameters"]


def test_structure_says_what_each_has(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [Change(param=f"a.{n}", state="weight", what="shape", a="[2]", b="[3]") for n in (0, 1, 5)]
    missing = Change(param="b", state="", what="missing", a="present", b="missing")
    rows = shown(capsys, *shape, missing)
    assert rows[-2].split() == ["a.#", "[0-1,5]", "×3", "weight", "shape", "[2]", "[3]"]
    assert rows[-1].split() == ["b", "missing", "present", "missing"]


@pytest.mark.parametrize("order", [1, -1])
def test_not_a_number_is_the_largest_difference(capsys: pytest.CaptureFixture[str], order: int) -> None:
    rows = shown(capsys, *[values("a.0", largest=math.nan), values("a.1", largest=9.0)][::order])
    assert rows[-1].split()[-1] == "nan"


def test_no_difference_is_no_table() -> None:
    assert not list(make_tables((), a="A", b="B"))
