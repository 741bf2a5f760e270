"""`load_into` a model under other names than the checkpoint's: a style that is said, found, or cannot be told."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

import ucp
from tests.unit.live.cluster import module_of
from tests.unit.live.threads import run
from ucp.errors import LoadError, UnknownFamilyError, UsageError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

FIXTURES = Path(__file__).parents[4] / "fixtures"
LLAMA = FIXTURES / "megatron" / "llama-tp2-dp2-dp" / "checkpoint"
GPT = FIXTURES / "megatron" / "gpt-tp2-pp2-dp2-full" / "checkpoint"
HEADS = {"num_attention_heads": 4, "num_query_groups": 2}


@pytest.fixture(scope="module")
def styled(tmp_path_factory):
    """The checkpoints of fixtures as `ucp convert` writes them in a style."""
    root = tmp_path_factory.mktemp("styled")

    def made(source: Path, style: str) -> ucp.Checkpoint:
        out = root / f"{source.parent.name}-{style}"
        if not out.exists():
            ucp.convert(source, out, names=style, virtual=True)
        return ucp.open(out)

    return made


def adam(model: nn.Module) -> optim.AdamW:
    """With the groups of Megatron: no weight decay for vectors."""
    parts = ([own for own in model.parameters() if (own.ndim > 1) is large] for large in (True, False))
    return optim.AdamW([{"params": own} for own in parts], lr=7.0)


def check(model: nn.Module, optimizer: optim.Optimizer | None, wanted: ucp.Checkpoint) -> None:
    """Raise unless all is what the conversion has."""
    for name, own in model.named_parameters():
        assert torch.equal(own.detach(), wanted.read(name, "weight").float()), name
        for state in ("exp_avg", "exp_avg_sq") if optimizer is not None else ():
            assert torch.equal(optimizer.state[own][state], wanted.read(name, state)), (name, state)


@pytest.mark.parametrize("style", ["huggingface", "torchtitan"])
def test_a_style_that_is_said(styled, style):
    wanted = styled(LLAMA, style)
    model = module_of(wanted)
    optimizer = adam(model)
    report = ucp.load_into(model, LLAMA, optimizer=optimizer, names=style)
    assert not report.missing
    assert not report.unexpected
    check(model, optimizer, wanted)
    assert f"names are translated to {style} by the rules of the family llama" in report.notes


def test_padding_of_the_vocabulary_that_the_model_lacks(styled):
    """Megatron padded 50 rows to 64; a model of transformers has 50 (or more, but not fewer), moments too."""
    wanted = styled(LLAMA, "huggingface")
    model = module_of(wanted)
    heads = (model.model.embed_tokens, model.lm_head)
    for module in heads:
        module.weight = nn.Parameter(torch.zeros(50, 20))
    optimizer = adam(model)
    report = ucp.load_into(model, LLAMA, optimizer=optimizer)
    for module, name in zip(heads, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert torch.equal(module.weight.detach(), wanted.read(name).float()[:50])
        assert torch.equal(optimizer.state[module.weight]["exp_avg"], wanted.read(name, "exp_avg")[:50])
    assert any("lm_head.weight has 50 of 64" in note for note in report.notes)
    model.lm_head.weight = nn.Parameter(torch.zeros(49, 20))
    with pytest.raises(LoadError):
        ucp.load_into(model, LLAMA)
    model.classifier = nn.Linear(20, 2)  # a name that no style has: the error says what to pass
    with pytest.raises(LoadError, match="names='huggingface'"):
        ucp.load_into(model, LLAMA)
    assert ucp.load_into(model, LLAMA, names="huggingface", strict=False).missing == (
        "classifier.weight",
        "classifier.bias",
    )


def test_names_of_all_ranks_together_show_the_style(styled):
    wanted = styled(LLAMA, "huggingface")

    def stage(ranks):
        parts = ("layers.0", "embed") if ranks.rank == 0 else ("layers.1", "layers.2", "layers.3", "norm", "lm_head")
        model = module_of(wanted, *parts)
        ucp.load_into(model, LLAMA, process_group=ranks)
        check(model, None, wanted)
        return len(list(model.parameters()))

    found = run(2, stage)
    assert all(isinstance(own, int) for own in found), found


def test_a_style_of_one_rank_alone_is_none(styled):
    wanted = styled(LLAMA, "huggingface")

    def stage(ranks):
        model = module_of(wanted) if ranks.rank == 0 else module_of(styled(LLAMA, "torchtitan"))
        return ucp.load_into(model, LLAMA, process_group=ranks)

    found = run(2, stage)
    assert all(isinstance(own, LoadError) for own in found), found


def test_shapes_tell_styles_with_the_same_names_apart(styled):
    for style in ("nanogpt", "huggingface"):  # the one stores the matrices of the other transposed
        wanted = styled(GPT, style)
        model = module_of(wanted)
        ucp.load_into(model, GPT)
        check(model, None, wanted)
        model.transformer.wte.weight = nn.Parameter(torch.zeros(50, 20))  # without padding
        if hasattr(model, "lm_head"):
            model.lm_head.weight = model.transformer.wte.weight
        ucp.load_into(model, GPT)
        assert torch.equal(model.transformer.wte.weight.detach(), wanted.read("transformer.wte.weight")[:50])


def test_between_two_styles_none_is_taken(styled):
    model = module_of(styled(GPT, "nanogpt"), "attn.c_proj.weight")  # square: the shapes of both are the same
    with pytest.raises(LoadError, match="pass names='huggingface' or names='nanogpt'"):
        ucp.load_into(model, GPT)
    assert not any(own.any() for own in model.parameters())


def test_a_model_of_megatron_from_names_of_hugging_face(styled, tmp_path):
    wanted = ucp.open(LLAMA)
    source = tmp_path / "hf"
    ucp.convert(LLAMA, source, names="huggingface", to="dcp", settings={"drop": "args", **HEADS})
    model = module_of(wanted)
    with pytest.raises(LoadError, match="--set num_"):
        ucp.load_into(model, source)
    optimizer = adam(model)
    ucp.load_into(model, source, settings=HEADS, optimizer=optimizer)
    check(model, optimizer, wanted)


RULES = """
[[rename]]
from = ["up.weight", "gate.weight"]
to = "both.weight"
"""


def test_rules_of_the_users_own_join_tensors(tmp_path):
    shards = Shards(tmp_path)
    random = np.random.default_rng(1)
    arrays = {name: random.normal(size=(3, 4)).astype(np.float32) for name in ("up.weight", "gate.weight", "rest")}
    path = write_checkpoint(make_index(tmp_path, {(name, "weight"): shards.whole(own) for name, own in arrays.items()}))
    (tmp_path / "rules.toml").write_text(RULES)
    model = nn.Module()
    model.both = nn.Linear(4, 6, bias=False)
    model.rest = nn.Parameter(torch.zeros(3, 4))
    ucp.load_into(model, path, rename=tmp_path / "rules.toml")
    joined = np.concatenate([arrays["up.weight"], arrays["gate.weight"]])
    assert torch.equal(model.both.weight.detach(), torch.from_numpy(joined))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"names": "klingon"}, "got 'klingon'"),
        ({"names": "hugingface"}, "got 'hugingface'; did you mean 'huggingface'?"),
        ({"names": ":"}, "got ':'"),
        ({"names": "huggingface", "settings": {"klingons": 3}}, "klingons"),
        ({"rename": 3}, "function; got 3"),
        ({"family": "klingon", "names": "huggingface"}, "got 'klingon'"),
        ({"rank_extras": "some"}, "drop, carry, replicate; got 'some'"),
        ({"dtype": "int8"}, "int8"),
        ({"progress": 3}, "progress"),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_line(styled, asked, said):
    model = module_of(styled(LLAMA, "huggingface"), "norm")
    with pytest.raises(UsageError) as error:
        ucp.load_into(model, LLAMA, **asked)
    assert said in str(error.value)


def test_a_family_that_does_not_know_the_names_is_refused(tmp_path):
    shards = Shards(tmp_path)
    path = write_checkpoint(make_index(tmp_path, {("own.name", "weight"): shards.whole(np.zeros(3, np.float32))}))
    with pytest.raises(UnknownFamilyError, match="--patterns"):
        ucp.load_into(nn.Linear(2, 2), path, names="huggingface")


def test_weights_of_another_type_than_said_are_refused(styled):
    wanted = styled(LLAMA, "huggingface")
    model = module_of(wanted)
    with pytest.raises(LoadError, match=r"model\.to\(torch\.bfloat16\)"):
        ucp.load_into(model, LLAMA, dtype=torch.bfloat16)
    ucp.load_into(model.bfloat16(), LLAMA, dtype="bf16")


@pytest.mark.parametrize(("source", "other"), [("nanogpt", "huggingface"), ("huggingface", "nanogpt")])
def test_shapes_tell_the_style_of_the_checkpoint_too(styled, tmp_path, source, other):
    """Both have the names of the model; its matrices lie transposed, the square ones among them."""
    folder = tmp_path / source
    ucp.convert(GPT, folder, names=source, to="dcp", settings={"drop": "args", "num_attention_heads": 4})
    model = module_of(styled(GPT, other))
    ucp.load_into(model, folder, settings={"num_attention_heads": 4})
    check(model, None, styled(GPT, other))
    with pytest.raises(LoadError, match="--set n_head=N"):
        ucp.load_into(model, folder)


def test_a_model_of_other_shapes_is_of_no_other_style(styled):
    model = module_of(styled(GPT, "huggingface"))
    model.transformer.wpe.weight = nn.Parameter(torch.zeros(3, 20))
    with pytest.raises(LoadError, match="wpe") as caught:
        ucp.load_into(model, styled(GPT, "huggingface").index.path)
    assert "names=" not in str(caught.value)
