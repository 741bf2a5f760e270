"""State of the machine that reads a pickle: bytes, stack, marks, memo.

Lengths are checked before bytes are taken, so that a short file ends in `EndOfPickleError` and never in a short string.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ucp.core.pickle_values import GlobalName
from ucp.io.pickle.keys import Keys
from ucp.io.pickle.repeats import Repeats

__all__ = ["Begun", "EndOfPickleError", "Machine", "PickleFaultError", "RefusedOpcodeError", "StopReachedError"]

_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
"""Modules that moved in Python 3; protocols 0 to 2 use the old names (CPython 3.11 Lib/_compat_pickle.py)."""

_PYTHON2_NAMES = {
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unichr"): ("builtins", "chr"),
    ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "intern"): ("sys", "intern"),
}
"""Names that changed in Python 3."""


class PickleFaultError(Exception):
    """The instruction makes no sense where it stands."""


class EndOfPickleError(PickleFaultError):
    """An instruction reaches past the last byte."""


class RefusedOpcodeError(PickleFaultError):
    """The instruction makes sense, but not for data alone."""


class StopReachedError(Exception):
    """The STOP instruction."""


class Begun(NamedTuple):
    """An object that is not finished."""

    depth: int
    """Values on the stack, with it."""
    start: int
    """Byte after the name of its class."""
    memoized: int
    """Entries of the memo before it."""
    made_by: GlobalName
    """Its class."""


class Machine:
    """Stack, marks and memo of one pickle in progress."""

    __slots__ = (
        "at",
        "begun",
        "data",
        "instruction",
        "keys",
        "marks",
        "memo",
        "more",
        "names",
        "persistent",
        "pop",
        "protocol",
        "push",
        "repeats",
        "sizes",
        "stack",
    )

    def __init__(self, data: bytes, start: int, persistent: Callable[[object], object] | None) -> None:
        self.data = data
        self.at = start
        self.instruction = start
        self.persistent = persistent
        self.protocol = 0
        self.stack: list[object] = []
        self.push = self.stack.append
        self.pop = self.stack.pop
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.keys = Keys()
        self.names: dict[tuple[str, str], GlobalName] = {}
        self.sizes: dict[bytes, tuple[int, ...]] = {}
        self.repeats: Repeats | None = None
        """Objects that are recognised by their bytes, where that is asked for."""
        self.more = 0
        """Entries of the memo that were counted and not kept (`Repeats.memoized`)."""
        self.begun: list[Begun] = []
        """Objects whose instructions are to be learned."""

    def put(self, index: int) -> None:
        """Keep the top of the stack in the memo, under an index of the writer's choice: objects are no more learned."""
        if self.repeats is not None:
            if self.repeats.memoized:
                raise PickleFaultError("a memo index of the writer's choice among others")
            self.repeats = None
        self.memo[index] = self.stack[-1]

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes."""
        at = self.at
        end = at + nbytes
        if end > len(self.data):
            raise EndOfPickleError
        self.at = end
        return self.data[at:end]

    def line(self) -> bytes:
        """The bytes up to the next newline, which is passed over."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise EndOfPickleError
        line = self.data[self.at : end]
        self.at = end + 1
        return line

    def unmark(self) -> list[object]:
        """The values above the last mark, taken off the stack."""
        stack = self.stack
        if not self.marks:
            raise PickleFaultError("an opcode that needs a mark, without one")
        start = self.marks.pop()
        if start > len(stack):
            raise PickleFaultError("a mark above the top of the stack")
        items = stack[start:]
        del stack[start:]
        return items

    def name(self, module: str, qualname: str) -> GlobalName:
        """The global of that name, one object per name; protocols 0 to 2 use the module names of Python 2."""
        key = (module, qualname)
        if self.protocol < 3:
            key = _PYTHON2_NAMES.get(key, (_PYTHON2_MODULES.get(module, module), qualname))
        known = self.names.get(key)
        if known is None:
            known = self.names[key] = GlobalName(*key)
        return known
