"""Whether recorded values are the same: those of several ranks, tensors by their checksums, and where two differ.

No tensor byte is read: pairs of tensors are given for whoever reads them.

>>> Checksums(()).same({"lr": [0.1, float("nan")]}, {"lr": [0.1, float("nan")]})
True
>>> [str(found) for found in differing_values({"lr": 0.1, "betas": (1, 2)}, {"lr": 0.2, "betas": (1, 2)})]
['lr: 0.1 and 0.2']
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ucp.core.index import Extra
from ucp.core.pickle_values import ABSENT, GlobalName, Step, Stub, diff, equal_leaves
from ucp.core.tensor import InlineTensor, Record, Tensor, TensorRef


class Checksums:
    """Recorded checksums of the storages of many files."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_path: dict[str, list[Record]] = {}
        for record in records:
            self._by_path.setdefault(record.path, []).append(record)
        for own in self._by_path.values():
            own.sort(key=attrgetter("offset"))

    def storage(self, ref: TensorRef) -> Record | None:
        """The storage that a tensor lies in, where the file recorded one."""
        own = self._by_path.get(ref.path, ())
        at = bisect_right(own, ref.offset, key=attrgetter("offset"))
        found = own[at - 1] if at else None
        return found if found is not None and ref.offset + ref.extent <= found.offset + found.nbytes else None

    def same_bytes(self, a: TensorRef, b: TensorRef) -> bool | None:
        """Whether two tensors hold the same bytes; None where the files do not tell."""
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
            return False
        if a.numel == 0 or (a.path, a.offset) == (b.path, b.offset):
            return True
        mine, other = self.storage(a), self.storage(b)
        if mine is None or other is None:
            return None
        whole = a.offset - mine.offset == b.offset - other.offset and mine.nbytes == other.nbytes
        if whole and mine.crc32 == other.crc32:
            return True
        return False if whole and a.extent == mine.nbytes else None

    def same(self, a: object, b: object) -> bool:
        """Whether two values are known to be the same."""

        def same(one: object, other: object) -> bool:
            if isinstance(one, TensorRef) and isinstance(other, TensorRef):
                return self.same_bytes(one, other) is True
            return equal_leaves(one, other)

        return not any(True for _ in diff(a, b, same))

    def first_same(self, values: Iterable[object]) -> list[int]:
        """For each value the position of the first that is known to be the same.

        >>> Checksums(()).first_same(["a", "b", "a"])
        [0, 1, 0]
        """
        firsts: dict[int, object] = {}
        found = []
        for at, value in enumerate(values):
            found.append(next((first for first, own in firsts.items() if self.same(own, value)), at))
            firsts.setdefault(found[-1], value)
        return found


def per_rank_extras(name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for what every rank of `values` (rank to value) saved under `name`.

    The first rank's value stands for all; a rank whose value differs has an extra of its own. Dicts are compared key
    by key: such an extra holds only the keys that differ, and a key that some ranks lack is kept for those with it.
    """
    first, common = next(iter(values.items()))
    if isinstance(common, dict) and all(isinstance(value, dict) for value in values.values()):
        dicts = {rank: value for rank, value in values.items() if isinstance(value, dict)}
        shared = {key: value for key, value in common.items() if all(key in own for own in dicts.values())}
        extras = [Extra(name=name, value=shared)] if shared or not common else []
        for rank, own in dicts.items():
            if checksums.same(own, shared):  # what its values share is then looked into once
                continue
            apart = {k: v for k, v in own.items() if k not in shared or not checksums.same(v, shared[k])}
            extras += [Extra(name=name, value=apart, rank=rank)] if apart else []
        return extras
    extras = [Extra(name=name, value=common)]
    others = ((rank, value) for rank, value in values.items() if rank != first)
    return extras + [Extra(name=name, value=v, rank=rank) for rank, v in others if not checksums.same(v, common)]


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
