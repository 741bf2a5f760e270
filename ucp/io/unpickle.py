r"""Read a pickle as data: its opcodes are interpreted here, and no class or function is ever imported or called.

A pickle is a program for a stack machine. This is that machine (protocols 0 to 5, CPython 3.11 Lib/pickle.py) with
the dangerous instructions replaced by descriptions: a global is a `GlobalName`, a call is what `ucp.io.interpret`
makes of it, which for anything unknown is a `Stub`. The machine does not recurse, so depth is no danger, and every
length is checked against the bytes that are there.

>>> parse_pickle(b"cos\nsystem\n(Vecho\ntR.", where="demo").value.args
('echo',)
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ucp.errors import MalformedError, UnsupportedError
from ucp.inert import GlobalName, Stub, TorchSize
from ucp.io.machine import EndOfPickleError, Machine, PickleFaultError, RefusedOpcodeError, StopReachedError
from ucp.io.opcodes import OPERATIONS

__all__ = ["Parsed", "TruncatedPickleError", "parse_pickle"]

_MARK, _BININT1, _BINGET, _LONG_BINGET, _MEMOIZE = b"(Khj\x94"
_UINT32 = struct.Struct("<I")
_NEW_OBJECT = b")\x81\x94"
"""EMPTY_TUPLE NEWOBJ MEMOIZE."""
_ATTRIBUTES = b"}\x94("
"""EMPTY_DICT MEMOIZE MARK."""
_SIZE = re.compile(
    rb"((?:(?:K.|M..|J...[\0-\x7f])(?=\x85)|(?:K.|M..|J...[\0-\x7f]){2}(?=\x86)|(?:K.|M..|J...[\0-\x7f]){3}(?=\x87)))"
    rb"[\x85-\x87]\x94\x85\x94R\x94",
    re.DOTALL,
)
"""One to three numbers (BININT1, BININT2, BININT), TUPLE1 to TUPLE3 MEMOIZE, TUPLE1 MEMOIZE REDUCE MEMOIZE."""
_NUMBER_NBYTES = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
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
    data: bytes, *, where: str, start: int = 0, persistent: Callable[[object], object] | None = None
) -> Parsed:
    """Value of the pickle that begins at byte `start` of `data`.

    Parameters
    ----------
    where
        File (and member) for error messages.
    persistent
        Value of a persistent id, without which one is an error. A ValueError from it is reported with the place.

    Raises
    ------
    TruncatedPickleError
        The bytes end before the pickle does.
    MalformedError
        The bytes are no pickle, or one that cannot be read as data.
    UnsupportedError
        The pickle needs something outside itself (registered extensions, out-of-band buffers), or a later protocol.
    """
    machine = Machine(data, start, persistent)
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

    The commonest instructions are carried out in place, exactly as their own functions in `ucp.io.opcodes` do, and so
    are three sequences of them: an index of a distributed checkpoint consists of millions of these.
    """
    data, stack, push, memo = machine.data, machine.stack, machine.push, machine.memo
    at = machine.at
    try:
        while True:
            code = data[at]
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
                at += 1
            elif code == _BINGET:
                value = memo[data[at + 1]]
                push(value)
                at += 2
                if type(value) is GlobalName:
                    at = _after_name(machine, value, at)
            elif code == _LONG_BINGET:
                value = memo[_UINT32.unpack_from(data, at + 1)[0]]
                push(value)
                at += 5
                if type(value) is GlobalName:
                    at = _after_name(machine, value, at)
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

    An object without arguments, and the beginning of its attributes; or a torch.Size of numbers.
    """
    data, memo = machine.data, machine.memo
    if data.startswith(_NEW_OBJECT, at):
        memo[len(memo)] = machine.stack[-1] = Stub(name, ())
        at += len(_NEW_OBJECT)
        if data.startswith(_ATTRIBUTES, at):
            attributes: dict[object, object] = {}
            memo[len(memo)] = attributes
            machine.push(attributes)
            machine.marks.append(len(machine.stack))
            at += len(_ATTRIBUTES)
        return at
    if name.qualname == "Size" and name.module == "torch":
        match = _SIZE.match(data, at)
        if match is not None:
            numbers = machine.sizes.get(match[1])
            if numbers is None:
                numbers = machine.sizes[match[1]] = _numbers(match[1])
            memo[len(memo)] = numbers
            memo[len(memo)] = (numbers,)
            memo[len(memo)] = machine.stack[-1] = TorchSize(numbers)
            return match.end()
    return at


def _numbers(data: bytes) -> tuple[int, ...]:
    """The numbers that BININT1, BININT2 and BININT instructions push."""
    found, at = [], 0
    while at < len(data):
        nbytes = _NUMBER_NBYTES[data[at]]
        found.append(int.from_bytes(data[at + 1 : at + 1 + nbytes], "little"))
        at += 1 + nbytes
    return tuple(found)


def _truncated(nbytes: int, where: str) -> TruncatedPickleError:
    return TruncatedPickleError(
        f"{where}: expected the rest of a pickle at byte {nbytes}; the bytes end there. Copy the file again"
    )


def _fail(at: int, where: str, got: str) -> Parsed:
    raise MalformedError(f"{where}: byte {at} of the pickle cannot be read: {got}. {_REMEDY}")
