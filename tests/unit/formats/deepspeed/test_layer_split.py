"""Layers dealt out to stages by the shapes of their optimizers."""

from __future__ import annotations

import pytest
from ucp_formats.deepspeed.layer_split import split_layers
from ucp_formats.deepspeed.whole_source import WholeOptimizer

from ucp.dtypes import DType
from ucp.errors import UnsupportedError
from ucp.tensor import TensorRef, contiguous_strides


def ref(*shape: int) -> TensorRef:
    return TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=shape, strides=contiguous_strides(shape))


def optimizer(*shapes: tuple[int, ...]) -> WholeOptimizer:
    state = {number: {"exp_avg": ref(*shape)} for number, shape in enumerate(shapes)}
    saved: dict[object, object] = {"state": state, "param_groups": [{"params": list(range(len(shapes)))}]}
    return WholeOptimizer(where="a", saved=saved, params={})


LAYERS = {"0.weight": ref(7, 4), "1.weight": ref(4, 4), "1.bias": ref(4), "3.weight": ref(4, 4), "4.weight": ref(4, 7)}


def test_the_one_way_that_fits() -> None:
    found = split_layers([optimizer((7, 4), (4, 4), (4,)), optimizer((4, 4), (4, 7))], LAYERS, "x")
    assert [list(own) for own in found] == [["0.weight", "1.weight", "1.bias"], ["3.weight", "4.weight"]]


def test_frozen_layers_between_stages_change_nothing() -> None:
    layers = dict(sorted({**LAYERS, "2.frozen": ref(9, 9)}.items(), key=lambda item: item[0][0]))
    found = split_layers([optimizer((7, 4), (4, 4), (4,)), optimizer((4, 4), (4, 7))], layers, "x")
    assert [len(own) for own in found] == [3, 2]


def test_several_ways() -> None:
    layers = {"0.weight": ref(4, 4), "1.weight": ref(4, 4), "2.weight": ref(4, 4)}
    with pytest.raises(UnsupportedError, match=r"several fit|none fits"):
        split_layers([optimizer((4, 4)), optimizer((4, 4))], layers, "x")


def test_a_tied_layer_without_a_file() -> None:
    with pytest.raises(UnsupportedError, match=r"none fits for certain. A layer tied .* has no file"):
        split_layers([optimizer((7, 4), (4, 4), (4,)), optimizer((4, 4), (4, 7), (7, 4))], LAYERS, "x")
