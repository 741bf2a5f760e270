"""Keys of dicts and members of sets that a file asks for: hashing them and telling them apart takes bounded time.

Python hashes a tuple anew each time, with all that lies in it, and compares keys of one hash one by one. Whole numbers
of 61 bits, complex numbers and tuples can be chosen so that thousands of them have the same.

>>> check_keys([(1, "a"), 7])
>>> check_keys([[]])
Traceback (most recent call last):
ValueError: expected a hashable key; got a list
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ucp.core.pickle_values import GlobalName, Stub
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.io.torch_file.storage import StorageRef

__all__ = ["Keys", "check_keys"]

_MOST_NODES = 256
"""Members of one key, those of its members counted: hashing and comparing recurse, and are repeated."""
_MOST_ALIKE = 100
"""Keys of one container that may have one hash."""
_APART = 1 << 60
"""Whole numbers below it have different hashes (but -1 and -2)."""
_NUMBERS_APART = range(1 - _APART, _APART)
_SIMPLE = frozenset({str, bool, float, bytes, type(None), GlobalName, Stub})
"""Types of which a writer cannot choose many keys of one hash."""
_LEAVES = _SIMPLE | {complex, TensorRef, InlineTensor, StorageRef}
_MOST_TEXT = 1 << 16
"""Characters and bytes in a key of several members: those of keys that are equal are compared one by one."""
_MOST_BITS = 1 << 12
"""Bits of a whole number in a key: hashing reads all of them, each time."""


class Keys:
    """Keys met so far in containers that are filled little by little."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: Counter[tuple[int, int]] = Counter()

    def check(self, key: object, container: object = None) -> None:
        """Raise ValueError when `key` cannot be a key, or one too many of `container` for the time it would take."""
        kind = type(key)
        if kind in _SIMPLE or (kind is int and key in _NUMBERS_APART):
            return
        _check_nodes(key)
        alike = (id(container), hash(key))
        self._alike[alike] += 1
        if self._alike[alike] > _MOST_ALIKE:
            raise ValueError(f"expected keys that differ in their hash; got more than {_MOST_ALIKE} of one hash")


def check_keys(keys: Iterable[object]) -> None:
    """Raise ValueError when `keys` cannot be those of one container, or only in unbounded time."""
    known = Keys()
    for key in keys:
        known.check(key)


def _check_nodes(key: object) -> None:
    rest, count, text = [key], 0, 0
    while rest:
        node = rest.pop()
        count += 1
        if isinstance(node, tuple | frozenset):
            if count + len(rest) + len(node) > _MOST_NODES:
                raise ValueError(f"expected a key of at most {_MOST_NODES} members, those of its members counted")
            rest.extend(node)
        elif isinstance(node, str | bytes):
            text += len(node)
            if text > _MOST_TEXT:
                raise ValueError(f"expected a key with at most {_MOST_TEXT} characters in its members")
        elif isinstance(node, range):
            rest += (node.start, node.stop, node.step)
        elif isinstance(node, int):
            if node.bit_length() > _MOST_BITS:
                raise ValueError(f"expected a number of at most {_MOST_BITS} bits in a key")
        elif type(node) not in _LEAVES:
            raise ValueError(f"expected a hashable key; got a {type(node).__name__}")
