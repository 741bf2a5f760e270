"""Checkpoints of other frameworks: names are translated, tensors joined, arguments derived or asked for."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ucp
from ucp.api import convert, diff, verify
from ucp.conversion.convert import ConvertReport, carry_out, verify_written
from ucp.conversion.options import make_options
from ucp.conversion.prepare import SilentObserver, prepare
from ucp.core.index import ParamGroup
from ucp.errors import CorruptError, IdleOptionError, MisfitError, UsageError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

FIXTURES = Path(__file__).parents[5] / "fixtures"
HEADS, GROUPS, WIDTH, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 2, 8, 12, 16, 2


def huggingface() -> dict[str, torch.Tensor]:
    """A Llama as transformers names it, every element different."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (GROUPS * WIDTH, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (GROUPS * WIDTH, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fuse_qkv(model: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    """Queries, key and value of every group (megatron-core, attention.py)."""
    q, k, v = (model[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
    groups = zip(q.chunk(GROUPS), k.chunk(GROUPS), v.chunk(GROUPS), strict=True)
    return torch.cat([torch.cat(group) for group in groups])


@pytest.fixture
def model():
    return huggingface()


@pytest.fixture
def store(model, tmp_path) -> Path:
    """The model as atoms, with moments that are its weights times 2 and 3."""
    shards = Shards(tmp_path / "store")
    states = {}
    for name, value in model.items():
        for state, factor in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            states[name, state] = shards.whole((value * factor).numpy())
        states[name, "step"] = shards.whole(torch.tensor(5.0).numpy())
    groups = [ParamGroup(params=tuple(model), hyper={"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01})]
    write_checkpoint(make_index(tmp_path / "store", states, groups=groups))
    return tmp_path / "store"


def to_megatron(src: Path, dst: Path, topology: str, layout: str = "", **settings: object) -> ConvertReport:
    given = {"transformer_impl": "local", **{key: str(value) for key, value in settings.items()}}
    return convert(
        src,
        dst,
        to="megatron",
        topology=topology,
        layout=layout,
        settings=given,
        dtypes={"weight": "bfloat16"},
        workers=1,
    )


SAID = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True, "kv_channels": WIDTH}


def test_arguments_follow_from_shapes(store, tmp_path):
    report = to_megatron(store, tmp_path / "b", "tp=2", **SAID, consumed_train_samples=640)
    common = torch.load(tmp_path / "b" / "iter_0000007" / "common.pt", weights_only=False)
    args: Namespace = common["args"]
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.padded_vocab_size) == (2, 8, 12, 16)
    assert (args.swiglu, args.normalization, args.untie_embeddings_and_output_weights) == (True, "RMSNorm", True)
    assert (args.bf16, args.params_dtype, args.use_distributed_optimizer) == (True, torch.bfloat16, True)
    assert common["opt_param_scheduler"]["num_steps"] == args.consumed_train_samples == 640
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(own["wd_mult"], own["lr"], own["step"]) for own in groups] == [(1.0, 0.1, 5), (0.0, 0.1, 5)]
    assert any("640 samples" in note for note in report.notes)
    assert any("parameter groups of ucp" in note for note in report.notes)


def test_what_shapes_do_not_tell_is_asked_for(store, tmp_path):
    with pytest.raises(UsageError, match=r"num_attention_heads, .*--set num_attention_heads=\.\.\."):
        convert(store, tmp_path / "b", to="megatron", topology="tp=1", settings={"num_query_groups": "2"})


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"num_attention_heads": "4", "padded_vocab_sise": "64"}, r"\n  padded_vocab_sise: .*padded_vocab_size"),
        ({"num_attention_heads": "many"}, " num_attention_heads .*--set.*'many'"),
        ({"num_attention_heads": "4", "num_layers": "-1"}, r"\n  num_layers: -1 "),
    ],
)
def test_settings_that_no_model_has(store, tmp_path, settings, facts):
    with pytest.raises(UsageError, match=facts):
        convert(store, tmp_path / "b", to="megatron", topology="tp=1", settings=settings)
    assert not (tmp_path / "b").exists()


def test_a_part_of_a_joined_tensor_is_missing(store, tmp_path):
    with pytest.raises(MisfitError, match=r"layers\.1\.self_attention\.linear_qkv\.weight: .*q_proj"):
        convert(
            store,
            tmp_path / "b",
            to="megatron",
            topology="tp=1",
            settings={key: str(value) for key, value in SAID.items()},
            exclude=["model.layers.1.self_attn.k_proj.weight"],
        )


def test_steps_that_differ(model, tmp_path):
    shards = Shards(tmp_path / "store")
    states = {}
    for number, (name, value) in enumerate(model.items()):
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            states[name, state] = shards.whole(value.numpy())
        states[name, "step"] = shards.whole(torch.tensor(float(number)).numpy())
    groups = [ParamGroup(params=tuple(model), hyper={"lr": 0.1})]
    write_checkpoint(make_index(tmp_path / "store", states, groups=groups))
    with pytest.raises(MisfitError, match=r"\n  decoder\.layers\.0\..*linear_qkv\.weight: step of .*q_proj"):
        to_megatron(tmp_path / "store", tmp_path / "b", "tp=1", **SAID)


def test_a_family_is_for_the_target_where_the_source_has_no_use_for_one(model, store, tmp_path):
    """DeepSpeed's files of one tensor-parallel rank hold whole tensors: rules say nothing of how to read them."""
    given = {key: str(value) for key, value in SAID.items()}
    convert(store, tmp_path / "zero", to="deepspeed", topology="dp=2,zero=1", workers=1)
    for layout in ("torch_dist", "torch"):
        options = {"to": "megatron", "topology": "tp=2", "layout": layout, "settings": given, "workers": 1}
        convert(tmp_path / "zero", tmp_path / layout, family="llama", verify=True, **options)
        assert diff(tmp_path / layout, tmp_path / layout, family="llama").equal
        assert verify(tmp_path / layout, family="llama").ok
    with pytest.raises(IdleOptionError, match="--family"):
        convert(tmp_path / "zero", tmp_path / "atoms", family="llama", workers=1)


def test_what_is_read_back_is_compared_under_megatrons_names(store, tmp_path):
    options = make_options(to="megatron", topology="tp=2", settings={key: str(value) for key, value in SAID.items()})
    prepared = prepare(store, options)
    carry_out(store, tmp_path / "b", options, SilentObserver())
    atoms = dict(prepared.job.index.atoms)
    qkv = atoms["decoder.layers.0.self_attention.linear_qkv.weight"].states["weight"]
    assert len(qkv.fragments) == 3 * GROUPS
    told = {"source": options.source, "observer": SilentObserver(), "threads": 1}
    verify_written(prepared.job, tmp_path / "b", **told)
    one, other = (f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in (0, 1))
    atoms[one], atoms[other] = replace(atoms[other], name=one), replace(atoms[one], name=other)
    wrong = replace(prepared.job, index=replace(prepared.job.index, atoms=atoms))
    with pytest.raises(CorruptError, match=rf"{one}/weight values") as caught:
        verify_written(wrong, tmp_path / "b", **told)
    assert str(caught.value).count("linear_proj") == 6
    assert "linear_qkv" not in str(caught.value)


def test_tensors_whose_dims_go_the_other_way_are_transposed(tmp_path):
    """GPT-2 keeps [in, out], and all queries before all keys."""
    made = json.loads((FIXTURES / "huggingface" / "names-5.23.0.json").read_text())["models"]["gpt2"]
    generator = torch.Generator().manual_seed(3)
    model = {name: torch.randn(shape, generator=generator) for name, shape in made["tensors"].items()}
    shards = Shards(tmp_path / "store")
    states = {(name, "weight"): shards.whole(value.numpy()) for name, value in model.items()}
    write_checkpoint(make_index(tmp_path / "store", states))
    convert(
        tmp_path / "store",
        tmp_path / "b",
        to="megatron",
        topology="tp=2",
        settings={"num_attention_heads": 4},
        dtypes={"weight": "float32"},
        verify=True,
    )
    found = ucp.open(tmp_path / "b")
    proj = found.read("decoder.layers.0.self_attention.linear_proj.weight", "weight")
    assert torch.equal(proj, model["transformer.h.0.attn.c_proj.weight"].T)
    attn = model["transformer.h.0.attn.c_attn.weight"].T  # [3 * hidden, hidden]
    hidden = attn.shape[1]
    by_head = attn.view(3, 4, hidden // 4, hidden).transpose(0, 1).reshape(3 * hidden, hidden)
    assert torch.equal(found.read("decoder.layers.0.self_attention.linear_qkv.weight", "weight"), by_head)


def test_names_that_several_parameters_have_go_by_what_stands_beside_them(tmp_path):
    """Nemotron-H calls the norm of every layer `norm`; the names are those that transformers wrote."""
    made = json.loads((FIXTURES / "huggingface" / "names-5.23.0.json").read_text())["models"]["nemotron-h"]
    generator = torch.Generator().manual_seed(3)
    model = {name: torch.randn(shape, generator=generator) for name, shape in made["tensors"].items()}
    shards = Shards(tmp_path / "store")
    states = {(name, "weight"): shards.whole(value.numpy()) for name, value in model.items()}
    write_checkpoint(make_index(tmp_path / "store", states))
    to_megatron(tmp_path / "store", tmp_path / "b", "tp=2", num_attention_heads=4, num_query_groups=2)
    found = ucp.open(tmp_path / "b")
    for layer, norm in enumerate(["norm", "input_layernorm", "norm", "pre_mlp_layernorm"]):
        stored = model[f"backbone.layers.{layer}.norm.weight"].bfloat16()  # without an optimizer, what it computes in
        assert torch.equal(found.read(f"decoder.layers.{layer}.{norm}.weight", "weight"), stored)
    with pytest.raises(MisfitError, match=r"decoder\.layers\.0\.mixer\.in_proj\.weight"):
        convert(
            tmp_path / "store",
            tmp_path / "c",
            to="megatron",
            topology="tp=1",
            exclude=["backbone.layers.0.mixer.*"],
            settings={"num_attention_heads": "4"},
        )


def without_modules(src: Path, dst: Path, layout: str = "", **settings: object) -> list[str]:
    """What is said of modules where `to_megatron` does not say which."""
    given = {**{key: str(value) for key, value in SAID.items()}, **{key: str(own) for key, own in settings.items()}}
    report = convert(src, dst, to="megatron", topology="tp=1", layout=layout, settings=given, workers=1)
    return [note for note in report.notes if "transformer_impl" in note]


def test_modules_that_nothing_tells_are_said(store, tmp_path):
    (note,) = without_modules(store, tmp_path / "b", "torch")
    assert "transformer_impl transformer_engine), Megatron's default, because the source does not say" in note
    assert note.endswith("add --set transformer_impl=local")
    (note,) = without_modules(store, tmp_path / "c")
    assert note.endswith("(transformer_impl): runs with either find the written keys")


def test_modules_that_megatron_does_not_have(store, tmp_path):
    with pytest.raises(UsageError, match=r"transformer_impl .*local, transformer_engine.*'Local'"):
        without_modules(store, tmp_path / "b", transformer_impl="Local")
