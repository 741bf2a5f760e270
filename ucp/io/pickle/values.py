"""Inert values of a pickle: no class of a checkpoint is ever imported or called.

A pickle is read into plain Python values (None, bool, int, float, complex, str, bytes, list, tuple, dict, set,
frozenset), `Tensor` values, `GlobalName` for a class or function that is only *named*, and `Stub` for an object of
any other class: the class and arguments that the pickle has for it, which can be written again unchanged.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from ucp.core.tensor import InlineTensor, Tensor, TensorRef


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that the pickle names."""

    module: str
    """Module as written, e.g. "torch"."""
    qualname: str
    """Name in the module, e.g. "float32"."""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(slots=True, eq=False)
class Stub:
    """An object that was not built: its class, arguments and state.

    Mutable, because a pickle may refer to an object before its state is known (cycles).
    """

    made_by: GlobalName
    """The class (`new` true) or the callable (`new` false) that would have made it."""
    args: tuple[object, ...] = ()
    """Positional arguments of the call."""
    kwargs: dict[str, object] | None = None
    """Keyword arguments of the call (pickle protocol 4, NEWOBJ_EX), or None."""
    new: bool = True
    """True for cls.__new__(cls, *args); false for callable(*args)."""
    state: object = None
    """Argument of __setstate__ (BUILD), or None."""
    has_state: bool = False
    """Whether BUILD was given at all."""
    items: Sequence[object] = ()
    """Elements appended to it (APPEND, APPENDS, ADDITEMS)."""
    entries: Sequence[tuple[object, object]] = ()
    """Key and value pairs set on it (SETITEM, SETITEMS)."""

    def attribute(self, name: str, default: object = None) -> object:
        """Attribute `name` of the state, which is a dict or a pair (dict, slots)."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        for part in parts:
            if isinstance(part, dict) and name in part:
                return part[name]
        return default


class TorchSize(tuple[int, ...]):
    """A torch.Size: equal to the tuple and printed like it, but written back as a torch.Size.

    >>> TorchSize((2, 3)) == (2, 3), TorchSize((2, 3))
    (True, (2, 3))
    """

    __slots__ = ()


_MOST_STEPS = 16
"""Most nested dicts and lists that are searched."""

HOLDERS = (list, tuple, dict, set, frozenset, Stub)
"""Types of values that hold others."""


def walk(values: Iterable[object], through: tuple[type, ...] = HOLDERS) -> Iterator[object]:
    """Yield every object in `values` and nested in them, once, outer ones first; depth and cycles do no harm.

    `through`: types of containers that are entered.

    >>> [own for own in walk([{"lr": [0.1, None]}]) if not isinstance(own, HOLDERS)]
    [None, 0.1, 'lr']
    """
    seen: set[int] = set()
    rest = list(values)
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, through):
            continue
        if isinstance(value, Stub):
            rest += (value.args, value.kwargs, value.state, *value.items, *chain.from_iterable(value.entries))
        elif isinstance(value, dict):
            rest += (*value, *value.values(), *(vars(value).values() if isinstance(value, OrderedDict) else ()))
        elif isinstance(value, list | tuple | set | frozenset):
            rest += value


def walk_paths(
    value: object, path: tuple[object, ...] = (), *, enter: Callable[[object], bool] = lambda _: True
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield dicts, lists and objects in nested dicts and lists, with the keys and positions to them; outer ones first.

    `path`: the path of `value`. `enter`: whether to enter a dict or list. Each is entered once, and none below 16
    levels.

    >>> [path for path, _ in walk_paths({"app": [{"lr": 0.1}], "step": 2})]
    [(), ('app',), ('app', 0)]
    """
    rest = [(path, value)]
    seen: set[int] = set()
    for way, container in rest:
        yield way, container
        if id(container) not in seen and len(way) < _MOST_STEPS and enter(container):
            seen.add(id(container))
            items: Iterable[tuple[object, object]] = ()
            if isinstance(container, dict | list):
                items = container.items() if isinstance(container, dict) else enumerate(container)
            rest += [((*way, key), item) for key, item in items if isinstance(item, dict | list | Stub)]


def measure_memory(values: Iterable[object]) -> int:
    """Bytes of memory that values and everything nested in them take; each object counts once.

    >>> measure_memory([b"x" * 1000, [b"y" * 1000] * 2]) < 2500
    True
    """
    return sum(map(sys.getsizeof, walk(values)))


def rebuild(
    value: object, leaf: Callable[[object], object], through: tuple[type, ...] = HOLDERS, *, with_keys: bool = True
) -> object:
    """Copy `value`, with `leaf` applied to each value that is not a container; shared objects and cycles stay so.

    `through`: types of containers; all others are leaves. `with_keys`: whether keys of dicts are copied too.

    >>> rebuild({"betas": (1, 2)}, lambda own: -own if isinstance(own, int) else own)
    {'betas': (-1, -2)}
    """
    return _Copy(leaf, through, with_keys=with_keys).copy(value)


class _Copy:
    """Copies made so far. Mutable containers are copied empty first and filled later, so that cycles are no problem."""

    def __init__(self, leaf: Callable[[object], object], through: tuple[type, ...], *, with_keys: bool) -> None:
        self._leaf = leaf
        self._through = through
        self._with_keys = with_keys
        self._copies: dict[int, object] = {}
        self._empty: list[tuple[object, object]] = []

    def copy(self, value: object) -> object:
        """Copy a value with everything nested in it."""
        copy = self._shallow(value)
        while self._empty:
            self._fill(*self._empty.pop())
        return copy

    def _shallow(self, value: object) -> object:
        """Copy a value; lists, dicts and objects in it stay empty for now (every cycle goes through one of them)."""
        rest = [value] if isinstance(value, self._through) else []
        while rest:
            part = rest[-1]
            if id(part) in self._copies:
                rest.pop()
            elif isinstance(part, tuple | set | frozenset):
                rest += [
                    member for member in part if isinstance(member, self._through) and id(member) not in self._copies
                ]
                if rest[-1] is part:
                    self._copies[id(part)] = type(part)(map(self._copy, part))
            else:
                copy = Stub(part.made_by) if isinstance(part, Stub) else type(part)()
                self._copies[id(part)] = copy
                self._empty.append((part, copy))
        return self._copy(value)

    def _copy(self, value: object) -> object:
        return self._copies[id(value)] if isinstance(value, self._through) else self._leaf(value)

    def _fill(self, value: object, copy: object) -> None:
        match value, copy:
            case list(), list():
                copy += map(self._shallow, value)
            case dict(), dict():
                keys = map(self._shallow, value) if self._with_keys else value
                copy.update(zip(keys, map(self._shallow, value.values()), strict=True))
                for name, attribute in getattr(value, "__dict__", {}).items():  # an OrderedDict may carry attributes
                    setattr(copy, name, self._shallow(attribute))
            case Stub(), Stub():
                copy.new, copy.has_state = value.new, value.has_state
                copy.args = tuple(map(self._shallow, value.args))
                copy.kwargs = value.kwargs and {name: self._shallow(item) for name, item in value.kwargs.items()}
                copy.state = self._shallow(value.state)
                copy.items = [*map(self._shallow, value.items)]
                copy.entries = [(self._shallow(key), self._shallow(item)) for key, item in value.entries]


class TreeStep(NamedTuple):
    """A step on the path to a nested value."""

    name: object
    """Number of an item, key of an entry, or (`is_field`) name of an attribute."""
    within: TreeStep | None
    """The steps before."""
    is_field: bool = False
    """Whether `name` is an attribute."""


class _Absent:
    """Type of `ABSENT`, which stands for a missing value."""


ABSENT = _Absent()

_SHOWN = 60
"""Characters of a value in a message."""
_STEPS = 12
"""Steps of a path in a message."""
_LONG = 256
"""Bits above which an integer is not printed."""
_MOST_IN_KEY = 32
"""Objects in a key, from which it is compared by identity."""


def diff(
    a: object, b: object, same: Callable[[object, object], bool]
) -> Iterator[tuple[TreeStep | None, object, object]]:
    """Yield differences of two values, in the order of `a`: last step of the path, value of `a`, value of `b`.

    `ABSENT` stands for a missing value. `same`: whether two leaves of one type are equal. The order of dicts and sets
    does not matter. A pair of objects counts as equal once it is being compared, so that none is compared twice
    (Hopcroft and Karp 1971, on the equality of automata): values may be shared, cyclic, or nested to any depth.

    >>> [(step.name, *pair) for step, *pair in diff({"lr": 0.1}, {"lr": 0.2}, equal_leaves)]
    [('lr', 0.1, 0.2)]
    """
    above: dict[int, int] = {}

    def root(value: object) -> int:
        key = id(value)
        while (higher := above.get(key, key)) != key:
            above[key] = key = above.get(higher, higher)
        return key

    todo: list[tuple[object, object, TreeStep | None]] = [(a, b, None)]
    while todo:
        one, other, step = todo.pop()
        if type(one) is type(other) and isinstance(one, HOLDERS) and _head(one) == _head(other):
            first, second = root(one), root(other)
            if first != second:
                above[first] = second
                todo.extend(reversed(_pair_members(one, other, step)))
        elif type(one) is not type(other) or not same(one, other):
            yield step, one, other


def equal_leaves(a: object, b: object) -> bool:
    """Whether two leaves of one type are equal; floats are compared as they are printed."""
    return repr(a) == repr(b) if isinstance(a, float | complex) else a == b


def _head(value: object) -> object:
    """Class of a stub: stubs of different classes are not compared member by member."""
    return (value.made_by, value.new) if isinstance(value, Stub) else None


def _pair_members(a: object, b: object, step: TreeStep | None) -> Sequence[tuple[object, object, TreeStep | None]]:
    """Pairs of members of two containers of one type."""
    match a, b:
        case Stub(), Stub():
            fields = ("args", "kwargs", "state", "has_state", "items", "entries")
            return [(getattr(a, name), getattr(b, name), TreeStep(name, step, is_field=True)) for name in fields]
        case dict(), dict() if type(a) is dict and a.keys() == b.keys() and set(map(type, (*a, *b))) == {str}:
            return [(value, b[key], TreeStep(key, step)) for key, value in a.items()]
        case dict(), dict():
            sides = [{_comparable(key): (key, value) for key, value in side.items()} for side in (a, b)]
            extra, other = (getattr(side, "__dict__", {}) for side in (a, b))  # an OrderedDict may carry attributes
            fields = tuple(dict.fromkeys((*extra, *other)))
            more = [(extra.get(n, ABSENT), other.get(n, ABSENT), TreeStep(n, step, is_field=True)) for n in fields]
        case ((set() | frozenset()), (set() | frozenset())):
            sides, more = [{_comparable(item): (item, item) for item in side} for side in (a, b)], []
        case ((list() | tuple()), (list() | tuple())):
            both = enumerate(zip_longest(a, b, fillvalue=ABSENT))
            return [(one, other, TreeStep(at, step)) for at, (one, other) in both]
        case _:
            raise TypeError(f"two values of {type(a)} and {type(b)}")
    pairs = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        (name, one), (_, other) = (side.get(key, (None, ABSENT)) for side in sides)
        pairs.append((one, other, TreeStep(sides[1][key][0] if key in sides[1] else name, step)))
    return pairs + more


def _comparable(key: object) -> object:
    """A value that is equal for equal dict keys or set members, and only for those."""
    match key:
        case str():
            return key
        case tuple() | frozenset():
            return type(key), type(key)(map(_comparable, key))
        case float() | complex():
            return type(key), repr(key)
        case Stub() if len(list(islice(walk([key]), _MOST_IN_KEY))) < _MOST_IN_KEY:
            return Stub, repr(key)
    return type(key), key


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Two values that differ at one place."""

    place: str
    """Path of the values, e.g. "param_groups[0].lr"; empty for the outermost."""
    a: str
    """Description of the first; "-" if it is missing."""
    b: str
    """The second."""

    def __str__(self) -> str:
        return f"{self.place}: {self.a} and {self.b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """Two tensors of one dtype and shape at one place, whose elements are still to be compared."""

    place: str
    """Where."""
    a: Tensor
    """The first."""
    b: Tensor
    """The second."""


def find_differing_values(a: object, b: object) -> Iterator[Apart | TensorPair]:
    """Yield all differences of `b` from `a`, in the order of `a`; see `diff`.

    Tensors of one dtype and shape are yielded as pairs: the caller compares their elements.
    """
    seen: set[tuple[object, object]] = set()

    def same(one: object, other: object) -> bool:
        return not isinstance(one, TensorRef | InlineTensor) and equal_leaves(one, other)

    for step, one, other in diff(a, b, same):
        if isinstance(one, TensorRef | InlineTensor) and isinstance(other, TensorRef | InlineTensor):
            if (one, other) in seen:
                continue
            seen.add((one, other))
            if (one.dtype, one.shape) == (other.dtype, other.shape):
                yield TensorPair(place=_format_place(step), a=one, b=other)
                continue
        yield Apart(place=_format_place(step), a=_format_brief(one), b=_format_brief(other))


def _format_place(step: TreeStep | None) -> str:
    steps: list[str] = []
    while step is not None and len(steps) < _STEPS:
        is_name = step.is_field or (isinstance(step.name, str) and len(step.name) <= _SHOWN)
        steps.append(f".{step.name}" if is_name else f"[{_format_brief(step.name)}]")
        step = step.within
    return ("..." if step is not None else "") + "".join(reversed(steps)).removeprefix(".")


def _format_brief(value: object) -> str:
    if value is ABSENT:
        return "-"
    match value:
        case TensorRef() | InlineTensor():
            return f"tensor {'x'.join(map(str, value.shape)) or 'of one element'} {value.dtype}"
        case Stub():
            return f"an object of {value.made_by}"
        case GlobalName():
            return str(value)
        case int() if value.bit_length() > _LONG:
            return f"a number of {value.bit_length()} bits"
        case list() | tuple() | dict() | set() | frozenset():
            return f"{type(value).__name__} of {len(value)}"
        case str() | bytes() | bytearray():
            text = repr(value[:_SHOWN])
            return f"{text}... ({len(value)})" if len(value) > _SHOWN else text
    return repr(value) if isinstance(value, float | int | complex | None) else f"a {type(value).__name__}"
