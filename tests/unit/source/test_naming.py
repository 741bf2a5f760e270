"""Other names: by rules of the user's own, and by the styles of a family."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import ucp
from ucp.api import convert, diff, plan
from ucp.core.index import ParamGroup
from ucp.errors import MisfitError, ReplicaError, UsageError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

KEPT = Path(__file__).parents[3] / "fixtures" / "megatron"
FIXTURES = Path(__file__).parents[3] / "fixtures"
HIDDEN = 8
MODEL = {
    "emb.weight": (16, HIDDEN),
    **{f"blocks.{layer}.{name}": shape for layer in range(2) for name, shape in [("gate", (6, 8)), ("up", (6, 8))]},
    **{f"blocks.{layer}.experts": (3, 4, HIDDEN) for layer in range(2)},
    "head.weight": (HIDDEN, 16),
}
RULES = """
[sizes]
half = 8

[[rename]]
from = "emb.weight"
to = ["left.weight", "right.weight"]
lengths = ["half / 2", "12"]

[[rename]]
from = ["blocks.{layer}.gate", "blocks.{layer}.up"]
to = "layers.{layer}.gate_up"
groups = 2

[[rename]]
from = "blocks.{layer}.experts"
to = "layers.{layer}.experts.{expert}"

[[rename]]
from = "head.weight"
order = [1, 0]
to = "lm_head.weight"
"""


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in MODEL.items()}


@pytest.fixture
def store(tmp_path: Path, values: dict[str, torch.Tensor]) -> Path:
    shards = Shards(tmp_path / "store")
    states = {}
    for name, value in values.items():
        states |= {(name, "weight"): shards.whole(value.numpy()), (name, "exp_avg"): shards.whole(-value.numpy())}
        states[name, "step"] = shards.whole(torch.tensor(3.0).numpy())
    write_checkpoint(make_index(tmp_path / "store", states, groups=[ParamGroup(params=tuple(values), hyper={"lr": 1})]))
    return tmp_path / "store"


def rules(folder: Path, text: str) -> Path:
    path = folder / "names.toml"
    path.write_text(text)
    return path


def test_rules_join_split_transpose_and_take_apart(
    store: Path, values: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    convert(store, tmp_path / "b", rename=rules(tmp_path, RULES), verify=True, workers=1)
    found = ucp.open(tmp_path / "b")
    wanted = {
        "left.weight": values["emb.weight"][:4],
        "right.weight": values["emb.weight"][4:],
        "lm_head.weight": values["head.weight"].T,
    }
    for layer in range(2):
        gate, up, experts = (values[f"blocks.{layer}.{name}"] for name in ("gate", "up", "experts"))
        wanted[f"layers.{layer}.gate_up"] = torch.cat([gate[:3], up[:3], gate[3:], up[3:]])
        wanted |= {f"layers.{layer}.experts.{expert}": experts[expert] for expert in range(3)}
    assert set(found.index.atoms) == set(wanted)
    assert set(found.index.groups[0].params) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found.read(name, "weight"), value), name
        assert torch.equal(found.read(name, "exp_avg"), -value), name
        assert found.read(name, "step") == 3


def test_there_and_back_is_the_same(store: Path, tmp_path: Path) -> None:
    convert(store, tmp_path / "b", rename=rules(tmp_path, RULES), virtual=True, workers=1)
    back = RULES.replace("from =", "FROM =").replace("to =", "from =").replace("FROM =", "to =")
    convert(tmp_path / "b", tmp_path / "c", rename=rules(tmp_path, back), verify=True, workers=1)
    assert diff(store, tmp_path / "c").equal


def test_a_name_without_a_rule_stays_and_is_told(store: Path, tmp_path: Path) -> None:
    text = '[[rename]]\nfrom = "head.weight"\nto = "lm_head.weight"'
    report = plan(store, rename=rules(tmp_path, text))
    assert set(MODEL) - set(report.source.atoms) == {"head.weight"}
    (note,) = [own for own in report.notes if "are unchanged:" in own]
    assert "blocks.1.experts" in note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rename]]\nfrom = "heads.weight"\nto = "b"', r"\n  heads\.weight -> b"),
        ('[[rename]]\nfrom = "head.weight"\nto = "emb.weight"', r"without a rule .*\n  emb\.weight"),
        ('[[rename]]\nfrom = "blocks.{layer}.up"\nto = "{other}.up"', r"got \['blocks\.\{layer\}\.up', "),
        ('[[rename]]\nfrom = ["a", "b"]\nto = ["c", "d"]', r"got \[\['a', 'b'\], "),
        ('[[rename]]\nfrom = "head.weight"\nto = ["a", "b"]\nlengths = [1, 2]', "a, b do not .* 8"),
        ('[[rename]]\nfrom = "head.weight"\nto = ["a", "b", "c"]', "a, b, c do not .* 8"),
        ('[[rename]]\nfrom = "head.weight"', r"field `to` - at `\$\.rename\[0\]`"),
        (
            '[[rename]]\nfrom = "head.weight"\nto = "x"\n[[rename]]\nfrom = "emb.weight"\nto = "x"',
            r"several tensors .*\n  x",
        ),
        ('[[rename]]\nfrom = "head.weight"\nto = ["x", "x"]', r"got \['x', 'x'\]"),
        ('[[rename]]\nfrom = "head.weight"\nto = ["a", "b"]\nlengths = [0, 8]', r"head\.weight, \[8, 16\], .*dim 0, "),
        (
            '[[rename]]\nfrom = ["head.weight", "emb.weight"]\nto = "x"',
            r"head\.weight \[8, 16\], emb\.weight \[16, 8\] .*dim 0, ",
        ),
        ('[[rename]]\nfrom = "head.weight"\nto = "{=1+2}.x"', "rename"),
        ('[[rename]]\nfrom = "head.weight"\nview = [-2, 16]\nto = "x"', "`int` >= -1"),
        ('[[rename]]\nfrom = "head.weight"\nview = [4, 4]\nto = "x"', r"\[4, 4\].*\[8, 16\]"),
        ("[rename]\na = 1", "got `object`"),
        ("a = 1", "a"),
        ("", "field `rename`"),
    ],
)
def test_rules_that_cannot_be_meant(store: Path, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(store, rename=rules(tmp_path, text))


def test_styles_that_are_none(store: Path) -> None:
    with pytest.raises(MisfitError, match="--names huggingface: "):
        plan(store, names="huggingface")
    for text in ("", ":", ":huggingface"):
        with pytest.raises(UsageError, match=f"nanogpt:huggingface; got {text!r}"):
            plan(store, names=text)
    with pytest.raises(UsageError, match=r"megatron .*mcore only: drop --names huggingface"):
        plan(store, names="huggingface", to="megatron", topology="tp=1")


@pytest.mark.parametrize("setting", ["num_query_groups", "num_heads"])
def test_a_size_that_is_none_of_the_family_is_refused(setting: str) -> None:
    """Latent attention has no query groups; other families have."""
    source = KEPT / "deepseek-tp2-ep2-dp2-full" / "checkpoint"
    with pytest.raises(UsageError, match=rf"dcp .*--set.*\n  {setting}"):
        plan(source, to="dcp", names="torchtitan", settings={setting: 3})


def of_deepseek(folder: Path, *, differ: bool) -> Path:
    """DeepSeek-V3 with its extra layer, which repeats the embedding and the output matrix."""
    made = json.loads((FIXTURES / "huggingface" / "names-5.23.0.json").read_text())["models"]["deepseek-v3-mtp"]
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in made["tensors"].items()}
    copies = {name for name in values if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    for name in copies - {"model.embed_tokens.weight"}:
        first = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
        values[name] = values[first] + float(differ)
    shards = Shards(folder)
    write_checkpoint(make_index(folder, {(name, "weight"): shards.whole(own.numpy()) for name, own in values.items()}))
    return folder


def test_tensors_stored_twice_are_one_and_compared(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_layers": 2}
    source = of_deepseek(tmp_path / "a", differ=False)
    convert(source, tmp_path / "b", names="mcore", settings=sizes, workers=1)
    found = ucp.open(tmp_path / "b")
    assert torch.equal(
        found.read("embedding.word_embeddings.weight", "weight"),
        ucp.open(source).read("model.embed_tokens.weight", "weight"),
    )
    with pytest.raises(ReplicaError, match=r"embedding\.word_embeddings\.weight"):
        convert(of_deepseek(tmp_path / "c", differ=True), tmp_path / "d", names="mcore", settings=sizes, workers=1)


def test_a_scalar_is_renamed_stacked_and_taken_apart(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "a")
    states = {(f"scale.{n}", "weight"): shards.whole(torch.tensor(float(n)).numpy()) for n in range(3)}
    write_checkpoint(make_index(tmp_path / "a", states))
    text = '[[rename]]\nfrom = "scale.{n}"\nto = "scales"'
    convert(tmp_path / "a", tmp_path / "b", rename=rules(tmp_path, text), verify=True, workers=1)
    assert torch.equal(ucp.open(tmp_path / "b").read("scales", "weight"), torch.arange(3.0))
    back = '[[rename]]\nfrom = "scales"\nto = "scale.{n}"'
    convert(tmp_path / "b", tmp_path / "c", rename=rules(tmp_path, back), verify=True, workers=1)
    assert diff(tmp_path / "a", tmp_path / "c").equal


def test_a_second_name_that_has_no_place_is_told(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "a")
    states = {("emb.weight", "weight"): shards.whole(torch.randn(4, 3).numpy())}
    index = replace(make_index(tmp_path / "a", states), aliases={"head.weight": "emb.weight"})
    write_checkpoint(index)
    plain = '[[rename]]\nfrom = "emb.weight"\nto = "e.weight"'
    report = plan(tmp_path / "a", rename=rules(tmp_path, plain))
    assert (report.source.aliases, report.dropped) == ({"head.weight": "e.weight"}, ())
    turned = plan(tmp_path / "a", rename=rules(tmp_path, plain + "\norder = [1, 0]"))
    assert turned.source.aliases == {}
    assert any("head.weight = emb.weight" in line for line in turned.dropped)
    taken = plan(tmp_path / "a", rename=rules(tmp_path, '[[rename]]\nfrom = "emb.weight"\nto = "head.weight"'))
    assert taken.source.aliases == {}


def of_llama(folder: Path, *, lacks: str) -> Path:
    """A Llama of two layers, without the tensors whose names match a glob."""
    sizes = {"self_attn.q": (8, 8), "self_attn.k": (8, 8), "self_attn.v": (8, 8), "self_attn.o": (8, 8)}
    sizes |= {"mlp.gate": (12, 8), "mlp.up": (12, 8), "mlp.down": (8, 12)}
    model: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}
    for layer in range(2):
        model |= {f"model.layers.{layer}.{name}_proj.weight": shape for name, shape in sizes.items()}
        model |= {f"model.layers.{layer}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    model["model.norm.weight"] = (8,)
    shards = Shards(folder)
    kept = {name: shape for name, shape in model.items() if not fnmatchcase(name, lacks)}
    write_checkpoint(make_index(folder, {(n, "weight"): shards.whole(torch.zeros(s).numpy()) for n, s in kept.items()}))
    return folder


def test_a_model_without_what_its_family_always_has_is_refused(tmp_path: Path) -> None:
    """OLMo has Llama's names, but norms without weights: a model of megatron-core would keep its initial norms."""
    sizes = {"num_attention_heads": 2}
    source = of_llama(tmp_path / "olmo", lacks="*norm.weight")
    for target in ({"to": "megatron", "topology": "tp=1"}, {"to": "dcp", "names": "torchtitan"}):
        with pytest.raises(MisfitError) as error:
            plan(source, settings=sizes, **target)
        assert {
            f"decoder.layers.{layer}.{norm}_layernorm.weight" for layer in range(2) for norm in ("input", "pre_mlp")
        } | {"decoder.final_layernorm.weight"} == set(re.findall(r"^  (\S+)$", str(error.value), re.MULTILINE))
    plan(source, to="torch")  # under its own names
    partly = tmp_path / "part.toml"
    partly.write_text('name = "part"\nextends = ["llama"]\nrequired = []')
    assert len(plan(source, settings=sizes, names="mcore", patterns=partly).source.atoms) == 10
    chosen = plan(source, settings=sizes, names="mcore", include=["*layers.1*"])
    assert len(chosen.source.atoms) == 4
    with pytest.raises(MisfitError, match=r"these 1:\n  decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        plan(of_llama(tmp_path / "hole", lacks="*1.mlp.down*"), settings=sizes, names="mcore")


@pytest.mark.parametrize("differs", [{}, {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}])
def test_a_model_of_another_type_with_the_names_of_a_family_is_noted(tmp_path: Path, differs: dict[str, str]) -> None:
    """Gemma has Llama's names, but another activation and norms: the bits would be right, and the losses wrong."""
    source = tmp_path / "model"
    shutil.copytree(FIXTURES / "huggingface" / "llama" / "model", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | differs))
    notes = [note for note in plan(source, to="megatron", topology="tp=1").notes if "the names are those" in note]
    assert [all(value in note for value in differs.values()) for note in notes] == [True] * bool(differs)
    assert not any("the names are those" in note for note in plan(source, to="torch").notes)


def test_query_groups_that_the_shapes_contradict_are_refused(tmp_path: Path) -> None:
    """By default there are as many groups as heads, which would join other rows."""
    shards = Shards(tmp_path / "a")
    layer = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    model = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in layer.items()}
    mlp = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    model |= {f"model.layers.0.mlp.{name}.weight": shape for name, shape in mlp.items()}
    model |= {f"model.layers.0.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    model |= {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    values = {name: torch.randn(shape) for name, shape in model.items()}
    states = {(name, "weight"): shards.whole(value.numpy()) for name, value in values.items()}
    write_checkpoint(make_index(tmp_path / "a", states))
    for wrong in ({}, {"num_query_groups": 4}, {"num_query_groups": 1}, {"num_query_groups": 2, "kv_channels": 4}):
        with pytest.raises(MisfitError, match="32, 16, 16; expected heads"):
            plan(tmp_path / "a", names="mcore", settings={"num_attention_heads": 4, **wrong})
    sizes = {"num_attention_heads": 4, "num_query_groups": 2}
    convert(tmp_path / "a", tmp_path / "b", names="mcore", settings=sizes, workers=1)
    q, k, v = (values[f"model.layers.0.self_attn.{own}_proj.weight"] for own in "qkv")
    joined = torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
    found = ucp.open(tmp_path / "b").read("decoder.layers.0.self_attention.linear_qkv.weight", "weight")
    assert torch.equal(found, joined)
