"""What was written as DeepSpeed files reads back as the checkpoint of real DeepSpeed that it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ucp
from ucp.core.index import Index
from ucp.errors import MisfitError

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "deepspeed"

REFUSED = {"z1-dp2-elastic"}
"""Beside those of pipeline, tensor and expert parallelism."""

TARGETS = (None, *(ucp.Topology(dp=3, zero=stage) for stage in range(4)))
"""None for a universal checkpoint."""


def _sources() -> list[str]:
    names = []
    for truth in sorted(FIXTURES.glob("*/truth.json")):
        if json.loads(truth.read_text())["case"]["kind"] == "module" and truth.parent.name not in REFUSED:
            names.append(truth.parent.name)
    return names


def _checkpoint(name: str) -> Path:
    kept = FIXTURES / name
    return kept / "checkpoint" if (kept / "checkpoint").is_dir() else next(kept.glob("checkpoint-*"))


def _write(src: Path, dst: Path, topology: ucp.Topology | None) -> ucp.ConvertReport:
    to = "deepspeed-universal" if topology is None else "deepspeed"
    return ucp.convert(src, dst, to=to, topology=topology, workers=1)


def _settings(index: Index) -> list[tuple[frozenset[str], dict[str, object]]]:
    """Parameters with elements and hyper-parameters of each group."""
    return [
        (frozenset(name for name in group.params if 0 not in index.atoms[name].global_shape), dict(group.hyper))
        for group in index.groups
    ]


def _cells() -> list[tuple[str, ucp.Topology | None]]:
    """Every source, in turn, into ZeRO 0, 1, 2 or 3, and every second into a universal checkpoint too."""
    cells: list[tuple[str, ucp.Topology | None]] = []
    for number, name in enumerate(_sources()):
        cells.append((name, TARGETS[1 + number % 4]))
        if number % 2 and name != "z1-dp2-counting":  # DeepSpeed loads no counts but step from there: see below
            cells.append((name, None))
    return cells


@pytest.mark.parametrize(("name", "topology"), _cells(), ids=str)
def test_reads_back_equal(name: str, topology: ucp.Topology | None, tmp_path: Path) -> None:
    src, dst = _checkpoint(name), tmp_path / "dst"
    _write(src, dst, topology)
    assert ucp.diff(src, dst).equal
    before, after = ucp.inspect(src), ucp.inspect(dst)
    assert _settings(after) == _settings(before)
    assert after.step == before.step


def test_counts_but_step_are_not_written_universally(tmp_path: Path) -> None:
    src = _checkpoint("z1-dp2-counting")
    with pytest.raises(MisfitError, match=r"step .*; got calls"):
        _write(src, tmp_path / "dst", None)
    ucp.convert(src, tmp_path / "dst", to="deepspeed-universal", exclude=["*/calls"], workers=1)


@pytest.mark.parametrize("virtual", [False, True])
def test_atoms_in_between_change_nothing(virtual: bool, tmp_path: Path) -> None:
    src = _checkpoint("z3-dp4-fp32")
    ucp.convert(src, tmp_path / "atoms", virtual=virtual)
    for name, origin in (("direct", src), ("over", tmp_path / "atoms")):
        _write(origin, tmp_path / name, ucp.Topology(dp=2, zero=1))
    files = sorted(path.relative_to(tmp_path / "direct") for path in (tmp_path / "direct").rglob("*.pt"))
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "direct" / file).read_bytes() == (tmp_path / "over" / file).read_bytes()
