"""torch_dist as torch and Megatron's loader see it: keys, whole tensors, objects, common state."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ucp.errors import MissingStateError, UsageError

STATES = {"param": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


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


def stacked(run: Any, layers: int, name: str, state: str = "weight") -> torch.Tensor:
    return torch.stack([run.expected(f"decoder.layers.{layer}.{name}", state) for layer in range(layers)])


@pytest.fixture
def llama(fake_legacy, tmp_path):
    run = fake_legacy(kind="llama", tp=2, pp=2, optimizer="L3a")
    run.save(tmp_path / "a")
    return run


def test_layers_are_stacked(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=4,pp=2")
    found = tensors(tmp_path / "b" / "iter_0000010")
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
        "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
    }
    for key, name in names.items():
        whole = stacked(llama, 4, name)
        assert torch.equal(found.pop(f"decoder.layers.{key}"), whole.bfloat16()), key
        for prefix, state in STATES.items():
            own = found.pop(f"optimizer.state.{prefix}.decoder.layers.{key}")
            assert torch.equal(own, stacked(llama, 4, name, state)), (key, state)
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"):
        assert torch.equal(found.pop(name), llama.masters[name].bfloat16())
        for prefix, state in STATES.items():
            assert torch.equal(found.pop(f"optimizer.state.{prefix}.{name}"), llama.expected(name, state))
    assert found == {}


def test_chunks_are_what_ranks_of_the_run_hold(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=2")
    saved = metadata(tmp_path / "b" / "iter_0000010").state_dict_metadata
    gated = [(tuple(c.offsets), tuple(c.sizes)) for c in saved["decoder.layers.mlp.linear_fc1.weight"].chunks[:4]]
    assert gated == [((0, row, 0), (1, 6, 8)) for row in (0, 12, 6, 18)]
    rows = [tuple(c.offsets) for c in saved["decoder.layers.mlp.linear_fc2.weight"].chunks[:2]]
    assert rows == [(0, 0, 0), (0, 0, 6)]
    assert len(saved["decoder.layers.mlp.linear_fc1.layer_norm_weight"].chunks) == 4


def test_experts_count_a_dim(fake_legacy, to_megatron, tmp_path):
    run = fake_legacy(kind="mixtral", ep=2, optimizer="L3a", layers=2)
    run.save(tmp_path / "a")
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=2,ep=2,etp=1,dp=2")
    found = tensors(tmp_path / "b" / "iter_0000010")
    own = found["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    names = [
        [f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in range(4)]
        for layer in (0, 1)
    ]
    assert torch.equal(own, torch.stack([torch.stack([run.masters[n].bfloat16() for n in row]) for row in names]))
    common = torch.load(tmp_path / "b" / "iter_0000010" / "common.pt", weights_only=False)
    assert list(common["optimizer"]) == [0, 1]
    assert [len(common["optimizer"][n]["optimizer"]["param_groups"]) for n in (0, 1)] == [2, 1]
    assert common["optimizer"][1]["optimizer"]["param_groups"][0]["is_expert_parallel"] is True


def test_layers_that_differ_have_keys_of_their_own(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=1", moe_layer_freq="[1]")
    found = tensors(tmp_path / "b" / "iter_0000010")
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    assert torch.equal(found[name], llama.masters[name].bfloat16())
    assert f"optimizer.state.param.{name}" in found
    keys = objects(tmp_path / "b" / "iter_0000010")
    assert "decoder.layers.3.self_attention.linear_proj._extra_state/shard_0_1" in keys


def test_a_norm_before_experts(fake_legacy, to_megatron, tmp_path):
    """Specs with Transformer Engine keep it apart, those without rename it."""
    fake_legacy(kind="mixtral", optimizer="none", layers=2).save(tmp_path / "a")
    to_megatron(tmp_path / "a", tmp_path / "te", "tp=1", transformer_impl="transformer_engine")
    to_megatron(tmp_path / "a", tmp_path / "local", "tp=1")
    te, local = (set(tensors(tmp_path / name / "iter_0000010")) for name in ("te", "local"))
    assert te - local == {"decoder.layers.pre_mlp_layernorm.weight"}
    assert local - te == {"decoder.layers.mlp.linear_fc1.layer_norm_weight"}


def test_empty_extra_states_are_there(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=1")
    found = objects(tmp_path / "b" / "iter_0000010")
    for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(4):
            assert found[f"decoder.layers.{module}._extra_state/shard_{layer}_4"] == [None]


def test_common_state(llama, to_megatron, tmp_path):
    to_megatron(tmp_path / "a", tmp_path / "b", "tp=4,pp=2,vpp=2,dp=2")
    root = tmp_path / "b" / "iter_0000010"
    common = torch.load(root / "common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (10, 3.0)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(1.0, 3), (0.0, 3)]
    args = common["args"]
    assert (args.tensor_model_parallel_size, args.world_size, args.no_save_rng) == (4, 16, True)
    assert json.loads((root / "metadata.json").read_text())["common_backend"] == "torch"


def test_random_states_stay_where_the_layout_does(llama, to_megatron, tmp_path):
    same = to_megatron(tmp_path / "a", tmp_path / "b", "tp=2,pp=2,dp=2")
    assert not any("RNG states" in line for line in same.dropped)
    other = to_megatron(tmp_path / "a", tmp_path / "c", "tp=4")
    (line,) = (line for line in other.dropped if "RNG states" in line)
    assert line.endswith("even without --no-load-rng")
    found = objects(tmp_path / "b" / "iter_0000010")
    theirs = llama.roots["mp_rank_01_000"]["rng_state"]
    assert torch.equal(found["rng_state/shard_0.1_2.2"][0][0]["torch_rng_state"], theirs[0]["torch_rng_state"])


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

    for options, message in (({"layout": "zarr"}, "torch_dist, torch"), ({"compress": True}, "not compressed")):
        with pytest.raises(UsageError, match=message):
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
