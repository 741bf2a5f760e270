"""Instructions of the pickle machine that leave a number, text or bytes on the stack (CPython 3.11 Lib/pickle.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from struct import unpack_from

from ucp.io.pickle.machine import EndOfPickleError, Machine, PickleFaultError

__all__ = ["VALUE_OPCODES"]

_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {
    b"\\": b"\\",
    b"'": b"'",
    b'"': b'"',
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}
_BOOLS = {b"00": False, b"01": True}


def _none(m: Machine) -> None:
    m.push(None)


def _true(m: Machine) -> None:
    m.stack.append(True)


def _false(m: Machine) -> None:
    m.stack.append(False)


def _int(m: Machine) -> None:
    line = m.line()
    value = _BOOLS.get(line)
    m.push(_number(line, int) if value is None else value)


def _binint(m: Machine) -> None:
    m.push(unpack_from("<i", m.data, m.at)[0])
    m.at += 4


def _binint1(m: Machine) -> None:
    m.push(m.data[m.at])
    m.at += 1


def _binint2(m: Machine) -> None:
    m.push(unpack_from("<H", m.data, m.at)[0])
    m.at += 2


def _long(m: Machine) -> None:
    m.push(_number(m.line().removesuffix(b"L"), int))


def _long1(m: Machine) -> None:
    nbytes = m.data[m.at]
    m.at += 1
    m.push(int.from_bytes(m.take(nbytes), "little", signed=True))


def _long4(m: Machine) -> None:
    (nbytes,) = unpack_from("<i", m.data, m.at)
    m.at += 4
    if nbytes < 0:
        raise PickleFaultError("an integer of a negative number of bytes")
    m.push(int.from_bytes(m.take(nbytes), "little", signed=True))


def _float(m: Machine) -> None:
    m.push(_number(m.line(), float))


def _binfloat(m: Machine) -> None:
    m.push(unpack_from(">d", m.data, m.at)[0])
    m.at += 8


def _number(line: bytes, kind: type[int | float]) -> int | float:
    """The number that a line of digits is. Raises PickleFaultError."""
    try:
        return kind(line)
    except ValueError:  # Python refuses integers of thousands of digits too
        shown = repr(line[:40]) + ("..." if len(line) > 40 else "")
        raise PickleFaultError(f"{shown} where a number is expected") from None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _unicode(m: Machine) -> None:
    m.push(str(m.line(), "raw-unicode-escape"))


def _binunicode(m: Machine) -> None:
    data = m.data
    at = m.at + 4
    (nbytes,) = unpack_from("<I", data, m.at)
    end = at + nbytes
    if end > len(data):
        raise EndOfPickleError
    m.at = end
    m.push(data[at:end].decode("utf-8", "surrogatepass"))


def _short_binunicode(m: Machine) -> None:
    data = m.data
    at = m.at + 1
    end = at + data[at - 1]
    if end > len(data):
        raise EndOfPickleError
    m.at = end
    m.push(data[at:end].decode("utf-8", "surrogatepass"))


def _binunicode8(m: Machine) -> None:
    m.push(_text(_take8(m)))


def _take1(m: Machine) -> bytes:
    nbytes = m.data[m.at]
    m.at += 1
    return m.take(nbytes)


def _take4(m: Machine) -> bytes:
    (nbytes,) = unpack_from("<I", m.data, m.at)
    m.at += 4
    return m.take(nbytes)


def _take8(m: Machine) -> bytes:
    (nbytes,) = unpack_from("<Q", m.data, m.at)
    m.at += 8
    return m.take(nbytes)


def _python2_text(data: bytes) -> str | bytes:
    """A `str` of Python 2: text when it is UTF-8, as torch.load reads it, else the bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _unescaped(match: re.Match[bytes]) -> bytes:
    """The byte of one escape of a Python 2 string; an unknown escape stands for itself."""
    code: bytes = match[1]
    if code.isdigit() and code < b"8":
        return bytes([int(code, 8) & 0xFF])
    if len(code) == 3:
        return bytes([int(code[1:], 16)])
    return _ESCAPED.get(code, match[0])


def _string(m: Machine) -> None:
    line = m.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise PickleFaultError("a quoted string without its quotes")
    m.push(_python2_text(_ESCAPE.sub(_unescaped, line[1:-1])))


def _short_binstring(m: Machine) -> None:
    m.push(_python2_text(_take1(m)))


def _binstring(m: Machine) -> None:
    (nbytes,) = unpack_from("<i", m.data, m.at)
    m.at += 4
    if nbytes < 0:
        raise PickleFaultError("a string of a negative number of bytes")
    m.push(_python2_text(m.take(nbytes)))


def _short_binbytes(m: Machine) -> None:
    m.push(_take1(m))


def _binbytes(m: Machine) -> None:
    m.push(_take4(m))


def _binbytes8(m: Machine) -> None:
    m.push(_take8(m))


def _bytearray8(m: Machine) -> None:
    m.push(bytearray(_take8(m)))


VALUE_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"F": _float,
    b"I": _int,
    b"J": _binint,
    b"K": _binint1,
    b"L": _long,
    b"M": _binint2,
    b"N": _none,
    b"S": _string,
    b"T": _binstring,
    b"U": _short_binstring,
    b"V": _unicode,
    b"X": _binunicode,
    b"G": _binfloat,
    b"\x88": _true,
    b"\x89": _false,
    b"\x8a": _long1,
    b"\x8b": _long4,
    b"B": _binbytes,
    b"C": _short_binbytes,
    b"\x8c": _short_binunicode,
    b"\x8d": _binunicode8,
    b"\x8e": _binbytes8,
    b"\x96": _bytearray8,
}
