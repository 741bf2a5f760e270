"""The grammar of keys alone."""

import pytest
from ucp_formats.megatron.torch_dist.keys import (
    BucketKey,
    ObjectKey,
    StateKey,
    parse_bucket_key,
    parse_model_key,
    parse_object_key,
    parse_state_key,
)

DTYPES = "(torch.bfloat16, torch.float32)"


@pytest.mark.parametrize(
    ("key", "template", "stacked", "part"),
    [
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", (), ""),
        ("decoder.layers.mlp.linear_fc2.weight", "decoder.layers.{layer}.mlp.linear_fc2.weight", ("layer",), ""),
        ("decoder.layers.7.mlp.linear_fc2.weight", "decoder.layers.7.mlp.linear_fc2.weight", (), ""),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            ("layer", "expert"),
            "",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            ("expert",),
            "",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.12.linear_fc1.weight_w",
            "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight",
            (),
            "_w",
        ),
        ("decoder.layers.0.mlp.linear_fc1.bias_v", "decoder.layers.0.mlp.linear_fc1.bias", (), "_v"),
        ("decoder.layers.0.mixer.in_proj.weight.dt", "decoder.layers.0.mixer.in_proj.weight", (), ".dt"),
        ("decoder.layers.0.mixer.conv1d.bias.B", "decoder.layers.0.mixer.conv1d.bias", (), ".B"),
        ("decoder.layers.0.self_attention.in_proj.weight.query", None, (), ".query"),
        (
            "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight",
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.{expert}.linear_fc2.weight",
            ("expert",),
            "",
        ),
        ("decoder.layers.0.odd.weight_w", "decoder.layers.0.odd.weight_w", (), ""),
        ("decoder.layers.0.odd.weight.amax", "decoder.layers.0.odd.weight.amax", (), ""),
        ("my_layers.weight", "my_layers.weight", (), ""),
    ],
)
def test_keys_of_the_model(key, template, stacked, part):
    found = parse_model_key(key)
    assert (found.stacked, found.part) == (stacked, part)
    assert found.template == (template or key.removesuffix(part))
    assert found.full_key == key.removesuffix(part)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("optimizer.state.exp_avg.output_layer.weight", StateKey(None, "exp_avg", "output_layer.weight")),
        ("chained_3.optimizer.state.fp32_param.a.b", StateKey(3, "fp32_param", "a.b")),
        ("optimizer.state.exp_avg", None),
        ("output_layer.weight", None),
        (f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_{DTYPES}.bucket_idx_0.param", None),
    ],
)
def test_keys_of_states(key, found):
    assert parse_state_key(key) == found


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (
            f"optimizer.distributed.dp_group_idx_5.gbuf_idx_1.dtype_{DTYPES}.bucket_idx_12.exp_avg_sq",
            BucketKey(None, 5, 1, DTYPES, 12, "exp_avg_sq"),
        ),
        (
            "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_torch.float32.bucket_idx_0.param",
            BucketKey(1, 0, 0, "torch.float32", 0, "param"),
        ),
        ("optimizer.state.exp_avg.output_layer.weight", None),
        ("optimizer.distributed.dp_group_idx_5.optimizer", None),
    ],
)
def test_keys_of_buckets(key, found):
    assert parse_bucket_key(key) == found


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("rng_state/shard_1.0_2.4", ObjectKey("rng_state", (1, 0), (2, 4))),
        ("a.b._extra_state/shard_3_8", ObjectKey("a.b._extra_state", (3,), (8,))),
        ("a._extra_state/shard_3.1_8", ObjectKey("a._extra_state", (3, 1), (8,))),
        ("plain_object", None),
        ("a/shard_", None),
    ],
)
def test_keys_of_objects(key, found):
    assert parse_object_key(key) == found
