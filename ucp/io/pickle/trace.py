"""The instructions of one object of a pickle as an example: which bytes of them may differ, and what they make then.

They are carried out on recipes (`ucp.io.pickle.recipes`) in the place of values. Codes are those of CPython 3.11
Lib/pickle.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ucp.core.pickle_values import GlobalName, TorchSize
from ucp.io.pickle.recipes import (
    INTEGER,
    REFERENCE,
    SIZE,
    Hole,
    Known,
    Make,
    Node,
    recipe_of_dict,
    recipe_of_integer,
    recipe_of_list,
    recipe_of_object,
    recipe_of_reference,
    recipe_of_size,
    recipe_of_text,
    recipe_of_tuple,
    shared,
)

__all__ = ["NotRepeatedError", "Repeat", "Text", "repeat_of"]

_NEW_OBJECT = b")\x81"
"""EMPTY_TUPLE NEWOBJ."""
_SIZE_OF_NONE = b")\x85\x94R\x94"
"""What follows the name torch.Size for one without dims."""
_MEMOIZE = b"\x94"
_CONSTANTS: dict[bytes, object] = {b"N": None, b"\x88": True, b"\x89": False}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_EMPTY: dict[bytes, Callable[[], Node]] = {
    b")": lambda: recipe_of_tuple([]),
    b"]": recipe_of_list,
    b"}": recipe_of_dict,
}
_MOST_STEPS = 128
"""Instructions but MEMOIZE; recipes lie in each other no deeper than that, and are called so."""
_Fixed = TypeVar("_Fixed")


class NotRepeatedError(Exception):
    """Instructions with something that is no number, text, reference or size."""


class Text(NamedTuple):
    """A text that goes into the memo."""

    entry: int
    """Which of the entries that the instructions make."""
    group: int
    """Which of the bytes that differ."""


class Repeat(NamedTuple):
    """Objects whose instructions differ in numbers, texts, references and sizes only."""

    pattern: re.Pattern[bytes]
    """The instructions, with a group for each part that differs."""
    make: Make
    """The object. Raises KeyError for a reference to what is not in the memo, UnicodeError for a text that is none."""
    memoized: int
    """Entries that the instructions make in the memo."""
    texts: tuple[Text, ...]
    """Texts among these."""


def repeat_of(made_by: GlobalName, instructions: bytes, *, known: Known, memoized: int) -> Repeat:
    """What the object with these `instructions`, which follow the name of its class, is an example of.

    `memoized`: entries of the memo before them. Raises NotRepeatedError.
    """
    try:
        return _Trace(instructions, known, memoized).repeat(made_by)
    except LookupError as error:
        raise NotRepeatedError from error


class _Trace:
    """State of the machine in the midst of the instructions."""

    def __init__(self, data: bytes, known: Known, before: int) -> None:
        self._data = data
        self._known = known
        self._before = before
        self._at = 0
        self._pieces: list[bytes | Hole] = []
        self._stack: list[Node] = []
        self._marks: list[int] = []
        self._memoized = 0
        self._texts: list[tuple[int, Hole]] = []

    def repeat(self, made_by: GlobalName) -> Repeat:
        self._stack.append(Node(lambda _: made_by, reference=Hole(b"", b"", made_by)))
        steps = 0
        while self._at < len(self._data):
            code = self._data[self._at : self._at + 1]
            steps += code != _MEMOIZE
            if steps > _MOST_STEPS:
                raise NotRepeatedError
            self._step(code)
        if len(self._stack) != 1 or self._stack[0].state is None or self._marks:
            raise NotRepeatedError
        pattern, groups = [], 0
        for piece in self._pieces:
            if isinstance(piece, bytes):
                pattern.append(re.escape(piece))
            elif piece.group < 0:
                pattern.append(re.escape(piece.text))
            else:
                piece.group, groups = groups, groups + 1
                pattern.append(piece.pattern)
        texts = tuple(Text(entry, hole.group) for entry, hole in self._texts)
        return Repeat(re.compile(b"".join(pattern), re.DOTALL), self._stack[0].make, self._memoized, texts)

    def _step(self, code: bytes) -> None:
        """Carry out the next instruction."""
        if code in b"hj":
            self._refer(2 if code == b"h" else 5)
        elif code in b"KMJ\x8a":
            match = INTEGER.match(self._data, self._at)
            if match is None:
                raise NotRepeatedError
            self._stack.append(recipe_of_integer(self._hole(INTEGER.pattern, len(match[0]))))
        elif code == b"\x8c":
            self._spell(self._data[self._at + 1])
        elif self._data.startswith(_NEW_OBJECT, self._at):
            made_by = self._fixed(self._stack.pop(), GlobalName)
            self._stack.append(recipe_of_object(made_by, start=len(self._pieces)))
            self._keep(_NEW_OBJECT)
        else:
            self._arrange(code)
            self._keep(code)

    def _arrange(self, code: bytes) -> None:
        """An instruction of one byte."""
        if code in _CONSTANTS:
            value = _CONSTANTS[code]
            self._stack.append(Node(lambda _: value))
        elif code in _TUPLES:
            self._stack.append(recipe_of_tuple(self._last(_TUPLES[code])))
        elif code in _EMPTY:
            self._stack.append(_EMPTY[code]())
        elif code == b"(":
            self._marks.append(len(self._stack))
        else:
            self._fill(code)

    def _fill(self, code: bytes) -> None:
        """What takes values off the stack into a container, and MEMOIZE."""
        match code:
            case b"\x94":
                self._memoize()
            case b"t":
                self._stack.append(recipe_of_tuple(self._unmarked()))
            case b"a":
                self._extend(self._last(1))
            case b"e":
                self._extend(self._unmarked())
            case b"s":
                self._set(self._last(2))
            case b"u":
                self._set(self._unmarked())
            case b"b":
                self._build()
            case _:
                raise NotRepeatedError

    def _keep(self, text: bytes) -> None:
        """Pass over instructions that have to be the same."""
        self._pieces.append(text)
        self._at += len(text)

    def _hole(self, pattern: bytes, nbytes: int, value: object = None) -> Hole:
        """Pass over bytes that may differ."""
        hole = Hole(pattern, self._data[self._at : self._at + nbytes], value)
        self._pieces.append(hole)
        self._at += nbytes
        return hole

    def _refer(self, nbytes: int) -> None:
        """BINGET and LONG_BINGET; of torch.Size, with the numbers that follow."""
        index = int.from_bytes(self._data[self._at + 1 : self._at + nbytes], "little")
        if index >= self._before:
            raise NotRepeatedError
        value = self._known.memo[index]
        hole = self._hole(REFERENCE, nbytes, value)
        if isinstance(value, GlobalName) and (value.module, value.qualname) == ("torch", "Size"):
            hole.group = -1
            self._measure()
        else:
            self._stack.append(recipe_of_reference(hole, self._known))

    def _measure(self) -> None:
        """The arguments of a torch.Size."""
        match = SIZE.match(self._data, self._at)
        if match is not None:
            self._stack.append(recipe_of_size(self._hole(SIZE.pattern, len(match[0])), self._known))
            self._memoized += 3
        elif self._data.startswith(_SIZE_OF_NONE, self._at):
            self._keep(_SIZE_OF_NONE)
            self._stack.append(Node(lambda _: TorchSize()))
            self._memoized += 2
        else:
            raise NotRepeatedError

    def _spell(self, nbytes: int) -> None:
        """SHORT_BINUNICODE: a text of the same length."""
        self._keep(self._data[self._at : self._at + 2])
        self._stack.append(recipe_of_text(self._hole(b"(.{%d})" % nbytes, nbytes), self._known))

    def _memoize(self) -> None:
        text = self._stack[-1].text
        if text is not None:
            self._texts.append((self._memoized, text))
        self._memoized += 1

    def _fixed(self, node: Node, kind: type[_Fixed]) -> _Fixed:
        """What a reference refers to, which has to be the same in all repetitions."""
        if node.reference is None or not isinstance(node.reference.value, kind):
            raise NotRepeatedError
        node.reference.group = -1
        return node.reference.value

    def _last(self, count: int) -> list[Node]:
        if len(self._stack) < count:
            raise NotRepeatedError
        nodes = self._stack[-count:]
        del self._stack[-count:]
        return nodes

    def _unmarked(self) -> list[Node]:
        start = self._marks.pop()
        nodes = self._stack[start:]
        del self._stack[start:]
        return nodes

    def _set(self, nodes: list[Node]) -> None:
        entries = self._stack[-1].entries
        if entries is None or len(nodes) % 2:
            raise NotRepeatedError
        entries += [(self._fixed(key, str), value.make) for key, value in zip(nodes[::2], nodes[1::2], strict=True)]

    def _extend(self, nodes: list[Node]) -> None:
        items = self._stack[-1].items
        if items is None:
            raise NotRepeatedError
        items += [node.make for node in nodes]

    def _build(self) -> None:
        own, target = self._stack.pop(), self._stack[-1]
        if target.state is None or target.state:
            raise NotRepeatedError
        target.state.append(own.make)
        if len(self._stack) > 1:  # an object inside of the one that is learned from
            holes = [piece for piece in self._pieces[target.start :] if isinstance(piece, Hole)]
            target.make = shared(target.make, holes)
