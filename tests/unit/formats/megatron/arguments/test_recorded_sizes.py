"""Recorded sizes that are not those of the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from ucp_formats.megatron.arguments import compare_sizes
from ucp_formats.megatron.source import MegatronFormat

from ucp.contract import registry
from ucp.contract.protocols import SourceOptions
from ucp.errors import MalformedError

FIXTURES = Path(__file__).parents[5] / "fixtures" / "megatron"


@pytest.mark.parametrize(
    ("kind", "name", "value", "facts"),
    [
        ("llama", "swiglu", False, r"gated: .*swiglu = False; .*fc1\.weight is \[24, 8\], .*fc2\.weight is \[8, 12\]"),
        ("gpt", "swiglu", True, r"gated: .*swiglu = True; .*fc1\.weight is \[12, 8\]"),
        ("llama", "ffn_hidden_size", 6, r"ffn: .*ffn_hidden_size = 6; .*fc2\.weight is \[8, 12\]"),
        ("llama", "hidden_size", 16, r"hidden: .*hidden_size = 16; embedding\.word_embeddings\.weight is \[16, 8\]"),
        ("llama", "padded_vocab_size", 32, r"padded_vocab_size = 32; embedding\.word_embeddings\.weight is \[16, 8\]"),
        ("llama", "num_attention_heads", 0, r"num_attention_heads = 0; .*linear_proj\.weight is \[8, 8\]"),
        ("llama", "kv_channels", 4, r"kv_channels = 4"),
        ("mixtral", "num_experts", 8, r"experts: .*num_experts = 8; .*router\.weight is \[4, 8\]"),
        ("mixtral", "num_experts", 5, r"experts: .*num_experts = 5; "),
        ("mixtral", "moe_ffn_hidden_size", 24, r"moe_ffn_hidden_size = 24; .*linear_fc2\.weight is \[8, 12\]"),
    ],
)
def test_an_argument_that_was_edited(fake_legacy, tmp_path: Path, kind: str, name: str, value: int, facts: str) -> None:
    run = fake_legacy(kind=kind, tp=2, ep=2 if kind == "mixtral" else 1, optimizer="none")
    for root in run.roots.values():
        setattr(root["args"], name, value)
    with pytest.raises(MalformedError, match=facts):
        MegatronFormat().read(run.save(tmp_path))


def test_what_the_user_gives_is_not_held_against_the_arguments(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer="none")
    for root in run.roots.values():
        root["args"].ffn_hidden_size = 6
    run.save(tmp_path / "c")
    rules = tmp_path / "mine.toml"
    rules.write_text('name = "mine"\nextends = ["llama"]\n[given]\nffn = 12\n')
    index = MegatronFormat(SourceOptions(patterns=rules)).read(tmp_path / "c")
    assert index.atoms["decoder.layers.0.mlp.linear_fc2.weight"].global_shape == (8, 12)


@pytest.mark.parametrize("case", ["llama-tp2-pp2-dp2-torch-zero", "gpt-tp2-pp2-torch"])
def test_rules_that_join_the_wrong_rows_of_a_real_run(case: str, tmp_path: Path) -> None:
    family = case.partition("-")[0]
    rules = tmp_path / "lie.toml"
    rules.write_text(
        f'name = "lie"\nextends = ["{family}"]\n[[rule]]\nname = "decoder.layers.{{layer}}.mlp.linear_fc2.weight"\n'
        'tp = { pattern = "shard", dim = 0 }\n'
    )
    with pytest.raises(MalformedError, match=r"(?s)'lie'.*ffn_hidden_size = .*hidden_size = "):
        MegatronFormat(SourceOptions(patterns=rules)).read(FIXTURES / case / "checkpoint")


def test_layers_of_several_sizes_are_not_held_against_one() -> None:
    """Of `--heterogeneous-layers-config-path`, and of shapes that differ, no argument tells."""
    family, name = registry.family("llama"), "decoder.layers.{}.mlp.linear_fc2.weight"
    one, other = {name.format(0): (8, 12)}, {name.format(0): (8, 12), name.format(1): (8, 16)}
    said = {"hidden_size": 8, "ffn_hidden_size": 14}
    assert len(compare_sizes(family, said, one, pads_on_load=True)) == 1
    assert not compare_sizes(family, said, other, pads_on_load=True)
    uneven = {**said, "heterogeneous_layers_config_path": "a.json"}
    assert not compare_sizes(family, uneven, one, pads_on_load=True)


def test_padding_of_the_vocabulary_counts_only_where_it_cannot_change() -> None:
    family, shapes = registry.family("llama"), {"embedding.word_embeddings.weight": (64, 8)}
    said = {"padded_vocab_size": 128}
    assert not compare_sizes(family, said, shapes, pads_on_load=True)
    (line,) = compare_sizes(family, said, shapes, pads_on_load=False)
    assert line.endswith("say padded_vocab_size = 128; embedding.word_embeddings.weight is [64, 8]")
