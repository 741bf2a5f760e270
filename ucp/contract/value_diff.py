"""Where two recorded values differ: plain values, recipes of objects, tensors, in any nesting.

>>> [str(found) for found in differing_values({"lr": 0.1, "betas": (1, 2)}, {"lr": 0.2, "betas": (1, 2)})]
['lr: 0.1 and 0.2']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ucp.core.pickle_values import ABSENT, GlobalName, Step, Stub, diff, equal_leaves
from ucp.core.tensor import InlineTensor, Tensor, TensorRef

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


def differing_values(a: object, b: object) -> Iterator[Apart | TensorPair]:
    """Everything in which `b` is not `a`, in the order of `a`; see `ucp.core.pickle_values.diff`.

    Tensors of one type and shape are given for whoever reads them.
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
                yield TensorPair(place=_place(step), a=one, b=other)
                continue
        yield Apart(place=_place(step), a=_shown(one), b=_shown(other))


def _place(step: Step | None) -> str:
    steps: list[str] = []
    while step is not None and len(steps) < _STEPS:
        is_name = step.is_field or (isinstance(step.name, str) and len(step.name) <= _SHOWN)
        steps.append(f".{step.name}" if is_name else f"[{_shown(step.name)}]")
        step = step.within
    return ("..." if step is not None else "") + "".join(reversed(steps)).removeprefix(".")


def _shown(value: object) -> str:
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
