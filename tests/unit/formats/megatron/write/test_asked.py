"""What --set says against the model and the layout that are written."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from ucp.api import convert, plan
from ucp.errors import UsageError

FIXTURES = Path(__file__).parents[5] / "fixtures" / "megatron"
LLAMA = FIXTURES / "llama-tp2-pp2-dp2-full" / "checkpoint"
"""4 layers, bfloat16, hidden 20, ffn 28, output layer of its own; no experts."""

MAMBA = FIXTURES / "mamba-tp2-dp2-full" / "checkpoint"
"""A hybrid of layers M*M-."""


@pytest.mark.parametrize(
    ("name", "value", "facts"),
    [
        ("swiglu", "false", r"swiglu = False; decoder\.layers\.\d\.mlp\.linear_fc1\.weight is \[56, 20\]"),
        ("ffn_hidden_size", "9", r"ffn_hidden_size = 9; decoder\.layers\.\d\.mlp\.linear_fc2\.weight is \[20, 28\]"),
        ("hidden_size", "40", r"hidden_size = 40; embedding\.word_embeddings\.weight is \[64, 20\]"),
        ("num_attention_heads", "4", r"num_attention_heads = 4; decoder\.layers\.\d\.self_attention\.linear_proj"),
        ("num_experts", "2", "num_experts = 2: .* 0 experts"),
        ("num_layers", "5", "num_layers = 5: .* 4 layers"),
        (
            "untie_embeddings_and_output_weights",
            "false",
            r"untie_embeddings_and_output_weights = False: .*output_layer\.weight",
        ),
        ("bf16", "false", "bf16 = False: .* bfloat16"),
        ("fp16", "true", "fp16 = True: .* bfloat16"),
        ("tensor_model_parallel_size", "8", r"tensor_model_parallel_size = 8: .*--topology.* 2\b"),
        ("world_size", "3", r"world_size = 3: .*--topology.* 2\b"),
    ],
)
def test_what_the_tensors_or_the_layout_contradict(name: str, value: str, facts: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=facts):
        convert(LLAMA, tmp_path / "b", to="megatron", topology="tp=2", settings={name: value}, workers=1)
    assert not (tmp_path / "b").exists()


def test_the_type_of_steps_is_not_for_the_user_to_choose(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dtype step="):
        plan(LLAMA, to="megatron", dtypes={"step": "bfloat16"})


def test_what_holds_may_be_said(tmp_path: Path) -> None:
    given = {"swiglu": "true", "num_layers": "4", "hidden_size": "20", "bf16": "true", "lr": "1"}
    given |= {"tensor_model_parallel_size": "2", "padded_vocab_size": "128", "num_experts": "none"}
    convert(LLAMA, tmp_path / "b", to="megatron", topology="tp=2", settings=given, workers=1)
    shown = {extra.name: extra.value for extra in ucp.open(tmp_path / "b").index.extras}["args"]
    said = shown.state if hasattr(shown, "state") else shown
    assert (said["padded_vocab_size"], said["lr"]) == (128, 1)


@pytest.mark.parametrize(
    ("source", "pattern", "facts"),
    [
        (LLAMA, "*-*-*-*-", r"pattern '\*-\*-\*-\*-': .*GPT"),
        (MAMBA, "M*MM", r"pattern 'M\*MM': .*'M\*M-'"),
        (MAMBA, "M*M", r"pattern 'M\*M': .*'M\*M-'"),
    ],
)
def test_a_pattern_of_other_layers(source: Path, pattern: str, facts: str, tmp_path: Path) -> None:
    """What megatron-core 0.20 does at loading (gpt_checkpoint_interop.py) needs the keys of a GPT."""
    with pytest.raises(UsageError, match=facts):
        convert(source, tmp_path / "b", to="megatron", settings={"hybrid_layer_pattern": pattern}, workers=1)
    assert not (tmp_path / "b").exists()


def test_the_pattern_that_the_layers_have_may_be_said(tmp_path: Path) -> None:
    given = {"hybrid_layer_pattern": "M*|M-"}
    convert(MAMBA, tmp_path / "b", to="megatron", topology="pp=2", settings=given, workers=1)
