"""JSON that is damaged: where, in words of our own."""

from __future__ import annotations

import json

import pytest

from ucp.io.json_text import Natural, NotJson, decode, parsed


@pytest.mark.parametrize("document", [{}, [1, 2.5, None, True], {"a": {"b": "\u00e4"}}, "text", 3])
def test_what_is_json_is_read(document: object) -> None:
    assert parsed(json.dumps(document).encode()) == document


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "line 1, column 2$"),
        (b'{\n "a": 1,\n}', "line 3, column 1$"),
        (b'{"a": 1} x', "line 1, column 10$"),
        (b'"\xff"', "byte 1 .*UTF-8"),
        (b"[" * 100_000, "nested"),
        (b"9" * 5000, "digits"),
    ],
)
def test_what_is_not_says_where(text: bytes, facts: str) -> None:
    with pytest.raises(NotJson, match=facts):
        parsed(text)


def test_objects_become_what_is_asked_for() -> None:
    assert parsed(b'{"a": 1, "a": 2}', pairs=lambda pairs: pairs) == [("a", 1), ("a", 2)]


def test_what_is_wrong_with_an_object_is_told_by_who_makes_it() -> None:
    def refuse(pairs: list[tuple[str, object]]) -> object:
        raise ValueError("twice")

    with pytest.raises(ValueError, match=r"^twice$"):
        parsed(b'{"a": 1}', pairs=refuse)


class TestTyped:
    """`decode`: a document of a type, or where it is not."""

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            (b'{"a": [1, -1]}', r"`int` >= 0 - at `\$\[...\]\[1\]`"),
            (b'{"a": [1, 2.5]}', r"got `float` - at `\$\[...\]\[1\]`"),
            (b'{"a": [true]}', r"got `bool` - at `\$\[...\]\[0\]`"),
            (b'{"a": 3}', r"got `int` - at `\$\[...\]`"),
            (b'{"a": ["\\ud800"]}', "surrogates"),
            (b'{"a": [NaN]}', r"got `float`"),
            (b'{"a": [1', "line 1, column 9$"),
            (b'{"a": [1]} x', "line 1, column 12$"),
            (b"\xff", "byte 0 .*UTF-8"),
            (b'{"a": ' + b"[" * 100_000, "got `array`"),
        ],
    )
    def test_what_is_not_says_where(self, text: bytes, place: str) -> None:
        with pytest.raises(NotJson, match=place):
            decode(text, dict[str, list[Natural]])

    def test_names_of_files_that_are_not_utf_8_come_back(self) -> None:
        names = ["a\udcffb", "c"]
        assert decode(json.dumps(names).encode(), list[str]) == names
