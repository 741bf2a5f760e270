"""What the files of a pipeline tell of its stages, and what layers without a file can be."""

from __future__ import annotations

from ucp_formats.deepspeed.write.pipeline.layers import Pipeline, stage_at
from ucp_formats.deepspeed.write.pipeline.tied_uses import possible_uses

from ucp.core.index import ParamGroup

EMB = "tied_modules.emb.weight"
LAYERS = {0: "tied_modules.emb.", 1: "1.", 3: "3.", 4: "4."}
HEADED = Pipeline(LAYERS, [[EMB, "1.weight"], [EMB, "3.weight", "4.weight"]])
"""The second stage has the tied layer too, in a layer without a file; layer 2 has none either."""


def test_layers_and_windows() -> None:
    assert (HEADED.free, HEADED.layer_stages) == (5, {1: 0, 3: 1, 4: 1})
    assert (HEADED.tied_stages, HEADED.tied_layers) == ({"emb": {0, 1}}, {"emb": [0]})
    assert (HEADED.window(0), HEADED.window(1)) == ((0, 3), (2, None))


def test_stages_agree_where_every_parameter_is_on_its_stage() -> None:
    assert HEADED.agrees((0, 3, 6), {"emb": [0, 5]})
    assert HEADED.agrees((0, 2, 6), {"emb": [0, 5]})
    assert not HEADED.agrees((0, 4, 6), {"emb": [0, 5]})  # 3 is on the second stage
    assert not HEADED.agrees((0, 3, 5), {"emb": [0]})  # the second stage has emb
    assert Pipeline(LAYERS, [[], []]).agrees((0, 4, 6), {})  # no optimizer says anything


def test_bounds_with_empty_stages() -> None:
    assert [stage_at((0, 1, 2, 2, 2), layer) for layer in (0, 1)] == [0, 1]


def test_a_tied_layer_without_a_file_is_after_the_others_or_in_a_gap() -> None:
    found = [(own.layers, own.every["emb"]) for own in possible_uses(HEADED, {}, None)]
    assert found[:3] == [(6, [0, 5]), (7, [0, 5]), (7, [0, 6])]
    assert found[-1] == (8, [0, 2])
    assert [(own.layers, own.every["emb"]) for own in possible_uses(HEADED, {}, 6)] == [(6, [0, 5]), (6, [0, 2])]
    assert [(own.layers, own.every["emb"]) for own in possible_uses(HEADED, {}, 5)] == [(5, [0, 2])]
    assert [own.gaps(HEADED) for own in possible_uses(HEADED, {}, 6)] == [0, 1]


def test_the_user_says_where_it_is() -> None:
    assert next(possible_uses(HEADED, {"emb": (7,)}, None)).every == {"emb": [0, 7]}
    assert next(possible_uses(HEADED, {"emb": (7,)}, None)).layers == 8


def test_files_can_be_of_all_stages_that_have_it() -> None:
    own = Pipeline({**LAYERS, 4: "tied_modules.emb."}, [[EMB, "1.weight"], [EMB, "3.weight"]])
    assert next(possible_uses(own, {}, None)).every == {"emb": [0, 4]}


def test_one_stage_alone_ties_to_something_that_is_not_seen() -> None:
    own = Pipeline(LAYERS, [[EMB, "1.weight", "3.weight", "4.weight"]])
    assert next(possible_uses(own, {}, None)).every == {"emb": [0, 5]}


def test_several_keys_after_the_last_file() -> None:
    both = [EMB, "tied_modules.pos.weight"]
    own = Pipeline({0: "tied_modules.emb.", 1: "tied_modules.pos.", 2: "2."}, [both, ["2.weight", *both]])
    assert next(possible_uses(own, {}, None)).every == {"emb": [0, 3], "pos": [1, 4]}


def test_the_order_of_parameters_is_that_of_layers() -> None:
    group = ParamGroup(params=(EMB, "1.weight", "3.weight", "4.weight"), hyper={})
    assert HEADED.disorder([group]) is None
    odd = Pipeline(LAYERS, [[EMB, "1.weight"], [EMB, "4.weight", "3.weight"]])
    assert odd.disorder([group]) == ("4.weight", "3.weight")
    last = Pipeline(LAYERS, [[EMB, "1.weight"], ["3.weight", EMB]])
    assert last.disorder([group]) == ("3.weight", EMB)
    apart = [ParamGroup(params=(EMB, "4.weight"), hyper={}), ParamGroup(params=("3.weight",), hyper={})]
    assert odd.disorder(apart) is None


def test_what_no_optimizer_has() -> None:
    assert HEADED.stage_of("2.frozen") == {0}
    assert HEADED.stage_of("4.seen") == {1}
    assert HEADED.stage_of("tied_modules.emb.seen") == {0, 1}
