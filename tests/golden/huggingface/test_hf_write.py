"""What `--to huggingface` writes, read by safetensors itself, byte for byte as safetensors writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from ucp_formats.huggingface.target import HuggingFaceTarget

import ucp
from ucp.errors import CorruptError, DestinationError, MalformedError, MisfitError, ReplicaError, UsageError

ROOT = Path(__file__).parents[3] / "fixtures"
FSDP = ROOT / "torch" / "fsdp2-dp4" / "checkpoint"
BF16 = ROOT / "deepspeed" / "z3-dp4-bf16"
TRAINER = ROOT / "deepspeed" / "z2-dp2-hf-trainer"
ALONE = {"config": "none"}
AS_IS = "huggingface:huggingface"
"""Names that are those of transformers already, of models of no known family."""

EVERY_TYPE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint of torch.distributed.checkpoint."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    return folder


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", **config}))
    return folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def test_every_type_and_shape(tmp_path: Path) -> None:
    """Those that torch's own consolidation gets wrong among them: 0-d tensors, whole numbers and truth values."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{kind}.{shape}".replace("torch.", ""): torch.randint(0, 2, shape, generator=generator).to(kind)
        for kind in EVERY_TYPE
        for shape in ((), (3,), (2, 5), (0, 4))
    }
    ucp.convert(saved(tensors, tmp_path / "src"), tmp_path / "out", to="huggingface", settings=ALONE, names=AS_IS)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(own, tensors[name]) for name, own in found.items())
    save_file(found, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "theirs.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", ["z0-fp16", "z1-dp2-fp16", "z2-dp4-fp32-roundrobin", "z3-dp3-uneven", "z3-dp4-bf16"])
def test_weights_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    """In the type that it computed with, where DeepSpeed keeps masters."""
    source = ROOT / "deepspeed" / case
    ucp.convert(source / "checkpoint", tmp_path / "out", to="huggingface", settings=ALONE, names=AS_IS)
    truth = load_file(source / "truth.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    names = {name.removesuffix("/module") for name in truth if name.endswith("/module")}
    assert names <= found.keys()
    assert all(same(found[name], truth[f"{name}/module"]) for name in names)


def test_masters_where_they_are_asked_for(tmp_path: Path) -> None:
    told = ucp.plan(BF16 / "checkpoint", to="huggingface", settings=ALONE, names=AS_IS)
    assert any("--dtype weight=float32" in own for own in told.notes)
    ucp.convert(
        BF16 / "checkpoint",
        tmp_path / "out",
        to="huggingface",
        settings=ALONE,
        names=AS_IS,
        dtypes={"weight": "float32"},
    )
    truth, found = load_file(BF16 / "truth.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    masters = {name for name in found if f"{name}/exp_avg" in truth}
    assert masters
    assert all(same(found[name], truth[f"{name}/weight"]) for name in masters)


def test_what_is_left_out_is_said() -> None:
    dropped = "\n".join(ucp.plan(TRAINER / "checkpoint-3", to="huggingface", settings=ALONE, names=AS_IS).dropped)
    assert "states step, exp_avg, exp_avg_sq" in dropped
    assert "2 parameter groups" in dropped
    assert "trainer_state.json, beside the checkpoint: of the training" in dropped


@pytest.mark.parametrize("tied", [True, False, None])
def test_tied_names(tied: bool | None, tmp_path: Path) -> None:
    """Left out where transformers ties them, and under both names elsewhere."""
    config = {} if tied is None else {"tie_word_embeddings": tied}
    folder = model_folder(tmp_path / "model", **config)
    source = TRAINER / "checkpoint-3"
    ucp.convert(source, tmp_path / "out", to="huggingface", settings={"config": str(folder)})
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert ("head.weight" in found) is not tied
    assert len(found) == len(ucp.inspect(source).atoms) + (not tied)
    if not tied:
        (first,) = ucp.inspect(source).aliases.values()
        assert torch.equal(found["head.weight"], found[first])


def test_shards_are_those_of_huggingface_hub(tmp_path: Path) -> None:
    """Greedy, in order; what is larger than a shard has one of its own, before the one that is being filled."""
    tensors = {
        name: torch.arange(n, dtype=torch.float32) for name, n in zip("abcdef", (6, 60, 6, 2, 6, 2), strict=True)
    }
    source = saved(tensors, tmp_path / "src")
    order = list(ucp.inspect(source).atoms)
    assert order == list("abcdef")
    settings = {**ALONE, "max_shard_size": "0.04KB"}
    ucp.convert(source, tmp_path / "out", to="huggingface", settings=settings, names=AS_IS)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert index == {
        "metadata": {"total_parameters": 82, "total_size": 328},
        "weight_map": dict(zip("abcdef", [names[1], names[0], names[2], names[2], names[3], names[3]], strict=True)),
    }
    for name, path in index["weight_map"].items():
        with safe_open(tmp_path / "out" / path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(name), tensors[name])


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Headers of safetensors are UTF-8, which a lone surrogate does not have."""
    source = saved({"a\ud800b": torch.ones(2), "\udc80": torch.ones(2), "w": torch.ones(2)}, tmp_path / "src")
    same_names = "huggingface:huggingface"
    with pytest.raises(DestinationError, match=r"2 names .*surrogates") as caught:
        ucp.convert(source, tmp_path / "out", to="huggingface", settings=ALONE, names=same_names)
    str(caught.value).encode()
    assert not (tmp_path / "out").exists()
    ucp.convert(
        source, tmp_path / "out", to="huggingface", settings=ALONE, names="huggingface:huggingface", include=["w"]
    )


def test_what_is_published_with_a_model_goes_along(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_text('{"a": 1}')
    folder = model_folder(tmp_path / "model", dtype="bfloat16")
    (folder / "tokenizer.json").symlink_to(blob)  # as in the cache of huggingface_hub
    for name in ("generation_config.json", "tokenizer.model", "optimizer.pt", "README.md", "model.safetensors"):
        (folder / name).write_text(name)
    ucp.convert(FSDP, tmp_path / "out", to="huggingface", settings={"config": str(folder)})
    names = {own.name for own in (tmp_path / "out").iterdir()} - {"ucp-conversion.json"}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "tokenizer.model"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"vocab_size": 31}, "vocab_size = 31: "),
        ({"hidden_size": 777}, "hidden_size = 777"),
        ({"num_hidden_layers": 9}, "num_hidden_layers = 9: .* 2"),
    ],
)
def test_a_config_of_another_model(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.w": torch.zeros(5, 7) for n in range(2)}
    source, folder = saved(tensors, tmp_path / "src"), model_folder(tmp_path / "model", **config)
    with pytest.raises(MisfitError, match=match):
        ucp.plan(source, to="huggingface", settings={"config": str(folder)})


def test_the_config_of_a_model_without_the_tensors_that_it_sizes(tmp_path: Path) -> None:
    """As transformers 5.23 saves Wav2Vec2Model: a vocabulary without a head, convolutions counted as layers."""
    folder = model_folder(tmp_path / "model", vocab_size=97, hidden_size=4, num_hidden_layers=2)
    tensors = {f"encoder.layers.{n}.w": torch.zeros(4, 7) for n in range(2)}
    convolutions = {f"encoder.pos_conv_embed.layers.{n}.w": torch.zeros(4) for n in range(5)}
    save_file(tensors | convolutions, folder / "model.safetensors")
    assert ucp.verify(folder).problems == ()
    ucp.convert(folder, tmp_path / "out", to="huggingface")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "--set config=DIR"),
        ({"settings": {"config": "nowhere"}}, "nowhere"),
        ({"settings": {**ALONE, "max_shard_size": "5GiB"}}, "max_shard_size"),
        ({"settings": {**ALONE, "max_shard_size": "0GB"}}, "above 0"),
        ({"settings": {**ALONE, "max_shard_size": "-1"}}, "above 0"),
        ({"settings": {**ALONE, "max_shard_size": "9" * 400}}, r"max_shard_size.*9\.\.\."),
        ({"settings": {**ALONE, "max_shard_size": "١GB"}}, "max_shard_size"),
        ({"settings": {**ALONE, "shards": "3"}}, r"\n +shards"),
        ({"settings": ALONE, "topology": "dp=2"}, "drop --topology"),
        ({"settings": ALONE, "compress": True}, "compress"),
        ({"settings": ALONE, "tag": "last"}, "tag"),
        ({"settings": ALONE, "dtypes": {"exp_avg": "bfloat16"}}, "weights alone"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ucp.plan(FSDP, to="huggingface", names=AS_IS, **options)


@pytest.mark.parametrize("text", ["", "[1]", '{"model_type": 3}', '{"a": '])
def test_a_damaged_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"in .*config\.json"):
        ucp.plan(FSDP, to="huggingface", settings={"config": str(tmp_path)})


MEGATRON = ROOT / "megatron"


def test_a_megatron_run_is_published(tmp_path: Path) -> None:
    """By what it recorded: names, padding and configuration; read back, and equal."""
    source = MEGATRON / "mixtral-ep4-dp4-full" / "checkpoint"
    ucp.convert(source, tmp_path / "out", to="huggingface", verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(MEGATRON / "truth" / "mixtral.safetensors")
    embedding = truth["embedding.word_embeddings.weight/model"]
    assert same(found["model.embed_tokens.weight"], embedding[:51])
    gate, up = truth["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight/model"].chunk(2)
    assert same(found["model.layers.1.block_sparse_moe.experts.2.w1.weight"], gate.contiguous())
    assert same(found["model.layers.1.block_sparse_moe.experts.2.w3.weight"], up.contiguous())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"], config["model_type"]) == (51, "bfloat16", "mixtral")


def test_a_config_that_transformers_refuses_is_told(tmp_path: Path) -> None:
    """LlamaConfig of transformers 5 wants hidden_size a multiple of num_attention_heads; the kept run has 20 and 8."""
    notes = ucp.plan(MEGATRON / "llama-tp2-pp2-dp2-full" / "checkpoint", to="huggingface").notes
    assert "transformers 5 will refuse this model" in notes[0]
    assert "these are 20 and 8" in notes[0]
    notes = ucp.plan(MEGATRON / "mixtral-ep4-dp4-full" / "checkpoint", to="huggingface").notes
    assert not any("will refuse" in note for note in notes)


def test_a_config_is_asked_for_before_sizes(tmp_path: Path) -> None:
    """Names of Meta need the number of heads, which config.json tells."""
    names = [f"layers.0.attention.w{part}.weight" for part in "qkvo"] + ["layers.0.attention_norm.weight"]
    names += [f"layers.0.feed_forward.w{part}.weight" for part in "123"] + ["layers.0.ffn_norm.weight"]
    names += ["tok_embeddings.weight", "norm.weight", "output.weight"]
    torch.save({name: torch.ones(8 if "norm" in name else (8, 8)) for name in names}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"--set config=DIR"):
        ucp.plan(tmp_path / "a.pt", to="huggingface")
    with pytest.raises(MisfitError, match="num_attention_heads"):
        ucp.plan(tmp_path / "a.pt", to="huggingface", settings=ALONE)


def test_the_vocabulary_of_a_config_that_is_named(tmp_path: Path) -> None:
    """Counts before that of the run; one that is larger than the embedding is of another model."""
    source = MEGATRON / "mixtral-ep4-dp4-full" / "checkpoint"
    ucp.convert(source, tmp_path / "derived", to="huggingface")
    config = json.loads((tmp_path / "derived" / "config.json").read_text())
    for rows, refused in ((60, ""), (65, "vocab_size = 65")):
        folder = model_folder(tmp_path / f"model-{rows}", **{**config, "vocab_size": rows})
        plan = {"to": "huggingface", "settings": {"config": str(folder)}}
        if refused:
            with pytest.raises(MisfitError, match=refused):
                ucp.plan(source, **plan)
        else:
            assert any("4 rows of padding left out after the 60" in own for own in ucp.plan(source, **plan).notes)


def test_a_config_of_fewer_layers_is_named(tmp_path: Path) -> None:
    source = MEGATRON / "llama-tp2-pp2-dp2-full" / "checkpoint"
    config = json.loads((ROOT / "huggingface" / "llama" / "model" / "config.json").read_text())
    folder = model_folder(tmp_path / "model", **{**config, "num_hidden_layers": 2})
    ucp.convert(source, tmp_path / "fsdp", to="dcp", names="huggingface")
    with pytest.raises(MisfitError, match="2 layers"):
        ucp.plan(tmp_path / "fsdp", to="huggingface", settings={"config": str(folder)})


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"head_dim": 8}, "num_key_value_heads = 2, with 8 "),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"intermediate_size": 28}, "intermediate_size = 28: .* 24"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_a_config_that_disagrees(changed: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = ROOT / "huggingface" / "mixtral" / "model"
    config = json.loads((source / "config.json").read_text())
    folder = model_folder(tmp_path / "model", **{**config, **changed})
    with pytest.raises(MisfitError, match=match):
        ucp.plan(source, to="huggingface", settings={"config": str(folder)})


GPT2 = ROOT / "huggingface" / "gpt2" / "model"


def nanogpt(folder: Path) -> dict[str, torch.Tensor]:
    """GPT-2 with nanoGPT's matrices, [out, in], under the same names."""
    settings = {"drop": "config", "num_attention_heads": 4}
    ucp.convert(GPT2, folder, to="torch", names="nanogpt", companions="none", settings=settings)
    state: dict[str, torch.Tensor] = torch.load(next(folder.glob("*.pt")))["model"]
    return {name: own.contiguous() for name, own in state.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("extra", [False, True])
def test_a_config_that_contradicts_shapes_is_refused(extra: bool, tmp_path: Path) -> None:
    """Under a wrong style of the source; with a tensor of no family, so that names stay as they are."""
    options: dict[str, Any] = {} if extra else {"names": "huggingface:huggingface"}
    state = nanogpt(tmp_path / "nano") | ({"value_head": torch.ones(2)} if extra else {})
    source = saved(state, tmp_path / "source")
    with pytest.raises(MisfitError, match=r"c_attn\.weight is \[48, 16\], expected \[16, 48\]"):
        ucp.convert(source, tmp_path / "out", to="huggingface", settings={"config": str(GPT2)}, **options)
    assert not (tmp_path / "out").exists()


def test_names_of_another_framework_are_refused(tmp_path: Path) -> None:
    """Those of torchtitan, of no family for one buffer that none has, beside the config.json of a Llama."""
    llama = ROOT / "huggingface" / "llama" / "model"
    ucp.convert(
        llama,
        tmp_path / "titan",
        to="torch",
        names="torchtitan",
        settings={"drop": "config", "num_attention_heads": 4, "num_key_value_heads": 2},
    )
    state = torch.load(next((tmp_path / "titan").glob("*.pt")))
    source = saved({**state["model"], "freqs": torch.ones(2)}, tmp_path / "source")
    with pytest.raises(MisfitError, match=r"config\.json .*\n.*: tok_embeddings\.weight"):
        ucp.plan(source, to="huggingface", settings={"config": str(llama)})


def test_verify_holds_a_model_against_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(nanogpt(tmp_path / "nano"), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((GPT2 / "config.json").read_bytes())
    (problem,) = ucp.verify(folder).problems
    assert "c_attn.weight is [48, 16], expected [16, 48]" in problem
    with pytest.raises(MalformedError, match="--accept config"):
        ucp.plan(folder, to="dcp")
    ucp.convert(folder, tmp_path / "out", to="dcp", accept=["config"])
    sound = ucp.verify(GPT2)
    assert (sound.ok, sound.checked_bytes) == (True, 0)
    assert any("not the bytes of tensors" in note for note in sound.notes)


def test_names_of_no_family_are_not_taken_for_those_of_transformers(tmp_path: Path) -> None:
    """Weights alone, of which neither a config.json nor the source says that it is a model of transformers."""
    source = saved({"tok.weight": torch.ones(4, 2)}, tmp_path / "source")
    with pytest.raises(MisfitError, match=r"tok\.weight\n(?s:.*)--names huggingface:huggingface"):
        ucp.plan(source, to="huggingface", settings={**ALONE, "num_attention_heads": 4})
    ucp.convert(source, tmp_path / "model", to="huggingface", settings=ALONE, names=AS_IS)
    ucp.convert(
        source, tmp_path / "configured", to="huggingface", settings={"config": str(model_folder(tmp_path / "c"))}
    )
    ucp.convert(tmp_path / "model", tmp_path / "shards", to="huggingface", settings=ALONE)
    ucp.convert(tmp_path / "model", tmp_path / "atoms")
    ucp.convert(tmp_path / "atoms", tmp_path / "again", to="huggingface", settings=ALONE)
    assert ucp.diff(tmp_path / "model", tmp_path / "again").equal


def test_names_stay_where_the_source_has_those_of_transformers_already(tmp_path: Path) -> None:
    """A dense model with DeepSeek's attention (Youtu-LLM): a family knows each name, and the model is of none."""
    sizes = {
        "self_attn.q_a_proj": (8, 16),
        "self_attn.q_a_layernorm": (8,),
        "self_attn.q_b_proj": (48, 8),
        "self_attn.kv_a_proj_with_mqa": (12, 16),
        "self_attn.kv_a_layernorm": (8,),
        "self_attn.kv_b_proj": (64, 8),
        "self_attn.o_proj": (16, 32),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
    }
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in sizes.items()}
    tensors |= {"model.embed_tokens.weight": torch.randn(32, 16), "model.norm.weight": torch.ones(16)}
    folder = model_folder(tmp_path / "model", vocab_size=32, hidden_size=16, num_hidden_layers=1)
    save_file(tensors, folder / "model.safetensors")
    ucp.convert(folder, tmp_path / "out", to="huggingface")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(same(written[name], own) for name, own in tensors.items())


def test_a_config_that_says_what_is_written_is_copied_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", torch_dtype="float32", unknown=[1, None])
    ucp.convert(FSDP, tmp_path / "out", to="huggingface", settings={"config": str(folder)})
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("options", [{"to": "huggingface", "settings": ALONE}, {"to": "dcp", "names": "huggingface"}])
def test_names_that_stay_need_no_sizes(options: dict[str, Any], tmp_path: Path) -> None:
    tensors = load_file(ROOT / "huggingface" / "llama" / "model" / "model.safetensors")
    torch.save(tensors, tmp_path / "nano.pt")
    ucp.convert(tmp_path / "nano.pt", tmp_path / "out", workers=1, **options)
    assert ucp.open(tmp_path / "out").index.atoms.keys() == tensors.keys()


def test_a_tied_weight_that_the_source_holds_twice(tmp_path: Path) -> None:
    """Both are compared while one is written."""
    folder = model_folder(tmp_path / "model", tie_word_embeddings=True)
    embedding = torch.arange(12.0).reshape(4, 3)
    tensors = {"own.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1, "own.other.weight": embedding}
    source = saved(tensors, tmp_path / "src")
    with pytest.raises(ReplicaError, match=r"embed_tokens\.weight"):
        ucp.convert(source, tmp_path / "out", to="huggingface", settings={"config": str(folder)})
    assert not (tmp_path / "out").exists()


def test_the_reader_of_safetensors_looks_at_files(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    assert not [*HuggingFaceTarget().find_faults(tmp_path)]
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"0")
    (fault,) = HuggingFaceTarget().find_faults(tmp_path)
    assert "model.safetensors" in fault


def test_what_it_refuses_stays_no_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved({"a": torch.arange(3.0)}, tmp_path / "source")
    options: dict[str, Any] = {"to": "huggingface", "names": AS_IS, "settings": ALONE}
    monkeypatch.setattr(HuggingFaceTarget, "find_faults", lambda _, written: [f"refused {written.name}"])
    ucp.convert(source, tmp_path / "unproved", **options)
    with pytest.raises(CorruptError):
        ucp.convert(source, tmp_path / "proved", **options, verify=True)
    assert not (tmp_path / "proved").exists()
