"""What the files of a pipeline tell of its stages, and of layers that use tied ones."""

from __future__ import annotations

from ucp_formats.deepspeed.write.pipeline.layers import Pipeline

from ucp.core.index import ParamGroup

EMB = "tied_modules.emb.weight"
LAYERS = {0: "tied_modules.emb.", 1: "1.", 3: "3.", 4: "4."}
HEADED = Pipeline(LAYERS, [[EMB, "1.weight"], [EMB, "3.weight", "4.weight"]])
"""The second stage has the tied layer too, in a layer without a file; layer 2 has none either."""


def test_every_stage_with_a_tied_layer_uses_it_and_one_alone_uses_it_twice() -> None:
    assert HEADED.find_unknown_uses({"emb": (0,)}) == ["emb"]
    assert Pipeline({**LAYERS, 4: "tied_modules.emb."}, HEADED.stages).find_unknown_uses({}) == []
    alone = Pipeline(LAYERS, [[EMB, "1.weight", "3.weight", "4.weight"]])
    assert (alone.find_unknown_uses({}), alone.find_unknown_uses({"emb": (0,)})) == (["emb"], [])


def test_stages_agree_where_every_parameter_is_on_its_stage() -> None:
    assert HEADED.has_stages((0, 3, 6), {"emb": [0, 5]})
    assert HEADED.has_stages((0, 2, 6), {"emb": [0, 5]})
    assert not HEADED.has_stages((0, 4, 6), {"emb": [0, 5]})  # 3 is on the second stage
    assert not HEADED.has_stages((0, 3, 5), {"emb": [0]})  # the second stage has emb
    assert Pipeline(LAYERS, [[], []]).has_stages((0, 4, 6), {})  # no optimizer says anything


def test_the_order_of_parameters_is_that_of_layers() -> None:
    group = ParamGroup(params=(EMB, "1.weight", "3.weight", "4.weight"), hyper={})
    assert HEADED.find_disorder([group]) is None
    odd = Pipeline(LAYERS, [[EMB, "1.weight"], [EMB, "4.weight", "3.weight"]])
    assert odd.find_disorder([group]) == ("4.weight", "3.weight")
    last = Pipeline(LAYERS, [[EMB, "1.weight"], ["3.weight", EMB]])
    assert last.find_disorder([group]) == ("3.weight", EMB)
    apart = [ParamGroup(params=(EMB, "4.weight"), hyper={}), ParamGroup(params=("3.weight",), hyper={})]
    assert odd.find_disorder(apart) is None


def test_what_no_optimizer_has() -> None:
    assert HEADED.stage_of("2.frozen") == {0}
    assert HEADED.stage_of("4.seen") == {1}
    assert HEADED.stage_of("tied_modules.emb.seen") == {0, 1}
