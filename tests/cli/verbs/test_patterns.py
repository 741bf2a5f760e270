"""`ucp patterns`: families, their rules, and what they say about a checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from ucp.checks.explain import FamilyReport, explain_index
from ucp.contract.protocols import SourceOptions
from ucp.source.read import read_index
from ucp.testing.handmade import Shards, make_index, write_checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"

HIDDEN, FFN, LAYERS = 4, 6, 2

LLAMA = {
    "model.embed_tokens.weight": (10, HIDDEN),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (2, HIDDEN),
            "self_attn.v_proj": (2, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }.items()
    },
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (10, HIDDEN),
}


def checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    shards = Shards(folder)
    states = {(name, "weight"): shards.whole(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    write_checkpoint(make_index(shards.folder, states))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Atoms with Hugging Face's names."""
    return checkpoint(tmp_path / "llama", LLAMA)


def test_list_names_families_and_patterns(ucp: Run) -> None:
    page = ucp("patterns", "list").stdout
    assert re.search(r"^  llama +Llama 2 and 3", page, re.MULTILINE)
    assert "  - shard\n" in page
    document = json.loads(ucp("patterns", "list", "--json").stdout)
    assert document["schema"] == "ucp.patterns-list/1"
    assert {"llama", "mixtral", "bloom"} <= {own["name"] for own in document["families"]}


def test_show_explains_every_rule(ucp: Run) -> None:
    page = ucp("patterns", "show", "mixtral", "--style", "huggingface").stdout
    row = next(line for line in page.splitlines() if "local_experts.{expert}.linear_fc1.weight" in line)
    assert "etp: shard(dim=0, blocks=[dim / 2, dim / 2])" in row
    assert "block_sparse_moe.experts.{expert}.w1.weight, " in row
    assert "gate and up projection of one expert" in row
    document = json.loads(ucp("patterns", "show", "mixtral", "--json").stdout)
    assert document["rules"][0]["name"] == "embedding.word_embeddings.weight"
    assert document["given"] == {"gated": 1, "mla": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "lama"), "did you mean 'llama'?"),
        (("show", "llama", "--style", "bert"), "got 'bert'"),
        (("show", "llama", "--style", "bert", "--json"), "got 'bert'"),
        (("check", "x", "--family", "llama", "--patterns", "my.toml"), "(--family) or by file (--patterns)"),
    ],
)
def test_what_is_not_there_is_wrong_usage(ucp: Run, words: tuple[str, ...], message: str) -> None:
    assert message in ucp("patterns", *words, code=2).stderr


def test_check_explains_every_parameter(ucp: Run, llama: Path) -> None:
    page = ucp("patterns", "check", llama).stdout
    assert "21 parameters, every parameter has a rule and fits it" in page.splitlines()[0]
    assert re.search(r"^family +llama: ", page, re.MULTILINE)
    row = next(line for line in page.splitlines() if "k_proj" in line)
    assert row.split()[:3] == ["model.layers.{layer}.self_attn.k_proj.weight", "2", "2x4"]
    assert "linear_qkv.weight (part 2): queries, key and value" in row


def test_a_name_of_several_rules_is_told_with_what_would_decide(ucp: Run, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "norms", {"backbone.layers.0.norm.weight": (4,), "backbone.norm_f.weight": (4,)})
    page = ucp("patterns", "check", source, "--family", "mcore-hybrid", code=3).stdout
    assert "With several rules\n  - in the family 'mcore-hybrid', backbone.layers.0.norm.weight can be " in page
    assert "(beside decoder.layers.0.mixer.in_proj.weight)" in page
    assert "Without a rule" not in page


def test_tensors_whose_dims_go_another_way_are_marked(ucp: Run, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "gpt2", {"transformer.h.0.mlp.c_fc.weight": (4, 6)})
    page = ucp("patterns", "check", source, "--family", "gpt").stdout
    assert "decoder.layers.{layer}.mlp.linear_fc1.weight (dims in the order [1, 0]): " in page
    document = json.loads(ucp("patterns", "check", source, "--family", "gpt", "--json").stdout)
    assert document["parameters"]["transformer.h.0.mlp.c_fc.weight"]["order"] == [1, 0]


def test_a_wrong_family_says_which_names_do_not_fit(ucp: Run, llama: Path) -> None:
    page = ucp("patterns", "check", llama, "--family", "gpt", code=3).stdout
    assert page.splitlines()[0].endswith("21 parameters, 20 do not fit")  # lm_head.weight is a name of both
    assert "Without a rule\n  - model.embed_tokens.weight 10x4\n" in page
    assert "Rules that matched nothing" in page


def test_a_shape_that_does_not_fit_is_told(ucp: Run, tmp_path: Path) -> None:
    shapes = {
        "embedding.word_embeddings.weight": (10, HIDDEN),
        "decoder.layers.0.self_attention.linear_qkv.weight": (8, HIDDEN),
        "decoder.layers.0.mlp.linear_fc1.weight": (7, HIDDEN),
    }
    page = ucp("patterns", "check", checkpoint(tmp_path / "odd", shapes), "--family", "llama", code=3).stdout
    assert re.search(r"Not as their rule says\n  - decoder.layers.0.mlp.linear_fc1.weight, shape \[7, 4\]", page)
    assert "7 is not a multiple of 2" in page


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints as if they did not record how their tensors lie."""

    def explain(path: Path, options: SourceOptions) -> FamilyReport:
        return explain_index(replace(read_index(path), recorded_in={}), options)

    monkeypatch.setattr("ucp_cli.commands.patterns.explain", explain)


@pytest.mark.usefixtures("unrecorded")
def test_names_of_no_family_are_a_failure_that_says_what_to_do(ucp: Run, tmp_path: Path) -> None:
    message = ucp("patterns", "check", checkpoint(tmp_path / "odd", {"a.weight": (3,)}), code=3).stderr
    assert "any of them" in message
    assert "--patterns my.toml" in message
    assert len(message.splitlines()) == 1


@pytest.mark.usefixtures("unrecorded")
def test_the_nearest_family_alone_says_what_speaks_against_it(ucp: Run, tmp_path: Path) -> None:
    odd = {**LLAMA, "model.layers.0.adapter.weight": (3,)}
    message = ucp("patterns", "check", checkpoint(tmp_path / "odd", odd), code=3).stderr
    assert "the nearest is llama: no rule for model.layers.0.adapter.weight. " in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("case", "where", "row"),
    [
        (
            "z3-dp4-bf16/checkpoint",
            "dp    param_shapes of zero_pp_rank_0_",
            ["emb.weight", "1", "11x7", "dp: flat chunk(dim=0)"],
        ),
        (
            "z1-tp2-dp2/checkpoint",
            "tp    universal_checkpoint_info of mp_rank_00_model_states.pt",
            ["block.down.weight", "1", "8x32", "tp: shard(dim=1); dp: flat partition(share=280)"],
        ),
        (
            "z1-ep2-dp4/checkpoint",
            "ep    names of the layer_*_expert_*",
            [
                "moe.deepspeed_moe.experts.deepspeed_experts.#.weight",
                "4",
                "8x8",
                "ep: unique; dp: flat partition(share=64)",
            ],
        ),
        (
            "z1-pp2-dp2/checkpoint",
            "pp    names of the layer_*-model_states.pt files",
            None,
        ),
        ("z1-tp2-dp2/universal", "every axis  folders of zero/", ["block.down.weight", "1", "8x32", "whole"]),
    ],
)
def test_what_records_its_own_layout_needs_no_family(ucp: Run, case: str, where: str, row: list[str] | None) -> None:
    """Files that real DeepSpeed wrote."""
    source = PAGE.parents[2] / "fixtures" / "deepspeed" / case
    page = ucp("patterns", "check", source).stdout
    assert "no family is needed" in page.splitlines()[0]
    assert where in page
    found = [line.split(maxsplit=3) for line in page.splitlines()]
    assert row is None or row in found
    document = json.loads(ucp("patterns", "check", source, "--json").stdout)
    assert (document["ok"], document["family"]) == (True, None)
    assert where.split("  ", maxsplit=1)[0] in document["recorded_in"]


def test_rules_of_ones_own(ucp: Run, tmp_path: Path) -> None:
    rules = tmp_path / "my.toml"
    rules.write_text(
        'name = "mine"\n[[rule]]\nname = "a.{layer}.weight"\ntp = { pattern = "shard", dim = 0 }\nmeaning = "a thing"'
    )
    source = checkpoint(tmp_path / "own", {"a.0.weight": (4, 2), "a.1.weight": (4, 2)})
    row = ucp("patterns", "check", source, "--patterns", rules).stdout.splitlines()[-1]
    assert row.split(maxsplit=3) == ["a.{layer}.weight", "2", "4x2", "tp: shard(dim=0)  a thing"]


def test_every_key_is_described(ucp: Run, llama: Path) -> None:
    words = set(re.findall(r"\w+", PAGE.read_text()))
    for page in (("list",), ("show", "llama"), ("check", llama)):
        document = json.loads(ucp("patterns", *page, "--json").stdout)
        found = set(document)
        for inner in ("families", "rules", "tied"):
            found |= {key for own in document.get(inner, []) if isinstance(own, dict) for key in own}
        found |= {key for own in document.get("parameters", {}).values() for key in own}
        assert found <= words
