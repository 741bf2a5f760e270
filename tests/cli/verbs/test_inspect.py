"""`ucp inspect` on what DeepSpeed wrote."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import FIXTURES, Run
from ucp import api

SCHEMA = {
    "schema": str,
    "path": str,
    "format": str,
    "producer": str,
    "topology": dict,
    "step": int,
    "evidence": list,
    "kinds": dict,
    "nbytes": int,
    "states": list,
    "atoms": dict,
    "groups": list,
    "aliases": dict,
    "extras": list,
    "files": list,
    "missing": list,
    "doubts": list,
    "notes": list,
    "dropped": list,
}
"""Keys of ucp.inspect/1 and their types: to be added to, never changed."""


@pytest.fixture
def document(ucp: Run, mixed: Path) -> dict:
    return json.loads(ucp("inspect", mixed, "--json").stdout)


CASES = sorted(path for name in ("checkpoint", "checkpoint-3", "universal") for path in FIXTURES.glob(f"*/{name}"))


REFUSED = {
    "z1-dp2-elastic": "elastic_checkpoint",
}
"""Layouts that are recognised, and what is said of them."""


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_kept_checkpoint_is_shown_or_refused_by_name(
    ucp: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = REFUSED.get(path.parent.name)
    if said is not None:
        assert said in ucp("inspect", path, code=1).stderr
        return
    index = api.inspect(path)
    monkeypatch.setattr(api, "inspect", lambda *_, **__: index)  # three commands read it once
    assert re.search("^complete +yes", ucp("inspect", path).stdout, re.MULTILINE)
    document = json.loads(ucp("inspect", path, "--json", "--param", "*").stdout)
    assert document["missing"] == []
    name = list(document["atoms"])[-1]
    page = ucp("inspect", path, "--param", name.replace("[", "[[]"), "--files").stdout
    assert f"{name}\n" in page
    assert "Files\n" in page


def test_the_page_says_what_it_is(ucp: Run, mixed: Path) -> None:
    lines = ucp("inspect", mixed).stdout.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert facts["checkpoint"] == str(mixed.resolve() / "global_step3")
    assert facts["format"].startswith("deepspeed (")
    assert facts["producer"].startswith("DeepSpeed")
    assert facts["topology"] == "dp=4,zero=1"
    assert facts["step"] == "3"
    assert facts["complete"].startswith("yes")
    sections = [line.split(" (")[0] for line in lines if line and not line.startswith(" ")]
    assert [name for name in sections if name in {"States", "Parameters", "Tied", "Parameter groups", "Extras"}] == [
        "States",
        "Parameters",
        "Tied",
        "Parameter groups",
        "Extras",
    ]


def test_json_has_the_keys_of_its_schema(document: dict) -> None:
    assert document["schema"] == "ucp.inspect/1"
    assert {key: type(value) for key, value in document.items()} == SCHEMA
    assert set(document["topology"]) == {"dp", "tp", "pp", "ep", "cp", "zero", "vpp", "etp", "dp_replicate", "dp_shard"}
    assert set(document["kinds"]) == {"parameter", "frozen", "buffer"}
    assert {key for kind in document["kinds"].values() for key in kind} == {"tensors", "numel"}
    assert set(document["states"][0]) == {"state", "dtype", "tensors", "numel", "nbytes"}
    assert set(document["groups"][0]) == {"params", "hyper"}
    assert set(document["extras"][0]) == {"name", "rank", "what", "value"}
    assert set(document["files"][0]) == {"path", "nbytes", "mtime_ns", "role"}
    for atom in document["atoms"].values():
        assert set(atom) == {
            "kind",
            "shape",
            "iteration",
            "cast",
            "model_dtype",
            "group",
            "patterns",
            "layout",
            "made_of",
            "states",
        }
        for state in atom["states"].values():
            assert set(state) == {"dtype", "shape", "nbytes", "overlap"}


def test_json_adds_up(document: dict) -> None:
    states = [state for atom in document["atoms"].values() for state in atom["states"].values()]
    assert sum(state["nbytes"] for state in states) == document["nbytes"]
    assert sum(tally["nbytes"] for tally in document["states"]) == document["nbytes"]
    assert sum(kind["tensors"] for kind in document["kinds"].values()) == len(document["atoms"])
    grouped = [name for group in document["groups"] for name in group["params"]]
    assert all(document["atoms"][name]["group"] is not None for name in grouped)


def test_json_tells_pieces_of_the_parameters_asked_for(ucp: Run, zero3: Path) -> None:
    document = json.loads(ucp("inspect", zero3, "--json", "--param", "l1.weight").stdout)
    held = {name for name, atom in document["atoms"].items() for s in atom["states"].values() if "pieces" in s}
    assert held == {"l1.weight"}
    pieces = document["atoms"]["l1.weight"]["states"]["weight"]["pieces"]
    assert {key for piece in pieces for key in piece} == {
        "offsets",
        "sizes",
        "dtype",
        "replica",
        "term",
        "path",
        "offset",
        "strides",
        "codec",
    }
    taken = [piece for piece in pieces if piece["replica"] == 0]
    assert sum(piece["sizes"][0] * piece["sizes"][1] for piece in taken) == 13 * 7


def test_param_shows_where_pieces_lie(ucp: Run, zero3: Path) -> None:
    page = ucp("inspect", zero3, "--param", "l1.*").stdout
    assert "l1.weight\n" in page
    assert "l1.bias\n" in page
    assert "exp_avg_sq float32\n" in page
    assert " zero_pp_rank_3_mp_rank_00_optim_states.pt\n" in page
    assert "l2.weight" not in page


def test_param_says_where_a_state_is_stored_otherwise_than_its_parameter_lies(ucp: Run) -> None:
    page = ucp("inspect", FIXTURES.parent / "torch" / "verl-fsdp1-dp4" / "checkpoint", "--param", "emb.weight").stdout
    assert "laid out  dp_shard=4: flat partition(share=44), known from flat parameters of FSDP1\n" in page
    assert "weight float32, stored as dp_shard=4: chunk(dim=0), known from" in page


def test_an_extra_is_shown_value_by_value(ucp: Run) -> None:
    path = FIXTURES.parent / "megatron" / "mixtral-pp2-ep2-dp2-dp" / "checkpoint"
    page = ucp("inspect", path, "--extra", "args", "--extra", "rng_state/*").stdout
    assert {"num_attention_heads = 8", "moe_router_score_function = 'softmax'", "iteration = 10"} <= {
        line.strip(" -") for line in page.splitlines()
    }
    assert "rng_state/pp1.tp0" in page
    assert "content_metadata" not in page
    assert "opt_param_scheduler" in ucp("inspect", path, "--extra", "arg", code=2).stderr


def test_param_that_matches_nothing_is_wrong_usage(ucp: Run, zero3: Path) -> None:
    assert "'l9.*'" in ucp("inspect", zero3, "--param", "l9.*", code=2).stderr


def test_an_atom_store_is_shown_too(ucp: Run, atoms: Path, zero3: Path) -> None:
    ours = json.loads(ucp("inspect", atoms, "--json").stdout)
    theirs = json.loads(ucp("inspect", zero3, "--json").stdout)
    assert ours["format"] == "ucp"
    for key in ("topology", "step", "kinds", "nbytes", "atoms", "aliases", "groups"):
        assert ours[key] == theirs[key], key


def test_what_is_there_is_shown_where_files_are_missing_or_damaged(ucp: Run, copy: Path) -> None:
    tag = copy / "global_step3"
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    os.truncate(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 2000)
    page = ucp("inspect", copy, code=1).stdout
    facts = dict(line.split(maxsplit=1) for line in page.split("\n\n")[0].splitlines())
    assert facts["checkpoint"] == str(tag.resolve())
    assert facts["format"].startswith("deepspeed (latest -> global_step3")
    assert facts["readable"].startswith("NO")
    assert "missing: zero_pp_rank_2_mp_rank_00_optim_states.pt (rank 2 of 4)" in page
    assert "optimizer states of rank 1" in page
    rows = [line.split() for line in page.splitlines() if "#" in line]
    assert [row[:3] for row in rows] == [
        ["zero_pp_rank_#_mp_rank_00_model_states.pt", "[0-3]", "4"],
        ["zero_pp_rank_#_mp_rank_00_optim_states.pt", "[0-1,3]", "3"],
    ]
    assert "the same below each" not in page
    each = ucp("inspect", copy, "--files", code=1).stdout
    assert all(path.name in each for path in tag.iterdir())


def test_json_of_what_cannot_be_read(ucp: Run, copy: Path) -> None:
    gone = copy / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    gone.unlink()
    document = json.loads(ucp("inspect", copy, "--json", code=1).stdout)
    assert document["schema"] == "ucp.inspect.partial/1"
    assert set(document) == {"schema", "path", "format", "evidence", "files", "problems"}
    assert set(document["files"][0]) == {"path", "nbytes", "mtime_ns", "role"}
    assert {Path(file["path"]).name for file in document["files"]} == {path.name for path in gone.parent.iterdir()}
    assert gone.name in document["problems"][0]


def test_no_page_begins_or_ends_with_an_empty_line(ucp: Run, zero3: Path) -> None:
    for words in (["--files"], ["--param", "l1.*"], ["--param", "l1.*", "--files"], []):
        page = ucp("inspect", zero3, *words).stdout
        assert page == page.strip("\n") + "\n"
        assert "\n\n\n" not in page


def test_a_hole_is_shown_not_refused(ucp: Run, zero3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = api.inspect(zero3)
    atom = index.atoms["l1.weight"]
    weight = replace(atom.states["weight"], fragments=atom.states["weight"].fragments[1:])
    broken = replace(atom, states={**atom.states, "weight": weight})
    monkeypatch.setattr(api, "inspect", lambda path, **_: replace(index, atoms={**index.atoms, "l1.weight": broken}))
    page = ucp("inspect", zero3).stdout
    assert "complete    NO" in page
    assert "l1.weight/weight [0:3, 0:7] of [13, 7]: held by nothing" in page
    (missing,) = json.loads(ucp("inspect", zero3, "--json").stdout)["missing"]
    assert "l1.weight/weight" in missing


def test_the_signs_of_the_tree_are_explained_where_they_occur(ucp: Run, zero3: Path) -> None:
    layers = FIXTURES.parent / "megatron" / "mixtral-ep4-dp4-full" / "checkpoint"
    page = ucp("inspect", layers).stdout
    tree = page.split("\nParameters")[1].split("\n\n")[0]
    assert "layers.#  [0-3]" in tree
    assert tree.splitlines()[-1] == "  #  [0-3]: the same below each of these numbers; ×N: N such tensors"
    assert "the same below each" not in ucp("inspect", zero3).stdout


def test_a_family_that_does_not_fit_says_nothing_of_the_checkpoint(ucp: Run) -> None:
    source = FIXTURES / "z1-tp2-dp2" / "checkpoint"
    result = ucp("inspect", source, "--family", "llama", code=1)
    assert r"18 names" in result.stderr
    assert result.stdout == ""
