"""The layers of the target's stages, from what the source shows and the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ucp_formats.deepspeed.write.pipeline.choice import Stages, stages_of
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline, pipeline_of
from ucp_formats.deepspeed.write.pipeline.settings import stage_settings
from ucp_formats.deepspeed.write.run import RunFacts, run_facts

import ucp
from ucp.core.target import TargetOptions
from ucp.errors import TopologyError, UsageError

FIXTURES = Path(__file__).resolve().parents[6] / "fixtures" / "deepspeed"
EMB = "tied_modules.emb.weight"


@cache
def facts(name: str, zero: int = 0) -> RunFacts:
    return run_facts(ucp.inspect(FIXTURES / name / "checkpoint"), TargetOptions(), ranks=1, stage=zero)


def pipeline(name: str) -> Pipeline:
    found = pipeline_of(facts(name))
    assert found is not None
    return found


def stages(name: str, count: int, settings: Mapping[str, str] | None = None, *, zero: int = 0) -> Stages:
    return stages_of(facts(name, zero), pipeline(name), stage_settings(settings or {}), count)


def layers(found: Stages) -> list[list[str]]:
    return [sorted({"emb" if name.startswith("tied") else name.split(".")[0] for name in own}) for own in found.places]


def test_as_many_stages_are_those_of_the_source() -> None:
    found = stages("z1-pp2-dp2", 2)
    assert [list(own) for own in found.places] == [list(own) for own in pipeline("z1-pp2-dp2").stages]
    assert found.notes == ()


def test_the_method_that_explains_the_source_is_taken() -> None:
    found = stages("z1-pp2-dp2", 4)
    assert layers(found) == [["1", "emb"], ["3"], ["4"], ["emb"]]
    assert "layers 0-1 | 2-3 | 4 | 5 (stages=0,2,4,5,6), as partition_method=uniform of DeepSpeed" in found.notes[0]
    assert "layer 5 to use tied_modules.emb again" in found.notes[0]
    assert layers(stages("z1-pp4-tied", 2)) == [["1", "2", "emb"], ["3", "4", "emb"]]


def test_of_several_methods_the_default_is_taken_and_the_others_named() -> None:
    found = stages("z1-pp2-tp2-dp2-bf16", 4, zero=1)
    assert "(stages=0,2,3,4,6), as partition_method=parameters" in found.notes[0]
    assert "uniform fits the source too: layers 0-1 | 2-3 | 4 | 5 (stages=0,2,4,5,6)" in found.notes[0]


def test_one_stage_has_all_and_says_nothing() -> None:
    found = stages("z1-pp2-dp2", 1)
    assert layers(found) == [["1", "3", "4", "emb"]]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stages": "0,1,4,6"}, [["emb"], ["1", "3"], ["4", "emb"]]),
        ({"partition": "uniform", "tied": "emb:6"}, [["1", "emb"], ["3", "4"], ["emb"]]),
        ({"partition": "parameters"}, [["1", "emb"], ["3", "4"], ["emb"]]),
        ({"partition": "type"}, [["1", "3", "emb"], ["4"], ["emb"]]),
        ({"partition": "type:1,3-4"}, [["1", "emb"], ["3"], ["4", "emb"]]),
    ],
)
def test_what_the_user_says(settings: Mapping[str, str], expected: list[list[str]]) -> None:
    assert layers(stages("z1-pp2-dp2", 3, settings)) == expected


def test_tied_layers_come_first_then_layers_in_order() -> None:
    own = stages("z1-pp2-dp2", 1).places[0]
    assert min(own, key=own.__getitem__) == EMB
    assert own["1.weight"] == own["1.bias"] < own["3.weight"] < own["4.weight"]


def test_stages_that_could_not_take_a_step_are_refused_with_others_that_could() -> None:
    with pytest.raises(TopologyError) as error:
        stages("z1-pp2-dp2", 3, zero=1)
    text = str(error.value)
    assert "  stages 0, 2 (layers 1, 4, tied emb): groups 0-1\n" in text
    assert "  stage 1 (layer 3): group 1, nothing of 0 (tied_modules.emb.weight, ...)\n" in text
    assert "DeepSpeed 0.19.8 would load the files and hang in the first step: ZeRO 1 (scaled_global_norm in" in text
    assert "\n  --topology with pp=2 (partition=uniform): layers 0-2 | 3-5 (stages=0,3,6)\n" in text
    for count, more in ((2, {}), (3, {"norm": "unchecked"})):  # what the message says to do
        stages("z1-pp2-dp2", count, more, zero=1)
    stages("z1-pp2-dp2", 3, zero=0)


def test_a_stage_of_copies_alone_is_refused_and_another_method_offered() -> None:
    name, wrong = "z1-pp2-tp2-dp2-bf16", {"partition": "uniform"}
    with pytest.raises(TopologyError) as error:
        stages(name, 4, wrong, zero=1)
    text = str(error.value)
    assert "stage 3 would train nothing else" in text
    assert "fail in the first step: BF16_Optimizer leaves copies out" in text
    assert "\n  --set partition=parameters, for a run with that partition_method: layers 0-1 | 2 | 3 | 4-5 (" in text
    assert "\n  --topology with pp=3 and --set partition=uniform: layers 0-1 | 2-3 | 4-5 (" in text
    stages(name, 4, {"partition": "parameters"}, zero=1)
    stages(name, 3, wrong, zero=1)
    notes = stages(name, 4, {**wrong, "norm": "unchecked"}, zero=1).notes
    assert "Written as --set norm=unchecked says, for a run that takes no step" in notes[-1]


def test_unchecked_stages_are_those_of_the_source_still() -> None:
    own = stages("z1-pp2-dp2", 2, {"norm": "unchecked"}, zero=1)
    assert [list(names) for names in own.places] == [list(names) for names in pipeline("z1-pp2-dp2").stages]


def test_the_stages_of_the_source_are_looked_at_too() -> None:
    own = pipeline("z1-pp2-dp2")
    tied = [name for name in own.stages[1] if name == EMB]
    moved = replace(own, stages=[[*own.stages[0], *(n for n in own.stages[1] if n != EMB)], tied])
    with pytest.raises(TopologyError, match=r"stage 1 \(tied emb\): group 0, nothing of 1"):
        stages_of(facts("z1-pp2-dp2", 1), moved, stage_settings({}), 2)


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (3, {"stages": "0,3,6"}, "stages: 2 of them for pp=3"),
        (2, {"stages": "0,3,4"}, "4 layers: there are layers up to number 4"),
        (2, {"stages": "0,2,99"}, "stages: 99 layers, 94 of them after the last with a file"),
        (3, {"tied": "emb:70"}, "tied=emb: 71 layers, 66 of them after the last with a file"),
        (3, {"partition": "type:1-9"}, "partition=type: 10 layers, 5 of them after the last with a file"),
        (3, {"partition": "uniform", "layers": "3"}, "3 layers: there are layers up to number 4"),
        (3, {"tied": "embd:5"}, "tied=embd: trained tied layers of the source are emb"),
        (3, {"tied": "emb:4"}, "tied=emb:4: this layer has a file"),
        (3, {"partition": "type:1-9", "layers": "8"}, "type: layer 9 of 8"),
    ],
)
def test_settings_that_do_not_fit_the_files(count: int, settings: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        stages("z1-pp2-dp2", count, settings)
    assert message in str(error.value)
    assert "which has files of layers 0-1, 3-4:" in str(error.value)


def test_a_list_that_ends_with_many_functions_has_to_be_told() -> None:
    assert layers(stages("z1-pp2-dp2", 2, {"stages": "0,2,9"})) == [["1", "emb"], ["3", "4", "emb"]]
    found = stages("z1-pp2-dp2", 2, {"stages": "0,2,99", "layers": "99"})
    assert layers(found) == [["1", "emb"], ["3", "4", "emb"]]


def test_more_stages_than_layers_are_refused_in_one_line() -> None:
    with pytest.raises(TopologyError) as error:
        stages("z1-pp2-dp2", 50)
    assert str(error.value).endswith(
        "expected at most pp=5 for " + facts("z1-pp2-dp2").index.path + ", whose layers with trained parameters are "
        "0-1, 3-5; got pp=50. DeepSpeed makes no optimizer for a stage without: ask for fewer stages"
    )


def test_a_stage_without_trained_parameters_is_refused_with_stages_that_have() -> None:
    with pytest.raises(TopologyError, match=r"stage 1 of layers 0-1 \| 2 \| 3 \| 4 \| 5 .* has none") as error:
        stages("z1-pp2-dp2", 5)
    assert "\n  --topology with pp=4 (partition=uniform): layers 0-1 | 2-3 | 4 | 5 (stages=0,2,4,5,6)\n" in str(
        error.value
    )
    assert layers(stages("z1-pp2-dp2", 4)) == [["1", "emb"], ["3"], ["4"], ["emb"]]


def test_stages_that_no_method_explains_are_asked_for() -> None:
    odd = replace(pipeline("z1-pp4-tied"), stages=[["tied_modules.embed.w"], ["1.w", "2.w", "3.w"], ["4.w"]])
    own = facts("z1-pp4-tied")
    with pytest.raises(TopologyError, match=r"tied layers only; 1, 2, 3; 4\. For pp=2, say .*--set stages="):
        stages_of(own, odd, stage_settings({}), 2)


def test_parameters_out_of_order_are_refused() -> None:
    name = "z1-pp4-tied"
    own = pipeline(name)
    turned = replace(own, stages=[own.stages[0], list(reversed(own.stages[1])), *own.stages[2:]])
    with pytest.raises(TopologyError, match="in the order of their layers"):
        stages_of(facts(name), turned, stage_settings({}), 2)
