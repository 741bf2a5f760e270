"""Sums over an index: what there is of each kind and of each state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ucp.core.dtypes import DType
from ucp.core.index import Index, Kind
from ucp.core.layout import Layout
from ucp.errors import counted

__all__ = ["KindTally", "StateTally", "count_kinds", "count_patterns", "count_states", "layout_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTally:
    """Tensors of a model of one kind."""

    kind: Kind
    """Trained, frozen or buffer."""
    tensors: int
    """How many."""
    numel: int
    """Elements of them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTally:
    """Tensors of one state and dtype."""

    state: str
    """Name of the state."""
    dtype: DType
    """Type of its elements."""
    tensors: int
    """How many."""
    numel: int
    """Elements of them all."""
    nbytes: int
    """Bytes of them all."""


def count_kinds(index: Index) -> tuple[KindTally, ...]:
    """One tally per kind, all kinds, in the order of `Kind`."""
    counts = {kind: [prod(own.global_shape) for own in index.atoms.values() if own.kind is kind] for kind in Kind}
    return tuple(KindTally(kind=kind, tensors=len(own), numel=sum(own)) for kind, own in counts.items())


def count_states(index: Index) -> tuple[StateTally, ...]:
    """One tally per state and dtype: states in order of first appearance, the commonest dtype of each first."""
    states: dict[str, dict[DType, list[int]]] = {}
    for _, name, state in index.states():
        states.setdefault(name, {}).setdefault(state.dtype, []).append(state.numel)
    return tuple(
        StateTally(state=name, dtype=dtype, tensors=len(own), numel=sum(own), nbytes=sum(own) * dtype.itemsize)
        for name, dtypes in states.items()
        for dtype, own in sorted(dtypes.items(), key=lambda item: -len(item[1]))
    )


def count_patterns(index: Index) -> dict[str, int]:
    """Parameters laid out by each pattern over each axis, e.g. {"shard(dim=0) over tp": 12}."""
    return dict(
        Counter(f"{pattern} over {axis}" for atom in index.atoms.values() for axis, pattern in atom.patterns.items())
    )


def layout_lines(layouts: Iterable[tuple[str, str, Layout]]) -> tuple[str, ...]:
    """Each way in which tensors lie over an axis, with how many there are. `layouts`: of parameters and their states.

    >>> from ucp.core.layout import AxisLayout
    >>> from ucp_patterns.chunk import Chunk
    >>> cut = Layout((AxisLayout("dp", 2, Chunk(0), "ZeRO-3"),))
    >>> layout_lines([("w", "weight", cut), ("b", "weight", cut), ("w", "exp_avg", Layout())])
    ('dp=2: chunk(dim=0), known from ZeRO-3: 2 parameters, their weight',)
    """
    known_from: dict[str, dict[str, None]] = {}
    params: dict[str, dict[str, None]] = {}
    states: dict[str, dict[str, None]] = {}
    every: dict[str, None] = {}
    for param, state, layout in layouts:
        every[state] = None
        for what, known in layout.described:
            known_from.setdefault(what, {})[known] = None
            params.setdefault(what, {})[param] = None
            states.setdefault(what, {})[state] = None
    lines = []
    for what, places in known_from.items():
        places.pop("", None)
        some = [*places] if len(places) < 3 else [next(iter(places)), f"{len(places) - 1} others"]
        known = f", known from {' and '.join(some)}" if some else ""
        whose = f", their {', '.join(states[what])}" if len(states[what]) < len(every) else ""
        lines.append(f"{what}{known}: {counted(len(params[what]), 'parameter')}{whose}")
    return tuple(lines)
