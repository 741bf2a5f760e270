r"""Rewrites a pickle so that CPython's unpickler can run it safely.

A pickle is a program for a stack machine. CPython's unpickler in C is fast, but imports, calls and hashes whatever the
program says. So every instruction that could do this becomes a request: a tuple of its operands and its opcode, passed
to `persistent_load` (BINPERSID). REDUCE, for example, becomes BININT1 'R', TUPLE3, BINPERSID:

>>> b"KR\x87Q" in b"".join(Rewriter(b"(I7\ntR.", 0).body())
True

Whatever makes the unpickler allocate memory is checked first: lengths and memo indexes must not exceed the number of
bytes. Opcodes are those of CPython 3.11 Lib/pickle.py.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from struct import pack

FILL_AND_BUILD = ord("U")
"""Code of the request for SETITEMS followed by BUILD: (object, dict, keys and values), None."""
_REQUESTS = {
    b"": b"",
    b"R": b"KR\x87Q",  # function, args
    b"\x81": b"K\x81\x87Q",  # class, args
    b"\x92": b"\x86K\x92\x87Q",  # class, (args, kwargs)
    b"o": b"tNKo\x87Q",  # class and args
    b"b": b"Kb\x87Q",  # object, state
    b"ub": b"t\x87NKU\x87Q",
    b"u": b"tKu\x87Q",  # dict, keys and values
    b"s": b"\x86Ku\x87Q",
    b"d": b"tNKd\x87Q",  # keys and values
    b"e": b"tKe\x87Q",  # list, elements
    b"a": b"\x85Ke\x87Q",
    b"\x90": b"tK\x90\x87Q",  # set, elements
    b"\x91": b"tNK\x91\x87Q",  # elements of a frozenset
    b"\x93": b"K\x93\x87Q",  # module, qualname
    b"Q": b"NKQ\x87Q",  # persistent id
}
_ARGUMENT_NBYTES = {b"K": 1, b"h": 1, b"q": 1, b"M": 2, b"J": 4, b"j": 4, b"G": 8}
_COUNT_NBYTES = {b"C": 1, b"\x8a": 1, b"\x8c": 1, b"B": 4, b"X": 4, b"\x8b": 4, b"\x8d": 8, b"\x8e": 8, b"\x96": 8}
_REFUSED = {
    **dict.fromkeys((b"\x82", b"\x83", b"\x84"), "asks for a class by a number that only its writer knows (copyreg)"),
    **dict.fromkeys((b"\x97", b"\x98"), "asks for a buffer that lies outside the file (protocol 5, out of band)"),
}
_ESCAPE = re.compile(rb"""(\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|[0-7]{1,3}))|\\""")
"""An escape of a Python 2 string (group 1), or a backslash that stands for itself."""
_BATCH_NBYTES = 1 << 12
"""Bytes that the regular expression scans at once: the part that it cannot parse is copied."""


class PickleFaultError(Exception):
    """An instruction is invalid at its place."""


class EndOfPickleError(PickleFaultError):
    """An instruction extends past the last byte."""


class RefusedOpcodeError(PickleFaultError):
    """A valid instruction that needs something outside the pickle."""


@cache
def _common() -> re.Pattern[bytes]:
    """Instructions that stay, then one that becomes a request, or (group 3) bytes that are neither, or incomplete."""
    texts = [re.escape(bytes([n])) + b"%%s.{%d}" % n for n in range(256)]
    short, long = (b"|".join(texts).replace(b"%s", zeros) for zeros in (b"", rb"\0\0\0"))
    longs = b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(9))  # offsets in files above 2 GB
    stay = rb"[()012N\]lt}\x85-\x89\x8f\x94]++|[Khq].|[jJ]....|M..|G.{8}|r..[\0\1]\0"
    stay += rb"|\x8c(?:%s)|X(?:%s)|\x8a(?:%s)" % (short, long, longs)
    return re.compile(rb"((?:%s)*+)(?:(ub|[QRabdeosu\x81\x90-\x93])|(.*))" % stay, re.DOTALL)


class Frames(deque[bytes]):
    """A file of pickle frames, as `Unpickler` reads it; each part is freed once it is read."""

    def read(self, nbytes: int) -> bytes:
        """The next part: the instruction FRAME, its length, its bytes. Empty bytes may lie between two frames."""
        return self.popleft() if self and nbytes else b""

    def readline(self) -> bytes:
        """Never called for data: the rewriter replaces instructions that take a line."""
        return b""


class Rewriter:
    """Rewrites the pickle that begins at one byte of `data`."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = self.instruction = start
        """One past the last byte that was read, and the first byte of the instruction there."""
        self.protocol = 0
        self.is_whole = False
        """Whether STOP was reached."""

    def body(self) -> Frames:
        """The rewritten pickle. Raises PickleFaultError, or UnicodeError for a text of another encoding."""
        body = Frames()
        while not self.is_whole:
            stop = min(self.at + _BATCH_NBYTES, len(self.data))
            matches = _common().findall(self.data, self.at, stop)
            rest = max(len(other) for _, _, other in matches[-2:])
            self.at = self.instruction = stop - rest
            piece = b"".join([stays + _REQUESTS[asks] for stays, asks, _ in matches])
            if rest or stop == len(self.data):
                piece += self._step(self.take(1))
            if piece:
                body += (b"\x95", pack("<Q", len(piece)), piece)
        return body

    def _step(self, code: bytes) -> bytes:
        """Rewrite an instruction that the regular expression does not match."""
        if code in _ARGUMENT_NBYTES:
            return code + self.take(_ARGUMENT_NBYTES[code])
        if code in _COUNT_NBYTES:
            self.take(self.number(_COUNT_NBYTES[code]))
            return self.data[self.instruction : self.at]
        if code == b".":
            self.is_whole = True
            return code
        if code == b"\x95":  # a frame: it must be there, and is read like the rest
            if self.number(8) > len(self.data) - self.at:
                raise EndOfPickleError
            return b""
        if code in _REFUSED:
            raise RefusedOpcodeError(_REFUSED[code])
        if code not in _STEPS:
            raise PickleFaultError(f"the unknown opcode {code[0]:#04x}")
        return _STEPS[code](self)

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes."""
        at, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise EndOfPickleError
        return self.data[at : self.at]

    def number(self, nbytes: int) -> int:
        """The number in the next `nbytes` bytes."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> bytes:
        """The bytes up to the next newline, which is skipped."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise EndOfPickleError
        return self.take(end + 1 - self.at)[:-1]


def _number(line: bytes, kind: type[float] = int) -> float:
    """Parse a line of digits."""
    try:
        return kind(line)
    except ValueError:  # Python refuses integers of thousands of digits too
        shown = repr(line[:40]) + ("..." if len(line) > 40 else "")
        raise PickleFaultError(f"{shown} where a number is expected") from None


def _constant(value: str | bytes | float) -> bytes:
    """The instruction that pushes `value`; bytes (a `str` of Python 2) become text if they are UTF-8."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            value = value.decode()
    match value:
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"\x8d" + pack("<Q", len(text)) + text
        case bytes():
            return b"\x8e" + pack("<Q", len(value)) + value
        case int():
            number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8b" + pack("<I", len(number)) + number
    return b"G" + pack(">d", value)


def _string(r: Rewriter) -> bytes:
    line = r.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise PickleFaultError("a quoted string without its quotes")
    return _constant(codecs.escape_decode(_ESCAPE.sub(lambda match: match[1] or rb"\\", line[1:-1]))[0])


def _name(r: Rewriter) -> bytes:
    module, qualname = r.line().decode(), r.line().decode()
    return _constant(module) + _constant(qualname) + _REQUESTS[b"\x93"]


def _memo(r: Rewriter, code: bytes, index: float) -> bytes:
    """An instruction of the memo; the unpickler allocates memory for all indexes up to this one."""
    if not 0 <= index <= len(r.data):
        raise PickleFaultError(f"a memo index {index}; expected no more of them than bytes")
    return code + pack("<I", index)


def _proto(r: Rewriter) -> bytes:
    r.protocol = r.number(1)
    if r.protocol > 5:
        raise RefusedOpcodeError(f"asks for pickle protocol {r.protocol}; expected 0 to 5")
    return b""


_STEPS: dict[bytes, Callable[[Rewriter], bytes]] = {
    b"I": lambda r: {b"00": b"\x89", b"01": b"\x88"}.get(line := r.line()) or _constant(_number(line)),
    b"L": lambda r: _constant(_number(r.line().removesuffix(b"L"))),
    b"F": lambda r: _constant(_number(r.line(), float)),
    b"V": lambda r: _constant(str(r.line(), "raw-unicode-escape")),
    b"S": _string,
    b"T": lambda r: _constant(r.take(r.number(4))),
    b"U": lambda r: _constant(r.take(r.number(1))),
    b"P": lambda r: _constant(r.line().decode()) + _REQUESTS[b"Q"],
    b"c": _name,
    b"i": lambda r: b"t" + _name(r) + b"Ki\x87Q",  # args, class
    b"p": lambda r: _memo(r, b"r", _number(r.line())),
    b"r": lambda r: _memo(r, b"r", r.number(4)),
    b"g": lambda r: _memo(r, b"j", _number(r.line())),
    b"\x80": _proto,
}
