"""Checks the dict keys and set members of a pickle, so that a hostile file cannot make hashing take forever.

Python rehashes a tuple and its members at every use, and compares keys of equal hash one by one. An attacker can choose
thousands of integers, complex numbers or tuples with the same hash, or numbers of different hashes that all probe the
same slots of the hash table.

>>> check_keys([(1, "a"), 7])
>>> check_keys([[]])
Traceback (most recent call last):
ValueError: expected a hashable key; got a list
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable

from ucp.core.tensor import InlineTensor, TensorRef
from ucp.io.pickle.values import GlobalName, Stub
from ucp.io.torch_file.storage import StorageRef

_MOST_NODES = 256
"""Most members of one key, nested ones included: hashing and comparing recurse into them."""
_MOST_ALIKE = 100
"""Most keys of one container with equal hashes."""
_DISTINCT_BELOW = 1 << 60
"""Integers of smaller magnitude have different hashes (except -1 and -2)."""
_NUMBERS_APART = range(1 - _DISTINCT_BELOW, _DISTINCT_BELOW)
_SIMPLE = frozenset({str, bool, bytes, type(None), GlobalName, Stub})
"""Types whose hashes the writer of a file cannot choose."""
_LEAVES = _SIMPLE | {float, complex, TensorRef, InlineTensor, StorageRef}
_MOST_TEXT = 1 << 16
"""Most characters and bytes in the members of one key: comparing equal keys reads them all."""
_MOST_BITS = 1 << 12
"""Most bits of an integer in a key: each hashing reads them all."""
_FEW = 1024
"""Containers below this size need no check of their probes."""
_PROBES_PER_KEY = 128
"""Occupied slots that a key may probe, on average. Random keys probe a few, multiples of powers of two up to 55."""
_FREE_PROBES = 4096
"""Occupied slots that a container may probe beyond that."""


class _Slots:
    """The smallest hash table for some keys, as CPython 3.11 to 3.14 probes it (`Objects/dictobject.c`).

    A larger table needs no more probes: modulo a smaller power of two, its probes are those of the smaller table.
    """

    __slots__ = ("_hashes", "_probes_left", "_used")

    def __init__(self, keys: Iterable[object]) -> None:
        self._hashes = array("q")
        self._used = bytearray(8)
        self._probes_left = _FREE_PROBES
        for key in keys:
            if type(key) not in _SIMPLE:
                self.add(hash(key))

    def add(self, hashed: int) -> None:
        """Insert a key. Raises ValueError once all insertions together took too many probes."""
        self._hashes.append(hashed)
        self._probes_left += _PROBES_PER_KEY
        if 3 * len(self._hashes) <= 2 * len(self._used):
            self._put(hashed)
            return
        self._used = bytearray(2 * len(self._used))
        for known_hash in self._hashes:
            self._put(known_hash)

    def _put(self, hashed: int) -> None:
        used, mask = self._used, len(self._used) - 1
        perturb = hashed % (1 << 64)
        slot = perturb & mask
        while used[slot]:
            perturb >>= 5
            slot = (5 * slot + perturb + 1) & mask
            self._probes_left -= 1
            if self._probes_left < 0:
                raise ValueError("expected keys that spread over a hash table; got keys that were chosen to collide")
        used[slot] = 1


class Keys:
    """Keys seen so far in containers that a pickle fills in several steps."""

    __slots__ = ("_alike", "_slots")

    def __init__(self) -> None:
        self._alike: Counter[tuple[int, int]] = Counter()
        self._slots: dict[int, tuple[Collection[object], _Slots]] = {}

    def check(self, key: object, container: Collection[object] = ()) -> None:
        """Raise ValueError if `key` is unhashable, or collides with too many keys of `container`.

        `container`: holds the keys before it.
        """
        kind = type(key)
        if kind in _SIMPLE:
            return
        if kind is not float and not (kind is int and key in _NUMBERS_APART):
            _check_nodes(key)
            alike = (id(container), hash(key))
            self._alike[alike] += 1
            if self._alike[alike] > _MOST_ALIKE:
                raise ValueError(f"expected keys that differ in their hash; got more than {_MOST_ALIKE} of one hash")
        if len(container) >= _FEW:
            if id(container) not in self._slots:
                self._slots[id(container)] = (container, _Slots(container))
            self._slots[id(container)][1].add(hash(key))


def check_keys(keys: Iterable[object]) -> None:
    """Raise ValueError if one of `keys` is unhashable, or too many of them collide."""
    known, slots = Keys(), _Slots(())
    for key in keys:
        known.check(key)
        if type(key) not in _SIMPLE:
            slots.add(hash(key))


def _check_nodes(key: object) -> None:
    rest, count, text = [key], 0, 0
    while rest:
        node = rest.pop()
        count += 1
        if isinstance(node, tuple | frozenset):
            if count + len(rest) + len(node) > _MOST_NODES:
                raise ValueError(f"expected a key of at most {_MOST_NODES} members, nested ones included")
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
