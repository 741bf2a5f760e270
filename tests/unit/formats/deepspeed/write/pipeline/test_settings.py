"""What `--set` says of the stages of a pipeline."""

from __future__ import annotations

import pytest
from ucp_formats.deepspeed.write.pipeline.stages import StageSettings, parse_stage_settings

from ucp.errors import UsageError


def test_every_setting() -> None:
    assert parse_stage_settings({}) == StageSettings()
    assert not parse_stage_settings({}).partitions
    assert parse_stage_settings({"stages": "0,3,5,9", "tied": "embed:8,embed:7,pos:1"}) == StageSettings(
        bounds=(0, 3, 5, 9), tied={"embed": (8, 7), "pos": (1,)}
    )
    found = parse_stage_settings({"partition": "type:2-4,7", "layers": "9"})
    assert found == StageSettings(partition="type:2-4,7", matched=frozenset({2, 3, 4, 7}), layers=9)
    assert found.partitions


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stages", "1,3"),
        ("stages", "0,3,3"),
        ("stages", "4"),
        ("stages", "0,999999999"),
        ("partition", "type:transformer"),
        ("partition", "type:4-2"),
        ("partition", "type:1-999999999"),
        ("partition", "profile"),
        ("layers", "0"),
        ("tied", "8"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)--set stages, partition, layers, tied.*\n  {name}={text}: "):
        parse_stage_settings({name: text})


@pytest.mark.parametrize("settings", [{"stages": "0,3", "partition": "uniform"}, {"layers": "3"}, {"tied": "e:3"}])
def test_either_stages_or_partition(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"\n  .*\bstages .*\bpartition\b"):
        parse_stage_settings(settings)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)\n  layers=x: .*\n  partition=x: ") as error:
        parse_stage_settings({"layers": "x", "partition": "x"})
    assert str(error.value).count("\n") == 2
