"""The optimizer of a source for a target: its step counts, missing parameters and casts.

A count such as `step` is one number per parameter. A target reads counts when it plans (a few bytes each) to see
whether parameters agree, and writes them in its framework's form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from ctypes import c_float
from math import isnan
from struct import unpack
from typing import TYPE_CHECKING

from ucp.core.index import STEP, WEIGHT, Index
from ucp.core.tensor import DType, Tensor
from ucp.errors import MissingStateError, UnsupportedError, format_count, format_list

if TYPE_CHECKING:
    from ucp.transfer.probe import Prober


class OptimizerPlan:
    """What a target knows of the optimizer of `index`."""

    def __init__(self, index: Index, prober: Prober) -> None:
        """Read every count. Raises SourceError."""
        self._data: dict[tuple[str, str], bytes] = {}
        self._index = index
        self._counts: dict[tuple[str, str], int | float] = {}
        self._casts: Counter[str] = Counter()
        known: dict[Tensor, tuple[bytes, int | float]] = {}  # parameters of one flat tensor share their counts
        # for a parameter with one element, a count looks like a state with a value per element
        counts = {name for atom, name, _ in index.states() if atom.is_count(name) and name != WEIGHT}
        for atom, name, state in index.states():
            if name in counts and state.numel == 1:
                ref = state.fragments[0].ref
                if ref not in known:
                    known[ref] = _read(ref, prober)
                self._data[atom.name, name], self._counts[atom.name, name] = known[ref]

    def count(self, param: str, state: str = STEP) -> int | float | None:
        """A count of a parameter, such as its step; None if it has no such state."""
        return self._counts.get((param, state))

    def count_bytes(self, param: str, state: str) -> bytes:
        """Bytes of a count, in the dtype of the source."""
        return self._data[param, state]

    def find_common_count(self, params: Iterable[str], state: str = STEP, *, keeper: str, remedy: str) -> str | None:
        """The first of `params` that has this count; None if none has. All counts must agree.

        `keeper`: clause of the message that says who keeps a single count. Raises UnsupportedError if counts differ.
        """
        first: dict[int | float, str] = {}
        for name in params:
            if (name, state) in self._counts:
                first.setdefault(self._counts[name, state], name)
        if len(first) > 1:
            remedy = f"{remedy}; or take the newest for all (--step newest)" if state == STEP else remedy
            raise UnsupportedError(
                f"expected one {state} for all parameters of an optimizer group, as {keeper}; got\n"
                f"{format_list(f'{name}: {count:g}' for count, name in first.items())}\n{remedy}"
            )
        return next(iter(first.values()), None)

    def check_float32(self, param: str, state: str, *, remedy: str) -> None:
        """Raise UnsupportedError for a count that float32, in which a framework keeps it, would round."""
        count = self._counts.get((param, state), 0)
        if not isnan(count) and c_float(count).value != count:
            raise UnsupportedError(
                "expected counts that float32 holds, as torch's optimizers keep them: whole numbers up to 2**24; got "
                f"{param}/{state} = {count} in {self._index.path}. {remedy}"
            )

    def note_cast(self, state: str, old: DType, new: DType) -> None:
        """Remember that a count of one parameter is written in another type."""
        if old is not new:
            self._casts[f"{state}: {old} -> {new}"] += 1

    @property
    def casts(self) -> tuple[str, ...]:
        """A line per change of type of counts."""
        return tuple(f"{change} in {format_count(count, 'parameter')}" for change, count in self._casts.items())

    def check_grouped(self, params: Iterable[str], *, remedy: str) -> None:
        """Raise MissingStateError for those of `params` that are in no group, with the reasons, as far as known."""
        grouped = {name for group in self._index.groups for name in group.params}
        absent = [name for name in params if name not in grouped]
        if absent:
            reasons = self._index.loss_reasons(absent) or (format_list(absent),)
            raise MissingStateError(
                f"expected every trained parameter in an optimizer group; {self._index.path} has {len(absent)} in "
                "none:\n" + "\n".join((*reasons, remedy))
            )


def find_missing_states(
    states: Mapping[str, Collection[str]], expected: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Parameters that lack states which others have or `expected` names, each with the missing states.

    >>> find_missing_states({"a": ["weight", "exp_avg"], "b": ["weight"]})
    {'b': ('exp_avg',)}
    """
    wanted = dict.fromkeys([*expected, *(state for names in states.values() for state in names)])
    lacking = {name: tuple(state for state in wanted if state not in names) for name, names in states.items()}
    return {name: lost for name, lost in lacking.items() if lost}


def read_step_counts(index: Index, prober: Prober) -> list[float]:
    """The different values that the parameters' `step` states have, in increasing order."""
    plan = OptimizerPlan(index, prober)
    counts = (plan.count(name) for name in index.atoms)
    return sorted({float(count) for count in counts if count is not None})


def _read(ref: Tensor, prober: Prober) -> tuple[bytes, int | float]:
    data = prober.window(ref, 0, 1)
    if ref.dtype.is_floating:
        return data, float(unpack("<d", prober.window(ref, 0, 1, dtype=DType.FLOAT64))[0])
    if ref.dtype is DType.BOOL:
        return data, bool(data[0])
    return data, int.from_bytes(data, "little", signed=not ref.dtype.value.startswith("u"))
