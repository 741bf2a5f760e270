"""The families' names in Hugging Face, against what transformers itself writes (`make_hf_names.py`).

Every model of `fixtures/huggingface/` was made and saved by transformers; its configuration is what the family is told.
Five of them have the sizes of a model of the Megatron fixtures: the names and shapes that the family derives from
megatron-core's tensors must be those that transformers wrote.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ucp.contract.registry import choose_family, families, family
from ucp.core.region import Box
from ucp.errors import FamilyError
from ucp.families.family import Family
from ucp.families.naming import ParsedName
from ucp.families.rule import Alias, Rule
from ucp.families.template import Template
from ucp.families.translate import find_missing

FIXTURES = Path(__file__).parents[2] / "fixtures"
STYLE = "huggingface"
BASE = {"gpt2-base", "bloom-base"}
"""Models without a head: a class of their own, names without the part before the first dot."""
COPIES = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
"""Embedding and head once more, with the layer of multi-token prediction of a model of two layers."""
NORM = Template("backbone.layers.{layer}.norm.weight")
"""Nemotron-H calls the norm of every layer so, whatever the layer is."""
NORMS = {
    "linear_attention": "decoder.layers.{layer}.norm.weight",
    "full_attention": "decoder.layers.{layer}.input_layernorm.weight",
    "mlp": "decoder.layers.{layer}.pre_mlp_layernorm.weight",
    "moe": "decoder.layers.{layer}.pre_mlp_layernorm.weight",
}
NAMELESS = {
    "embedding.tokentype_embeddings.weight",
    "decoder.layers.{layer}.mlp.router.bias",
    "decoder.layers.{layer}.mlp.router.local_tokens_per_expert",
    "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.bias",
    "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.bias",
}
"""What Megatron can have, and no model of Hugging Face that a family stands for."""
DERIVED = {f"mtp.layers.{{mtp}}.transformer_layer.mlp.linear_fc{number}.weight" for number in (1, 2)}
"""Multi-token prediction with a dense layer, which transformers never builds: named like a dense layer."""
NAMELESS_IN = {
    "mcore-hybrid": {"decoder.layers.{layer}.mlp.shared_experts.gate_weight"},
    "qwen3-moe": {"decoder.layers.{layer}.mlp.router.expert_bias"},
}
"""The same for one family: megatron-core's hybrids may have a gate of shared experts, Nemotron-H has none; torchtitan
balances the experts of Qwen 3 by a bias, transformers has none."""


@dataclass(frozen=True)
class Model:
    """A model that transformers made."""

    name: str
    """E.g. "llama-3"; with the release behind it where that is an old one."""
    old: bool
    """Written by transformers 4.28.1: files of torch, with masks and tables in them."""
    made: Mapping[str, object]
    """`made` (its class), `family`, `twin`, `transposed` (weights kept as [in, out]), `config`, `tensors`."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the file to shape, those left out that are no parameters."""
        ignores = family(self.made["family"]).ignores
        return {name: tuple(shape) for name, shape in self.made["tensors"].items() if not ignores(name)}

    @property
    def config(self) -> Mapping[str, int]:
        return self.made["config"]

    @cached_property
    def family(self) -> Family:
        """The family that it is of, told of its configuration, shapes and names."""
        return family(self.made["family"]).bind(arguments=self.config, shapes=self.shapes).among(self.shapes)

    @cached_property
    def named(self) -> dict[str, ParsedName]:
        """Name in the file to what it stands for; None where there is no rule."""
        return {name: self.family.read(name, STYLE) for name in self.shapes}

    @cached_property
    def parameters(self) -> dict[str, list[str]]:
        """Canonical name to the names in the file that it is made of, in order."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for name, named in self.named.items():
            if name not in COPIES:
                found[named.canonical][named.part] = name
        return {canonical: [parts[part] for part in sorted(parts)] for canonical, parts in found.items()}

    def joined(self, canonical: str) -> tuple[Alias, list[tuple[int, ...]]]:
        """How a parameter is made of tensors in the file, and their shapes as its rule sees them."""
        names = self.parameters[canonical]
        alias = self.named[names[0]].alias
        values = self.family.values
        return alias, [alias.elements(self.shapes[name], values).shape for name in names]


def models() -> Iterator[Model]:
    for release, old in (("5.23.0", False), ("4.28.1", True)):
        document = json.loads((FIXTURES / STYLE / f"names-{release}.json").read_text())
        for name, made in document["models"].items():
            yield Model(f"{name}-{release}" if old else name, old, made)


MODELS = {model.name: model for model in models()}
TWINS = {name: model.made["twin"] for name, model in MODELS.items() if model.made["twin"] and not model.old}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def truth(model: str) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape, of a model that megatron-core trained."""
    with safe_open(FIXTURES / "megatron" / "truth" / f"{model}.safetensors", "np") as file:
        keys = [key for key in file.keys() if key.endswith(("/weight", "/buffer"))]  # noqa: SIM118
        return {key.rpartition("/")[0]: tuple(file.get_slice(key).get_shape()) for key in keys}


def whole_shape(alias: Alias, shapes: list[tuple[int, ...]], values: Mapping[str, int]) -> tuple[int, ...]:
    stops = [pair.global_box.stops for pair in alias.locate_parts(shapes, values)]
    return tuple(map(max, zip(*stops, strict=True)))


@every_model
def test_the_family_is_recognised(name):
    model = MODELS[name]
    found, _ = choose_family(names=list(model.made["tensors"]), shapes=model.shapes, arguments=model.config)
    assert (found.name, found.conflicts) == (model.made["family"], ())
    assert not find_missing(found, model.shapes)


@every_model
def test_every_name_has_a_rule_and_leads_back(name):
    model = MODELS[name]
    without = [own for own, named in model.named.items() if named is None]
    assert not without
    model.family.match([named.canonical for named in model.named.values()])
    for own, named in model.named.items():
        assert model.family.canonical(own) == named.canonical, "other styles do not read it as something else"
        spellings = [names for _, names in model.family.find_spellings(named.canonical, STYLE)]
        assert own in {names[named.part] for names in spellings if len(names) > named.part}
        if name not in BASE and own not in COPIES:
            assert model.family.find_spelling(named.canonical, STYLE)[1][named.part] == own


@every_model
def test_weights_are_turned_that_transformers_keeps_the_other_way_round(name):
    """A square one shows it in no shape."""
    model = MODELS[name]
    turned = {own for own, named in model.named.items() if named.alias.order}
    assert turned == set(model.made["transposed"])
    assert all(model.named[own].alias.order == (1, 0) for own in turned)


@every_model
def test_queries_keys_and_values_lie_where_megatron_core_reads_them(name):
    """`SelfAttention.get_query_key_value_tensors` views the rows as [groups, queries of a group + 2, head_dim]."""
    model = MODELS[name]
    values = model.family.values
    for canonical in [own for own in model.parameters if "linear_qkv" in own]:
        stored = numbered(model, canonical)
        groups, heads, width = values["groups"], values["heads"], values["head_dim"]
        turns = joined(model, canonical, stored).reshape(groups, heads // groups + 2, width, -1)
        wanted = np.concatenate([turns[:, :-2], turns[:, -2:-1], turns[:, -1:]], axis=1)
        query, key, value = (own.reshape(-1, wanted.shape[-1]) for own in as_hugging_face_reads(model, stored))
        assert wanted[:, :-2].reshape(query.shape).tolist() == query.tolist()
        assert wanted[:, -2].reshape(key.shape).tolist() == key.tolist()
        assert wanted[:, -1].reshape(value.shape).tolist() == value.tolist()


def numbered(model: Model, canonical: str) -> list[np.ndarray]:
    """The tensors of a parameter, as they are in the file, every element a number of its own."""
    shapes = [model.shapes[name] for name in model.parameters[canonical]]
    starts = np.cumsum([0, *map(prod, shapes)])
    return [np.arange(start, start + prod(shape)).reshape(shape) for start, shape in zip(starts, shapes, strict=False)]


def joined(model: Model, canonical: str, stored: list[np.ndarray]) -> np.ndarray:
    """The parameter, put together as its alias says."""
    alias, shapes = model.joined(canonical)
    values = model.family.values
    whole = np.full(whole_shape(alias, shapes, values), -1)
    seen = []
    for own in stored:
        elements = alias.elements(own.shape, values)
        strides = [own.itemsize * stride for stride in elements.strides]
        seen.append(np.lib.stride_tricks.as_strided(own, elements.shape, strides))
    for pair in alias.locate_parts(shapes, values):
        whole[slices(pair.global_box)] = seen[pair.tensor][slices(pair.local)]
    return whole


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


def as_hugging_face_reads(model: Model, stored: list[np.ndarray]) -> list[np.ndarray]:
    """Queries, keys and values of all heads, one after another, as the model's own code takes them from its tensors."""
    if len(stored) == 3:
        return stored
    (fused,) = stored
    if model.made["family"] == "gpt":  # modeling_gpt2: Conv1D [in, out], then split(split_size, dim=2)
        return np.split(fused.T if fused.ndim == 2 else fused, 3)
    heads = model.config.get("n_head") or model.config["num_attention_heads"]
    apart = fused.reshape(heads, 3, -1, *fused.shape[1:])  # modeling_bloom, _gpt_neox: view(..., heads, 3, head_dim)
    return [apart[:, own].reshape(-1, *fused.shape[1:]) for own in range(3)]


SIZES = {
    "gpt": {"heads": "n_head", "groups": "n_head", "hidden": "n_embd", "layers": "n_layer"},
    "bloom": {"heads": "n_head", "groups": "n_head", "hidden": "hidden_size", "layers": "n_layer"},
    "mcore-hybrid": {"heads": "num_attention_heads", "groups": "num_key_value_heads", "hidden": "hidden_size"},
}
"""Size of the family to the key of the configuration that says it, where that is a matter of the model."""


@every_model
def test_the_configuration_says_the_sizes(name):
    """Without a look at the tensors."""
    model = MODELS[name]
    own = family(model.made["family"]).bind(arguments=model.config)
    wanted = {"heads": "num_attention_heads", "hidden": "hidden_size", "layers": "num_hidden_layers"}
    wanted = SIZES.get(own.name, wanted)
    assert {size: own.values.get(size) for size in wanted} == {size: model.config[key] for size, key in wanted.items()}
    assert own.conflicts == ()


@every_model
def test_a_tied_head_is_the_embedding(name):
    model = MODELS[name]
    if "tie_word_embeddings" in model.config:
        tied = model.family.find_tied("output_layer.weight")
        assert tied == ("embedding.word_embeddings.weight" if model.config["tie_word_embeddings"] else None)
        assert ("output_layer.weight" in model.parameters) == (tied is None and name not in BASE)


@pytest.mark.parametrize("name", TWINS)
def test_megatrons_tensors_are_those_of_the_model_of_the_same_sizes(name):
    """Both directions, for a whole model: no name of either side is left over, and all shapes agree."""
    model = MODELS[name]
    whole = truth(TWINS[name])
    stored = {own: model.family.find_spelling(own, STYLE)[1] for own in whole}
    assert sorted(each for names in stored.values() for each in names) == sorted(model.shapes)
    for canonical, shape in whole.items():
        assert model.parameters[canonical] == list(stored[canonical])
        assert whole_shape(*model.joined(canonical), model.family.values) == shape, canonical


def test_every_model_of_the_megatron_fixtures_has_a_twin():
    """But `qwen`, which has both Qwen 2's biases and Qwen 3's norms to prove more at once: no model is like that."""
    made = {path.stem for path in (FIXTURES / "megatron" / "truth").glob("*.safetensors")}
    assert made - set(TWINS.values()) == {"qwen"}


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.made["family"] == "mcore-hybrid"])
def test_the_norms_of_a_hybrid_go_by_what_else_the_layer_has(name):
    """The configuration says of every layer what it is; a family is told of the names alone."""
    model = MODELS[name]
    kinds = model.made["config"]["layers_block_type"]
    assert sum(NORM.fields_in(own) is not None for own in model.shapes) == len(kinds)
    found, _ = choose_family(names=list(model.shapes), shapes=model.shapes)
    alone = family(model.made["family"]).among([NORM.filled({"layer": layer}) for layer in range(len(kinds))])
    twice = found.among([*model.shapes, *(f"backbone.layers.{n}.mixer.in_proj.weight" for n in range(len(kinds)))])
    for layer, kind in enumerate(kinds):
        canonical, stored = Template(NORMS[kind]).filled({"layer": layer}), NORM.filled({"layer": layer})
        assert model.family.to_style(canonical, STYLE) == stored
        assert found.canonical(stored) == found.canonical(stored, STYLE) == canonical
        for unsure, said in ((alone, "has none"), (twice, f"neighbours of .*{canonical}")):
            if unsure is alone or kind != "linear_attention":
                with pytest.raises(FamilyError, match=said) as caught:
                    unsure.read(stored)
                assert all(Template(own).filled({"layer": layer}) in str(caught.value) for own in NORMS.values())
                assert "--patterns" in str(caught.value)


@pytest.mark.parametrize("name", [own for own in families() if own != "mcore-gpt"])
def test_no_name_of_a_family_is_unproven(name):
    """Whatever names a family gives a parameter, transformers has them in the files of some model; few have none."""
    own = [model for model in MODELS.values() if model.made["family"] == name]
    unproven, nameless = [], []
    for rule in own[0].family.rules:
        if not any(model.family.written_names(rule, STYLE) for model in own):
            nameless.append(rule.name.text.replace("mtp.layers.{mtp}.transformer_layer.", "decoder.layers.{layer}."))
        elif not any(names <= set(model.made["tensors"]) for model in own for names in written(rule, model)):
            unproven.append(rule.name.text)
    assert set(unproven) == (DERIVED if name == "deepseek-v3" else set())
    assert set(nameless) <= NAMELESS | NAMELESS_IN.get(name, set())


def written(rule: Rule, model: Model) -> Iterator[set[str]]:
    """Names in Hugging Face of every parameter of a rule that the model has, or may have under a name for several."""
    for canonical in model.parameters:
        if rule.name.fields_in(canonical) is not None:
            yield set(model.family.find_spelling(canonical, STYLE)[1])


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("gpt2-4.28.1", ["transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"]),
        ("bloom-4.28.1", []),
        (
            "gpt-neox-4.28.1",
            [
                "gpt_neox.layers.{layer}.attention.bias",
                "gpt_neox.layers.{layer}.attention.masked_bias",
                "gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq",
            ],
        ),
        ("llama-2-4.28.1", ["model.layers.{layer}.self_attn.rotary_emb.inv_freq"]),
    ],
)
def test_masks_and_tables_in_old_files_are_no_parameters(name, left):
    model = MODELS[name]
    layers = range(model.family.values["layers"])
    wanted = {Template(each).filled({"layer": layer}) for each in left for layer in layers}
    assert set(model.made["tensors"]) - set(model.shapes) == wanted
