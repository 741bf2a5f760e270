"""`ucp plan`: everything is decided, nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import FIXTURES, Run

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
    "references",
    "tasks",
    "workers",
    "threads",
    "memory",
    "projected_bytes",
    "index_bytes",
    "patterns",
    "layouts",
    "warnings",
    "casts",
    "notes",
    "dropped",
}


def test_it_says_what_is_read_written_and_needed(ucp: Run, zero3: Path) -> None:
    page = ucp("plan", zero3, "--memory", "512M", "--workers", 2).stdout
    facts = {line.split()[0]: line for line in page.splitlines() if line and not line.startswith(" ")}
    assert facts["to"].split() == ["to", "ucp"]
    assert {"tensors", "files", "time", "work", "memory", "index"} <= facts.keys()
    assert "512 MiB allowed" in facts["memory"]
    assert "2 workers" in facts["work"]


def test_it_says_how_tensors_lie_before_and_after(ucp: Run, zero3: Path) -> None:
    page = ucp("plan", zero3, "--to", "deepspeed", "--topology", "dp=2,zero=1").stdout
    before, after = page.split("Layout of the source\n")[1].split("Layout of the target\n")
    assert "dp=4: flat chunk(dim=0), known from ZeRO-3: " in before
    assert "dp=2: flat partition(share=" in after
    assert "known from ZeRO-1: " in after


def test_the_layout_of_a_store_is_that_of_the_run_that_was_saved(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    ucp("convert", zero3, tmp_path / "store", "-q")
    page = ucp("plan", tmp_path / "store", "--to", "dcp").stdout
    assert "dp=4: flat chunk(dim=0)" in page.split("Layout of the run that saved it (deepspeed)\n")[1]


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path) -> None:
    document = json.loads(ucp("plan", zero3, "--json").stdout)
    assert document["schema"] == "ucp.plan/1"
    assert set(document) == KEYS
    assert set(document["source"]) == {"path", "format", "producer", "topology", "step"}
    assert document["nbytes_out"] == sum(file["nbytes"] for file in document["files"])


def test_a_target_with_ranks(ucp: Run, zero3: Path) -> None:
    document = json.loads(ucp("plan", zero3, "--to", "deepspeed", "--topology", "dp=2,zero=1", "--json").stdout)
    degrees = {"dp": 2, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "zero": 1, "vpp": 1, "etp": None}
    assert document["topology"] == {**degrees, "dp_replicate": None, "dp_shard": None}
    names = [Path(file["path"]).name for file in document["files"]]
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in names


FRAMEWORKS = [["--to", "deepspeed"], ["--to", "deepspeed-universal"]]


@pytest.mark.parametrize("words", FRAMEWORKS)
def test_a_part_of_a_model_is_warned_of(ucp: Run, zero3: Path, tmp_path: Path, words: list[str]) -> None:
    """Whether it is selected here or was when the store was made; not where it is of use, nor for whole parameters."""
    said = "a part of the model is written: 14 parameters of 16: left out by --include/--exclude. A run of the whole"
    assert said in warnings_of(ucp("plan", zero3, *words, "--include", "l1.*").stdout)
    page = ucp("convert", zero3, tmp_path / "framework", *words, "--include", "l1.*").stdout
    assert said in warnings_of(page)
    assert page.index("Warnings") < page.index("Left behind")
    made = json.loads((tmp_path / "framework" / "ucp-conversion.json").read_text())
    assert made["warnings"] == json.loads(ucp("plan", zero3, *words, "--include", "l1.*", "--json").stdout)["warnings"]
    store = ucp("convert", zero3, tmp_path / "store", "--include", "l1.*").stdout
    assert "Warnings" not in store
    assert "14 parameters of 16: left out" in store
    assert said in warnings_of(ucp("plan", tmp_path / "store", *words).stdout)
    assert warnings_of(ucp("plan", zero3, *words, "--include", "*/weight").stdout) == ""


@pytest.mark.parametrize("words", FRAMEWORKS)
def test_a_moment_of_some_parameters_alone_is_warned_of(ucp: Run, zero3: Path, words: list[str]) -> None:
    words = [*words, "--exclude", "l1.weight/exp_avg"]
    assert "l1.weight: exp_avg, and has step, exp_avg_sq" in ucp("plan", zero3, *words, code=1).stderr
    found = json.loads(ucp("plan", zero3, *words, "--zero-moments", "keep", "--json").stdout)
    (warning,) = found["warnings"]
    assert warning.startswith(
        "exp_avg is left out for 1 parameter and kept for 11: the optimizer starts afresh for l1.weight (or continues"
        " from zeros"
    )
    assert found["dropped"] == ["1 state of parameters: left out by --include/--exclude"]


@pytest.mark.parametrize("words", [*FRAMEWORKS, ["--to", "deepspeed", "--topology", "dp=2,zero=1"]])
def test_all_states_of_one_parameter_left_out_are_not_taken_for_zeros(
    ucp: Run, zero3: Path, tmp_path: Path, words: list[str]
) -> None:
    """Whether they are left out here or were when the store was made, and then selected of once more."""
    said = "of these parameters, left out by --include/--exclude but kept for others: include them, too:\n  l1.bias\n"
    left = ["--exclude", "l1.bias/exp_avg*", "--exclude", "l1.bias/step"]
    assert said in ucp("plan", zero3, *words, *left, code=1).stderr
    ucp("convert", zero3, tmp_path / "store", *left)
    ucp("convert", tmp_path / "store", tmp_path / "again", "--include", "*bias*")
    for store in (tmp_path / "store", tmp_path / "again"):
        assert said in ucp("plan", store, *words, code=1).stderr
    ucp("convert", zero3, tmp_path / "kept", *words, *left, "--zero-moments", "keep", "--verify")


def warnings_of(page: str) -> str:
    """What stands under the title."""
    return page.partition("\nWarnings\n")[2].partition("\n\n")[0]


def test_all_sizes_that_nothing_records_are_named_together(ucp: Run, tmp_path: Path) -> None:
    model = FIXTURES.parent / "huggingface" / "llama" / "model" / "model.safetensors"
    shutil.copy(model, tmp_path)
    error = ucp("plan", tmp_path, "--to", "megatron", "--topology", "tp=2", code=2).stderr
    assert "--set num_query_groups=" in error
    assert "--set num_attention_heads=" in error
