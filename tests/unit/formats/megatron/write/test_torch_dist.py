"""torch_dist as torch and Megatron's loader see it: keys, whole tensors, objects, common state."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ucp.errors import MissingStateError, UsageError


def metadata(root: Path) -> Any:
    return pickle.loads((root / ".metadata").read_bytes())


def tensors(root: Path) -> dict[str, torch.Tensor]:
    """All tensors, read by torch."""
    saved = {k: v for k, v in metadata(root).state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    found = {key: torch.empty(own.size, dtype=own.properties.dtype) for key, own in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it is alone
        dcp.load(found, storage_reader=dcp.FileSystemReader(root), no_dist=True)
    return found


def objects(root: Path) -> dict[str, Any]:
    """All objects, read by torch."""
    saved = [k for k, v in metadata(root).state_dict_metadata.items() if not isinstance(v, TensorStorageMetadata)]
    found: dict[str, Any] = dict.fromkeys(saved)
    places = {index.fqn: place for index, place in metadata(root).storage_data.items() if index.offset is None}
    for key in saved:
        with (root / places[key].relative_path).open("rb") as file:
            file.seek(places[key].offset)
            (root.parent / "item.pt").write_bytes(file.read(places[key].length))
        found[key] = torch.load(root.parent / "item.pt", weights_only=False)
    return found


@pytest.fixture
def llama(fake_legacy, tmp_path):
    run = fake_legacy(kind="llama", tp=2, pp=2, optimizer="L3a")
    run.save(tmp_path / "a")
    return run


def test_chunks_are_what_ranks_of_the_run_hold(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=2")
    saved = metadata(tmp_path / "b" / "iter_0000010").state_dict_metadata
    gated = [(tuple(c.offsets), tuple(c.sizes)) for c in saved["decoder.layers.mlp.linear_fc1.weight"].chunks[:4]]
    assert gated == [((0, row, 0), (1, 6, 8)) for row in (0, 12, 6, 18)]
    rows = [tuple(c.offsets) for c in saved["decoder.layers.mlp.linear_fc2.weight"].chunks[:2]]
    assert rows == [(0, 0, 0), (0, 0, 6)]
    assert len(saved["decoder.layers.mlp.linear_fc1.layer_norm_weight"].chunks) == 4


def test_layers_that_differ_have_keys_of_their_own(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=1", moe_layer_freq="[1]")
    found = tensors(tmp_path / "b" / "iter_0000010")
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    assert torch.equal(found[name], llama.masters[name].bfloat16())
    assert f"optimizer.state.param.{name}" in found
    keys = objects(tmp_path / "b" / "iter_0000010")
    assert "decoder.layers.3.self_attention.linear_proj._extra_state/shard_0_1" in keys


def test_an_optimizer_that_is_not_distributed(fake_legacy, to_megatron, tmp_path):
    run = fake_legacy(kind="gpt", optimizer="whole", tied=True, pp=2)
    run.save(tmp_path / "a")
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=2")
    root = tmp_path / "b" / "iter_0000010"
    found = tensors(root)
    assert "output_layer.weight" not in found
    name = "embedding.word_embeddings.weight"
    assert torch.equal(found[f"optimizer.state.fp32_param.{name}"], run.masters[name])
    common = torch.load(root / "common.pt", weights_only=False)
    assert common["optimizer"]["optimizer"]["state"] == {"common_step": 3}
    assert "distrib_optim_sharding_type" not in common["content_metadata"]


def test_weights_alone(fake_legacy, to_megatron, tmp_path):
    fake_legacy(kind="gpt", optimizer="none").save(tmp_path / "a")
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=2")
    root = tmp_path / "b" / "iter_0000010"
    assert not any(key.startswith("optimizer") for key in tensors(root))
    common = torch.load(root / "common.pt", weights_only=False)
    assert "optimizer" not in common
    assert common["args"].no_save_optim is True


def test_a_layer_that_is_left_out(llama, tmp_path):
    from ucp.api import convert

    with pytest.raises(MissingStateError, match=r"layer 1: mlp.linear_fc1.weight \[24, 8\]"):
        convert(tmp_path / "a", tmp_path / "b", to="megatron", exclude=["decoder.layers.1.mlp.linear_fc1.weight"])
    with pytest.raises(MissingStateError, match=r"lacks\n.*exp_avg"):
        convert(tmp_path / "a", tmp_path / "b", to="megatron", exclude=["decoder.layers.1.*/exp_avg"])


def test_layouts_that_megatron_does_not_have(llama, tmp_path):
    from ucp.api import convert

    for options, facts in (({"layout": "zarr"}, "torch_dist, torch; got 'zarr'"), ({"compress": True}, "--compress")):
        with pytest.raises(UsageError, match=facts):
            convert(tmp_path / "a", tmp_path / "b", to="megatron", **options)


@pytest.mark.parametrize(("topology", "apart"), [("tp=2,etp=1,dp=2", True), ("tp=2,dp=2", False)])
def test_experts_that_are_cut_over_other_ranks_have_an_optimizer_of_their_own(
    topology, apart, fake_legacy, to_megatron, tmp_path
):
    """0.19.2 core/tensor_parallel/layers.py, use_expert_pgs: Megatron loads no other number of optimizers."""
    src = fake_legacy(kind="mixtral", optimizer="L3a", layers=2).save(tmp_path / "a")
    to_megatron(src, tmp_path / "b", topology)
    common = torch.load(tmp_path / "b" / "iter_0000010" / "common.pt", weights_only=False)
    assert (list(common["optimizer"]) == [0, 1]) == apart
