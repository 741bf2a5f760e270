"""Values of a given type from parsed text, in any thread.

msgspec 0.22 learns a type when it is first used, and crashes if two threads do so at once: a lock lets one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LOCK = Lock()


def convert(value: object, kind: Callable[..., T]) -> T:
    """Plain values as a `kind`, a class. Raises msgspec.ValidationError, a ValueError."""
    with _LOCK:
        converted: T = msgspec.convert(value, kind)
    return converted


def decode_json(text: bytes, kind: type[T]) -> T:
    """A JSON document as a `kind`. Raises msgspec.DecodeError, ValidationError, UnicodeDecodeError, RecursionError."""
    with _LOCK:
        return msgspec.json.decode(text, type=kind)
