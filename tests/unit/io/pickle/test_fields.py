from __future__ import annotations

import pytest

from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError
from ucp.io.pickle.fields import (
    describe_value,
    require_integer,
    require_mapping,
    require_sequence,
    require_shapes,
    require_tensor,
    text,
)
from ucp.io.pickle.values import GlobalName, Stub, TorchSize

TENSOR = TensorRef(path="f", offset=0, dtype=DType.FLOAT32, shape=(2, 3), strides=(3, 1))
ENUM = Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,), new=False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (TENSOR, "a tensor of float32 [2, 3]"),
        (ENUM, "an object of deepspeed.runtime.zero.config.ZeroStageEnum"),
        (GlobalName("torch", "int8"), "the name torch.int8"),
        (None, "None"),
        ("x", "a str ('x')"),
        ("x" * 99, "a str"),
        (True, "a bool (True)"),
        ([1], "a list"),
    ],
)
def test_described(value: object, words: str) -> None:
    assert describe_value(value) == words


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (require_mapping, {"a": 1}, [1]),
        (require_sequence, (1, 2), {"a": 1}),
        (require_integer, 3, True),
        (require_integer, -1, 1.0),
        (text, "a", b"a"),
        (require_tensor, TENSOR, [1.0]),
    ],
)
def test_a_value_is_given_back_or_named(read, good: object, bad: object) -> None:
    assert read(good, "here") == good
    with pytest.raises(MalformedError, match=r" for here; got "):
        read(bad, "here")


def test_shapes_in_order() -> None:
    assert list(require_shapes({"b": TorchSize((2, 3)), "a": [], "c": (0,)}, "here").items()) == [
        ("b", (2, 3)), ("a", ()), ("c", (0,)),
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [{"a": (2, -1)}, {"a": (2, 1.5)}, {"a": (True,)}, {"a": 3}, {1: (2,)}, [("a", (2,))]])
def test_wrong_shapes(bad: object) -> None:
    with pytest.raises(MalformedError, match="here"):
        require_shapes(bad, "here")
