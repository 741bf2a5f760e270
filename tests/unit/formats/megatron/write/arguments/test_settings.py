"""What a user says of a run beside what its checkpoint records."""

from __future__ import annotations

import pytest
from ucp_formats.megatron.write.checks import check_settings

from ucp.errors import UsageError

RECORDED = {"num_layers": 4, "lr": 0.5, "swiglu": True, "tokenizer_type": "Null", "layout": [1], "vpp": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 8),
        ("lr", 1),
        ("lr", 0.25),
        ("swiglu", False),
        ("layout", [2]),
        ("vpp", "1,2"),
        ("num_layers", None),
    ],
)
def test_values_of_the_kind_that_was_recorded(name, value):
    check_settings({name: value}, RECORDED)


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", "x"), ("num_layers", 1.5), ("swiglu", 1), ("tokenizer_type", 3), ("layout", 1)]
)
def test_values_of_another_kind(name, value):
    with pytest.raises(UsageError, match=rf" --set; got\n {{0,2}}{name}: "):
        check_settings({name: value}, RECORDED)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(UsageError, match=r"(?s)num_layers: -3 .*lr: 'fast'"):
        check_settings({"num_layers": -3, "lr": "fast"}, RECORDED)
