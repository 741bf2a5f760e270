"""A layout of ranks that cannot be had is a mistake in the arguments, exit code 2, whichever target finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = "deepspeed/z3-dp4-fp32"
PIPELINE = "deepspeed/z1-pp2-dp2"
EXPERTS = "deepspeed/z1-ep2-dp4"
LLAMA = "megatron/llama-tp2-pp2-dp2-full"
MIXTRAL = "megatron/mixtral-ep4-dp4-full"


@pytest.mark.parametrize("target", ["ucp", "deepspeed", "deepspeed-universal", "megatron"])
@pytest.mark.parametrize(
    "topology", ["", "dp", "dp=0", "dp=-1", "dp=two", "dp=1000000", "rows=2", "zero=7", "dp=2,dp=2", "vpp=2,zero=1"]
)
def test_what_no_run_can_have(ucp: Run, target: str, topology: str) -> None:
    said = ucp("plan", FIXTURES / ZERO3 / "checkpoint", "--to", target, "--topology", topology, code=2).stderr
    assert "Invalid value for '--topology'" in said


@pytest.mark.parametrize(
    ("source", "words", "said"),
    [
        (ZERO3, ["ucp", "dp=2"], "atoms are rank-independent"),
        (ZERO3, ["deepspeed", "dp=2,tp=2,zero=1"], "with tp=1"),
        (ZERO3, ["deepspeed", "dp=2,pp=2,zero=1"], "DeepSpeed pipeline saved"),
        (ZERO3, ["deepspeed", "dp=2,cp=2,zero=1"], "drop cp"),
        (ZERO3, ["deepspeed", "dp=2,etp=1,zero=1"], "drop vpp and etp"),
        (PIPELINE, ["deepspeed", "dp=2,pp=2,vpp=2,zero=1"], "drop vpp and etp"),
        (PIPELINE, ["deepspeed", "pp=50,zero=1"], "--set stages=FIRST,FIRST"),
        (PIPELINE, ["deepspeed", "pp=2,zero=1", "--set", "stages=0,2"], "2 stages for pp=2; got 1"),
        ("deepspeed/z1-pp2-tp2-dp2-bf16", ["deepspeed", "tp=8,zero=1"], ": 1, 2, 4"),
        (PIPELINE, ["deepspeed", "pp=2,zero=3"], "ZeRO 2 or 3"),
        ("deepspeed/z1-tp2-dp2", ["deepspeed", "tp=3,zero=1"], ": 1, 2, 4, 8"),
        (EXPERTS, ["deepspeed", "dp=3,ep=3,zero=1"], "got dp=3,ep=3"),
        ("deepspeed/z1-pp2-ep2-dp2", ["deepspeed", "dp=2,pp=2,ep=2,zero=1"], "tp=1, pp=1 and zero=0 to 2"),
        (EXPERTS, ["deepspeed", "dp=2,ep=2,zero=3"], "experts with ZeRO 3"),
        (
            ZERO3,
            ["deepspeed-universal", "tp=2"],
            "16 tensors are split over 2 tensor-parallel ranks",
        ),
        (ZERO3, ["deepspeed-universal", "pp=2"], "DeepSpeed pipeline saved"),
        ("deepspeed/z1-tp2-dp2", ["deepspeed-universal", "tp=3"], ": 1, 2, 4, 8"),
        (ZERO3, ["deepspeed-universal", "dp=2"], "Only tp and pp"),
        (ZERO3, ["deepspeed-universal", "zero=1"], "for dp=1,zero=1"),
        (ZERO3, ["deepspeed-universal", "pp=2,vpp=2"], "Only tp and pp"),
        (LLAMA, ["megatron", "zero=1"], "drop zero=1"),
        (LLAMA, ["megatron", "dp=3,ep=2"], "or lower ep"),
        (LLAMA, ["megatron", "tp=3", "--layout", "torch"], "Choose "),
        (LLAMA, ["megatron", "pp=3", "--layout", "torch"], "Choose "),
        (MIXTRAL, ["megatron", "dp=3,ep=3", "--layout", "torch"], "Choose "),
    ],
)
def test_what_a_target_or_a_source_cannot_have(ucp: Run, source: str, words: list[str], said: str) -> None:
    to, topology, *more = words
    found = ucp("plan", FIXTURES / source / "checkpoint", "--to", to, "--topology", topology, *more, code=2).stderr
    assert said in " ".join(found.split())
    assert "Traceback" not in found


def test_the_stage_has_to_be_said_and_what_is_left_out_is_told(ucp: Run, zero3: Path) -> None:
    said = ucp("plan", zero3, "--to", "deepspeed", "--topology", "dp=2", code=2).stderr
    assert "as in --topology dp=2,zero=3; got dp=2" in said
    assert "out are 1" in said
    assert "the source: dp=4,zero=3" in said


def test_a_source_without_a_stage_has_none_to_keep(ucp: Run) -> None:
    said = ucp("plan", FIXTURES / LLAMA / "checkpoint", "--to", "deepspeed", code=2).stderr
    assert "as in --topology dp=2,zero=1" in said
    assert "dp=2,tp=2,pp=2, and records no ZeRO" in said


def test_what_leaving_out_means_holds(ucp: Run, zero3: Path) -> None:
    """The option's help says so: axes left out are 1, without the option the source's are kept."""

    def planned(*words: str) -> dict[str, int]:
        document = json.loads(ucp("plan", zero3, "--to", "deepspeed", *words, "--json").stdout)
        return {axis: document["topology"][axis] for axis in ("dp", "tp", "pp", "zero")}

    assert planned() == {"dp": 4, "tp": 1, "pp": 1, "zero": 3}
    assert planned("--topology", "zero=1") == {"dp": 1, "tp": 1, "pp": 1, "zero": 1}
    told = " ".join(ucp("plan", "--help").stdout.split())
    assert "axes that are not given are 1" in told
    assert "Without this option, the layout of the source" in told


@pytest.mark.parametrize("words", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_a_universal_folder_takes_model_parallel_ranks(ucp: Run, words: str) -> None:
    """One model-states file of either kind per model-parallel rank, as DeepSpeed before 0.19.8 wants."""
    source = FIXTURES / "deepspeed" / "z1-pp2-tp2-dp2-bf16" / "checkpoint"
    document = json.loads(ucp("plan", source, "--to", "deepspeed-universal", "--topology", words, "--json").stdout)
    ranks = {"tp=2": 2, "pp=2": 2, "tp=2,pp=2": 4}[words]
    assert sum(file["path"].endswith("_model_states.pt") for file in document["files"]) == 2 * ranks
