"""What `--set` says of the stages of a pipeline."""

from __future__ import annotations

import pytest
from ucp_formats.deepspeed.write.pipeline.settings import Method, StageSettings, stage_settings

from ucp.errors import UsageError


def test_every_setting() -> None:
    assert stage_settings({}).is_empty
    assert stage_settings({"stages": "0,3,5,9", "tied": "embed:8,embed:7,pos:1"}) == StageSettings(
        bounds=(0, 3, 5, 9), tied={"embed": (8, 7), "pos": (1,)}
    )
    found = stage_settings({"partition": "type:2-4,7", "layers": "9"})
    assert found == StageSettings(method=Method.TYPE, matched=frozenset({2, 3, 4, 7}), layers=9)
    assert stage_settings({"partition": "Uniform"}).method is Method.UNIFORM
    assert stage_settings({"stages": "0,3,9", "layers": "9"}) == StageSettings(bounds=(0, 3, 9), layers=9)


def test_what_is_not_checked_deals_nothing_out() -> None:
    unchecked = stage_settings({"norm": "unchecked"})
    assert unchecked.any_norm
    assert not unchecked.is_empty
    assert not unchecked.deals
    assert stage_settings({"norm": "unchecked", "layers": "9"}).deals


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("stags", "0,2", "stags=0,2: did you mean stages?"),
        ("num_layers", "9", "did you mean layers?"),
        ("xyz", "1", "xyz=1: no such setting"),
        ("stages", "1,3", "stages=1,3: expected the layer that each stage starts with"),
        ("stages", "0,3,3", "increasing from 0"),
        ("stages", "4", "stages=4: expected"),
        ("stages", "0,999999999", "stages=0,999999999: expected"),
        ("partition", "type:transformer", "the classes that type:... speaks of are not in the files"),
        ("partition", "type:4-2", "partition=type:4-2: expected"),
        ("partition", "type:1-999999999", "expected parameters, uniform or type"),
        ("partition", "profile", "expected parameters, uniform or type"),
        ("layers", "0", "the number of entries in the list of layers"),
        ("tied", "8", "expected key and number of the layer"),
        ("norm", "none", "norm=none: expected unchecked"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        stage_settings({name: text})
    assert message in str(error.value)
    assert "--set stages, partition, layers, tied, norm" in str(error.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)layrs.*partition=x.*") as error:
        stage_settings({"layrs": "3", "partition": "x"})
    assert str(error.value).count("\n") == 2


def test_stages_say_all() -> None:
    with pytest.raises(UsageError) as error:
        stage_settings({"stages": "0,3", "layers": "4", "partition": "uniform"})
    assert "partition: stages says it; drop one of them" in str(error.value)
    assert "layers=4: stages ends with 3, the number of layers" in str(error.value)
