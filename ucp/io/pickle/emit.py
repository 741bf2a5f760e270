r"""Write plain values, names, stubs and new tensors as a pickle that torch.load understands.

Protocol 2, with the opcodes and the batches of CPython's pickler (3.11 Lib/pickle.py), so that also the restricted
unpickler behind `weights_only=True` reads it. Equal strings are written once; lists, dicts, stubs and tensors that
are one object stay one object, cycles included. The writer keeps its own stack of what is left to write, so depth is
no danger.

>>> emit_pickle({"step": 3}).data
b'\x80\x02}q\x00X\x04\x00\x00\x00stepq\x01K\x03s.'
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from ucp.core.pickle_values import GlobalName, Stub, TorchSize
from ucp.errors import DestinationError
from ucp.io.torch_file.storage import STORAGE_CLASSES
from ucp.io.torch_file.tensors import NewStorage, NewTensor

__all__ = ["EmittedPickle", "emit_pickle"]

_BATCH = 1000
"""Elements per APPENDS or SETITEMS, as the pickler of CPython does."""
_MOST_REENTRIES = 1000
"""Bound on writing one object inside itself; a set of objects that refer to the set needs one round per object."""
_MOST_REWRITTEN = 1_000_000
"""Bound on the parts that all such rounds write, each of them as many as the object has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedPickle:
    """A pickle and the storages that it names."""

    data: bytes
    """The pickle."""
    storages: tuple[NewStorage, ...]
    """Storages; the place in the tuple is the key, "0" the first."""


def emit_pickle(root: object) -> EmittedPickle:
    """The pickle of `root`.

    Raises
    ------
    DestinationError
        A value of a type that has no place in a checkpoint, such as a reference to another file's tensor.
    """
    writer = _Writer()
    writer.write(root)
    storages = tuple(writer.storages)
    data = writer.out
    del writer  # its memo may be as large as what it wrote, and `data` is about to be copied
    return EmittedPickle(data=bytes(data), storages=storages)


class _Writer:
    """Output so far, memo, and steps still to take."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[NewStorage, int] = {}
        self.memo: dict[object, int] = {}
        self._count = 0
        self._alive: list[object] = []
        self._open: dict[object, int] = {}
        self._rewritten = 0
        self._steps: list[Callable[[], None] | Iterator[Callable[[], None]]] = []

    def write(self, root: object) -> None:
        """Write the whole pickle."""
        self.save(root)
        while self._steps:
            step = self._steps[-1]
            if callable(step):
                self._steps.pop()
                step()
                continue
            following = next(step, None)
            if following is None:
                self._steps.pop()
            else:
                following()
        self.out += b"."

    def then(self, *steps: Callable[[], None]) -> None:
        """Take `steps` in this order, before any step that waits already."""
        self._steps.append(iter(steps))

    def each(self, steps: Iterator[Callable[[], None]]) -> None:
        """Take lazily made `steps` before any step that waits already."""
        self._steps.append(steps)

    def opcode(self, data: bytes) -> Callable[[], None]:
        """The step that writes `data`."""
        return lambda: self.out.extend(data)

    def saving(self, value: object) -> Callable[[], None]:
        """The step that writes `value`."""
        return lambda: self.save(value)

    def save(self, value: object) -> None:
        """Write `value`, or take the steps to do so."""
        writer = _WRITERS.get(type(value))
        if writer is None:
            raise DestinationError(
                f"cannot write a {type(value).__name__} into a file of torch.save; expected plain values, stubs and "
                "new tensors. Replace it before the file is laid out"
            )
        writer(self, value)

    def got(self, key: object) -> bool:
        """Whether what `key` stands for was written before; if so, refer to it."""
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")
        return True

    def memoize(self, key: object) -> None:
        """Remember the value just written."""
        index = self.memo[key] = self._count
        self._count += 1
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + index.to_bytes(4, "little")

    def identity(self, value: object) -> tuple[str, int]:
        """Memo key of one object, which is kept alive so that no other takes its place."""
        self._alive.append(value)
        return ("object", id(value))

    def enter(self, key: object, numel: int) -> None:
        """Begin to write what is memoised only once its `numel` parts are written; refuse to do so without end."""
        depth = self._open[key] = self._open.get(key, 0) + 1
        self._rewritten += numel if depth > 1 else 0
        if depth > _MOST_REENTRIES or self._rewritten > _MOST_REWRITTEN:
            raise DestinationError("cannot write an object that is among the arguments that make it")

    def close(self, key: object) -> None:
        """Note that what `enter` began has its parts."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]

    def leave(self, key: object) -> None:
        """End what `enter` began; when writing the parts has written it already, refer to that one."""
        self.close(key)
        start = len(self.out)
        if self.got(key):
            self.out[start:start] = b"0"
        else:
            self.memoize(key)

    def key_of(self, storage: NewStorage) -> str:
        """Key of the storage in the archive."""
        return str(self.storages.setdefault(storage, len(self.storages)))


def _none(w: _Writer, value: object) -> None:
    w.out += b"N"


def _bool(w: _Writer, value: object) -> None:
    w.out += b"\x88" if value else b"\x89"


def _int(w: _Writer, value: int) -> None:
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


def _float(w: _Writer, value: float) -> None:
    w.out += b"G" + struct.pack(">d", value)


def _str(w: _Writer, value: str) -> None:
    if not w.got(value):
        data = value.encode("utf-8", "surrogatepass")
        w.out += b"X" + len(data).to_bytes(4, "little")
        w.out += data  # not joined before: it may be hundreds of megabytes
        w.memoize(value)


def _global(w: _Writer, value: GlobalName) -> None:
    if w.got(value):
        return
    module, (first, *rest) = _PYTHON2_MODULES.get(value.module, value.module), value.qualname.split(".")
    if not f"{value}".isprintable():
        raise DestinationError(f"cannot write the name {value!r}; expected one of printable characters")
    if not rest:
        w.out += b"c" + f"{module}\n{first}\n".encode()
        w.memoize(value)
        return
    parent = GlobalName(value.module, ".".join((first, *rest[:-1])))
    _call(w, GlobalName("builtins", "getattr"), (parent, rest[-1]), then=(lambda: w.memoize(value),))


def _call(w: _Writer, function: object, args: tuple[object, ...], *, then: Iterable[Callable[[], None]] = ()) -> None:
    w.then(w.saving(function), w.saving(args), w.opcode(b"R"), *then)


def _reduced(w: _Writer, value: object, name: str, *args: object) -> None:
    """A value that the pickler writes as a call of a builtin."""
    key = w.identity(value)
    if not w.got(key):
        w.enter(key, sum(len(arg) for arg in args if isinstance(arg, list)))
        module, _, qualname = name.rpartition(".")
        _call(w, GlobalName(module, qualname), args, then=(lambda: w.leave(key),))


def _bytes(w: _Writer, value: bytes) -> None:
    if value:
        _reduced(w, value, "_codecs.encode", value.decode("latin-1"), "latin1")
    else:
        _reduced(w, value, "builtins.bytes")


def _bytearray(w: _Writer, value: bytearray) -> None:
    if value:
        _reduced(w, value, "builtins.bytearray", value.decode("latin-1"), "latin-1")
    else:
        _reduced(w, value, "builtins.bytearray")


def _complex(w: _Writer, value: complex) -> None:
    _reduced(w, value, "builtins.complex", value.real, value.imag)


def _slice(w: _Writer, value: slice) -> None:
    _reduced(w, value, "builtins.slice", value.start, value.stop, value.step)


def _range(w: _Writer, value: range) -> None:
    _reduced(w, value, "builtins.range", value.start, value.stop, value.step)


def _set(w: _Writer, value: set[object]) -> None:
    _reduced(w, value, "builtins.set", list(value))


def _frozenset(w: _Writer, value: frozenset[object]) -> None:
    _reduced(w, value, "builtins.frozenset", list(value))


def _size(w: _Writer, value: TorchSize) -> None:
    _reduced(w, value, "torch.Size", tuple(value))


def _tuple(w: _Writer, value: tuple[object, ...]) -> None:
    if not value:
        w.out += b")"
        return
    key = w.identity(value)
    if w.got(key):
        return
    if len(value) > 3:
        w.out += b"("
    if _LEAVES.keys() >= set(map(type, value)):  # no steps: it holds nothing that could hold it
        for item in value:
            _LEAVES[type(item)](w, item)
        w.out += (b"\x85", b"\x86", b"\x87")[len(value) - 1] if len(value) <= 3 else b"t"
        w.memoize(key)
        return
    w.enter(key, len(value))
    w.each(chain((w.saving(item) for item in value), [lambda: _close_tuple(w, key, len(value))]))


def _close_tuple(w: _Writer, key: tuple[str, int], numel: int) -> None:
    """End a tuple, unless writing its members has already written it (a cycle through a list or dict)."""
    w.close(key)
    start = len(w.out)
    if w.got(key):
        reference = bytes(w.out[start:])
        del w.out[start:]
        w.out += (b"0" * numel if numel <= 3 else b"1") + reference
        return
    w.out += (b"\x85", b"\x86", b"\x87")[numel - 1] if numel <= 3 else b"t"
    w.memoize(key)


def _list(w: _Writer, value: list[object]) -> None:
    key = w.identity(value)
    if not w.got(key):
        w.out += b"]"
        w.memoize(key)
        w.each(_batches(w, ((item,) for item in value), one=b"a", many=b"e", several=len(value) > 1))


def _dict(w: _Writer, value: dict[object, object]) -> None:
    key = w.identity(value)
    if not w.got(key):
        w.out += b"}"
        w.memoize(key)
        w.each(_batches(w, value.items(), one=b"s", many=b"u", several=len(value) > 1))


def _ordered_dict(w: _Writer, value: OrderedDict[object, object]) -> None:
    key = w.identity(value)
    if w.got(key):
        return
    attributes = vars(value)
    if attributes:
        w.then(w.saving(dict(attributes)), w.opcode(b"b"))
    w.each(_batches(w, value.items(), one=b"s", many=b"u"))
    _call(w, GlobalName("collections", "OrderedDict"), (), then=(lambda: w.memoize(key),))


def _batches(
    w: _Writer, groups: Iterable[tuple[object, ...]], *, one: bytes, many: bytes, several: bool = False
) -> Iterator[Callable[[], None]]:
    """Steps that write groups of values (an element, or a key and a value) and add them to the container below.

    A batch of one has an opcode of its own; CPython uses it for the rest of a long iterator, but (`several`) not for
    the rest of a long list or dict.
    """
    rest = iter(groups)
    while batch := tuple(islice(rest, _BATCH)):
        marked = several or len(batch) > 1
        if marked:
            w.out += b"("
        for value in chain.from_iterable(batch):
            leaf = _LEAVES.get(type(value))
            if leaf is not None:  # is written without steps: all before it are done
                leaf(w, value)
            elif not _flat_stub(w, value):
                yield w.saving(value)
        w.out += many if marked else one


def _stub(w: _Writer, value: Stub) -> None:
    key = w.identity(value)
    if w.got(key):
        return
    if value.has_state:
        w.then(w.saving(value.state), w.opcode(b"b"))
    if value.entries:
        w.each(_batches(w, value.entries, one=b"s", many=b"u"))
    if value.items:
        w.each(_batches(w, ((item,) for item in value.items), one=b"a", many=b"e"))
    if not value.args and not value.kwargs and "." not in value.made_by.qualname:  # no steps: the commonest
        _global(w, value.made_by)
        w.out += b")\x81" if value.new else b")R"
        w.memoize(key)
        return
    w.enter(key, len(value.args))
    w.then(*_made(w, value), lambda: w.leave(key))


def _flat_stub(w: _Writer, value: object) -> bool:
    """Whether a value is an object without arguments, of a dict of leaves and known objects, written here at once.

    Of these `.metadata` has millions: what `_stub` does, but for the steps.
    """
    if type(value) is not Stub or not value.has_state or value.args or value.kwargs or value.entries or value.items:
        return False
    state = value.state
    if type(state) is not dict or not 1 < len(state) <= _BATCH or "." in value.made_by.qualname:
        return False
    memo = w.memo
    for own in state.values():
        if type(own) not in _LEAVES and ("object", id(own)) not in memo:
            return False
    if any(type(key) is not str for key in state) or ("object", id(value)) in memo or ("object", id(state)) in memo:
        return False
    _global(w, value.made_by)
    w.out += b")\x81" if value.new else b")R"
    w.memoize(w.identity(value))
    w.out += b"}"
    w.memoize(w.identity(state))
    w.out += b"("
    for key, own in state.items():
        _str(w, key)
        leaf = _LEAVES.get(type(own))
        if leaf is None:
            w.got(("object", id(own)))
        else:
            leaf(w, own)
    w.out += b"ub"
    return True


def _made(w: _Writer, value: Stub) -> tuple[Callable[[], None], ...]:
    """Steps that leave the object of a stub on the stack, before its elements and state."""
    if value.kwargs:
        function = GlobalName("copyreg", "__newobj_ex__")
        return w.saving(function), w.saving((value.made_by, value.args, value.kwargs)), w.opcode(b"R")
    return w.saving(value.made_by), w.saving(value.args), w.opcode(b"\x81" if value.new else b"R")


def _tensor(w: _Writer, value: NewTensor) -> None:
    key = w.identity(value)
    if w.got(key):
        return
    dtype = value.storage.dtype
    hooks: OrderedDict[object, object] = OrderedDict()
    args = (value.storage, value.offset, value.shape, value.strides, False, hooks)
    if dtype in STORAGE_CLASSES:
        _call(w, GlobalName("torch._utils", "_rebuild_tensor_v2"), args, then=(lambda: w.memoize(key),))
    else:
        typed = (*args, GlobalName("torch", dtype.value))
        _call(w, GlobalName("torch._utils", "_rebuild_tensor_v3"), typed, then=(lambda: w.memoize(key),))


def _storage(w: _Writer, value: NewStorage) -> None:
    name = STORAGE_CLASSES.get(value.dtype)
    kind = GlobalName("torch", name) if name else GlobalName("torch.storage", "UntypedStorage")
    numel = value.numel if name else value.nbytes
    w.then(w.saving(("storage", kind, w.key_of(value), "cpu", numel)), w.opcode(b"Q"))


_PYTHON2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
"""Module names of protocol 2 (CPython 3.11 Lib/_compat_pickle.py)."""
_LEAVES: dict[type, Callable[..., None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
}
"""Writers that take no steps."""
_WRITERS: dict[type, Callable[..., None]] = {
    **_LEAVES,
    bytes: _bytes,
    bytearray: _bytearray,
    complex: _complex,
    slice: _slice,
    range: _range,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    OrderedDict: _ordered_dict,
    set: _set,
    frozenset: _frozenset,
    TorchSize: _size,
    GlobalName: _global,
    Stub: _stub,
    NewTensor: _tensor,
    NewStorage: _storage,
}
