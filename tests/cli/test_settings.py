"""`--set`: names that a target does not take are a mistake in the arguments, and the message has those that it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "deepspeed/z3-dp4-fp32/checkpoint"
HF = FIXTURES / "huggingface/llama/model"
LLAMA = FIXTURES / "megatron/llama-tp2-pp2-dp2-full/checkpoint"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ([ZERO3], "It takes drop"),
        ([ZERO3, "--to", "deepspeed"], "It takes stages, partition, layers, tied, scheduler, step, drop"),
        ([ZERO3, "--to", "deepspeed-universal"], "It takes optimizer, scheduler, step, drop"),
        ([ZERO3, "--to", "megatron", "--topology", "tp=1"], "hidden_size"),
        (
            [LLAMA, "--to", "megatron"],
            "drop, frozen; any argument that the source records; sizes of the model by",
        ),
        (
            [ZERO3, "--to", "dcp", "--names", "huggingface"],
            "sizes of the model by the names of Megatron or",
        ),
        (
            [HF, "--to", "dcp", "--optimizer", "zero"],
            "It takes style, decoupled_weight_decay, lr, beta1, beta2, eps, weight_decay, scheduler, step, drop",
        ),
    ],
)
def test_an_unknown_name(ucp: Run, words: list[object], known: str) -> None:
    said = ucp("plan", *words, "--set", "nonsense=1", code=2).stderr
    assert "nonsense" in said
    assert known in said


@pytest.mark.parametrize(
    ("name", "near"),
    [("num_layer=2", "num_layers"), ("drap=x", "drop"), ("num_heads=4", "num_attention_heads")],
)
def test_a_slip_of_the_pen(ucp: Run, name: str, near: str) -> None:
    said = ucp("plan", LLAMA, "--to", "megatron", "--set", name, code=2).stderr
    assert f"{name.partition('=')[0]}: did you mean {near}?" in said


def test_an_argument_that_the_source_records(ucp: Run) -> None:
    ucp("plan", LLAMA, "--to", "megatron", "--set", "eval_interval=7")


def test_a_config_is_named_by_its_folder_or_itself(ucp: Run) -> None:
    words = ("plan", HF, "--to", "huggingface", "--set")
    folder, file = (ucp(*words, f"config={own}") for own in (HF, HF / "config.json"))
    assert folder.stdout == file.stdout
