"""A Megatron checkpoint in a live model, with the family that says how it was cut chosen by the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from tests.unit.live.cluster import module
from ucp.errors import MisfitError, NoSuchNameError, UsageError

CHECKPOINT = Path(__file__).resolve().parents[3] / "fixtures" / "megatron" / "gpt-tp2-pp2-torch" / "checkpoint"
FUSED = "decoder.layers.0.self_attention.linear_qkv.weight"
OWN = """
name = "mine"
title = "GPT with one block of fused attention"
extends = ["gpt"]
"""


def model() -> nn.Module:
    """A module with the names and shapes of the checkpoint, in fp32."""
    return module({name: torch.zeros(atom.global_shape) for name, atom in ucp.open(CHECKPOINT).atoms.items()})


def test_the_family_named_is_the_one_that_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN)
    loaded = {}
    for chosen in ({}, {"family": "gpt"}, {"patterns": tmp_path / "mine.toml"}):
        own = model()
        report = ucp.load_into(own, checkpoint=CHECKPOINT, **chosen)  # type: ignore[arg-type]
        (why,) = (note for note in report.notes if note.startswith("model family "))
        loaded[why] = own.get_parameter(FUSED).detach().clone()
        assert torch.equal(loaded[why], ucp.open(CHECKPOINT, **chosen).read(FUSED, "weight"))  # type: ignore[arg-type]
    chosen_by = list(loaded)
    assert chosen_by[1] == "model family gpt: chosen with --family gpt"
    assert chosen_by[2].startswith("model family mine: chosen with --patterns ")
    assert all(torch.equal(own, loaded[chosen_by[0]]) for own in loaded.values())


@pytest.mark.parametrize(
    ("chosen", "error", "said"),
    [
        ({"family": "llama"}, MisfitError, "family 'llama': "),
        ({"family": "lama"}, UsageError, "did you mean 'llama'"),
        ({"family": "gpt", "patterns": "mine.toml"}, UsageError, "got both"),
        ({"patterns": "nowhere.toml"}, UsageError, "nowhere.toml"),
    ],
)
def test_a_family_that_is_wrong_is_refused(chosen: dict[str, str], error: type[Exception], said: str) -> None:
    own = model()
    with pytest.raises(error, match=said):
        ucp.load_into(own, checkpoint=CHECKPOINT, **chosen)  # type: ignore[arg-type]
    assert not any(param.any() for param in own.parameters())
    with pytest.raises(error, match=said):
        ucp.open(CHECKPOINT, **chosen)  # type: ignore[arg-type]


def test_names_that_are_not_there() -> None:
    """An error of the library, and the KeyError that a mapping raises."""
    saved = ucp.open(CHECKPOINT)
    with pytest.raises(KeyError, match=r"'decoder.final_layernorm.weihgt' .*; .*'decoder.final_layernorm.weight'"):
        saved.atoms["decoder.final_layernorm.weihgt"]
    with pytest.raises(NoSuchNameError, match=r"'zzz' in .* 52 names"):
        saved.atoms["zzz"]
    with pytest.raises(KeyError, match=r"'exp_avg2'; .*weight, exp_avg, exp_avg_sq, step"):
        saved.atoms[FUSED].dtype("exp_avg2")
    with pytest.raises(NoSuchNameError, match="state 'exp_avg2'"):
        saved.read(FUSED, "exp_avg2")
    assert "zzz" not in saved.atoms
    assert saved.atoms.get("zzz") is None


def test_a_tied_name_says_which_holds_it() -> None:
    zero3 = CHECKPOINT.parents[2] / "deepspeed" / "z3-dp4-fp32" / "checkpoint"
    with pytest.raises(NoSuchNameError, match=r"'head.weight' .*: .*tied to 'emb.weight'"):
        ucp.open(zero3).atoms["head.weight"]
