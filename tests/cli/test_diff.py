"""`ucp diff`: 0 when equal, 3 when different, and where."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_a_checkpoint_equals_itself_in_another_format(ucp: Run, zero3: Path, atoms: Path) -> None:
    assert ucp("diff", zero3, atoms).stdout.startswith("equal; ")
    assert ucp("diff", zero3, atoms, "-q").stdout == ""


def test_differences_are_exit_code_3_and_named(ucp: Run, zero3: Path, mixed: Path) -> None:
    page = ucp("diff", zero3, mixed, code=3).stdout
    assert f"a  {zero3}\nb  {mixed}\n" in page
    for title in ("Structure", "Hyper-parameters", "Values, by state", "Values, by parameter"):
        assert f"\n{title}\n" in page
    assert "l1.weight" in page


def test_memory_and_workers_bound_it(ucp: Run, zero3: Path, atoms: Path) -> None:
    for words in (["diff", zero3, atoms], ["verify", atoms, "--against", zero3]):
        ucp(*words, "--memory", "40MiB", "--workers", "1")
        assert "at least 40 MiB, the need of one thread; got 8 MiB" in ucp(*words, "--memory", "8M", code=2).stderr
        assert "number of workers" in ucp(*words, "--workers", "-1", code=2).stderr


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path, mixed: Path) -> None:
    document = json.loads(ucp("diff", zero3, mixed, "--json", code=3).stdout)
    assert document["schema"] == "ucp.diff/1"
    assert set(document) == {"schema", "equal", "a", "b", "compared", "nbytes", "changes"}
    assert document["equal"] is False
    assert {key for change in document["changes"] for key in change} == {
        "param",
        "state",
        "what",
        "a",
        "b",
        "numel",
        "largest",
    }


def test_a_cast_is_a_difference_of_dtype_and_of_values(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    ucp("convert", zero3, tmp_path / "cast", "--dtype", "exp_avg=fp16", "-q")
    document = json.loads(ucp("diff", zero3, tmp_path / "cast", "--json", code=3).stdout)
    assert {(change["state"], change["what"]) for change in document["changes"]} == {
        ("exp_avg", "dtype"),
        ("exp_avg", "values"),
    }
    assert 0 < max(change["largest"] for change in document["changes"]) < 1e-3
