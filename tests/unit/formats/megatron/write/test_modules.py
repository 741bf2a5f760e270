"""The modules that a checkpoint is written for: from its keys, from its arguments, assumed, or asked for."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

import ucp
from tests.unit.formats.megatron.write.test_torch_dist import tensors
from ucp.api import convert, plan
from ucp.conversion.convert import ConvertReport

BEFORE_EXPERTS = {
    "local": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "transformer_engine": "decoder.layers.pre_mlp_layernorm.weight",
}
"""The key in torch_dist for which a run with the other modules ends with a KeyError."""
FIRST_NORM = {
    "local": "decoder.layers.0.input_layernorm.weight",
    "transformer_engine": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
}
MODULES = {"mcore": "local", "te": "transformer_engine"}
"""Names of a fake run to modules."""


def written(src: Path, dst: Path, layout: str = "", **settings: str) -> ConvertReport:
    return convert(src, dst, to="megatron", topology="tp=1", layout=layout, settings=settings, workers=1)


def arguments(root: Path) -> Namespace:
    folder = root / "iter_0000010"
    own = folder / "common.pt"
    loaded = torch.load(own if own.exists() else folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    return loaded["args"]


def note_of(report: ConvertReport) -> str:
    (note,) = (note for note in report.notes if "transformer_impl" in note)
    return note


@pytest.fixture(params=list(MODULES))
def mixtral(request, fake_legacy, tmp_path):
    """A run that does not record its modules; its keys show them."""
    run = fake_legacy(kind="mixtral", optimizer="none", layers=2, style=request.param)
    return run.save(tmp_path / "a"), MODULES[request.param]


@pytest.mark.parametrize("through", ["", "atoms"])
def test_keys_of_the_source_tell(through, mixtral, tmp_path):
    """Before, both were written for Transformer Engine, and Megatron did not find the norms of the one."""
    src, kind = mixtral
    if through:
        convert(src, tmp_path / "atoms", workers=1)
    report = written(tmp_path / "atoms" if through else src, tmp_path / "b")
    (other,) = set(MODULES.values()) - {kind}
    found = tensors(tmp_path / "b" / "iter_0000010")
    assert BEFORE_EXPERTS[kind] in found
    assert BEFORE_EXPERTS[other] not in found
    assert f"transformer_impl {kind}), as the key decoder.layers.0." in note_of(report)
    assert arguments(tmp_path / "b").transformer_impl == kind


def test_keys_of_the_source_tell_for_files_of_ranks(mixtral, tmp_path):
    src, kind = mixtral
    assert note_of(plan(src, to="megatron", topology="tp=1", layout="torch")).startswith("keys are those of")
    written(src, tmp_path / "b", "torch")
    root = torch.load(tmp_path / "b" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert FIRST_NORM[kind] in root["model"]
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
    assert (grouped in root["model"]) == (kind == "transformer_engine")


def test_what_is_asked_for_comes_first(mixtral, tmp_path):
    src, kind = mixtral
    (other,) = set(MODULES.values()) - {kind}
    report = written(src, tmp_path / "b", transformer_impl=other)
    assert BEFORE_EXPERTS[other] in tensors(tmp_path / "b" / "iter_0000010")
    assert note_of(report).endswith(f"(transformer_impl {other}), as --set asks for")


def test_keys_come_before_arguments_that_contradict(fake_legacy, tmp_path):
    """As with a `--spec` of the run's own, whatever its transformer_impl."""
    run = fake_legacy(kind="llama", optimizer="none")
    for root in run.roots.values():
        root["args"].transformer_impl = "transformer_engine"
    report = written(run.save(tmp_path / "a"), tmp_path / "b", "torch")
    assert note_of(report).endswith("though its arguments say transformer_engine")
    assert arguments(tmp_path / "b").transformer_impl == "local"


def test_arguments_tell_where_keys_fit_both(fake_legacy, to_megatron, tmp_path):
    fake_legacy(kind="llama", optimizer="none").save(tmp_path / "a")
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=1")
    assert [extra.name for extra in ucp.inspect(tmp_path / "b").extras if extra.name == "modules"] == []
    report = written(tmp_path / "b", tmp_path / "c", "torch")
    assert note_of(report).endswith("(transformer_impl local), as the arguments of the source say")
