from __future__ import annotations

from dataclasses import replace

import pytest

from ucp.contract.registry import family
from ucp.core.layout import Overlap
from ucp.errors import FamilyError, UsageError
from ucp.families.template import Template

GPT = {"num_layers": 4, "num_attention_heads": 8, "hidden_size": 32, "swiglu": True}


@pytest.fixture
def mcore():
    return family("mcore-gpt").bind(arguments=GPT)


class TestNames:
    @pytest.mark.parametrize(
        ("stored", "canonical", "style"),
        [
            ("decoder.layers.2.input_layernorm.weight", "decoder.layers.2.input_layernorm.weight", "mcore"),
            (
                "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
                "decoder.layers.3.input_layernorm.weight",
                "te",
            ),
            ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight", "te"),
            (
                "decoder.layers.3.mlp.experts.linear_fc1.weight12",
                "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight",
                "te",
            ),
            (
                "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
                "decoder.layers.0.self_attention.q_layernorm.weight",
                "te",
            ),
            (
                "language_model.encoder.layers.1.self_attention.query_key_value.weight",
                "decoder.layers.1.self_attention.linear_qkv.weight",
                "legacy",
            ),
            (
                "language_model.transformer.layers.1.attention.dense.bias",
                "decoder.layers.1.self_attention.linear_proj.bias",
                "legacy",
            ),
            ("word_embeddings_for_head.weight", "output_layer.weight", "legacy"),
            ("2.mlp.dense_h_to_4h.weight", "decoder.layers.0.mlp.linear_fc1.weight", "pipeline"),
            ("6.weight", "decoder.final_layernorm.weight", "pipeline"),
            (
                "mtp.layers.0.mtp_model_layer.mlp.router.weight",
                "mtp.layers.0.transformer_layer.mlp.router.weight",
                "te",
            ),
        ],
    )
    def test_every_style_leads_to_the_canonical_name(self, mcore, stored, canonical, style):
        named = mcore.read(stored)
        assert (named.canonical, named.stacked, named.style) == (canonical, (), style)
        assert mcore.canonical(stored, style) == canonical

    def test_keys_without_numbers_count_leading_dims(self, mcore):
        named = mcore.read("decoder.layers.mlp.experts.experts.linear_fc2.weight")
        assert named.stacked == ("layer", "expert")
        assert Template(named.canonical).filled({"layer": 2, "expert": 5}) == (
            "decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight"
        )
        assert mcore.read("decoder.layers.1.mlp.experts.experts.linear_fc2.weight").stacked == ("expert",)
        assert mcore.read("decoder.layers.1.mlp.experts.weight1").stacked == ("expert",)

    def test_parts_of_a_tensor_know_which_they_are(self):
        hybrid = family("mcore-hybrid")
        parts = [hybrid.read(f"decoder.layers.0.mixer.in_proj.weight.{part}") for part in ("z", "x", "B", "C", "dt")]
        assert [own.part for own in parts] == [0, 1, 2, 3, 4]
        assert {own.canonical for own in parts} == {"decoder.layers.0.mixer.in_proj.weight"}

    def test_how_it_is_written(self, mcore):
        name = "decoder.layers.2.input_layernorm.weight"
        assert mcore.to_style(name, "mcore") == name
        assert mcore.to_style(name, "te") == "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"
        assert mcore.to_style(name, "torch_dist") == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
        assert mcore.to_style(name, "legacy") == "language_model.encoder.layers.2.input_norm.weight"
        assert mcore.to_style(name, "pipeline") == "4.input_layernorm.weight"

    def test_latent_attention_keeps_its_norms(self):
        deepseek = family("deepseek-v2")
        name = "decoder.layers.2.input_layernorm.weight"
        assert deepseek.to_style(name, "torch_dist") == "decoder.layers.input_layernorm.weight"
        assert [names for _, names in deepseek.find_spellings(name, "torch_dist")] == [
            ("decoder.layers.input_layernorm.weight",),
            ("decoder.layers.self_attention.linear_qkv.layer_norm_weight",),
        ]

    def test_what_a_style_lacks_is_an_error(self, mcore):
        with pytest.raises(FamilyError, match=r"embeddings\.weight .*no name .*'huggingface'"):
            mcore.to_style("embedding.word_embeddings.weight", "huggingface")
        with pytest.raises(FamilyError, match=r"3 tensors .*'huggingface': .*q_proj"):
            family("llama").to_style("decoder.layers.0.self_attention.linear_qkv.weight", "huggingface")
        with pytest.raises(UsageError, match=r"mcore, te, .*; got 'bert'"):
            mcore.to_style("embedding.word_embeddings.weight", "bert")
        with pytest.raises(FamilyError, match=r"no rule .*\n  nothing\n"):
            mcore.to_style("nothing", "te")

    def test_a_name_of_several_parameters_is_not_guessed(self):
        with pytest.raises(FamilyError, match=r"input_layernorm.* or .*norm"):
            family("mcore-hybrid").read("backbone.layers.1.norm.weight")

    def test_a_layer_past_the_last_is_an_extra_one(self):
        deepseek = family("deepseek-v3").bind(arguments={"num_layers": 61})
        own = deepseek.read("model.layers.61.self_attn.o_proj.weight", "huggingface")
        assert own.canonical == "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight"
        own = deepseek.read("model.layers.60.self_attn.o_proj.weight", "huggingface")
        assert own.canonical == "decoder.layers.60.self_attention.linear_proj.weight"


class TestSizes:
    def test_from_arguments(self, mcore):
        assert (mcore.values["groups"], mcore.values["head_dim"], mcore.values["gated"]) == (8, 4, 1)

    def test_grouped_queries_only_where_they_are_on(self):
        own = family("llama").bind(arguments={**GPT, "group_query_attention": True, "num_query_groups": 2})
        assert own.values["groups"] == 2
        own = family("llama").bind(arguments={**GPT, "group_query_attention": False, "num_query_groups": 1})
        assert own.values["groups"] == 8

    @pytest.mark.parametrize(("rows", "gated"), [(16, 1), (8, 0)])
    @pytest.mark.parametrize("prefix", ["decoder.layers.0", "decoder.layers.1", "language_model.encoder.layers.0"])
    def test_from_shapes_of_any_style(self, rows, gated, prefix):
        names = (
            ("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight")
            if "language" in prefix
            else ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
        )
        shapes = dict(zip((f"{prefix}.{name}" for name in names), [(rows, 4), (4, 8)], strict=True))
        assert family("mcore-gpt").bind(shapes=shapes).values["gated"] == gated

    def test_of_one_rank_with_degrees(self):
        shapes = {"decoder.layers.0.mixer.out_proj.weight": (8, 16), "decoder.layers.0.mixer.A_log": (4,)}
        shapes["decoder.layers.0.mixer.in_proj.weight"] = (2 * 16 + 2 * 6 + 4, 8)
        values = family("mcore-hybrid").bind(shapes=shapes, axes={"tp": 2}).values
        assert (values["d_inner"], values["mamba_heads"], values["mamba_state"]) == (32, 8, 12)

    def test_shapes_that_disagree_say_nothing(self):
        shapes = {"decoder.layers.0.mlp.linear_fc1.weight": (16, 4), "decoder.layers.1.mlp.linear_fc1.weight": (8, 4)}
        shapes["decoder.layers.0.mlp.linear_fc2.weight"] = (4, 8)
        assert "gated" not in family("mcore-gpt").bind(shapes=shapes).values

    @pytest.mark.parametrize(
        ("arguments", "rows", "tp", "pattern"),
        [
            ({}, 24, 2, "replicate"),
            ({}, 12, 2, "shard"),
            ({"transformer_impl": "local"}, 24, 1, "shard"),
            ({"transformer_impl": "transformer_engine"}, 24, 1, "replicate"),
        ],
    )
    def test_down_projections_of_latent_attention_are_cut_or_whole(self, arguments, rows, tp, pattern):
        name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
        own = family("deepseek-v2").bind(
            arguments={"kv_lora_rank": 16, "qk_pos_emb_head_dim": 8, **arguments},
            shapes={name: (rows, 4)},
            axes={"tp": tp},
        )
        assert own.match([name])[name].rule.axes[0].pattern == pattern


class TestMatch:
    def test_all_names_without_a_rule_are_told_at_once(self):
        names = ["decoder.layers.0.mlp.linear_fc1.weight", "a.b", "decoder.layers.0.mlp.router.weight"]
        with pytest.raises(FamilyError, match=r"2 names .*'llama':\n  a\.b\n  decoder.*router"):
            family("llama").match(names)

    def test_two_rules_for_a_name_are_told(self):
        own = family("mcore-gpt")
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        both = [rule for rule in own.rules if rule.name.text == "decoder.layers.{layer}.mlp.linear_fc1.weight"]
        twice = replace(own, rules=tuple(replace(rule, when=None) for rule in both))
        with pytest.raises(FamilyError, match=r"two rules .*:\n  .*linear_fc1\.weight: .* and "):
            twice.match([name])

    def test_what_is_no_parameter_is_left_out(self, mcore):
        names = ["decoder.layers.0.mlp.linear_fc1._extra_state", "rotary_pos_emb.inv_freq"]
        assert mcore.match([*names, "output_layer.weight"]).keys() == {"output_layer.weight"}
        assert mcore.ignores(names[0])
        assert not mcore.ignores("output_layer.weight")

    def test_a_match_knows_its_numbers(self, mcore):
        name = "decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight"
        match = mcore.match([name])[name]
        assert match.fields == {"layer": 2, "expert": 5}
        assert match.renamed(layer=9) == "decoder.layers.9.mlp.experts.local_experts.5.linear_fc2.weight"
        assert match.template == "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
        assert match.axes({"tp": 4, "etp": 2}) == ("etp",)

    def test_vocabulary_is_padded(self, mcore):
        assert mcore.match(["output_layer.weight"])["output_layer.weight"].rule.padded == 0

    def test_an_open_question_is_asked_when_it_matters(self):
        names = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.input_layernorm.weight"]
        matches = family("mcore-gpt").match(names)
        matches[names[1]].layout(axes={"tp": 2}, global_shape=(4,))
        with pytest.raises(FamilyError, match=r"linear_fc1\.weight .*gated, .* \[given\] gated = N \(--patterns\)"):
            matches[names[0]].layout(axes={"tp": 2}, global_shape=(8, 4))

    def test_averaged_parameters(self):
        own = family("bloom")
        name = own.canonical("3.input_layernorm.weight", "pipeline")
        assert name == "decoder.layers.0.input_layernorm.weight"
        layout = own.match([name])[name].layout(axes={"tp": 4}, local_shapes=[(8,)] * 4)
        assert layout.axes[0].pattern.overlap is Overlap.MEAN


class TestLayout:
    NAME = "decoder.layers.0.mlp.linear_fc1.weight"

    def layout(self, **arguments):
        own = family("llama")
        return own.match([self.NAME])[self.NAME].layout(**arguments)

    def test_from_the_parts_or_the_whole(self):
        parts = self.layout(axes={"tp": 4, "etp": 2}, local_shapes=[(6, 5)] * 4)
        assert parts == self.layout(axes={"tp": 4}, global_shape=(24, 5))
        assert parts.axes[0].pattern.name == "shard(dim=0, blocks=[12, 12])"

    def test_no_axis_is_one_whole_tensor(self):
        assert self.layout(axes={}, local_shapes=[(6, 5)]).axes == ()
        assert self.layout(axes={"tp": 1}, global_shape=(6, 5)).axes[0].parts == 1

    def test_sizes_that_are_not_known_are_named(self):
        name = "decoder.layers.0.mixer.conv1d.bias"
        match = family("mcore-hybrid").match([name])[name]
        layout = replace(match, values={"d_inner": 8, "mamba_state": 2}).layout(axes={"tp": 2}, global_shape=(12,))
        assert layout.axes[0].pattern.name == "shard(dim=0, blocks=[8, 2, 2])"
        with pytest.raises(FamilyError, match="d_inner"):
            match.layout(axes={"tp": 2}, global_shape=(12,))

    @pytest.mark.parametrize(
        ("arguments", "facts"),
        [
            ({"axes": {"tp": 2}, "local_shapes": [(6, 5)]}, r"2 parts \(tp=2\); got 1"),
            ({"axes": {"tp": 2}, "local_shapes": [(6, 5), (6, 4)]}, r"got shapes \[\[6, 5\], \[6, 4\]\]"),
            ({"axes": {"tp": 2}, "local_shapes": [(6, 5), (5, 5)]}, "11 .*multiple of 2"),
            ({"axes": {"tp": 2}, "local_shapes": [(7, 5), (3, 5)]}, r"got shapes \[\[7, 5\], \[3, 5\]\]"),
            ({"axes": {"tp": 2}, "global_shape": (7, 5)}, "7 .*multiple of 2"),
            ({"axes": {"tp": 2}, "global_shape": ()}, r"shape \(\) .*dim 0"),
        ],
    )
    def test_what_does_not_fit_says_where_and_why(self, arguments, facts):
        with pytest.raises(FamilyError, match=facts) as raised:
            self.layout(**arguments)
        assert self.NAME in str(raised.value)
        assert "--family" in str(raised.value)

    def test_the_shape_of_the_whole(self):
        match = family("llama").match([self.NAME])[self.NAME]
        layout = match.layout(axes={"tp": 2}, local_shapes=[(6, 5)] * 2)
        assert match.global_shape(layout, [(6, 5)] * 2) == (12, 5)
        with pytest.raises(FamilyError, match=r"got shapes \[\[6, 5\], \[6, 6\]\]"):
            match.global_shape(layout, [(6, 5), (6, 6)])


class TestOrder:
    def test_it_is_that_of_registration(self, mcore):
        layer = [
            "input_layernorm.weight",
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_qkv.bias",
            "self_attention.q_layernorm.weight",
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            "mlp.experts.local_experts.0.linear_fc1.weight",
            "mlp.experts.local_experts.0.linear_fc2.weight",
            "mlp.experts.local_experts.2.linear_fc1.weight",
            "mlp.experts.local_experts.10.linear_fc1.weight",
            "mlp.shared_experts.gate_weight",
            "mlp.shared_experts.linear_fc1.weight",
        ]
        wanted = [
            "embedding.word_embeddings.weight",
            *(f"decoder.layers.{number}.{name}" for number in (2, 10) for name in layer),
            "decoder.final_layernorm.weight",
            "mtp.layers.0.enorm.weight",
            "mtp.layers.0.eh_proj.weight",
            *(f"mtp.layers.0.transformer_layer.{name}" for name in layer),
            "mtp.layers.0.final_layernorm.weight",
            "output_layer.weight",
        ]
        assert mcore.sort_canonical(sorted(wanted)) == wanted
        assert mcore.sort_canonical(reversed([*wanted, "zzz", "aaa"])) == [*wanted, "aaa", "zzz"]


@pytest.mark.parametrize("layers", [-1, 10**6, 10**18])
def test_sizes_that_no_name_counts_to_make_no_names(layers):
    """Arguments of a damaged checkpoint may say anything."""
    bound = family("deepseek-v3").bind(arguments={"num_layers": layers})
    assert bound.written_names(bound.rules_of("mtp.layers.0.enorm.weight")[0], "huggingface") == ()
