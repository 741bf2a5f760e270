"""Recipes of values: what the instructions of a pickle leave on the stack, when some of their bytes may differ.

A recipe is a function of those bytes (the groups of a regular expression) that gives the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from struct import Struct
from typing import TypeVar

from ucp.core.pickle_values import GlobalName, Stub, TorchSize

__all__ = [
    "INTEGER",
    "REFERENCE",
    "SIZE",
    "Groups",
    "Hole",
    "Known",
    "Make",
    "Node",
    "numbers_of",
    "recipe_of_dict",
    "recipe_of_integer",
    "recipe_of_list",
    "recipe_of_object",
    "recipe_of_reference",
    "recipe_of_size",
    "recipe_of_text",
    "recipe_of_tuple",
    "shared",
]

_NUMBER = rb"(?:K.|M..|J...[\0-\x7f])"
SIZE = re.compile(
    rb"((?:%(n)s(?=\x85)|%(n)s{2}(?=\x86)|%(n)s{3}(?=\x87)|\(%(n)s{4,}(?=t)))[\x85-\x87t]\x94\x85\x94R\x94"
    % {b"n": _NUMBER},
    re.DOTALL,
)
"""What follows the name torch.Size: numbers (group 1, after a MARK when four or more), their tuple, MEMOIZE, TUPLE1
MEMOIZE, REDUCE MEMOIZE."""
INTEGER = re.compile(rb"(K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})", re.DOTALL)
"""BININT1, BININT2, BININT, and LONG1 of five or six bytes: offsets past 2 GiB."""
REFERENCE = rb"(h.|j....)"
"""BINGET, LONG_BINGET."""
_BININT, _LONG1 = b"J\x8a"
_NUMBER_NBYTES = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_UINT32 = Struct("<I")

_MOST_SHARED = 1 << 14
"""Values kept to be shared."""

Groups = tuple[bytes, ...]
"""The bytes that differ."""
Make = Callable[[Groups], object]
_Made = TypeVar("_Made")


class Known:
    """Values that recipes refer to."""

    __slots__ = ("memo", "sizes", "texts")

    def __init__(self, memo: dict[int, object]) -> None:
        self.memo = memo
        """The memo of the pickle."""
        self.sizes: dict[bytes, TorchSize] = {}
        self.texts: dict[bytes, str] = {}


class Hole:
    """Bytes that may differ."""

    __slots__ = ("group", "pattern", "text", "value")

    def __init__(self, pattern: bytes, text: bytes, value: object = None) -> None:
        self.pattern = pattern
        """Regular expression with one group."""
        self.text = text
        """The bytes in the example."""
        self.value = value
        """What they refer to in the example, when they are a reference."""
        self.group = 0
        """Number of the group; negative where the bytes turned out to have to be the same."""


class Node:
    """What an instruction leaves on the stack: a recipe, and what later instructions may change of it."""

    __slots__ = ("entries", "items", "make", "reference", "start", "state", "text")

    def __init__(
        self,
        make: Make,
        *,
        reference: Hole | None = None,
        text: Hole | None = None,
        items: list[Make] | None = None,
        entries: list[tuple[str, Make]] | None = None,
        state: list[Make] | None = None,
        start: int = 0,
    ) -> None:
        self.make = make
        self.reference = reference
        """Of a reference: where it stands."""
        self.text = text
        """Of a text: where it stands."""
        self.items = items
        """Of a list: its elements."""
        self.entries = entries
        """Of a dict: its keys and values."""
        self.state = state
        """Of an object: none or one."""
        self.start = start
        """Of an object: number of the piece of the instructions that it begins with."""


def numbers_of(data: bytes) -> tuple[int, ...]:
    r"""The numbers that BININT1, BININT2 and BININT instructions push, perhaps after a MARK; none is negative.

    >>> numbers_of(b"K\x05M\x00\x01")
    (5, 256)
    """
    found, at = [], int(data.startswith(b"("))
    while at < len(data):
        nbytes = _NUMBER_NBYTES[data[at]]
        found.append(int.from_bytes(data[at + 1 : at + 1 + nbytes], "little"))
        at += 1 + nbytes
    return tuple(found)


def recipe_of_list() -> Node:
    """A new list."""
    items: list[Make] = []
    return Node(lambda groups: [make(groups) for make in items], items=items)


def recipe_of_dict() -> Node:
    """A new dict."""
    entries: list[tuple[str, Make]] = []
    return Node(lambda groups: {key: make(groups) for key, make in entries}, entries=entries)


def recipe_of_tuple(nodes: list[Node]) -> Node:
    """A tuple of what `nodes` make."""
    items = [node.make for node in nodes]
    return Node(lambda groups: tuple([make(groups) for make in items]))


def recipe_of_object(made_by: GlobalName, *, start: int) -> Node:
    """A new object without arguments."""
    state: list[Make] = []

    def make(groups: Groups) -> Stub:
        made = Stub(made_by)
        for own in state:
            made.state, made.has_state = own(groups), True
        return made

    return Node(make, state=state, start=start)


def shared(make: Make, holes: list[Hole]) -> Make:
    """The same recipe, which gives one value for the same bytes in `holes`; these are all that it depends on.

    For what lies inside of an object, where no later instruction can reach and change it.
    """
    made: dict[Groups, object] = {}
    span: list[slice] = []

    def find(groups: Groups) -> object:
        if not span:
            numbers = [hole.group for hole in holes if hole.group >= 0]
            span.append(slice(numbers[0], numbers[-1] + 1) if numbers else slice(0))
        own = groups[span[0]]
        value = made.get(own)
        if value is None:
            if len(made) >= _MOST_SHARED:
                made.clear()
            value = made[own] = make(groups)
        return value

    return find


def recipe_of_reference(hole: Hole, known: Known) -> Node:
    """What BINGET or LONG_BINGET refers to. Raises KeyError for what is not in the memo."""
    memo = known.memo

    def make(groups: Groups) -> object:
        text = groups[hole.group]
        return memo[text[1] if len(text) == 2 else _UINT32.unpack_from(text, 1)[0]]

    return Node(make, reference=hole)


def recipe_of_integer(hole: Hole) -> Node:
    """The number that one of `INTEGER` pushes."""

    def make(groups: Groups) -> int:
        text = groups[hole.group]
        code = text[0]
        if code == _LONG1:
            return int.from_bytes(text[2:], "little", signed=True)
        return int.from_bytes(text[1:], "little", signed=code == _BININT)

    return Node(make)


def recipe_of_size(hole: Hole, known: Known) -> Node:
    """A torch.Size of numbers."""
    return Node(_made_once(hole, known.sizes, lambda text: TorchSize(numbers_of(text))))


def recipe_of_text(hole: Hole, known: Known) -> Node:
    """A text of as many bytes. Raises UnicodeError."""
    return Node(_made_once(hole, known.texts, lambda text: text.decode("utf-8", "surrogatepass")), text=hole)


def _made_once(hole: Hole, made: dict[bytes, _Made], build: Callable[[bytes], _Made]) -> Make:
    """What `build` makes of the bytes in `hole`, kept in `made` for the next time."""

    def make(groups: Groups) -> _Made:
        text = groups[hole.group]
        value = made.get(text)
        if value is None:
            value = made[text] = build(text)
        return value

    return make
