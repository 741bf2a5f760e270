r"""Read a pickle as data: no class or function is ever imported or called.

`ucp.io.pickle.rewrite` turns every unsafe instruction into a request, and CPython's unpickler in C runs the rest. This
module answers the requests: a global becomes a `GlobalName`, a call becomes what `interpret` makes of it (a `Stub` if
it is unknown). `keys` checks keys before they are hashed.

>>> parse_pickle(b"cos\nsystem\n(Vecho\ntR.", where="demo").value.args
('echo',)
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.interpret import interpret_call, interpret_new, set_attributes
from ucp.io.pickle.keys import Keys
from ucp.io.pickle.rewrite import (
    FILL_AND_BUILD,
    EndOfPickleError,
    Frames,
    PickleFaultError,
    RefusedOpcodeError,
    Rewriter,
)
from ucp.io.pickle.values import GlobalName, Stub

_NEW, _CALL = 0x81, ord("R")
_VALUES_PER_BYTE, _FREE_VALUES = 8, 10_000
"""Most values that calls may copy, per byte of the pickle and in any case."""
_VALUES_PER_KEY = 8
"""Values that one key of a container made by a call counts for: each is checked."""
_MOST_MESSAGE = 500
"""Characters of an error that may quote the file."""
_FAULTS = (pickle.UnpicklingError, LookupError, ValueError, TypeError, RecursionError, EOFError, MemoryError)
"""What CPython's unpickler raises for an invalid pickle."""
_Item = TypeVar("_Item")
_REMEDY = "The file is damaged or was not written by pickle; copy it again from its source"


class TruncatedPickleError(MalformedError):
    """The bytes end before the pickle does."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The result of `parse_pickle`."""

    value: object
    """The unpickled value."""
    end: int
    """One past its last byte."""


def parse_pickle(
    data: bytes, *, where: str, start: int = 0, persistent: Callable[[object], object] | None = None
) -> Parsed:
    """Read the pickle that begins at byte `start` of `data`.

    Parameters
    ----------
    where
        File (and member) for error messages.
    persistent
        Returns the value of a persistent id; None: such ids are errors. Its ValueErrors are reported with the place.

    Raises
    ------
    TruncatedPickleError
        The bytes end before the pickle does.
    MalformedError
        The bytes are not a pickle, or one that cannot be read as data.
    UnsupportedError
        The pickle needs something outside itself (registered extensions, out-of-band buffers), or a later protocol.
    """
    rewriter = Rewriter(data, start)
    try:
        body = rewriter.body()
        return Parsed(_Machine(body, rewriter.protocol, rewriter.at - start, persistent).load(), rewriter.at)
    except EndOfPickleError as error:
        raise TruncatedPickleError(
            f"{where}: expected the rest of a pickle at byte {len(data)}; the bytes end there. Copy the file again"
        ) from error
    except RefusedOpcodeError as error:
        raise UnsupportedError(
            f"{where}: byte {rewriter.instruction} of the pickle {error}. Save the file again with torch"
        ) from None
    except UnicodeError:
        got = "text that is not in the encoding of its opcode"
    except (PickleFaultError, *_FAULTS) as error:
        got = str(error)[:_MOST_MESSAGE]
    at = "the pickle" if rewriter.is_whole else f"byte {rewriter.instruction} of the pickle"
    raise MalformedError(f"{where}: {at} cannot be read: {got}. {_REMEDY}")


class _Machine(pickle.Unpickler):
    """CPython's unpickler, running a rewritten pickle."""

    def __init__(self, body: Frames, protocol: int, nbytes: int, persistent: Callable[[object], object] | None) -> None:
        super().__init__(body)
        self._protocol = protocol
        self._persistent = persistent
        self._keys = Keys()
        self._names: dict[tuple[str, str], GlobalName] = {}
        self._values_left = _VALUES_PER_BYTE * nbytes + _FREE_VALUES

    def find_class(self, module: str, qualname: str) -> NoReturn:
        """Refuse to import: a rewritten pickle gets names by requests instead."""
        raise PickleFaultError(f"the name {module}.{qualname}")

    def persistent_load(self, request: tuple[object, object, int]) -> object:
        """Carry out an instruction that was rewritten into a request: its operands and opcode."""
        operand, right, code = request
        if code == _NEW and type(operand) is GlobalName and type(right) is tuple:  # the commonest are answered in place
            return Stub(operand, right)
        if code == _CALL and type(right) is tuple:
            return self.count_keys(interpret_call(operand, self.count_arguments(right)))
        if code == FILL_AND_BUILD and isinstance(operand, tuple):
            target, state, items = operand
            return self.build(target, self.fill(state, items))
        return _ANSWERS[code](self, operand, right)

    def count_arguments(self, args: object) -> tuple[object, ...]:
        """Count the arguments of a call, which may copy them: a few bytes could repeat such a call endlessly."""
        if type(args) is not tuple:
            raise PickleFaultError(f"a call whose arguments are a {type(args).__name__}; expected a tuple")
        values = len(args)
        for arg in args:
            if hasattr(arg, "__len__"):
                values += len(arg)
        self.count(values)
        return args

    def count_keys(self, result: object) -> object:
        """Count the keys of a container that a call made."""
        if isinstance(result, (set, frozenset, OrderedDict)):  # quicker than a union
            self.count(_VALUES_PER_KEY * len(result))
        return result

    def count(self, values: int) -> None:
        """Count copied values. Raises PickleFaultError when they are too many for a pickle of this length."""
        self._values_left -= values
        if self._values_left < 0:
            raise PickleFaultError("calls that copy the same values again and again")

    def fill(self, target: object, items: tuple[object, ...]) -> object:
        """Set keys and values of `target`."""
        if len(items) % 2:
            raise PickleFaultError("a key without a value")
        entries = iter(items)
        if type(target) is dict or type(target) is OrderedDict:
            for key in entries:
                if type(key) is not str:
                    self._keys.check(key, target)
                target[key] = next(entries)
        elif type(target) is Stub:
            target.entries = _append(target.entries, zip(entries, entries, strict=True))
        else:
            raise PickleFaultError(f"entries set on a {type(target).__name__}; expected a dict")
        return target

    def build(self, target: object, state: object) -> object:
        """Set the state of `target`."""
        if type(target) is Stub:
            if target.has_state:
                raise PickleFaultError("a second state for one object")
            target.state, target.has_state = state, True
        elif type(target) is OrderedDict:
            self.count(len(state) if type(state) is dict else 0)
            set_attributes(target, state)
        else:
            raise PickleFaultError(f"the state of an object given to a {type(target).__name__}")
        return target

    def construct(self, cls: object, args: object, kwargs: object) -> Stub:
        """The stub of an object made with keyword arguments."""
        if type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
            raise PickleFaultError("an object whose arguments are not a tuple and a dict of names")
        self.count(len(kwargs))
        return interpret_new(cls, self.count_arguments(args), kwargs)

    def extend(self, target: object, items: tuple[object, ...]) -> object:
        """Append elements to `target`, or add them to a set."""
        if type(target) is list:
            target.extend(items)
        elif type(target) is Stub:
            target.items = _append(target.items, items)
        elif type(target) is set:
            for item in items:
                self._keys.check(item, target)
                target.add(item)
        else:
            raise PickleFaultError(f"elements given to a {type(target).__name__}; expected a list or set")
        return target

    def make_name(self, module: object, qualname: object) -> GlobalName:
        """The global of that name, one object per name. Protocols 0 to 2 use module names of Python 2."""
        if type(module) is not str or type(qualname) is not str:
            raise PickleFaultError("a global whose name is not text")
        key = (module, qualname)
        if self._protocol < 3:
            key = NAME_MAPPING.get(key) or (IMPORT_MAPPING.get(module, module), qualname)
        return self._names.get(key) or self._names.setdefault(key, GlobalName(*key))

    def load_persistent(self, pid: object) -> object:
        """The value of a persistent id."""
        if self._persistent is None:
            raise PickleFaultError("a persistent id, which has no meaning in this file")
        return self._persistent(pid)


def _append(known: Sequence[_Item], more: Iterable[_Item]) -> list[_Item]:
    """Append `more` to `known`, which is made a list first if it is not one."""
    items = known if isinstance(known, list) else [*known]
    items.extend(more)
    return items


def _make_instance(*operands: object) -> object:
    if not operands:
        raise PickleFaultError("an object without a class")
    cls, *args = operands
    return interpret_call(cls, tuple(args)) if args else interpret_new(cls, ())


_ANSWERS: dict[int, Callable[..., object]] = {
    _NEW: lambda m, cls, args: interpret_new(cls, m.count_arguments(args)),
    0x92: lambda m, cls, operands: m.construct(cls, *operands),
    _CALL: lambda m, function, args: m.count_keys(interpret_call(function, m.count_arguments(args))),
    ord("i"): lambda m, args, cls: m.count_keys(_make_instance(cls, *m.count_arguments(args))),
    ord("o"): lambda m, operands, _: m.count_keys(_make_instance(*m.count_arguments(operands))),
    ord("b"): _Machine.build,
    ord("u"): _Machine.fill,
    ord("d"): lambda m, items, _: m.fill({}, items),
    ord("e"): _Machine.extend,
    0x90: _Machine.extend,
    0x91: lambda _, items, __: interpret_call(GlobalName("builtins", "frozenset"), (items,)),
    0x93: _Machine.make_name,
    ord("Q"): lambda m, pid, _: m.load_persistent(pid),
}
"""Answer to each request by its opcode, from the machine and the two operands that `rewrite` lists."""
