"""JSON that is damaged: where, in words of our own."""

from __future__ import annotations

import json

import pytest

from ucp.io.json_text import NotJson, parsed


@pytest.mark.parametrize("document", [{}, [1, 2.5, None, True], {"a": {"b": "\u00e4"}}, "text", 3])
def test_what_is_json_is_read(document: object) -> None:
    assert parsed(json.dumps(document).encode()) == document


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"{", "it goes wrong at line 1, column 2"),
        (b'{\n "a": 1,\n}', "it goes wrong at line 3, column 1"),
        (b'{"a": 1} x', "it goes wrong at line 1, column 10"),
        (b'"\xff"', "byte 1 is not UTF-8 text"),
        (b"[" * 100_000, "it is nested too deeply to be read"),
        (b"9" * 5000, "a number in it has thousands of digits"),
    ],
)
def test_what_is_not_says_where(text: bytes, said: str) -> None:
    with pytest.raises(NotJson) as caught:
        parsed(text)
    assert str(caught.value) == said


def test_objects_become_what_is_asked_for() -> None:
    assert parsed(b'{"a": 1, "a": 2}', pairs=lambda pairs: pairs) == [("a", 1), ("a", 2)]


def test_what_is_wrong_with_an_object_is_told_by_who_makes_it() -> None:
    def refuse(pairs: list[tuple[str, object]]) -> object:
        raise ValueError("twice")

    with pytest.raises(ValueError, match=r"^twice$"):
        parsed(b'{"a": 1}', pairs=refuse)
