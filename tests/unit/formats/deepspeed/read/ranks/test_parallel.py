"""What is wrong with checkpoints of several model-parallel ranks, on copies of real ones."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

import ucp
from ucp.contract.protocols import SourceOptions
from ucp.core.index import Index
from ucp.errors import (
    MalformedError,
    MissingFileError,
    ReplicaError,
    UnknownFamilyError,
    UnsupportedError,
)

FIXTURES = Path(__file__).parents[6] / "fixtures" / "deepspeed"
INFO = "universal_checkpoint_info"
EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """The tag folder of a copy of a kept checkpoint."""

    def copy(name: str) -> Path:
        shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name)
        (tag,) = (path for path in (tmp_path / name).iterdir() if path.is_dir())
        return tag

    return copy


def read(path: Path) -> Index:
    return DeepSpeedFormat().read(path)


def change(path: Path, how: Callable[[Any], object]) -> None:
    """Save a file of plain values and tensors anew."""
    saved = torch.load(path, weights_only=False)
    how(saved)
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("case", "file", "bare"),
    [
        ("z1-pp4-tied", "layer_00-model_00-model_states.pt", "layer_00, layers after 4"),
        ("z1-pp2-dp2", "layer_00-model_states.pt", "layer_00, layer_02, layers after 4"),
    ],
)
def test_a_missing_tied_layer_is_in_doubt(case: str, file: str, bare: str, copied, tmp_path: Path) -> None:
    """A model whose tied layers all have a `forward_fn` has no file of them: it is for the user to say."""
    tag = copied(case)
    (tag / file).unlink()
    (doubt,) = read(tag).doubts
    assert doubt.kind == "missing-layers"
    assert "tied parameters tied_modules.emb" in doubt.text
    assert f"(no file: {bare})" in doubt.text
    assert ucp.verify(tag).problems == (doubt.text,)
    pp = case[5]
    target = {"to": "deepspeed", "topology": f"dp=1,pp={pp},zero=1"}
    with pytest.raises(MalformedError, match=r"tied_modules\.emb(?s:.*)--accept missing-layers"):
        ucp.convert(tag, tmp_path / "out", **target)
    assert f"--accept missing-layers: {doubt.text}" in ucp.plan(tag, accept=["missing-layers"], **target).warnings


@pytest.mark.parametrize("other", ["layer_01", "layer_03", "layer_04"])
def test_another_layer_in_the_place_of_a_tied_one(other: str, copied) -> None:
    tag = copied("z1-pp2-dp2")
    shutil.copyfile(tag / f"{other}-model_states.pt", tag / "layer_00-model_states.pt")
    (doubt,) = read(tag).doubts
    assert doubt.kind == "missing-layers"


def test_a_layer_in_the_place_of_another(copied) -> None:
    tag = copied("z1-pp4-tied")
    shutil.copyfile(tag / "layer_00-model_00-model_states.pt", tag / "layer_04-model_00-model_states.pt")
    with pytest.raises(MalformedError, match=r"layer_04-model_00-model_states\.pt: .*4\.weight, 4\.bias"):
        read(tag)


@pytest.mark.parametrize(
    ("key", "value"), [("buffer_names", ["7.seen"]), ("frozen_param_shapes", {"7.weight": torch.Size([2])})]
)
def test_a_missing_layer_without_a_trained_parameter(key: str, value: object, copied) -> None:
    tag = copied("z1-pp2-dp2")
    for rank in range(2):
        change(tag / f"mp_rank_{rank:02d}_model_states.pt", lambda saved: saved.update({key: value}))
    with pytest.raises(MissingFileError, match=r"missing: layer_07-model_states\.pt"):
        read(tag)


def test_a_missing_model_parallel_rank(copied) -> None:
    tag = copied("z1-tp2-dp2")
    for path in tag.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(MissingFileError) as caught:
        read(tag)
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"):
        assert f"missing: {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "facts"), [("mp_rank_02_model_states.pt", "rank 2 of 2"), ("layer_00-model_states.pt", "")]
)
def test_a_rank_too_many_and_a_layer_beside_a_module(copied, name: str, facts: str) -> None:
    tag = copied("z1-tp2-dp2")
    shutil.copy(tag / "mp_rank_01_model_states.pt", tag / name)
    with pytest.raises(MalformedError, match=f"extra: {name} .*{facts}"):
        read(tag)


def test_layers_cut_over_an_axis_that_is_not_known(copied) -> None:
    tag = copied("z1-pp2-dp2")
    (tag / "layer_03-model_states.pt").rename(tag / "layer_03-context_00-model_states.pt")
    with pytest.raises(UnsupportedError, match=r"layer_03-context_00-model_states\.pt"):
        read(tag)


@pytest.mark.parametrize(
    ("pattern", "category"),
    [
        (r"1.dense.weight", "tp_replicated_parameter_patterns"),
        (r"1.dense.bias", "parameter_with_row_parallelism_patterns"),
        (r"1.gate_up", "parameter_to_average_patterns"),
    ],
)
def test_patterns_that_contradict_one_another(copied, pattern: str, category: str) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    for path in tag.glob("mp_rank_*"):
        change(path, lambda saved: saved[INFO][category].append(pattern))
    with pytest.raises(MalformedError, match=rf"{pattern.replace('_up', '_up.weight')}: .*{category}"):
        read(tag)


def test_patterns_that_do_not_fit_the_shapes(copied) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")

    def forget(saved: dict[str, Any]) -> None:
        saved[INFO]["sub_param_shard_widths"] = {r"\d+.qkv.weight": [[4, 4], [2, 2], [2, 1]]}
        saved[INFO]["parameter_with_row_parallelism_patterns"].append(r"4.bias")
        saved[INFO]["tp_replicated_parameter_patterns"].pop()

    for path in tag.glob("mp_rank_*"):
        change(path, forget)
    with pytest.raises(MalformedError, match=r"4 parameters:\n") as caught:
        read(tag)
    for facts in (r"1\.qkv\.weight: .*\[8, 7\].*\[8, 8\]", r"4\.bias: .*dim 1"):
        assert re.search(facts, str(caught.value)), facts


def test_tensor_parallel_ranks_that_say_different_things(copied) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    change(tag / "mp_rank_03_model_states.pt", lambda saved: saved[INFO].update(original_vocab_size=10))
    with pytest.raises(MalformedError, match=rf"mp_rank_03_model_states\.pt: .*{INFO}"):
        read(tag)


def test_tensor_parallel_ranks_without_a_record(copied) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    for path in tag.glob("mp_rank_*"):
        change(path, lambda saved: saved.pop(INFO))
    with pytest.raises(UnknownFamilyError, match=INFO):
        read(tag)


RULES = """
name = "small"
title = "The model of the 3D fixture"
[[rule]]
name = "tied_modules.embed.word.weight"
tp = { pattern = "shard", dim = 0 }
[[rule]]
name = "{layer}.qkv.weight"
tp = { pattern = "shard", dim = 0, blocks = [8, 4, 4] }
[[rule]]
name = "{layer}.gate_up.weight"
tp = { pattern = "shard", dim = 0, blocks = ["dim / 2", "dim / 2"] }
[[rule]]
name = "{layer}.dense.weight"
tp = { pattern = "shard", dim = 1 }
[[rule]]
name = "{layer}.down.weight"
tp = { pattern = "shard", dim = 1 }
[[rule]]
name = "{layer}.scale"
tp = "partial"
"""


def test_rules_of_the_users_own_say_what_is_not_recorded(copied, tmp_path: Path) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    recorded = read(tag).atoms
    for path in tag.glob("mp_rank_*"):
        change(path, lambda saved: saved.pop(INFO))
    norms = ("{layer}.norm1.weight", "{layer}.norm1.bias", "{layer}.norm2.weight", "{layer}.norm2.bias")
    others = (*norms, "{layer}.dense.bias", "{layer}.weight", "{layer}.bias")
    rules = tmp_path / "small.toml"
    rules.write_text(RULES + "".join(f'[[rule]]\nname = "{name}"\ntp = "replicate"\n' for name in others))
    index = DeepSpeedFormat().configured(SourceOptions(patterns=rules)).read(tag)
    assert list(index.atoms) == list(recorded)
    for name, atom in index.atoms.items():
        assert atom.patterns == recorded[name].patterns
        assert atom.states == recorded[name].states
    assert any("the family small: chosen with --patterns" in note for note in index.notes)


@pytest.mark.parametrize(
    ("key", "value", "facts"),
    [
        ("universal_checkpoint_version", 0.9, r"universal_checkpoint_version .*; got 0\.9\. "),
        ("affine_map", {"version": 2}, r"affine_map .*; got 2\. "),
        (
            "autotp_unsupported_parameter_patterns",
            {r"^1\.dense\.bias$": "a reason"},
            r"\n  1\.dense\.bias: a reason\n",
        ),
    ],
)
def test_a_record_of_another_version_or_of_what_it_cannot_describe(copied, key: str, value: object, facts: str) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    for path in tag.glob("mp_rank_*"):
        change(path, lambda saved: saved[INFO].update({key: value}))
    with pytest.raises(UnsupportedError, match=facts):
        read(tag)


def drifted(path: Path, name: str) -> None:
    def drift(saved: Any) -> None:
        saved.get("module", saved)[name].view(-1)[0] += 1

    change(path, drift)


@pytest.mark.parametrize(
    ("case", "file", "name", "where"),
    [
        ("z1-tp2-dp2", "mp_rank_01_model_states.pt", "block.o.bias", "block.o.bias"),
        ("z1-pp2-tp2-dp2-bf16", "layer_01-model_01-model_states.pt", "norm1.weight", "1.norm1.weight"),
        ("z1-pp2-tp2-dp2-bf16", "layer_00-model_00-model_states.pt", "word.weight", "tied_modules.embed.word.weight"),
        ("z1-ep2-dp4", "layer_0_expert_2_mp_rank_00_model_states.pt", f"{EXPERTS}.2.bias", f"{EXPERTS}.2.bias"),
    ],
)  # fmt: skip
def test_a_copy_that_has_drifted(copied, tmp_path: Path, case: str, file: str, name: str, where: str) -> None:
    tag = copied(case)
    drifted(tag / file, name)
    with pytest.raises(ReplicaError, match=where):
        ucp.convert(tag, tmp_path / "atoms", workers=1)


def test_experts_of_swapped_ranks_are_noticed(copied, tmp_path: Path) -> None:
    """The configuration says another order of the ranks than the shares of the optimizer files."""
    tag = copied("z2-ep2-dp4-contiguous")
    change(tag / "mp_rank_00_model_states.pt", lambda s: s["ds_config"].pop("use_data_before_expert_parallelism"))
    with pytest.raises(UnsupportedError, match="param_slice_mappings"):
        ucp.convert(tag, tmp_path / "atoms", workers=1)


def test_missing_experts_are_named(copied) -> None:
    tag = copied("z1-ep2-dp4")
    for number in (1, 3):
        (tag / f"layer_0_expert_{number}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingFileError, match=r"(?s)layer_0_expert_1_mp_rank_00_model_states\.pt .*experts 1, 3"):
        read(tag)


def test_empty_files_of_experts_stand_for_lost_optimizer_files(copied) -> None:
    """Before 0.19.5 ZeRO wrote `expp_rank_*` files without an optimizer."""
    tag = copied("z1-ep2-dp4-0.18")
    for path in tag.glob("zero_pp_rank_*"):
        path.unlink()
    with pytest.raises(MalformedError, match=r"expp_rank_1_mp_rank_00.*zero_pp_rank_\*_optim_states\.pt"):
        read(tag)


def test_an_optimizer_of_experts_beside_those_of_zero(copied) -> None:
    tag = copied("z1-ep2-dp4-0.18")
    shutil.copy(FIXTURES / "z0-ep2-dp4/checkpoint/global_step3/expp_rank_1_mp_rank_00_optim_states.pt", tag)
    with pytest.raises(MalformedError, match=r"extra: expp_rank_1_mp_rank_00_optim_states\.pt "):
        read(tag)


def test_modules_of_one_layer_are_no_stages_of_a_pipeline(copied) -> None:
    """A stage has layers of its own: a layer on two ranks under other names is no pipeline."""
    tag = copied("z1-pp2-ep2-dp2-0.18")

    def rename(saved: dict[str, Any]) -> None:
        saved["module"] = {name.replace("3.", "1."): tensor for name, tensor in saved["module"].items()}

    change(tag / "mp_rank_01_model_states.pt", rename)
    with pytest.raises(MalformedError, match=r"3\.weight"):
        read(tag)


@pytest.mark.parametrize("case", ["z0-ep2-dp4", "z1-ep2-dp4", "z2-ep2-dp4-contiguous"])
def test_a_file_of_another_expert_is_refused(copied, case: str) -> None:
    tag = copied(case)
    one, other = (tag / f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in (0, 3))
    shutil.copyfile(other, one)
    with pytest.raises(MalformedError, match=rf"extra: {other.name} .*experts\.3\.weight"):
        read(tag)


def test_a_lost_optimizer_of_experts_without_zero(copied) -> None:
    tag = copied("z0-ep2-dp4")
    for path in tag.glob("expp_rank_*"):
        path.unlink()
    with pytest.raises(UnsupportedError, match=r"; got 1 .* and 0 "):
        read(tag)


def test_a_tied_layer_with_files_on_both_ends_has_a_further_copy(copied) -> None:
    tag = copied("z1-pp2-dp2")
    before = read(tag).atoms["tied_modules.emb.weight"].states["weight"].fragments
    shutil.copy(tag / "layer_00-model_states.pt", tag / "layer_05-model_states.pt")
    after = read(tag).atoms["tied_modules.emb.weight"].states["weight"].fragments
    assert {piece.replica for piece in after} - {piece.replica for piece in before} == {3}


def test_a_pipeline_without_zero_and_without_names(copied) -> None:
    """A tied layer without a file of its own cannot be found by shapes, and is asked for."""
    tag = copied("z0-pp2")

    def forget(saved: dict[str, Any]) -> None:
        for group in saved["optimizer"]["param_groups"]:
            group.pop("param_names")

    for path in tag.glob("mp_rank_*"):
        change(path, forget)
    with pytest.raises(UnsupportedError, match="no assignment"):
        read(tag)


def test_alike_layers_that_may_be_tied_are_not_told_apart(copied) -> None:
    """The optimizer of a stage has a tied layer first, wherever it stands; such layers hold the same bytes."""
    tag = copied("z0-pp2-alike")
    assert len(read(tag).groups) == 2
    shutil.copy(tag / "layer_01-model_states.pt", tag / "layer_04-model_states.pt")
    with pytest.raises(UnsupportedError, match="layers 1 and 4 "):
        read(tag)


def test_extras_that_ranks_have_for_themselves(copied) -> None:
    tag = copied("z1-tp2-dp2")
    for rank in (0, 1):
        change(tag / f"mp_rank_{rank:02d}_model_states.pt", lambda saved, r=rank: saved.update(iteration=3, seed=r))
    extras = {extra.name: extra.value for extra in read(tag).extras}
    assert extras["client_state"] == {"iteration": 3, "seed": 0}
    assert extras["mp_rank_01/client_state"] == {"iteration": 3, "seed": 1}


def test_buffers_that_differ_between_tensor_parallel_ranks(copied) -> None:
    tag = copied("z1-pp2-tp2-dp2-bf16")
    change(tag / "layer_02-model_01-model_states.pt", lambda saved: saved["seen"].fill_(99))
    index = read(tag)
    assert "mp_rank_01/buffer/2.seen" in {extra.name for extra in index.extras}
    assert any("buffer 2.seen of model-parallel rank 1 differs from rank 0's" in note for note in index.notes)
