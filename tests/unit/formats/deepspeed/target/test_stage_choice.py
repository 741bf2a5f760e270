"""The layers of the target's stages, from what the source shows and the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ucp_formats.deepspeed.run_facts import RunFacts, run_facts
from ucp_formats.deepspeed.source_stages import Pipeline, pipeline_of
from ucp_formats.deepspeed.stage_choice import Stages, stages_of
from ucp_formats.deepspeed.stage_settings import stage_settings

import ucp
from ucp.errors import TopologyError, UsageError
from ucp.target import TargetOptions

FIXTURES = Path(__file__).resolve().parents[5] / "fixtures" / "deepspeed"
EMB = "tied_modules.emb.weight"


@cache
def facts(name: str) -> RunFacts:
    return run_facts(ucp.inspect(FIXTURES / name / "checkpoint"), TargetOptions(), ranks=1, stage=1)


def pipeline(name: str) -> Pipeline:
    found = pipeline_of(facts(name))
    assert found is not None
    return found


def stages(name: str, count: int, settings: Mapping[str, str] | None = None) -> Stages:
    return stages_of(facts(name), pipeline(name), stage_settings(settings or {}), count)


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
    found = stages("z1-pp2-tp2-dp2-bf16", 4)
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


def test_groups_that_stages_do_not_all_have_are_told() -> None:
    assert any("waits for ever" in note for note in stages("z1-pp2-dp2", 3).notes)
    assert not any("waits for ever" in note for note in stages("z1-pp4-tied", 3).notes)  # one group


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (3, {"stages": "0,3,6"}, "stages: 2 of them for pp=3"),
        (2, {"stages": "0,3,4"}, "4 layers: there are layers up to number 4"),
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


def test_a_stage_without_trained_parameters_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"stages 1 of layers 0-1 \| 2 \| 3 \| 4 \| 5 .* have none"):
        stages("z1-pp2-dp2", 5)


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
