r"""Read a pickle as data: its opcodes are interpreted here, and no class or function is ever imported or called.

A pickle is a program for a stack machine. This is that machine (protocols 0 to 5, CPython 3.11 Lib/pickle.py) with
the dangerous instructions replaced by descriptions: a global is a `GlobalName`, a call is what `interpret` makes of
it, which for anything unknown is a `Stub`. The machine does not recurse, so depth is no danger, and every
length is checked against the bytes that are there.

>>> parse_pickle(b"cos\nsystem\n(Vecho\ntR.", where="demo").value.args
('echo',)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ucp.core.pickle_values import GlobalName, Stub, TorchSize
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.machine import (
    Begun,
    EndOfPickleError,
    Machine,
    PickleFaultError,
    RefusedOpcodeError,
    StopReachedError,
)
from ucp.io.pickle.opcodes import OPERATIONS
from ucp.io.pickle.recipes import SIZE, numbers_of
from ucp.io.pickle.repeats import Repeats

__all__ = ["Parsed", "TruncatedPickleError", "parse_pickle"]

_MARK, _BININT1, _BINGET, _LONG_BINGET, _MEMOIZE = b"(Khj\x94"
_UINT32 = struct.Struct("<I")
_NEW_OBJECT = b")\x81\x94"
"""EMPTY_TUPLE NEWOBJ MEMOIZE."""
_ATTRIBUTES = b"}\x94("
"""EMPTY_DICT MEMOIZE MARK."""
_MOST_MESSAGE = 500
"""Characters of an error that may quote the file."""
_REMEDY = "The file is damaged or was not written by pickle; copy it again from its source"


class TruncatedPickleError(MalformedError):
    """The bytes end before the pickle does."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One pickle read out of some bytes."""

    value: object
    """What it says."""
    end: int
    """One past its last byte."""


def parse_pickle(
    data: bytes,
    *,
    where: str,
    start: int = 0,
    persistent: Callable[[object], object] | None = None,
    repetitive: bool = False,
) -> Parsed:
    """Value of the pickle that begins at byte `start` of `data`.

    Parameters
    ----------
    where
        File (and member) for error messages.
    persistent
        Value of a persistent id, without which one is an error. A ValueError from it is reported with the place.
    repetitive
        It holds a great many objects of few classes, which are to be recognised by their bytes (`repeats`):
        faster, and equal objects inside of others may come out as one.

    Raises
    ------
    TruncatedPickleError
        The bytes end before the pickle does.
    MalformedError
        The bytes are no pickle, or one that cannot be read as data.
    UnsupportedError
        The pickle needs something outside itself (registered extensions, out-of-band buffers), or a later protocol.
    """
    if repetitive:
        machine = Machine(data, start, persistent)
        machine.repeats = Repeats(machine.memo)
        try:
            return _parsed(machine, where)
        except (MalformedError, UnsupportedError):
            if machine.repeats is None or not machine.repeats.memoized:
                raise
    return _parsed(Machine(data, start, persistent), where)


def _parsed(machine: Machine, where: str) -> Parsed:
    data = machine.data
    try:
        _execute(machine)
    except StopReachedError:
        at = machine.instruction
        return Parsed(machine.pop(), machine.at) if machine.stack else _fail(at, where, "an empty stack at its end")
    except EndOfPickleError as error:
        raise _truncated(len(data), where) from error
    except RefusedOpcodeError as error:
        raise UnsupportedError(
            f"{where}: byte {machine.instruction} of the pickle {error}. Save the file again with torch"
        ) from None
    except IndexError as error:
        if machine.at >= len(data):
            raise _truncated(len(data), where) from error
        return _fail(machine.instruction, where, "an opcode that takes more from the stack than is there")
    except KeyError as error:
        return _fail(machine.instruction, where, f"a reference to the unknown memo entry {error}")
    except struct.error as error:
        raise _truncated(len(data), where) from error
    except UnicodeError:
        return _fail(machine.instruction, where, "text that is not in the encoding of its opcode")
    except (PickleFaultError, ValueError, TypeError, OverflowError) as error:
        return _fail(machine.instruction, where, str(error)[:_MOST_MESSAGE])


def _execute(machine: Machine) -> NoReturn:
    """Carry out instructions until one of them raises (STOP does).

    The commonest instructions are carried out in place, exactly as their own functions in `opcodes` do, and so
    are sequences of them (`_after_name`): an index of a distributed checkpoint consists of millions of these.
    """
    data, stack, push, memo = machine.data, machine.stack, machine.push, machine.memo
    at, more = machine.at, 0
    try:
        while True:
            code = data[at]
            if code == _MEMOIZE:
                memo[len(memo) + more] = stack[-1]
                at += 1
            elif code == _BINGET:
                value = memo[data[at + 1]]
                push(value)
                at += 2
                if type(value) is GlobalName:
                    at = _after_name(machine, value, at)
                    more = machine.more
            elif code == _LONG_BINGET:
                value = memo[_UINT32.unpack_from(data, at + 1)[0]]
                push(value)
                at += 5
                if type(value) is GlobalName:
                    at = _after_name(machine, value, at)
                    more = machine.more
            elif code == _BININT1:
                push(data[at + 1])
                at += 2
            elif code == _MARK:
                machine.marks.append(len(stack))
                at += 1
            else:
                machine.instruction, machine.at = at, at + 1
                OPERATIONS[code](machine)
                at = machine.at
    finally:
        if machine.at <= at:  # the instruction at fault is one of those above
            machine.instruction, machine.at = at, at + 1


def _after_name(machine: Machine, name: GlobalName, at: int) -> int:
    """Carry out what often follows the name of a class, at byte `at`; the byte after it, or `at` when it is not there.

    A whole object of a kind that was met before; one without arguments, and the beginning of its attributes; or a
    torch.Size of numbers.
    """
    data, memo = machine.data, machine.memo
    if data.startswith(_NEW_OBJECT, at):
        repeats = machine.repeats
        if repeats is not None:
            found = repeats.read(name, data, at)
            if found is not None:
                machine.stack[-1], at = found
                machine.more = repeats.memoized
                return at
            if repeats.wants(name):
                machine.begun.append(Begun(len(machine.stack), at, len(memo) + machine.more, name))
        memo[len(memo) + machine.more] = machine.stack[-1] = Stub(name, ())
        at += len(_NEW_OBJECT)
        if data.startswith(_ATTRIBUTES, at):
            attributes: dict[object, object] = {}
            memo[len(memo) + machine.more] = attributes
            machine.push(attributes)
            machine.marks.append(len(machine.stack))
            at += len(_ATTRIBUTES)
        return at
    if name.qualname == "Size" and name.module == "torch":
        match = SIZE.match(data, at)
        if match is not None:
            numbers = machine.sizes.get(match[1])
            if numbers is None:
                numbers = machine.sizes[match[1]] = numbers_of(match[1])
            for value in (numbers, (numbers,), TorchSize(numbers)):
                memo[len(memo) + machine.more] = value
            machine.stack[-1] = value
            return match.end()
    return at


def _truncated(nbytes: int, where: str) -> TruncatedPickleError:
    return TruncatedPickleError(
        f"{where}: expected the rest of a pickle at byte {nbytes}; the bytes end there. Copy the file again"
    )


def _fail(at: int, where: str, got: str) -> Parsed:
    raise MalformedError(f"{where}: byte {at} of the pickle cannot be read: {got}. {_REMEDY}")
