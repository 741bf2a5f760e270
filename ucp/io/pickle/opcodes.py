"""The instructions of the pickle machine by their code; here those of the stack, the marks and the memo.

Names and codes are those of CPython 3.11 Lib/pickle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack_from

from ucp.io.pickle.machine import EndOfPickleError, Machine, PickleFaultError, RefusedOpcodeError, StopReachedError
from ucp.io.pickle.opcodes_objects import OBJECT_OPCODES
from ucp.io.pickle.opcodes_values import VALUE_OPCODES

__all__ = ["OPERATIONS"]


def _unknown(m: Machine) -> None:
    raise PickleFaultError(f"the unknown opcode {m.data[m.at - 1]:#04x}")


def _stop(m: Machine) -> None:
    raise StopReachedError


def _proto(m: Machine) -> None:
    m.protocol = m.data[m.at]
    m.at += 1
    if m.protocol > 5:
        raise RefusedOpcodeError(f"asks for pickle protocol {m.protocol}; expected 0 to 5")


def _frame(m: Machine) -> None:
    (nbytes,) = unpack_from("<Q", m.data, m.at)
    m.at += 8
    if m.at + nbytes > len(m.data):
        raise EndOfPickleError


def _pop(m: Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.pop()


def _dup(m: Machine) -> None:
    m.push(m.stack[-1])


def _mark(m: Machine) -> None:
    m.marks.append(len(m.stack))


def _pop_mark(m: Machine) -> None:
    m.unmark()


def _get(m: Machine) -> None:
    m.push(m.memo[int(m.line())])


def _binget(m: Machine) -> None:
    m.push(m.memo[m.data[m.at]])
    m.at += 1


def _long_binget(m: Machine) -> None:
    (index,) = unpack_from("<I", m.data, m.at)
    m.at += 4
    m.push(m.memo[index])


def _put(m: Machine) -> None:
    index = int(m.line())
    if index < 0:
        raise PickleFaultError("a negative memo index")
    m.put(index)


def _binput(m: Machine) -> None:
    m.put(m.data[m.at])
    m.at += 1


def _long_binput(m: Machine) -> None:
    (index,) = unpack_from("<I", m.data, m.at)
    m.at += 4
    m.put(index)


_STACK_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"(": _mark,
    b".": _stop,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"g": _get,
    b"h": _binget,
    b"j": _long_binget,
    b"p": _put,
    b"q": _binput,
    b"r": _long_binput,
    b"\x80": _proto,
    b"\x95": _frame,
}
_BY_CODE = {**_STACK_OPCODES, **VALUE_OPCODES, **OBJECT_OPCODES}
OPERATIONS: tuple[Callable[[Machine], None], ...] = tuple(_BY_CODE.get(bytes([code]), _unknown) for code in range(256))
"""Instruction by its code."""
