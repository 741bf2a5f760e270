r"""Write plain values, names, stubs and new tensors as a pickle that torch.load understands.

Protocol 2, with the opcodes and the batches of CPython's pickler (3.11 Lib/pickle.py), so that also the restricted
unpickler behind `weights_only=True` reads it. Equal strings are written once. An object that is referred to twice
stays one object, cycles included. Writers are generators that yield the parts to write next, so deep nesting does not
exhaust the stack.

>>> emit_pickle({"step": 3}).data
b'\x80\x02}q\x00X\x04\x00\x00\x00stepq\x01K\x03s.'
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ucp.errors import DestinationError
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file.storage import STORAGE_CLASSES, NewStorage, NewTensor

_BATCH = 1000
"""Elements per APPENDS or SETITEMS, as the pickler of CPython does."""
_MOST_REENTRIES = 1000
"""Most times that one object is written inside itself; a set whose members refer to it needs one per member."""
_MOST_REWRITTEN = 1_000_000
"""Most parts that are written again in this way, over all objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedPickle:
    """A pickle and the storages that it names."""

    data: bytes
    """The pickle."""
    storages: tuple[NewStorage, ...]
    """Storages; the position is the key: "0" for the first."""


def emit_pickle(root: object) -> EmittedPickle:
    """The pickle of `root`.

    Raises
    ------
    DestinationError
        A value of a type that has no place in a checkpoint, such as a reference to another file's tensor.
    """
    writer = _Writer()
    writer.write(root)
    storages, data = tuple(writer.storages), writer.out
    del writer  # its memo may be as large as what it wrote, and `data` is about to be copied
    return EmittedPickle(data=bytes(data), storages=storages)


class _Writer:
    """Output so far, and the memo of what was written."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[NewStorage, int] = {}
        self.memo: dict[object, int] = {}
        self._alive: list[object] = []
        self._open: dict[object, int] = {}
        self._rewritten = 0

    def write(self, root: object) -> None:
        """Write the whole pickle."""
        rest: list[Iterator[object]] = [iter((root,))]
        while rest:
            for value in rest[-1]:
                writer = _WRITERS.get(type(value))
                if writer is None:
                    raise DestinationError(
                        f"cannot write a {type(value).__name__} into a file of torch.save; expected plain values, "
                        "stubs and new tensors. Replace it before the file is laid out"
                    )
                parts = writer(self, value)
                if parts is not None:
                    rest.append(parts)
                    break
            else:
                rest.pop()
        self.out += b"."

    def refer(self, key: object) -> bool:
        """Refer to the value with that memo key; False if it was not written yet."""
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")
        return True

    def memoize(self, key: object) -> None:
        """Remember the value just written."""
        index = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + index.to_bytes(4, "little")

    def identity(self, value: object) -> tuple[str, int]:
        """Memo key of an object. Keeps the object alive, so that its id is not used again."""
        self._alive.append(value)
        return ("object", id(value))

    def enter(self, key: object, numel: int) -> None:
        """Begin an object that enters the memo only after its `numel` parts. Raises DestinationError in a cycle."""
        depth = self._open[key] = self._open.get(key, 0) + 1
        self._rewritten += numel if depth > 1 else 0
        if depth > _MOST_REENTRIES or self._rewritten > _MOST_REWRITTEN:
            raise DestinationError("cannot write an object that is among the arguments that make it")

    def leave(self, key: object, end: bytes, undo: bytes = b"0") -> None:
        """Finish an object with the instructions `end`; if one of its parts wrote it already (a cycle), refer to that.

        `undo`: instructions that remove its parts from the stack in that case.
        """
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
        if key in self.memo:
            self.out += undo
            self.refer(key)
        else:
            self.out += end
            self.memoize(key)


Parts = Iterator[object]
"""Parts of a value, in the order in which they are to be written."""


def _write_int(w: _Writer, value: int) -> None:
    if 0 <= value < 1 << 8:
        w.out += b"K" + bytes([value])
    elif 0 <= value < 1 << 16:
        w.out += b"M" + value.to_bytes(2, "little")
    elif -(1 << 31) <= value < 1 << 31:
        w.out += b"J" + value.to_bytes(4, "little", signed=True)
    else:
        data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
        if len(data) > 1 and data[-1] == 0xFF and data[-2] & 0x80:
            data = data[:-1]
        head = b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + len(data).to_bytes(4, "little")
        w.out += head + data


def _write_str(w: _Writer, value: str) -> None:
    if not w.refer(value):
        data = value.encode("utf-8", "surrogatepass")
        w.out += b"X" + len(data).to_bytes(4, "little")
        w.out += data  # not joined before: it may be hundreds of megabytes
        w.memoize(value)


def _write_global(w: _Writer, value: GlobalName) -> Parts | None:
    if w.refer(value):
        return None
    if not f"{value}".isprintable():
        raise DestinationError(f"cannot write the name {value!r}; expected one of printable characters")
    if "." in value.qualname:
        return _write_nested_global(w, value)
    w.out += b"c" + f"{_PYTHON2_MODULES.get(value.module, value.module)}\n{value.qualname}\n".encode()
    w.memoize(value)
    return None


def _write_nested_global(w: _Writer, value: GlobalName) -> Parts:
    parent, _, name = value.qualname.rpartition(".")
    yield GlobalName("builtins", "getattr")
    yield (GlobalName(value.module, parent), name)
    w.out += b"R"
    w.memoize(value)


def _write_reduced(w: _Writer, value: object) -> Parts:
    """Write a value that has no opcode as a call."""
    key = w.identity(value)
    if not w.refer(key):
        module, name, *args = _REDUCED[type(value)](value)
        w.enter(key, sum(len(arg) for arg in args if isinstance(arg, list)))
        yield GlobalName(module, name)
        yield tuple(args)
        w.out += b"R"
        w.leave(key, b"")


def _write_tuple(w: _Writer, value: tuple[object, ...]) -> Parts | None:
    if not value:
        w.out += b")"
        return None
    return _write_members(w, value)


def _write_members(w: _Writer, value: tuple[object, ...]) -> Parts:
    key = w.identity(value)
    if not w.refer(key):
        numel = len(value)
        w.out += b"(" if numel > 3 else b""
        w.enter(key, numel)
        yield from value
        if numel > 3:
            w.leave(key, b"t", undo=b"1")
        else:
            w.leave(key, (b"\x85", b"\x86", b"\x87")[numel - 1], undo=b"0" * numel)


def _write_list(w: _Writer, value: list[object]) -> Parts:
    key = w.identity(value)
    if not w.refer(key):
        w.out += b"]"
        w.memoize(key)
        yield from _write_batches(w, ((item,) for item in value), one=b"a", many=b"e", several=len(value) > 1)


def _write_dict(w: _Writer, value: dict[object, object]) -> Parts:
    key = w.identity(value)
    if not w.refer(key):
        w.out += b"}"
        w.memoize(key)
        yield from _write_batches(w, value.items(), one=b"s", many=b"u", several=len(value) > 1)


def _write_ordered_dict(w: _Writer, value: OrderedDict[object, object]) -> Parts:
    key = w.identity(value)
    if w.refer(key):
        return
    yield GlobalName("collections", "OrderedDict")
    w.out += b")R"
    w.memoize(key)
    yield from _write_batches(w, value.items(), one=b"s", many=b"u")
    if vars(value):
        yield dict(vars(value))
        w.out += b"b"


def _write_batches(
    w: _Writer, groups: Iterable[tuple[object, ...]], *, one: bytes, many: bytes, several: bool = False
) -> Parts:
    """Write groups of values (an element, or a key and a value) and add them to the container below.

    There is a separate opcode for a batch of one. CPython uses it for the last element of a long iterator, but
    (`several`) not for the last element of a long list or dict.
    """
    rest = iter(groups)
    while batch := tuple(islice(rest, _BATCH)):
        marked = several or len(batch) > 1
        if marked:
            w.out += b"("
        for value in chain.from_iterable(batch):
            leaf = _LEAVES.get(type(value))
            if leaf is None:
                yield value
            else:  # most are: written at once
                leaf(w, value)
        w.out += many if marked else one
        if len(batch) < _BATCH:
            return


def _write_stub(w: _Writer, value: Stub) -> Parts:
    key = w.identity(value)
    if w.refer(key):
        return
    if value.args or value.kwargs:
        w.enter(key, len(value.args))
        yield GlobalName("copyreg", "__newobj_ex__") if value.kwargs else value.made_by
        yield (value.made_by, value.args, value.kwargs) if value.kwargs else value.args
        w.out += b"\x81" if value.new and not value.kwargs else b"R"
        w.leave(key, b"")
    else:
        yield value.made_by
        w.out += b")\x81" if value.new else b")R"
        w.memoize(key)
    if value.items:
        yield from _write_batches(w, ((item,) for item in value.items), one=b"a", many=b"e")
    if value.entries:
        yield from _write_batches(w, value.entries, one=b"s", many=b"u")
    if value.has_state:
        yield value.state
        w.out += b"b"


def _write_tensor(w: _Writer, value: NewTensor) -> Parts:
    key = w.identity(value)
    if w.refer(key):
        return
    dtype = value.storage.dtype
    hooks: OrderedDict[object, object] = OrderedDict()
    args = (value.storage, value.offset, value.shape, value.strides, False, hooks)
    if dtype in STORAGE_CLASSES:
        yield GlobalName("torch._utils", "_rebuild_tensor_v2")
        yield args
    else:
        yield GlobalName("torch._utils", "_rebuild_tensor_v3")
        yield (*args, GlobalName("torch", dtype.value))
    w.out += b"R"
    w.memoize(key)


def _write_storage(w: _Writer, value: NewStorage) -> Parts:
    name = STORAGE_CLASSES.get(value.dtype)
    kind = GlobalName("torch", name) if name else GlobalName("torch.storage", "UntypedStorage")
    key = str(w.storages.setdefault(value, len(w.storages)))
    yield ("storage", kind, key, "cpu", value.numel if name else value.nbytes)
    w.out += b"Q"


_PYTHON2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
"""Module names of protocol 2 (CPython 3.11 Lib/_compat_pickle.py)."""
_REDUCED: dict[type, Callable[..., tuple[Any, ...]]] = {
    bytes: lambda v: ("_codecs", "encode", v.decode("latin-1"), "latin1") if v else ("builtins", "bytes"),
    bytearray: lambda v: ("builtins", "bytearray", *((v.decode("latin-1"), "latin-1") if v else ())),
    complex: lambda v: ("builtins", "complex", v.real, v.imag),
    slice: lambda v: ("builtins", "slice", v.start, v.stop, v.step),
    range: lambda v: ("builtins", "range", v.start, v.stop, v.step),
    set: lambda v: ("builtins", "set", list(v)),
    frozenset: lambda v: ("builtins", "frozenset", list(v)),
    TorchSize: lambda v: ("torch", "Size", tuple(v)),
}
"""Module and name of the function, and its arguments."""
_LEAVES: dict[type, Callable[..., None]] = {
    type(None): lambda w, _: w.out.extend(b"N"),
    bool: lambda w, v: w.out.extend(b"\x88" if v else b"\x89"),
    int: _write_int,
    float: lambda w, v: w.out.extend(b"G" + struct.pack(">d", v)),
    str: _write_str,
}
"""Writers of values without parts."""
_WRITERS: dict[type, Callable[..., Parts | None]] = {
    **_LEAVES,
    **dict.fromkeys(_REDUCED, _write_reduced),
    tuple: _write_tuple,
    list: _write_list,
    dict: _write_dict,
    OrderedDict: _write_ordered_dict,
    GlobalName: _write_global,
    Stub: _write_stub,
    NewTensor: _write_tensor,
    NewStorage: _write_storage,
}
