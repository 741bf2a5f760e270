"""Arguments of Megatron out of a config.json of transformers, and the way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ucp_formats.megatron.write.arguments import parse_config, scaling_note

import ucp
from ucp.api import convert
from ucp.errors import MisfitError

LLAMA = Path(__file__).parents[6] / "fixtures" / "huggingface" / "llama" / "model"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of Llama 3.2."""
LINEAR = {"rope_type": "linear", "factor": 2.0}


def to_megatron(folder: Path, settings: dict[str, str] | None = None, **changes: object) -> tuple[dict, str]:
    """Arguments written, and the notes, for the kept Llama with another config.json."""
    shutil.copytree(LLAMA, folder / "a")
    path = folder / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    given = {"transformer_impl": "local", **(settings or {})}
    report = convert(folder / "a", folder / "b", to="megatron", topology="tp=1", settings=given, workers=1)
    (said,) = (extra.value for extra in ucp.open(folder / "b").index.extras if extra.name == "args")
    return dict(getattr(said, "state", said)), "\n".join(report.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    ],
    ids=["transformers 5", "transformers 4"],
)
def test_scaling_of_llama_3_goes_there_and_back(changes, tmp_path):
    said, notes = to_megatron(tmp_path, **changes)
    assert (said["use_rope_scaling"], said["rope_scaling_factor"], said["rotary_base"]) == (True, 32.0, 500000)
    assert "start the run with --use-rope-scaling --rope-scaling-factor 32.0" in notes
    convert(tmp_path / "b", tmp_path / "c", to="huggingface", workers=1)
    back = json.loads((tmp_path / "c" / "config.json").read_text())
    assert back["rope_parameters"] == {**LLAMA3, "rope_theta": 500000.0}


def test_sizes_go_there_and_back_without_a_config(tmp_path):
    said, notes = to_megatron(tmp_path)
    assert (said["max_position_embeddings"], said["rotary_percent"], said["vocab_size"]) == (32, 1.0, 32)
    assert (said["kv_channels"], said["num_query_groups"], said["group_query_attention"]) == (4, 2, True)
    assert "rotary" not in notes
    convert(tmp_path / "b", tmp_path / "c", to="huggingface", workers=1)
    first, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ac")
    assert {key: first[key] for key in back if not key.endswith("token_id")} == {
        key: own for key, own in back.items() if own is not None
    }


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {**LLAMA3, "original_max_position_embeddings": 4096},
        {"rope_type": "linear", "factor": 1.5},
        LINEAR,
    ],
    ids=["yarn", "dynamic", "llama3 of other numbers", "linear by a fraction", "linear"],
)
def test_other_scaling_is_told_and_not_lost_on_the_way_back(rope, tmp_path):
    said, notes = to_megatron(tmp_path, rope_parameters={**rope, "rope_theta": 1e4})
    assert f"rope_type={rope['rope_type']}), which Megatron does not take from a checkpoint" in notes
    assert said.get("rotary_seq_len_interpolation_factor") == (2 if rope == LINEAR else None)
    with pytest.raises(MisfitError, match=r"rotary_(percent|seq_len)"):
        convert(tmp_path / "b", tmp_path / "c", to="huggingface", workers=1)


@pytest.mark.parametrize("name", ["num_attention_heads", "num_query_groups", "kv_channels"])
def test_what_config_and_tensors_contradict_is_refused(name, tmp_path):
    with pytest.raises(MisfitError, match=r"q_proj.*lengths .*16, 8, 8\b.*heads \* head_dim"):
        to_megatron(tmp_path, {name: "8"})


def test_what_is_said_comes_before_the_config(tmp_path):
    said, notes = to_megatron(tmp_path, {"max_position_embeddings": "64", "norm_epsilon": "1e-5"})
    assert (said["max_position_embeddings"], said["norm_epsilon"]) == (64, 1e-5)
    assert "--set max_position_embeddings=64 is used, but config.json says 32" in notes


def test_latent_attention_has_no_such_widths():
    config = {"kv_lora_rank": 8, "head_dim": 64, "num_key_value_heads": 4, "rope_theta": 1e4, "vocab_size": 9}
    assert parse_config(config) == {"rotary_base": 10000, "vocab_size": 9}


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "9" * 400, "true", '"2"'])
def test_odd_numbers_of_json_are_no_arguments(number):
    rope = f'{{"rope_type": "linear", "factor": {number}, "rope_theta": {number}}}'
    config = json.loads(f'{{"rope_parameters": {rope}}}')
    assert parse_config(config) == {}
    assert "a run without this scaling" in (scaling_note(config) or "")
