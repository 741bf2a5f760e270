"""Pickles that run a program when they are loaded, read without any effect.

Each one would make a canary file. Those marked as live are first loaded by `pickle.loads` in this test, to prove that
they bite.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ucp.errors import MalformedError, UcpError
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.torch_file.archive import read_archive


def text(value: str) -> bytes:
    """BINUNICODE."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def short(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def touch(canary: str) -> bytes:
    """The command that makes the canary, as a pickled string."""
    return text(f"touch {canary}")


def program(canary: str) -> bytes:
    """Python that makes the canary, as a pickled string."""
    return text(f"open({canary!r}, 'w').close()")


def reduced(canary: str) -> bytes:
    return b"\x80\x02cos\nsystem\n" + touch(canary) + b"\x85R."


LIVE: dict[str, Callable[[str], bytes]] = {
    "reduce os.system": reduced,
    "reduce posix.system": lambda c: b"\x80\x02cposix\nsystem\n" + touch(c) + b"\x85R.",
    "reduce in protocol 0": lambda c: b"cos\nsystem\n(S'touch " + c.encode() + b"'\ntR.",
    "builtins.eval": lambda c: b"\x80\x02c__builtin__\neval\n" + program(c) + b"\x85R.",
    "builtins.exec": lambda c: b"\x80\x03cbuiltins\nexec\n" + program(c) + b"\x85R.",
    "subprocess.call": lambda c: b"\x80\x02csubprocess\ncall\n" + b"](" + text("touch") + text(c) + b"e\x85R.",
    "instance": lambda c: b"(" + touch(c) + b"ios\nsystem\n.",
    "object": lambda c: b"(cos\nsystem\n" + touch(c) + b"o.",
    "os.mkdir": lambda c: b"\x80\x02cos\nmkdir\n" + text(c) + b"\x85R.",
    "stack global": lambda c: b"\x80\x04" + short("os") + short("system") + b"\x93" + touch(c) + b"\x85R.",
    "stack global out of the memo": lambda c: (
        b"\x80\x04" + short("system") + b"\x94" + short("os") + b"h\x00\x93" + touch(c) + b"\x85R."
    ),
    "dotted global": lambda c: b"\x80\x04" + short("os") + short("system.__call__") + b"\x93" + touch(c) + b"\x85R.",
    "getattr of a module": lambda c: (
        b"\x80\x02c__builtin__\ngetattr\nc__builtin__\n__import__\n"
        + text("os")
        + b"\x85R"
        + text("system")
        + b"\x86R"
        + touch(c)
        + b"\x85R."
    ),
    "nested in a dict": lambda c: b"\x80\x02}" + text("a") + b"]cos\nsystem\n" + touch(c) + b"\x85Ras.",
    "nested in the arguments": lambda c: b"\x80\x02c__builtin__\nlist\ncos\nsystem\n" + touch(c) + b"\x85R\x85\x85R.",
    "memoised and thrown away": lambda c: b"\x80\x02cos\nsystem\nq\x00" + touch(c) + b"\x85q\x01R0K\x01.",
    "called through the memo": lambda c: b"\x80\x02cos\nsystem\nq\x000N0h\x00" + touch(c) + b"\x85R.",
    "in the state": lambda c: (
        b"\x80\x02cargparse\nNamespace\n)\x81}" + text("a") + b"cos\nsystem\n" + touch(c) + b"\x85Rsb."
    ),
    "as a key": lambda c: b"\x80\x02}cos\nsystem\n" + touch(c) + b"\x85RK\x01s.",
    "setstate": lambda c: b"\x80\x02cfunctools\npartial\ncos\nsystem\n\x85R(cos\nsystem\n" + touch(c) + b"\x85}Ntb)R.",
    "map": lambda c: (
        b"\x80\x02c__builtin__\nset\nc__builtin__\nmap\ncos\nsystem\n](" + touch(c) + touch(c) + b"e\x86R\x85R."
    ),
    "operator": lambda c: (
        b"\x80\x02coperator\nmethodcaller\n" + text("__call__") + touch(c) + b"\x86Rcos\nsystem\n\x85R."
    ),
    "state, then a call": lambda c: (
        b"\x80\x02ccode\nInteractiveInterpreter\n)\x81}"
        + text("locals")
        + b"}sb0c__builtin__\nexec\n"
        + program(c)
        + b"\x85R."
    ),
}
INERT: dict[str, Callable[[str], bytes]] = {
    "new object of a function": lambda c: b"\x80\x02cos\nsystem\n" + touch(c) + b"\x85\x81.",
    "new object with keywords": lambda c: b"\x80\x04cos\nsystem\n)}" + text("command") + touch(c) + b"s\x92.",
    "extension 1": lambda c: b"\x80\x02\x82\x01" + touch(c) + b"\x85R.",
    "extension 2": lambda c: b"\x80\x02\x83\x01\x00" + touch(c) + b"\x85R.",
    "extension 4": lambda c: b"\x80\x02\x84\x01\x00\x00\x00" + touch(c) + b"\x85R.",
    "registering an extension": lambda c: (
        b"\x80\x02ccopyreg\nadd_extension\n"
        + text("os")
        + text("system")
        + b"K\x07\x87R0\x82\x07"
        + touch(c)
        + b"\x85R."
    ),
    "persistent id": lambda c: b"\x80\x02cos\nsystem\n" + touch(c) + b"\x85RQ.",
    "persistent id of text": lambda c: b"Pcos\nsystem\n" + touch(c) + b"\x85R.",
    "reconstructor": lambda c: (
        b"\x80\x02ccopy_reg\n_reconstructor\ncos\nsystem\nc__builtin__\nstr\n" + touch(c) + b"\x87R."
    ),
    "new object by copyreg": lambda c: b"\x80\x02ccopy_reg\n__newobj__\ncos\nsystem\n" + touch(c) + b"\x86R.",
    "bytes that are a file of torch": lambda c: (
        b"\x80\x03ctorch.storage\n_load_from_bytes\nB" + len(reduced(c)).to_bytes(4, "little") + reduced(c) + b"\x85R."
    ),
    "numpy array of objects": lambda c: (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + text("b")
        + b"\x87R(K\x01K\x01\x85cnumpy\ndtype\n"
        + text("O8")
        + b"K\x00K\x01\x87R\x89]cos\nsystem\n"
        + touch(c)
        + b"\x85Ratb."
    ),
    "numpy.load": lambda c: b"\x80\x02cnumpy\nload\n" + text(c) + b"\x85R.",
    "torch.load": lambda c: b"\x80\x02ctorch.serialization\nload\n" + text(c) + b"\x85R.",
    "rebuild from a hostile type": lambda c: (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n" + touch(c) + b"\x85}tR."
    ),
    "parameter of a call": lambda c: (
        b"\x80\x02ctorch._utils\n_rebuild_parameter\ncos\nsystem\n" + touch(c) + b"\x85R\x88}\x87R."
    ),
    "build on a name": lambda c: b"\x80\x02cos\nsystem\n}" + text("__class__") + touch(c) + b"sb.",
    "state of a dict": lambda c: b"\x80\x02}(" + text("__setstate__") + b"cos\nsystem\nu" + touch(c) + b"b.",
    "attributes of an ordered dict": lambda c: (
        b"\x80\x02ccollections\nOrderedDict\n)R}" + text("__reduce__") + b"cos\nsystem\nsb."
    ),
    "size of a call": lambda c: b"\x80\x02ctorch\nSize\ncos\nsystem\n" + touch(c) + b"\x85R\x85R.",
    "codec of a name": lambda c: b"\x80\x02c_codecs\nencode\n" + touch(c) + text("os") + b"\x86R.",
}


@pytest.mark.skipif(sys.platform == "win32", reason="the canaries are made by the shell")
@pytest.mark.parametrize("name", LIVE)
def test_hostile_pickles_bite_pickle_and_not_us(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = LIVE[name](str(canary))
    parse_pickle(data, where="hostile")
    assert not canary.exists()
    with contextlib.suppress(Exception):
        pickle.loads(data)
    assert canary.exists(), "this pickle proves nothing"


@pytest.mark.parametrize("name", INERT)
def test_gadgets_do_nothing(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    modules = set(sys.modules)
    with contextlib.suppress(UcpError):
        parse_pickle(INERT[name](str(canary)), where="hostile")
    assert not canary.exists()
    assert set(sys.modules) == modules


@pytest.mark.parametrize("name", [*LIVE, *INERT])
def test_hostile_archives_do_nothing(name: str, tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "x.pt"
    pickled = {**LIVE, **INERT}[name](str(canary))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    with contextlib.suppress(UcpError):
        read_archive(str(path))
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickled)
    with contextlib.suppress(UcpError):
        read_archive(str(path))
    assert not canary.exists()


def again(function: bytes, args: bytes, times: int, *, then: bytes = b"") -> bytes:
    """A call of memoized arguments, again and again: three bytes each."""
    return function + b"q\0" + args + b"q\1" + (b"h\0h\1R" + then) * times + b"N."


COPIES = {
    "bytes": again(
        b"cbuiltins\nbytearray\n", b"B" + (160_000).to_bytes(4, "little") + b"a" * 160_000 + b"\x85", 32_000
    ),
    "arguments": again(b"N", b"(" + b"N" * 40_000 + b"t", 8_000),
    "a set, let go": again(
        b"cbuiltins\nset\n",
        b"(" + b"".join(b"J" + n.to_bytes(4, "little") for n in range(10_000)) + b"t\x85",
        10_000,
        then=b"0",
    ),
    "attributes": b"}("
    + b"".join(short(f"a{n}") + b"N" for n in range(3000))
    + b"uq\0ccollections\nOrderedDict\nq\1"
    + b"h\1)Rh\0b0" * 4000
    + b"N.",
    "a name that grows": b"cbuiltins\ngetattr\nq\0ca\na\nq\1"
    + text("a" * 10_000)
    + b"q\2"
    + b"h\0h\1h\2\x86Rq\1" * 1000
    + b".",
}


@pytest.mark.parametrize("case", COPIES)
def test_calls_that_copy_the_same_values_again_and_again_come_to_an_end(case: str) -> None:
    """In a file of 20 to 300 KB that would be gigabytes, or hours."""
    tracemalloc.start()
    try:
        with contextlib.suppress(UcpError):
            parse_pickle(COPIES[case], where="bomb")
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_equal_keys_are_not_compared_text_by_text() -> None:
    key = b"(" + text("x" * 1000) * 250 + b"t"
    with pytest.raises(MalformedError, match="65536 characters"):
        parse_pickle(b"}" + key + b"Ns.", where="keys")
