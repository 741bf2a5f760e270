from __future__ import annotations

import pytest
from ucp_formats.megatron.mesh import split_layers, stage_problem

from ucp.errors import TopologyError, UnsupportedError


def counts(layers: int, pp: int, vpp: int = 1, **arguments: object) -> list[int]:
    return [len(own) for own in split_layers(layers, pp=pp, vpp=vpp, arguments=arguments).values()]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ((8, 4), [2, 2, 2, 2]),
        ((8, 2, 2), [2, 2, 2, 2]),
        ((8, 1), [8]),
    ],
)
def test_even_stages(asked, wanted):
    assert counts(*asked) == wanted


def test_chunks_interleave():
    found = split_layers(8, pp=2, vpp=2, arguments={})
    assert [list(found[chunk]) for chunk in ((0, 0), (1, 0), (0, 1), (1, 1))] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"decoder_first_pipeline_num_layers": 1}, [1, 3, 3, 3]),
        ({"decoder_last_pipeline_num_layers": 4}, [2, 2, 2, 4]),
        ({"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}, [3, 3, 3, 1]),
        ({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}, [2, 3, 3, 2]),
    ],
)
def test_first_and_last_stage_may_differ(arguments, wanted):
    assert counts(10, 4, **arguments) == wanted


def test_uneven_stages_of_a_virtual_pipeline():
    assert counts(12, 2, 2, decoder_first_pipeline_num_layers=4) == [2, 4, 2, 4]


@pytest.mark.parametrize(
    ("layers", "pp", "arguments"),
    [(7, 2, {}), (8, 4, {"decoder_first_pipeline_num_layers": 3}), (4, 2, {"decoder_last_pipeline_num_layers": 9})],
)
def test_layers_that_cannot_be_dealt_out(layers, pp, arguments):
    with pytest.raises(TopologyError, match=rf"{pp} stages .*\b{layers}\b.* pp "):
        counts(layers, pp, **arguments)


def test_a_layout_of_its_own_is_refused():
    with pytest.raises(UnsupportedError, match="pipeline_model_parallel_layout"):
        counts(4, 2, pipeline_model_parallel_layout="Et|ttL")


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_the_pattern_of_a_hybrid_model_deals_its_layers_out(name):
    assert counts(7, 2, **{name: "M*M|M*M-/MM"}) == [3, 4]
    assert counts(7, 2, 2, **{name: "M|*M|M*|M-"}) == [1, 2, 2, 2]
    assert counts(4, 2, **{name: "M*M-"}) == [2, 2]


@pytest.mark.parametrize(
    ("pattern", "pp", "vpp", "message"),
    [("M*|M-", 4, 1, "2 segments, expected pp x vpp = 4"), ("M*M-", 2, 2, "no '|' between chunks")],
)
def test_patterns_that_do_not_fit(pattern, pp, vpp, message):
    found = stage_problem(4, pp=pp, vpp=vpp, arguments={"hybrid_override_pattern": pattern})
    assert message in (found or "")


def test_a_layout_of_its_own_is_no_problem_for_torch_dist():
    assert stage_problem(5, pp=2, vpp=1, arguments={"pipeline_model_parallel_layout": "Et|ttttL"}) is None
