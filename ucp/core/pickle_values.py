"""What a pickle says, kept as inert values: no class of a checkpoint is ever imported or called.

A pickle is read into plain Python values (None, bool, int, float, complex, str, bytes, list, tuple, dict, set,
frozenset), `Tensor` values, `GlobalName` for a class or function that is only *named*, and `Stub` for an object of
any class: the recipe that the pickle gave for it, which can be written out again unchanged.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

__all__ = ["GlobalName", "Stub", "TorchSize", "nbytes_in_memory", "parts_of"]


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


def parts_of(value: object) -> Iterable[object]:
    """Values that a container holds, but for the arguments that make a stub; nothing for any other value."""
    if isinstance(value, Stub):
        return (value.state, *value.items, *chain.from_iterable(value.entries))
    if isinstance(value, dict):
        return (*value, *value.values(), *(vars(value).values() if isinstance(value, OrderedDict) else ()))
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def nbytes_in_memory(values: Iterable[object]) -> int:
    """Bytes of memory that values and all they hold take; each object is counted once.

    >>> nbytes_in_memory([b"x" * 1000, [b"y" * 1000] * 2]) < 2500
    True
    """
    seen: set[int] = set()
    nbytes, rest = 0, list(values)
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        nbytes += sys.getsizeof(value)
        if isinstance(value, Stub):
            rest += (value.args, value.kwargs)
        rest += parts_of(value)
    return nbytes
