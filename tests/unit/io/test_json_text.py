"""JSON that is damaged: where, in words of our own."""

from __future__ import annotations

import json

import pytest

from ucp.io.json_text import Natural, NotJson, decode, parsed


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


class TestTyped:
    """`decode`: a document of a type, or where it is not."""

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            (b'{"a": [1, -1]}', r"`int` >= 0 - at `\$\[...\]\[1\]`"),
            (b'{"a": [1, 2.5]}', r"got `float` - at `\$\[...\]\[1\]`"),
            (b'{"a": [true]}', r"got `bool` - at `\$\[...\]\[0\]`"),
            (b'{"a": 3}', r"got `int` - at `\$\[...\]`"),
            (b'{"a": ["\\ud800"]}', "surrogates not allowed"),
            (b'{"a": [NaN]}', r"got `float`"),
            (b'{"a": [1', "it goes wrong at line 1, column 9"),
            (b'{"a": [1]} x', "it goes wrong at line 1, column 12"),
            (b"\xff", "byte 0 is not UTF-8"),
            (b'{"a": ' + b"[" * 100_000, "got `array`"),
        ],
    )
    def test_what_is_not_says_where(self, text: bytes, place: str) -> None:
        with pytest.raises(NotJson, match=place):
            decode(text, dict[str, list[Natural]])

    def test_names_of_files_that_are_not_utf_8_come_back(self) -> None:
        names = ["a\udcffb", "c"]
        assert decode(json.dumps(names).encode(), list[str]) == names
