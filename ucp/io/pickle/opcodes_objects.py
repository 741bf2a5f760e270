"""Instructions of the pickle machine that make and fill containers, and that describe calls.

Names and codes are those of CPython 3.11 Lib/pickle.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ucp.core.pickle_values import GlobalName, Stub
from ucp.io.pickle.interpret import called, constructed, set_attributes
from ucp.io.pickle.keys import check_keys
from ucp.io.pickle.machine import Machine, PickleFaultError, RefusedOpcodeError

__all__ = ["OBJECT_OPCODES"]

_BUILD = ord("b")


def _empty_tuple(m: Machine) -> None:
    m.push(())


def _tuple(m: Machine) -> None:
    m.push(tuple(m.unmark()))


def _tuple1(m: Machine) -> None:
    stack = m.stack
    stack[-1] = (stack[-1],)


def _tuple2(m: Machine) -> None:
    last = m.pop()
    stack = m.stack
    stack[-1] = (stack[-1], last)


def _tuple3(m: Machine) -> None:
    last = m.pop()
    middle = m.pop()
    stack = m.stack
    stack[-1] = (stack[-1], middle, last)


def _empty_list(m: Machine) -> None:
    m.push([])


def _list(m: Machine) -> None:
    m.push(m.unmark())


def _append(m: Machine) -> None:
    _extend(m, [m.pop()])


def _appends(m: Machine) -> None:
    _extend(m, m.unmark())


def _extend(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif type(target) is Stub:
        target.items.extend(items)
    else:
        raise PickleFaultError(f"elements appended to a {type(target).__name__}; expected a list")


def _empty_dict(m: Machine) -> None:
    m.push({})


def _dict(m: Machine) -> None:
    items = m.unmark()
    m.push({})
    _set_items(m, items)


def _setitem(m: Machine) -> None:
    value = m.pop()
    _set_items(m, [m.pop(), value])


def _setitems(m: Machine) -> None:
    stack = m.stack
    start = m.marks[-1] if m.marks else 0
    target = stack[start - 1] if 0 < start <= len(stack) else None
    if type(target) is dict and not (len(stack) - start) % 2:
        for index in range(start, len(stack), 2):
            key = stack[index]
            if type(key) is not str:
                m.keys.check(key, target)
            target[key] = stack[index + 1]
        del stack[start:]
        m.marks.pop()
    else:
        _set_items(m, m.unmark())
    if m.data[m.at] == _BUILD:  # attributes are followed by it: one dispatch less
        m.instruction, m.at = m.at, m.at + 1
        _build(m)


def _set_items(m: Machine, items: list[object]) -> None:
    if len(items) % 2:
        raise PickleFaultError("a key without a value")
    target = m.stack[-1]
    if type(target) is dict or type(target) is OrderedDict:
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                m.keys.check(key, target)
            target[key] = items[index + 1]
    elif type(target) is Stub:
        target.entries.extend(zip(items[::2], items[1::2], strict=True))
    else:
        raise PickleFaultError(f"entries set on a {type(target).__name__}; expected a dict")


def _empty_set(m: Machine) -> None:
    m.push(set())


def _additems(m: Machine) -> None:
    items = m.unmark()
    target = m.stack[-1]
    if type(target) is set:
        for item in items:
            m.keys.check(item, target)
        target.update(items)
    elif type(target) is Stub:
        target.items.extend(items)
    else:
        raise PickleFaultError(f"elements added to a {type(target).__name__}; expected a set")


def _frozenset(m: Machine) -> None:
    items = m.unmark()
    check_keys(items)
    m.push(frozenset(items))


def _global(m: Machine) -> None:
    module, qualname = m.line().decode(), m.line().decode()
    m.push(m.name(module, qualname))


def _stack_global(m: Machine) -> None:
    qualname, module = m.pop(), m.pop()
    if type(module) is not str or type(qualname) is not str:
        raise PickleFaultError("a global whose name is no text")
    m.push(m.name(module, qualname))


def _reduce(m: Machine) -> None:
    args = m.pop()
    if type(args) is not tuple:
        raise PickleFaultError(f"a call whose arguments are a {type(args).__name__}; expected a tuple")
    m.stack[-1] = called(m.stack[-1], args)


def _newobj(m: Machine) -> None:
    args = m.pop()
    if type(args) is not tuple:
        raise PickleFaultError(f"an object whose arguments are a {type(args).__name__}; expected a tuple")
    cls = m.stack[-1]
    m.stack[-1] = Stub(cls, args) if type(cls) is GlobalName else constructed(cls, args)


def _newobj_ex(m: Machine) -> None:
    kwargs, args = m.pop(), m.pop()
    if type(args) is not tuple or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise PickleFaultError("an object whose arguments are not a tuple and a dict of names")
    m.stack[-1] = constructed(m.stack[-1], args, kwargs)


def _inst(m: Machine) -> None:
    module, qualname = m.line().decode(), m.line().decode()
    _instance(m, m.name(module, qualname), tuple(m.unmark()))


def _obj(m: Machine) -> None:
    cls, *args = m.unmark() or [None]
    if cls is None:
        raise PickleFaultError("an object without a class")
    _instance(m, cls, tuple(args))


def _instance(m: Machine, cls: object, args: tuple[object, ...]) -> None:
    m.push(called(cls, args) if args else constructed(cls, ()))


def _build(m: Machine) -> None:
    state = m.pop()
    target = m.stack[-1]
    if type(target) is Stub:
        if target.has_state:
            raise PickleFaultError("a second state for one object")
        target.state, target.has_state = state, True
    elif type(target) is OrderedDict:
        set_attributes(target, state)
    else:
        raise PickleFaultError(f"the state of an object given to a {type(target).__name__}")
    if m.begun:
        _learn(m)


def _learn(m: Machine) -> None:
    """Learn from the object that was begun last, when it is the one now finished."""
    begun = m.begun[-1]
    if begun.depth >= len(m.stack):
        m.begun.pop()
        if begun.depth == len(m.stack) and m.repeats is not None:
            m.repeats.learn(begun.made_by, m.data[begun.start : m.at], begun.memoized)


def _persid(m: Machine) -> None:
    _persistent(m, m.line().decode())


def _binpersid(m: Machine) -> None:
    _persistent(m, m.pop())


def _persistent(m: Machine, pid: object) -> None:
    if m.persistent is None:
        raise PickleFaultError("a persistent id, which has no meaning in this file")
    m.push(m.persistent(pid))


def _extension(m: Machine) -> None:
    raise RefusedOpcodeError("asks for a class by a number that only the writing program knows (copyreg extension)")


def _buffer(m: Machine) -> None:
    raise RefusedOpcodeError("asks for a buffer that lies outside the file (pickle protocol 5, out of band)")


OBJECT_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"P": _persid,
    b"Q": _binpersid,
    b"R": _reduce,
    b"a": _append,
    b"b": _build,
    b"c": _global,
    b"d": _dict,
    b"}": _empty_dict,
    b"e": _appends,
    b"i": _inst,
    b"l": _list,
    b"]": _empty_list,
    b"o": _obj,
    b"s": _setitem,
    b"t": _tuple,
    b")": _empty_tuple,
    b"u": _setitems,
    b"\x81": _newobj,
    b"\x82": _extension,
    b"\x83": _extension,
    b"\x84": _extension,
    b"\x85": _tuple1,
    b"\x86": _tuple2,
    b"\x87": _tuple3,
    b"\x8f": _empty_set,
    b"\x90": _additems,
    b"\x91": _frozenset,
    b"\x92": _newobj_ex,
    b"\x93": _stack_global,
    b"\x97": _buffer,
    b"\x98": _buffer,
}
