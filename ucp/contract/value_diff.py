"""Where two recorded values differ: plain values, recipes of objects, tensors, in any nesting.

Objects may be shared, in cycles or nested to any depth: each pair of them is compared once, and none by recursion.

>>> [str(found) for found in differing_values({"lr": 0.1, "betas": (1, 2)}, {"lr": 0.2, "betas": (1, 2)})]
['lr: 0.1 and 0.2']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucp.core.pickle_values import GlobalName, Stub
from ucp.core.tensor import InlineTensor, Tensor, TensorRef
from ucp.io.pickle.emit import emit_pickle
from ucp.io.torch_file.copy_extras import grafted

__all__ = ["Apart", "TensorPair", "differing_values"]

_SHOWN = 60
"""Characters of a value that are shown."""

_STEPS = 12
"""Steps on the way to a value that are shown."""

_LONG = 256
"""Bits of a whole number that is not written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Two values in one place that are not the same."""

    place: str
    """Where, e.g. "param_groups[0].lr"; empty for the values as a whole."""
    a: str
    """The first, in a few words; "-" where there is none."""
    b: str
    """The second."""

    def __str__(self) -> str:
        return f"{self.place}: {self.a} and {self.b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """Two tensors of one type and shape in one place, whose elements are still to be compared."""

    place: str
    """Where."""
    a: Tensor
    """The first."""
    b: Tensor
    """The second."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A step on the way to a value."""

    step: str
    """As it is written."""
    within: _Place | None
    """The steps before."""

    def __str__(self) -> str:
        steps: list[str] = []
        at: _Place | None = self
        while at is not None and len(steps) < _STEPS:
            steps.append(at.step)
            at = at.within
        return ("..." if at is not None else "") + "".join(reversed(steps)).removeprefix(".")


_Item = tuple[object, object, _Place | None]


class _Nothing:
    """What stands where one of two has no value."""


_NOTHING = _Nothing()


def differing_values(a: object, b: object) -> Iterator[Apart | TensorPair]:
    """Everything in which `b` is not `a`, in the order of `a`; numbers are compared as they are printed.

    The order of dicts and sets is no difference. Tensors of one type and shape are given for whoever reads them.
    """
    todo: list[_Item] = [(a, b, None)]
    seen: set[tuple[object, object]] = set()
    while todo:
        own, other, place = todo.pop()
        where = "" if place is None else str(place)
        if isinstance(own, TensorRef | InlineTensor) and isinstance(other, TensorRef | InlineTensor):
            if (own, other) not in seen:
                seen.add((own, other))
                yield _tensors(own, other, where)
            continue
        inner = _inner(own, other, place)
        if inner is None:
            if not _is_same(own, other):
                yield Apart(place=where, a=_shown(own), b=_shown(other))
        elif (id(own), id(other)) not in seen:
            seen.add((id(own), id(other)))
            todo.extend(reversed(inner))


def _tensors(a: Tensor, b: Tensor, where: str) -> Apart | TensorPair:
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        return TensorPair(place=where, a=a, b=b)
    return Apart(place=where, a=_shown(a), b=_shown(b))


def _inner(a: object, b: object, place: _Place | None) -> list[_Item] | None:
    """What is to be compared of two values that hold others; None for others, and for two of different kinds."""
    if type(a) is not type(b):
        return None
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return [(*pair, _Place(f"[{at}]", place)) for at, pair in enumerate(_zipped(a, b))]
    if isinstance(a, set | frozenset) and isinstance(b, set | frozenset):
        own, other = ({_key(item): item for item in side} for side in (a, b))
        return _by_key(own, other, own | other, place)
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [{_key(key): key for key in side} for side in (a, b)]
        mine, others = ({name: side[key] for name, key in own.items()} for own, side in zip(keys, (a, b), strict=True))
        return [*_by_key(mine, others, keys[1] | keys[0], place), *_attributes(a, b, place)]
    if isinstance(a, Stub) and isinstance(b, Stub) and (a.made_by, a.new) == (b.made_by, b.new):
        return [(getattr(a, name), getattr(b, name), _Place(f".{name}", place)) for name in _RECIPE]
    return None


_RECIPE = ("args", "kwargs", "state", "has_state", "items", "entries")


def _zipped(
    a: list[object] | tuple[object, ...], b: list[object] | tuple[object, ...]
) -> Iterator[tuple[object, object]]:
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else _NOTHING), (b[at] if at < len(b) else _NOTHING)


def _by_key(
    a: Mapping[object, object], b: Mapping[object, object], names: Mapping[object, object], place: _Place | None
) -> list[_Item]:
    return [
        (a.get(key, _NOTHING), b.get(key, _NOTHING), _Place(_step(names[key]), place))
        for key in dict.fromkeys((*a, *b))
    ]


def _attributes(a: dict[object, object], b: dict[object, object], place: _Place | None) -> list[_Item]:
    """What an OrderedDict carries beside its entries."""
    own, other = (getattr(side, "__dict__", {}) for side in (a, b))
    return [
        (own.get(name, _NOTHING), other.get(name, _NOTHING), _Place(f".{name}", place)) for name in {**own, **other}
    ]


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and len(key) <= _SHOWN else f"[{_shown(key)}]"


def _key(key: object) -> object:
    """What two keys of dicts, or elements of sets, have in common that are the same, and no others."""
    if isinstance(key, tuple):
        return type(key), tuple(map(_key, key))
    if isinstance(key, frozenset):
        return type(key), frozenset(map(_key, key))
    if isinstance(key, float | complex):
        return type(key), repr(key)
    return (Stub, emit_pickle(grafted(key, {})).data) if isinstance(key, Stub) else (type(key), key)


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, float | complex) and type(a) is type(b):
        return repr(a) == repr(b)
    return type(a) is type(b) and a == b


def _shown(value: object) -> str:
    match value:
        case _Nothing():
            return "-"
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
