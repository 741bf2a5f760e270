"""What a pickle says, kept as inert values: no class of a checkpoint is ever imported or called.

A pickle is read into plain Python values (None, bool, int, float, complex, str, bytes, list, tuple, dict, set,
frozenset), `Tensor` values, `GlobalName` for a class or function that is only *named*, and `Stub` for an object of
any class: the recipe that the pickle gave for it, which can be written out again unchanged.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

__all__ = ["HOLDERS", "GlobalName", "Stub", "TorchSize", "nbytes_in_memory", "rebuild", "walk"]


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that the pickle names without saying more."""

    module: str
    """Module as written, e.g. "torch"."""
    qualname: str
    """Name in the module, e.g. "float32"."""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(slots=True, eq=False)
class Stub:
    """An object that was never built: the recipe the pickle gave for it.

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
        """Attribute `name` out of the state, wherever the state keeps it (dict, or (dict, slots))."""
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


HOLDERS = (list, tuple, dict, set, frozenset, Stub)
"""Types of values that hold others."""


def walk(values: Iterable[object], through: tuple[type, ...] = HOLDERS) -> Iterator[object]:
    """Every object of `values` and of what they hold, once, outer ones first: of any depth, shared or in cycles.

    `through`: types that are looked into.

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


def nbytes_in_memory(values: Iterable[object]) -> int:
    """Bytes of memory that values and all they hold take; each object is counted once.

    >>> nbytes_in_memory([b"x" * 1000, [b"y" * 1000] * 2]) < 2500
    True
    """
    return sum(map(sys.getsizeof, walk(values)))


def rebuild(
    value: object, leaf: Callable[[object], object], through: tuple[type, ...] = HOLDERS, *, with_keys: bool = True
) -> object:
    """A copy of `value` with `leaf` of everything that holds nothing: what was shared stays so, cycles stay cycles.

    `through`: types that are copied; those of all others are leaves. `with_keys`: whether keys of dicts are copied too.

    >>> rebuild({"betas": (1, 2)}, lambda own: -own if isinstance(own, int) else own)
    {'betas': (-1, -2)}
    """
    return _Copy(leaf, through, with_keys=with_keys).of(value)


class _Copy:
    """Copies made so far. What can change is copied empty, and filled when nothing is in the making around it."""

    def __init__(self, leaf: Callable[[object], object], through: tuple[type, ...], *, with_keys: bool) -> None:
        self._leaf = leaf
        self._through = through
        self._with_keys = with_keys
        self._copies: dict[int, object] = {}
        self._empty: list[tuple[object, object]] = []

    def of(self, value: object) -> object:
        """The copy of a value with all that it holds."""
        copy = self._shallow(value)
        while self._empty:
            self._fill(*self._empty.pop())
        return copy

    def _shallow(self, value: object) -> object:
        """The copy of a value; lists, dicts and objects in it are empty as yet (only through them there are cycles)."""
        rest = [value] if isinstance(value, self._through) else []
        while rest:
            part = rest[-1]
            if id(part) in self._copies:
                rest.pop()
            elif isinstance(part, tuple | set | frozenset):
                rest += [own for own in part if isinstance(own, self._through) and id(own) not in self._copies]
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
