"""What real Megatron wrote, in DeepSpeed's files: the form of steps and groups, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from ucp.errors import MisfitError, MissingStateError, TopologyError, UsageError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "megatron"
LLAMA = FIXTURES / "llama-tp2-pp2-dp2-full" / "checkpoint"
SHIFTED = FIXTURES / "gpt-tp2-pp2-dp2-full" / "checkpoint"
"""Its tied embedding has a master and moments that megatron-core wrote shifted."""
TAG = "global_step10"
NORM = "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("settings", "expected", "cast"),
    [
        ({}, torch.tensor(10.0), "step: float64 -> float32 in 27 parameters"),
        ({"optimizer": "torch"}, torch.tensor(10.0), "step: float64 -> float32 in 27 parameters"),
        ({"optimizer": "deepspeed"}, 10, "step: float64 -> int64 in 27 parameters"),
    ],
)
def test_universal_steps_are_of_the_form_that_is_asked_for(
    tmp_path: Path, settings: dict[str, str], expected: object, cast: str
) -> None:
    report = ucp.convert(LLAMA, tmp_path / "to", to="deepspeed-universal", settings=settings, workers=1, verify=True)
    assert cast in report.casts
    zero = tmp_path / "to" / TAG / "zero"
    shared = torch.load(zero / "optimizer_state.pt")
    for step in (torch.load(zero / NORM / "step.pt"), shared["optimizer_state_dict"]["state"][0]["step"]):
        assert type(step) is type(expected)
        assert step == expected
        assert not isinstance(expected, torch.Tensor) or step.dtype is expected.dtype
    assert [group["bias_correction"] for group in shared["param_groups"]] == [True, True]


@pytest.mark.parametrize("zero", range(4))
def test_native_files_are_equal_to_the_source(tmp_path: Path, zero: int) -> None:
    report = ucp.convert(LLAMA, tmp_path / "to", to="deepspeed", topology=f"dp=2,zero={zero}", workers=1, verify=True)
    assert "step: float64 -> int64 in 27 parameters" in report.casts
    groups = ucp.inspect(tmp_path / "to").groups
    assert [group.hyper["bias_correction"] for group in groups] == [True, True]


@pytest.mark.parametrize("to", ["deepspeed-universal", *(f"dp=2,zero={stage}" for stage in range(4))])
def test_moments_that_megatron_lost_are_refused_with_the_reason(tmp_path: Path, to: str) -> None:
    target = {"to": to} if "=" not in to else {"to": "deepspeed", "topology": to}
    with pytest.raises(MissingStateError, match=r"embedding\.word_embeddings\.weight: by 64 "):
        ucp.convert(SHIFTED, tmp_path / "to", workers=1, **target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["deepspeed-universal", "dp=2,zero=1", "dp=2,zero=3"])
def test_they_are_zeros_where_that_is_asked_for(tmp_path: Path, to: str) -> None:
    target = {"to": to} if "=" not in to else {"to": "deepspeed", "topology": to}
    report = ucp.convert(SHIFTED, tmp_path / "to", workers=1, zero_moments="keep", verify=True, **target)
    assert "weight: bfloat16 -> float32 in 1 parameter" in report.casts
    assert not ucp.open(tmp_path / "to").read("embedding.word_embeddings.weight", "exp_avg").any()


@pytest.mark.parametrize(
    ("names", "topology", "settings"),
    [
        ("huggingface", "dp=2,tp=2,zero=1", {}),
        ("huggingface", "dp=4,zero=3", {}),
        ("pipeline", "dp=2,tp=2,pp=2,zero=1", {"partition": "uniform"}),
        ("pipeline", "pp=4,zero=1", {"stages": "0,3,4,5,8"}),
    ],
)
def test_tensor_and_pipeline_parallel_runs_go_across_and_come_back(
    tmp_path: Path, names: str, topology: str, settings: dict[str, str]
) -> None:
    ucp.convert(
        LLAMA,
        tmp_path / "to",
        to="deepspeed",
        names=names,
        topology=topology,
        settings=settings,
        workers=1,
        verify=True,
    )
    sizes = {"num_layers": 4, "num_attention_heads": 8, "num_query_groups": 4}
    ucp.convert(tmp_path / "to", tmp_path / "back", to="megatron", topology="tp=2,pp=2", settings=sizes, verify=True)
    assert ucp.diff(LLAMA, tmp_path / "back").equal


def test_an_optimizer_without_names_has_the_order_of_the_model_that_loads_it(tmp_path: Path) -> None:
    """Of transformers' LlamaForCausalLM.named_parameters(), each group by itself."""
    ucp.convert(LLAMA, tmp_path / "to", to="deepspeed", names="huggingface", topology="dp=2,zero=1", workers=1)
    decayed, others = (group.params for group in ucp.inspect(tmp_path / "to").groups)
    layer = [f"self_attn.{own}_proj.weight" for own in "qkvo"] + [
        f"mlp.{own}_proj.weight" for own in ("gate", "up", "down")
    ]
    layers = [f"model.layers.{number}.{own}" for number in range(4) for own in layer]
    assert list(decayed) == ["model.embed_tokens.weight", *layers, "lm_head.weight"]
    norms = [f"model.layers.{n}.{own}_layernorm.weight" for n in range(4) for own in ("input", "post_attention")]
    assert list(others) == [*norms, "model.norm.weight"]
    mixtral = FIXTURES / "mixtral-ep4-dp4-full" / "checkpoint"
    with pytest.raises(MisfitError, match="deepspeed-universal"):
        ucp.plan(mixtral, to="deepspeed", names="huggingface", topology="dp=2,zero=1")


def test_stages_of_a_pipeline_that_was_none_have_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="--set stages=FIRST,FIRST"):
        ucp.plan(LLAMA, to="deepspeed", names="pipeline", topology="pp=2,zero=1")
    tied = FIXTURES / "gpt-tp2-pp2-torch" / "checkpoint"
    with pytest.raises(UsageError, match="--set tied=embed:1,embed:9"):
        ucp.plan(tied, to="deepspeed", names="pipeline", topology="pp=2,zero=1", settings={"partition": "uniform"})
