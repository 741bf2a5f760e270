from __future__ import annotations

import sys
from importlib import metadata

import pytest

from ucp.contract.plugins import entry_points, producer


def test_the_program_has_a_name():
    assert producer().startswith("ucp ")


@pytest.mark.parametrize("group", ["ucp.formats", "ucp.patterns", "ucp.nothing"])
def test_entry_points_are_those_that_python_finds(group: str) -> None:
    assert entry_points(group) == {point.name: point.value for point in metadata.entry_points(group=group)}


def test_a_comment_is_no_entry_point_and_an_extra_no_part_of_one(tmp_path, monkeypatch) -> None:
    for folder in (tmp_path / "near" / "a-1.dist-info", tmp_path / "far" / "A-2.dist-info"):
        folder.mkdir(parents=True)
        version = folder.stem[-1]
        (folder / "entry_points.txt").write_text(f"# [x]\n[x]\n; b = c:d\nb = c{version}:d.e [more]\n\n[y]\nf = g\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "near"), str(tmp_path / "none"), str(tmp_path / "far")])
    assert entry_points("x") == {"b": "c1:d.e"}
    assert producer() == "ucp (not installed)"
