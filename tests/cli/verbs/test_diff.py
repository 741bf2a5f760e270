"""`ucp diff`: 0 when equal, 3 when different, and where."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import torch

from tests.cli.conftest import Run

RULES = """
name = "mine"
[[rule]]
name = "layers.{layer}.up.weight"
tp = { pattern = "shard", dim = 0 }
[[rule]]
name = "layers.{layer}.down.weight"
tp = { pattern = "shard", dim = 1 }
"""


def unknown_model(folder: Path) -> tuple[Path, Path]:
    """Megatron's files of two tensor-parallel ranks, of a model that no family knows, and rules for it."""
    arguments = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, world_size=2, iteration=3)
    for rank in range(2):
        model = {
            "layers.0.up.weight": torch.arange(12.0).reshape(4, 3) + rank,
            "layers.0.down.weight": torch.arange(12.0).reshape(3, 4) - rank,
        }
        place = folder / "run" / "iter_0000003" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        root = {"args": arguments, "checkpoint_version": 3.0, "iteration": 3, "model": model}
        torch.save(root, place / "model_optim_rng.pt")
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "rules.toml").write_text(RULES)
    return folder / "run", folder / "rules.toml"


def test_a_checkpoint_equals_itself_in_another_format(ucp: Run, zero3: Path, atoms: Path) -> None:
    assert ucp("diff", zero3, atoms).stdout.startswith("equal; ")
    assert ucp("diff", zero3, atoms, "-q").stdout == ""


def test_differences_are_exit_code_3_and_named(ucp: Run, zero3: Path, mixed: Path) -> None:
    page = ucp("diff", zero3, mixed, code=3).stdout
    assert f"a  {zero3}\nb  {mixed}\n" in page
    for title in ("Structure", "Hyper-parameters", "Values, by state", "Values, by parameter"):
        assert f"\n{title}\n" in page
    assert "l1.weight" in page


def test_extras_are_compared_where_asked_for(ucp: Run, mixed: Path, tmp_path: Path) -> None:
    """Those of another layout differ, and say where."""
    ucp("convert", mixed, tmp_path / "dp2", "--to", "deepspeed", "--topology", "dp=2,zero=1", "-q")
    assert ucp("diff", mixed, tmp_path / "dp2").stdout.startswith("equal; ")
    page = ucp("diff", mixed, tmp_path / "dp2", "--extras", code=3).stdout
    assert "\nExtras\n" in page
    (line,) = (line for line in page.splitlines() if "dp_world_size" in line)
    assert line.split() == ["engine", "dp_world_size", "4", "2"]
    assert ["extra/loss_scaler", "missing", "missing", "present"] in [line.split() for line in page.splitlines()]
    ucp("convert", mixed, tmp_path / "atoms", "-q")
    assert ucp("diff", mixed, tmp_path / "atoms", "--extras").stdout.startswith("equal; ")


def test_memory_and_workers_bound_it(ucp: Run, zero3: Path, atoms: Path) -> None:
    for words in (["diff", zero3, atoms], ["verify", atoms, "--against", zero3]):
        ucp(*words, "--memory", "40MiB", "--workers", "1")
        assert "; got 8 MiB" in ucp(*words, "--memory", "8M", code=2).stderr
        assert "number of workers" in ucp(*words, "--workers", "0", code=2).stderr


def test_a_family_is_for_whichever_needs_one(ucp: Run, zero3: Path, atoms: Path, tmp_path: Path) -> None:
    """Rules of one's own, of which no evidence tells: without them the Megatron side cannot be read."""
    source, rules = unknown_model(tmp_path)
    needed = ["--patterns", rules]
    store = tmp_path / "store"
    ucp("convert", source, store, *needed, "-q")
    assert "--patterns" in ucp("diff", source, store, code=1).stderr
    for words in ([source, store], [store, source], [source, source]):
        assert ucp("diff", *words, *needed).stdout.startswith("equal; ")
        assert "equal to" in ucp("verify", words[0], "--against", words[1], *needed).stdout
    assert "; 0 states of 0 B compared\n" in ucp("diff", source, zero3, *needed, code=3).stdout
    for words in (["diff", source, zero3], ["verify", source, "--against", zero3]):
        assert "no parameter name occurs in both (" in ucp(*words, *needed, code=3).stdout
    for words in (["diff", atoms, zero3], ["diff", atoms, atoms], ["verify", atoms, "--against", atoms]):
        assert "drop --family and --patterns" in ucp(*words, "--family", "llama", code=2).stderr
    assert "(--family) or by file (--patterns)" in (
        ucp("diff", source, store, *needed, "--family", "llama", code=2).stderr
    )


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path, mixed: Path) -> None:
    document = json.loads(ucp("diff", zero3, mixed, "--json", code=3).stdout)
    assert document["schema"] == "ucp.diff/1"
    assert set(document) == {"schema", "equal", "a", "b", "compared", "nbytes", "nbytes_compared", "changes", "notes"}
    assert document["equal"] is False
    assert {key for change in document["changes"] for key in change} == {
        "param",
        "state",
        "what",
        "a",
        "b",
        "numel",
        "largest",
        "norm",
    }


def test_weights_alone_are_compared_where_asked_for(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    """A run and its export differ in optimizer states and hyper-parameters; the weights are equal."""
    run, export = zero3, tmp_path / "export"
    ucp("convert", run, export, "--include", "*/weight", "--to", "dcp", "-q")
    assert "\nStructure\n" in ucp("diff", run, export, code=3).stdout
    for options in (("--weights",), ("--include", "*/weight")):
        assert ucp("diff", run, export, *options).stdout.startswith("equal; ")
        assert f"equal to  {run}" in ucp("verify", export, "--against", run, *options).stdout


def test_weights_that_are_equal_after_a_cast_are_said_to_be(ucp: Run, tmp_path: Path) -> None:
    weights = {f"layers.{n}.weight": torch.rand(5, 3) for n in range(3)}
    torch.save(weights, tmp_path / "run.pt")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    torch.save(rounded, tmp_path / "export.pt")
    line = "weight: equal after the cast float32 -> bfloat16, in 3 parameters"
    for both in (("run.pt", "export.pt"), ("export.pt", "run.pt")):
        page = ucp("diff", *(tmp_path / name for name in both), "--weights", code=3).stdout
        assert page.rstrip().endswith(line)
    rounded["layers.1.weight"][2, 1] += 1
    torch.save(rounded, tmp_path / "trained.pt")
    assert "after the cast" not in ucp("diff", tmp_path / "run.pt", tmp_path / "trained.pt", code=3).stdout


def test_a_glob_that_matches_nothing_in_either_is_refused(ucp: Run, zero3: Path, mixed: Path) -> None:
    assert "'nothing*'" in ucp("diff", zero3, mixed, "--include", "nothing*", code=2).stderr
    assert "--against" in ucp("verify", zero3, "--weights", code=2).stderr
    both = ucp("diff", zero3, mixed, "--weights", "--include", "l1.*", code=2).stderr
    assert "expected --weights or --include" in both


def test_the_sides_of_verify_are_in_the_order_of_the_command(ucp: Run, zero3: Path, mixed: Path) -> None:
    page = ucp("verify", mixed, "--against", zero3, code=3).stdout
    assert f"a  {mixed}\nb  {zero3}\n" in page
    swapped = ucp("verify", zero3, "--against", mixed, "--json", code=3).stdout
    changes = {(one["param"], one["state"], one["what"]): one for one in json.loads(swapped)["changes"]}
    for change in json.loads(ucp("diff", zero3, mixed, "--json", code=3).stdout)["changes"]:
        if change["what"] in {"missing", "group", "shape"}:
            one = changes[change["param"], change["state"], change["what"]]
            assert (one["a"], one["b"]) == (change["a"], change["b"])


def test_a_table_has_twenty_rows_and_a_count(ucp: Run, tmp_path: Path) -> None:
    for name, width in (("a", 2), ("b", 3)):
        tensors = {f"part_{letter}.weight": torch.ones(width) for letter in "abcdefghijklmnopqrstuvwxy"}
        torch.save(tensors, tmp_path / f"{name}.pt")
    page = ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=3).stdout
    assert page.count("shape") == 20
    assert "and 5 more rows: --json lists all" in page
