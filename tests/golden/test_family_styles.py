"""The families' other styles, against what the frameworks themselves make of a file of Hugging Face (`make_styles.py`).

`fixtures/styles/` holds what transformers 5 has in memory, and what torchtitan 0.2 and 0.3, nanoGPT and DeepSpeed's
AutoEP have after their own code took the file over: name, shape and a digest of the elements, each of which was a
number of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path

import numpy as np
import pytest

from ucp.contract.registry import choose_family, family
from ucp.errors import FamilyError, UnsupportedError
from ucp.families.family import Family
from ucp.families.naming import CANONICAL
from ucp.families.recipes import TensorRecipe
from ucp.families.template import Template
from ucp.families.translate import translate
from ucp.source.naming import _list_further_names

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = json.loads((FIXTURES / "huggingface" / "names-5.23.0.json").read_text())["models"]
DISK = "huggingface"
STYLES = {
    "transformers": "transformers-5.23.0",
    "torchtitan": "torchtitan-0.3.0",
    "torchtitan_0_2": "torchtitan-0.2.2",
    "nanogpt": "nanogpt-3adf61e",
    "autoep": "autoep-0.19.8",
}
"""Style to the file with what its framework makes."""
HEAD = "lm_head.weight"
"""Where it is tied to the embedding, models hold it twice and files once."""
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
"""Embedding and head once more in files of DeepSeek-V3; torchtitan's adapter has no names for them."""
DERIVED = {f"mtp.layers.{{mtp}}.transformer_layer.mlp.linear_fc{number}.weight" for number in (1, 2)}
"""Multi-token prediction with a dense layer, which no released model has: named like a dense layer."""
TITAN = {"torchtitan", "torchtitan_0_2"}
WITH_STYLES = {
    "gpt": {"nanogpt"},
    "llama": TITAN | {"meta"},
    **dict.fromkeys(("qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3"), TITAN),
}
"""Family to the styles that it has beside those that all have."""
ALWAYS = {DISK, "transformers", "te", "fsdp_dtensor"}
OURS = ALWAYS | TITAN | {"nanogpt", "meta"}


@dataclass(frozen=True)
class Taken:
    """A model of transformers, and what a framework made of its file."""

    style: str
    name: str
    tensors: Mapping[str, list]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        second = {HEAD} if self.is_tied else set()
        second |= {
            name
            for name in self.tensors
            if name.replace(".gate.gate.", ".router.gate.") in self.tensors.keys() - {name}
        }
        return {name: tuple(own[:-1]) for name, own in self.tensors.items() if name not in second}

    @property
    def is_tied(self) -> bool:
        return NAMES[self.name]["config"]["tie_word_embeddings"]

    @property
    def family(self) -> Family:
        return bound(self.name)


@cache
def taken(style: str) -> dict[str, Taken]:
    models = json.loads((FIXTURES / "styles" / f"{STYLES[style]}.json").read_text())["models"]
    return {name: Taken(style, name, tensors) for name, tensors in models.items()}


ALL = [pytest.param(own, id=f"{style}-{own.name}") for style in STYLES for own in taken(style).values()]
every_model = pytest.mark.parametrize("model", ALL)


@cache
def bound(name: str) -> Family:
    made = NAMES[name]
    return family(made["family"]).bind(arguments=made["config"], shapes=on_disk(name)).among(made["tensors"])


def on_disk(name: str) -> dict[str, tuple[int, ...]]:
    return {own: tuple(shape) for own, shape in NAMES[name]["tensors"].items() if own not in COPIES}


def counted(name: str) -> dict[str, np.ndarray]:
    """Tensors of the file, as `make_styles.py` counts them."""
    start, found = 0, {}
    for own, shape in sorted(NAMES[name]["tensors"].items()):
        found[own] = np.arange(start, start + prod(shape), dtype=np.int32).reshape(shape)
        start += prod(shape)
    return {own: tensor for own, tensor in found.items() if own not in COPIES}


def carried_out(made: Mapping[str, TensorRecipe], sources: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors that are to be made; every element must be."""
    found = {}
    for name, own in made.items():
        whole = np.full(own.shape, -1, np.int32)
        for patch in own.patches:
            source = sources[patch.source]
            steps = [0 if dim is None else step * source.strides[dim] for dim, step in patch.dim_steps]
            part = np.lib.stride_tricks.as_strided(
                source[(*map(slice, patch.global_box.offsets, source.shape),)], patch.local.sizes, steps
            )
            whole[tuple(map(slice, patch.local.offsets, patch.local.stops))] = part
        assert (whole >= 0).all(), name
        found[name] = whole
    return found


def digest(tensor: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()[:16]


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, own in wanted.items():
        assert found[name].shape == own.shape, name
        assert (found[name] == own).all(), name


@every_model
def test_tensors_are_those_that_the_framework_makes(model):
    made = translate(model.family, on_disk(model.name), model.style, source=DISK)
    found = carried_out(made, counted(model.name))
    assert {name: (*own.shape, digest(own)) for name, own in found.items()} == {
        name: tuple(own) for name, own in model.tensors.items() if name in model.shapes
    }


@every_model
def test_the_way_back_gives_the_file(model):
    disk = counted(model.name)
    theirs = carried_out(translate(model.family, on_disk(model.name), model.style, source=DISK), disk)
    same(carried_out(translate(model.family, model.shapes, DISK, source=model.style), theirs), disk)


@pytest.mark.parametrize("name", ["llama-2"])
def test_metas_names_and_pairs_of_rows_are_those_of_torchtitan_0_2(name):
    """torchtitan took both over from Meta's model; its way to DCP from `consolidated.*.pth` renames nothing."""
    model = taken("torchtitan_0_2")[name]
    assert (
        carried_out(translate(model.family, on_disk(name), "meta", source=DISK), counted(name)).keys()
        == model.shapes.keys()
    )
    made = {style: translate(model.family, on_disk(name), style, source=DISK) for style in ("meta", "torchtitan_0_2")}
    same(*(carried_out(own, counted(name)) for own in made.values()))


@pytest.mark.parametrize("name", taken("autoep"))
def test_second_names_are_those_that_autoep_has(name):
    model = taken("autoep")[name]
    second = {
        further: stored
        for stored in model.shapes
        if ".experts." not in stored
        for further in _list_further_names(stored, model.family, "autoep")
    }
    assert second == {
        further: further.replace(".gate.gate.", ".router.gate.")
        for further in model.tensors.keys() - model.shapes.keys()
    }
    assert bool(second) is not name.startswith("deepseek")


@pytest.mark.parametrize("style", ["torchtitan", "transformers", "nanogpt", "autoep"])
def test_no_name_of_a_style_is_unproven(style):
    """Names that a family has in a style beside those of Hugging Face, some model of the framework has."""
    shown = {name for own in taken(style).values() for name in own.tensors}
    unproven = []
    for found in map(bound, {NAMES[name]["family"]: name for name in taken(style)}.values()):
        for rule in found.rules:
            names = found.written_names(rule, style)
            if names != found.written_names(rule, DISK) and not any(is_shown(name, shown) for name in names):
                unproven.append(rule.name.text)
    assert set(unproven) == (DERIVED if style == "torchtitan" else set())


def is_shown(template: str, names: set[str]) -> bool:
    return any(Template(template).fields_in(name) is not None for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_every_style_leads_back(name):
    """From the canonical tensors to a style and back, for every style that has a name for all of them."""
    found = bound(name)
    canonical = carried_out(translate(found, on_disk(name), CANONICAL, source=DISK), counted(name))
    shapes = {own: tensor.shape for own, tensor in canonical.items()}
    complete = set()
    for style in found.styles:
        try:
            there = translate(found, shapes, style, source=CANONICAL)
        except (FamilyError, UnsupportedError):
            continue
        complete.add(style)
        stored = carried_out(there, canonical)
        back = translate(found, {own: tensor.shape for own, tensor in stored.items()}, CANONICAL, source=style)
        same(carried_out(back, stored), canonical)
    assert complete & OURS == ALWAYS | WITH_STYLES.get(found.name, set())


def test_a_buffer_that_transformers_lacks_is_left_out() -> None:
    """torchtitan 0.3 balances the experts of a Qwen 3 by `moe.expert_bias_E`; its adapter has no name for it."""
    model = taken("torchtitan")["qwen3-moe"]
    biases = {f"layers.{layer}.moe.expert_bias_E": (3,) for layer in range(2)}
    shapes = {**model.shapes, **biases}
    found, _ = choose_family(names=shapes, shapes=shapes, arguments=NAMES[model.name]["config"])
    assert found.name == "qwen3-moe"
    for style in (DISK, "transformers"):
        assert translate(found, shapes, style) == translate(model.family, model.shapes, style)
    canonical = translate(found, shapes, CANONICAL)
    assert canonical["decoder.layers.1.mlp.router.expert_bias"].sources == ("layers.1.moe.expert_bias_E",)
    assert translate(found, shapes, "torchtitan").keys() == shapes.keys()
