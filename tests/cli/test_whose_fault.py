"""Exit code 2 where an option is at fault, 1 where the checkpoint is; and what the message says to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "deepspeed/z3-dp4-fp32/checkpoint"
LLAMA = FIXTURES / "megatron/llama-tp2-pp2-dp2-full/checkpoint"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", LLAMA, "--family", "gpt"], "family 'gpt': "),
        (["plan", LLAMA, "--family", "gpt"], "family 'gpt': "),
        (["patterns", "check", LLAMA, "--family", "gpt"], "family 'gpt': "),
        (["plan", ZERO3, "--to", "deepspeed", "--tag", "a/../b"], "part '..' cannot"),
        (["plan", ZERO3, "--to", "deepspeed", "--tag", ""], "a tag such"),
        (["plan", ZERO3, "--to", "megatron", "--topology", "tp=1"], "model family has"),
        (["plan", LLAMA, "--megatron-format", "torch"], "got 'torch', which"),
        (["plan", ZERO3, "--to", "deepspeed", "--layout", "packed"], "drop --layout"),
    ],
)
def test_an_option_is_at_fault(ucp: Run, words: list[object], said: str) -> None:
    assert said in ucp(*words, code=2).stderr


def test_a_plan_takes_the_arguments_of_a_conversion(ucp: Run, tmp_path: Path) -> None:
    assert ucp("plan", ZERO3, tmp_path / "atoms").output == ucp("plan", ZERO3).output
    assert not any(tmp_path.iterdir())


def test_an_inspection_shows_the_layers_of_each_stage(ucp: Run) -> None:
    page = ucp("inspect", LLAMA).stdout
    assert "stage  tensors  layers  other modules" in page
    assert "0       13  0-1     embedding.word_embeddings\n" in page
    assert "stage        1\n" in ucp("inspect", LLAMA, "--param", "output_layer.weight").stdout


def test_counts_in_another_type_are_no_difference(ucp: Run, tmp_path: Path) -> None:
    ucp("convert", ZERO3, tmp_path / "atoms", "--dtype", "step=float64", "-q")
    page = ucp("diff", ZERO3, tmp_path / "atoms").stdout
    assert page.startswith("equal; ")
    assert "step is float32 in a, float64 in b" in page
