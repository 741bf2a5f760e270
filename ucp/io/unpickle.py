r"""Read a pickle as data: its opcodes are interpreted here, and no class or function is ever imported or called.

A pickle is a program for a stack machine. This is that machine (protocols 0 to 5, CPython 3.11 Lib/pickle.py) with
the dangerous instructions replaced by descriptions: a global is a `GlobalName`, a call is what `ucp.io.interpret`
makes of it, which for anything unknown is a `Stub`. The machine does not recurse, so depth is no danger, and every
length is checked against the bytes that are there.

>>> parse_pickle(b"cos\nsystem\n(Vecho\ntR.", where="demo").value.args
('echo',)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.machine import EndOfPickleError, Machine, PickleFaultError, RefusedOpcodeError, StopReachedError
from ucp.io.opcodes import OPERATIONS

__all__ = ["Parsed", "TruncatedPickleError", "parse_pickle"]

_MARK, _EMPTY_TUPLE, _BININT1, _BINGET, _LONG_BINGET, _TUPLE1, _MEMOIZE = b"()Khj\x85\x94"
_UINT32 = struct.Struct("<I")
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
    except (PickleFaultError, ValueError, TypeError, OverflowError) as error:
        return _fail(machine.instruction, where, str(error)[:_MOST_MESSAGE])


def _execute(machine: Machine) -> NoReturn:
    """Carry out instructions until one of them raises (STOP does).

    Half of the millions of instructions in the index of a distributed checkpoint are the first few here. They are
    carried out in place, exactly as their own functions in `ucp.io.opcodes` do: a call would cost three times as much.
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
                push(memo[data[at + 1]])
                at += 2
            elif code == _LONG_BINGET:
                push(memo[_UINT32.unpack_from(data, at + 1)[0]])
                at += 5
            elif code == _BININT1:
                push(data[at + 1])
                at += 2
            elif code == _MARK:
                machine.marks.append(len(stack))
                at += 1
            elif code == _TUPLE1:
                stack[-1] = (stack[-1],)
                at += 1
            elif code == _EMPTY_TUPLE:
                push(())
                at += 1
            else:
                machine.instruction, machine.at = at, at + 1
                OPERATIONS[code](machine)
                at = machine.at
    finally:
        if machine.at <= at:  # the instruction at fault is one of those above
            machine.instruction, machine.at = at, at + 1


def _truncated(nbytes: int, where: str) -> TruncatedPickleError:
    return TruncatedPickleError(
        f"{where}: expected the rest of a pickle at byte {nbytes}; the bytes end there. Copy the file again"
    )


def _fail(at: int, where: str, got: str) -> Parsed:
    raise MalformedError(f"{where}: byte {at} of the pickle cannot be read: {got}. {_REMEDY}")
