"""Values of a checkpoint in words and as JSON, whatever they are."""

from __future__ import annotations

import json

import pytest

from ucp.core.tensor import DType, InlineTensor
from ucp.io.pickle.values import GlobalName, Stub
from ucp_cli.pages.values import describe_value, json_value

TENSOR = InlineTensor(data=b"\0" * 4, dtype=DType.INT8, shape=(2, 2))


def test_what_is_not_plain_keeps_what_is() -> None:
    scaler = Stub(GlobalName("ds", "Scaler"), state={"cur_scale": 2.0, "t": TENSOR}, has_state=True)
    assert json_value({"epoch": 3, "ema": [TENSOR, 1], "scaler": scaler, "pair": (TENSOR, None)}) == {
        "epoch": 3,
        "ema": ["<tensor 2x2 int8>", 1],
        "scaler": {"!object": "ds.Scaler", "state": {"cur_scale": 2.0, "t": "<tensor 2x2 int8>"}},
        "pair": {"!tuple": ["<tensor 2x2 int8>", None]},
    }


def test_what_holds_itself_comes_to_an_end() -> None:
    cycle = Stub(GlobalName("a", "B"))
    cycle.state = {"self": cycle}
    assert "<...>" in json.dumps(json_value(cycle))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        (0.1, "0.1"),
        ("x" * 100, "text of 100 characters"),
        ([1, 2], "[1, 2]"),
        (list(range(100)), "list of 100"),
        ((TENSOR,), "tuple of 1"),
        (TENSOR, "tensor 2x2 int8"),
        (GlobalName("torch", "float32"), "torch.float32"),
        (Stub(GlobalName("a", "B")), "object of a.B"),
        ({}, "nothing"),
        ({n: n for n in range(9)}, "0=0, 1=1, 2=2, 3=3, 4=4, 5=5, and 3 more"),
    ],
)
def test_in_words(value: object, said: str) -> None:
    assert describe_value(value) == said
