"""`ucp plan`: everything is decided, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run

KEYS = {
    "schema",
    "source",
    "to",
    "topology",
    "atoms",
    "nbytes",
    "files",
    "nbytes_written",
    "nbytes_out",
    "tasks",
    "workers",
    "threads",
    "memory",
    "projected_bytes",
    "patterns",
    "casts",
    "notes",
    "dropped",
}


def test_it_says_what_is_read_written_and_needed(ucp: Run, zero3: Path) -> None:
    page = ucp("plan", zero3, "--memory", "512M", "--workers", 2).stdout
    facts = {line.split()[0]: line for line in page.splitlines() if line and not line.startswith(" ")}
    assert facts["to"].split() == ["to", "ucp"]
    assert {"tensors", "files", "time", "work", "memory"} <= facts.keys()
    assert "512 MiB allowed" in facts["memory"]
    assert "2 workers" in facts["work"]


def test_casts_are_named(ucp: Run, zero3: Path) -> None:
    page = ucp("plan", zero3, "--dtype", "weight=bf16").stdout
    assert "weight: float32 -> bfloat16" in page


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path) -> None:
    document = json.loads(ucp("plan", zero3, "--json").stdout)
    assert document["schema"] == "ucp.plan/1"
    assert set(document) == KEYS
    assert set(document["source"]) == {"path", "format", "producer", "topology", "step"}
    assert document["nbytes_out"] == sum(file["nbytes"] for file in document["files"])


def test_the_plan_is_what_convert_writes(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    planned = json.loads(ucp("plan", zero3, "--layout", "per-parameter", "--json").stdout)
    ucp("convert", zero3, tmp_path / "out", "--layout", "per-parameter", "-q")
    for file in planned["files"]:
        assert (tmp_path / "out" / file["path"]).stat().st_size == file["nbytes"]


def test_a_target_with_ranks(ucp: Run, zero3: Path) -> None:
    document = json.loads(ucp("plan", zero3, "--to", "deepspeed", "--topology", "dp=2,zero=1", "--json").stdout)
    assert document["topology"] == {"dp": 2, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "zero": 1, "vpp": 1, "etp": None}
    names = [Path(file["path"]).name for file in document["files"]]
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in names


def test_nothing_is_written(ucp: Run, copy: Path) -> None:
    before = sorted(copy.parent.rglob("*"))
    ucp("plan", copy)
    assert sorted(copy.parent.rglob("*")) == before
