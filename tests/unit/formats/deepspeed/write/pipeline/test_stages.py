"""The layers of the target's stages: the source's own, or what the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline, read_pipeline
from ucp_formats.deepspeed.write.pipeline.stages import Stages, assign_stages, parse_stage_settings
from ucp_formats.deepspeed.write.run import RunFacts, run_facts

import ucp
from ucp.core.target import TargetOptions
from ucp.errors import TopologyError, UsageError

FIXTURES = Path(__file__).resolve().parents[6] / "fixtures" / "deepspeed"
EMB = "tied_modules.emb.weight"
TIED = {"tied": "emb:5"}


@cache
def facts(name: str, zero: int = 0) -> RunFacts:
    return run_facts(ucp.inspect(FIXTURES / name / "checkpoint"), TargetOptions(), ranks=1, stage=zero, tp=1)


def pipeline(name: str) -> Pipeline:
    found = read_pipeline(facts(name))
    assert found is not None
    return found


def stages(name: str, count: int, settings: Mapping[str, str] | None = None, *, zero: int = 0) -> Stages:
    return assign_stages(facts(name, zero), pipeline(name), parse_stage_settings(settings or {}), count)


def layers(found: Stages) -> list[list[str]]:
    return [sorted({"emb" if name.startswith("tied") else name.split(".")[0] for name in own}) for own in found.places]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stages": "0,1,4,6"}, [["emb"], ["1", "3"], ["4", "emb"]]),
        ({"stages": "0,1,4,9"}, [["emb"], ["1", "3"], ["4", "emb"]]),
        ({"partition": "uniform"}, [["1", "emb"], ["3"], ["4", "emb"]]),
        ({"partition": "uniform", "layers": "7", "tied": "emb:6"}, [["1", "emb"], ["3", "4"], ["emb"]]),
        ({"partition": "parameters"}, [["1", "emb"], ["3", "4"], ["emb"]]),
        ({"partition": "type:1,3-4"}, [["1", "emb"], ["3"], ["4", "emb"]]),
    ],
)
def test_what_the_user_says(settings: Mapping[str, str], expected: list[list[str]]) -> None:
    assert layers(stages("z1-pp2-dp2", 3, {**TIED, **settings})) == expected


@pytest.mark.parametrize("settings", [{}, {"stages": "0,2,4,6"}, {"partition": "uniform"}])
def test_nothing_is_inferred(settings: Mapping[str, str]) -> None:
    with pytest.raises(TopologyError, match=r"z1-pp2-dp2.* pp=2,.* tied_modules\.emb ") as error:
        stages("z1-pp2-dp2", 3, settings)
    ways = ["--set tied=emb:", "--to deepspeed-universal", *([] if settings else ["--set stages=", "--set partition="])]
    assert [way for way in ways if way not in str(error.value)] == []
    assert ("--set stages=" in str(error.value)) is not bool(settings)


def test_the_note_says_what_was_done_and_whether_the_source_is_so() -> None:
    (note,) = stages("z1-pp2-dp2", 4, {**TIED, "partition": "uniform"}).notes
    assert "stages=0,2,4,5,6, as --set says with partition=uniform for 6 layers. A run that" in note
    (note,) = stages("z1-pp2-dp2", 3, {**TIED, "partition": "parameters"}).notes
    assert "the source's stages do not follow from this partition: check partition, layers and tied" in note
    (note,) = stages("z1-pp2-dp2", 3, {**TIED, "stages": "0,1,4,6"}).notes
    assert "the source's stages" not in note


def test_one_stage_needs_no_layer_with_a_file() -> None:
    own = facts("z1-pp2-dp2")
    bare = replace(own, index=replace(own.index, atoms={EMB: own.index.atoms[EMB]}, groups=()))
    assert assign_stages(bare, Pipeline({}, [[EMB], [EMB]]), parse_stage_settings({}), 1).places == [{EMB: -1}]


def test_the_order_of_several_tied_layers_has_to_be_known() -> None:
    pos = "tied_modules.pos.weight"
    own = Pipeline({0: "tied_modules.emb.", 1: "1."}, [[EMB, "1.weight"], [EMB, pos]])
    with pytest.raises(TopologyError, match=r"tied_modules\.emb, tied_modules\.pos "):
        assign_stages(facts("z1-pp2-dp2"), own, parse_stage_settings({}), 1)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"stages": "0,3,6"}, "stages: .*pp=3; got 2"),
        ({"stages": "0,2,3,5"}, r".* layer 5; got 5\b"),
        ({"partition": "uniform", "layers": "3"}, r".* layer 5; got 3\b"),
        ({"partition": "uniform", "tied": "embd:5"}, r"tied=embd: .*\bemb$"),
        ({"partition": "uniform", "tied": "emb:4"}, "tied=emb:4: "),
        ({"partition": "type:1-9", "layers": "8"}, r"type: layer 9 .*\b8\b"),
    ],
)
def test_settings_that_do_not_fit_the_files(settings: Mapping[str, str], facts: str) -> None:
    with pytest.raises(UsageError, match=rf"\n  {facts}"):
        stages("z1-pp2-dp2", 3, {**TIED, **settings})


@pytest.mark.parametrize(
    ("count", "settings", "bounds"), [(5, {"partition": "uniform"}, "0,2,3,4,5,6"), (2, {"stages": "0,6,7"}, "0,6,7")]
)
def test_a_stage_without_trained_parameters_is_refused(count: int, settings: Mapping[str, str], bounds: str) -> None:
    with pytest.raises(TopologyError, match=rf" stages={bounds} .* 1\. "):
        stages("z1-pp2-dp2", count, {**TIED, **settings})


def test_parameters_out_of_order_are_refused() -> None:
    name = "z1-pp4-tied"
    own = pipeline(name)
    turned = replace(own, stages=[own.stages[0], list(reversed(own.stages[1])), *own.stages[2:]])
    with pytest.raises(TopologyError, match=r"2\.down\.weight .*3\.scale"):
        assign_stages(facts(name), turned, parse_stage_settings({}), 2)
