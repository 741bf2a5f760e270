"""Decodes JSON that may be damaged; errors say where it goes wrong.

>>> decode(b'{"steps": [3, 4]}', dict[str, list[int]])
{'steps': [3, 4]}
>>> decode(b'{"steps": [3, "four"]}', dict[str, list[int]])
Traceback (most recent call last):
ucp.io.json_text.NotJson: Expected `int`, got `str` - at `$[...][1]`
>>> parsed(b'{"step": ')
Traceback (most recent call last):
ucp.io.json_text.NotJson: it goes wrong at line 1, column 10
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import xxhash

from ucp.core.text.typed import convert, decode_json

T = TypeVar("T")

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""Field of a document: a whole number of at least 0."""


_DIGEST = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\s*\Z')
"""Last entry of a document that `with_digest` wrote."""

Pairs = Callable[[list[tuple[str, object]]], object]


class NotJson(ValueError):  # noqa: N818  # a word of the message, never shown to a user by name
    """Text is not JSON, or not of the type asked for; the message says where it goes wrong."""


def decode(text: bytes, kind: type[T]) -> T:
    """The document `text` (UTF-8) as a `kind`, such as a msgspec.Struct. Raises NotJson."""
    try:
        return decode_json(text, kind)
    except msgspec.ValidationError as error:
        raise NotJson(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document = parsed(text)  # says the line; and reads lone surrogates, as in names of files that are not UTF-8
    try:
        return convert(document, kind)
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError: a surrogate in place of a number
        raise NotJson(str(error)) from error


def parsed(text: bytes, *, pairs: Pairs | None = None) -> object:
    """The document in `text` (UTF-8). Raises NotJson, and what `pairs` raises.

    `pairs`: what an object becomes, from its names and values; a dict, if not given.
    """
    if not text.strip():
        raise NotJson("it is empty")
    try:
        document: object = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise NotJson(f"byte {error.start} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"it goes wrong at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise NotJson("it is nested too deeply to be read") from error
    except ValueError as error:
        if pairs is not None and "integer string conversion" not in str(error):
            raise
        raise NotJson("a number in it has thousands of digits") from error
    return document


def unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For `parsed`: a dict of names that come once each. Raises NotJson."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise NotJson(f"it has the name {name!r} twice")
    return entries


def with_digest(text: bytes) -> bytes:
    """The JSON object `text` with one more entry, the last: the xxh3-64 of all bytes before it."""
    text = text.removesuffix(b"}").rstrip()
    return text + b',"xxh3":"%s"}\n' % xxhash.xxh3_64_hexdigest(text).encode()


def has_digest(text: bytes) -> bool:
    """Whether a text ends with a digest, right or wrong."""
    return _DIGEST.search(text) is not None


def has_wrong_digest(text: bytes) -> bool:
    """Whether a text changed since `with_digest` wrote it; False without a digest (a text that was edited by hand)."""
    digest = _DIGEST.search(text)
    return digest is not None and xxhash.xxh3_64_hexdigest(text[: digest.start()]).encode() != digest[1]
