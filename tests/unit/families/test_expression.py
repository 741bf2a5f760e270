from __future__ import annotations

import pickle
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.families.expression import Expression, ExpressionError, UnknownNameError

VALUES = {"heads": 8, "groups": 2, "dim": 12, "gated": 1, "text": "RMSNorm", "nothing": None, "fc1": (8, 4)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("heads * 4", 32),
        ("(heads + 2 * groups) * 4", 48),
        ("dim / 2", 6),
        ("dim // 5", 2),
        ("dim % 5", 2),
        ("-heads + 9", 1),
        ("heads == 8", 1),
        ("heads < groups", 0),
        ("0 < groups <= 2", 1),
        ("0 < groups > 2", 0),
        ("text == 'RMSNorm'", 1),
        ("text != 'RMSNorm'", 0),
        ("nothing == None", 1),
        ("gated and heads > 2", 1),
        ("not gated", 0),
        ("gated or missing", 1),
        ("(not gated) and missing", 0),
        ("heads if gated else missing", 8),
        ("min(heads, groups, 5)", 2),
        ("max(heads, groups)", 8),
        ("fc1[0] == 2 * fc1[1]", 1),
        ("  heads  ", 8),
    ],
)
def test_values(text, value):
    assert Expression(text).value(VALUES) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "heads +",
        "heads ** 2",
        "1.5",
        "b'x'",
        "[1, 2]",
        "f(heads)",
        "min(heads, key=1)",
        "heads.real",
        "__import__('os')",
        "(lambda: 1)()",
        "heads[0:1]",
        "fc1[heads][0]",
        "heads is None",
        "heads in fc1",
        "heads & 1",
        "heads := 3",
        "x for x in y",
        "f'{heads}'",
        "1; 2",
        "(" * 300,
    ],
)
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(ExpressionError, match=re.escape(repr(text))):
        Expression(text)


@pytest.mark.parametrize("text", ["missing", "heads + missing", "heads[0]", "fc1[2]", "nowhere[0]", "text[0]"])
def test_what_is_not_known_is_named(text):
    with pytest.raises(UnknownNameError, match=r"missing|heads\[0\]|fc1\[2\]|nowhere|text\[0\]"):
        Expression(text).value(VALUES)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("dim / 5", "12 .*multiple of 5"),
        ("dim / 0", "zero"),
        ("dim % 0", "zero"),
        ("text", "64 bits for text; got a str"),
        ("nothing + 1", "64 bits for nothing; got a NoneType"),
        ("text < 3", "64 bits for <; got a str"),
        ("-text", "64 bits for -; got a str"),
        ("fc1", "64 bits for fc1; got a "),
    ],
)
def test_what_has_no_value_says_why(text, facts):
    with pytest.raises(ExpressionError, match=rf"^{re.escape(repr(text))}: .*{facts}"):
        Expression(text).value(VALUES)


def test_names_are_those_it_may_depend_on():
    assert Expression("max(a, b[0]) if c == 'd' else 3").names == {"a", "b", "c"}


def test_it_travels():
    again = pickle.loads(pickle.dumps(Expression("dim / 2")))
    assert again == Expression("dim / 2")
    assert again.value({"dim": 8}) == 4


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_an_error(text):
    with suppress(ExpressionError):
        Expression(text).value({})


@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(1, 99))
def test_arithmetic_is_that_of_whole_numbers(a, b, c):
    values = {"a": a, "b": b, "c": c}
    assert Expression("a + b * c").value(values) == a + b * c
    assert Expression("a * c / c - b").value(values) == a - b
    assert Expression("a // c * c + a % c").value(values) == a


def test_numbers_stay_sizes():
    """Products of products would soon fill the memory."""
    values: dict[str, object] = {"a": 1 << 62}
    with pytest.raises(ExpressionError, match=r"64 bits .* a \* a; got .*\b125 bits"):
        Expression("a * a").value(values)
    assert Expression("a + (a - 1)").value(values) == (1 << 63) - 1


def test_what_is_recorded_is_compared_only_where_it_is_a_number_or_text():
    nested: object = ()
    for _ in range(200):
        nested = (nested, nested)
    with pytest.raises(ExpressionError, match=r"'a == b': .*texts"):
        Expression("a == b").value({"a": nested, "b": (nested, nested)})
