"""The overview page of a checkpoint (what it is, what is missing, its states, its notes), and the counts on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ucp.core.gaps import check_cover, describe_state_gaps, find_state_gaps
from ucp.core.index import Index, Kind
from ucp.core.layout import Layout
from ucp.core.tensor import DType
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import count_text, nbytes_text
from ucp.errors import CoverError, format_count


def overview(index: Index) -> Iterator[Section]:
    """The head of the page, up to the states."""
    missing = describe_missing(index)
    pieces = sum(len(state.fragments) for _, _, state in index.states())
    no = "Missing" if missing else "In doubt" if index.doubts else ""
    complete = f"NO: see {no}" if no else f"yes: {format_count(pieces, 'shard')} cover every tensor"
    yield facts([*source_facts(index), *_size_facts(index), ("complete", complete)])
    yield lines("Missing", missing)
    yield lines("In doubt", [item.text for item in index.doubts])
    rows = [
        (t.state, t.dtype.value, count_text(t.tensors), count_text(t.numel), nbytes_text(t.nbytes))
        for t in count_states(index)
    ]
    yield Section(title="States", columns=("state", "dtype", ">tensors", ">elements", ">bytes"), rows=tuple(rows))


def remarks(index: Index) -> Iterator[Section]:
    """The end of the page."""
    yield lines("Notes", index.notes)
    yield lines("Left behind", index.dropped)


def describe_missing(index: Index) -> list[str]:
    """What keeps a checkpoint from being complete: holes in tensors, states that were lost or have no parameter."""
    lost = find_state_gaps(index)
    problems = [describe_state_gaps(lost)] if lost else []
    problems += [] if index.unnamed is None else [index.unnamed.reason]
    try:
        check_cover(index)
    except CoverError as error:
        return [str(error), *problems]
    return problems


def source_facts(index: Index) -> Iterator[tuple[str, str]]:
    """What the checkpoint is, and where it comes from."""
    yield "checkpoint", index.path
    yield "format", f"{index.format} ({', '.join(index.evidence)})" if index.evidence else index.format
    yield "producer", index.producer
    yield "topology", str(index.topology)
    yield "step", "not recorded" if index.step is None else count_text(index.step)


def _size_facts(index: Index) -> Iterator[tuple[str, str]]:
    words = {Kind.PARAMETER: "trained", Kind.FROZEN: "frozen"}
    kinds = [
        (
            count_text(tally.tensors) + f" {words[tally.kind]}"
            if tally.kind in words
            else format_count(tally.tensors, "buffer"),
            tally,
        )
        for tally in count_kinds(index)
        if tally.tensors
    ]
    yield "parameters", ", ".join(f"{count} of {count_text(tally.numel)}" for count, tally in kinds) + " elements"
    low = Counter(atom.model_dtype for atom in index.atoms.values() if atom.model_dtype is not None)
    yield "computes in", ", ".join(f"{dtype} ({format_count(count, 'tensor')})" for dtype, count in low.items())
    stored = sum(file.nbytes for file in index.files)
    yield (
        "bytes",
        f"{nbytes_text(index.nbytes)} of tensors, in {format_count(len(index.files), 'file')} of {nbytes_text(stored)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTally:
    """Number of a model's tensors of one kind."""

    kind: Kind
    """Trained, frozen or buffer."""
    tensors: int
    """Number of tensors."""
    numel: int
    """Elements of all these tensors together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTally:
    """Number of tensors of one state and dtype."""

    state: str
    """Name of the state."""
    dtype: DType
    """Type of its elements."""
    tensors: int
    """Number of tensors."""
    numel: int
    """Elements of all these tensors together."""
    nbytes: int
    """Bytes of all these tensors together."""


def count_kinds(index: Index) -> tuple[KindTally, ...]:
    """One tally per kind, all kinds, in the order of `Kind`."""
    counts = {kind: [prod(atom.global_shape) for atom in index.atoms.values() if atom.kind is kind] for kind in Kind}
    return tuple(KindTally(kind=kind, tensors=len(numels), numel=sum(numels)) for kind, numels in counts.items())


def count_states(index: Index) -> tuple[StateTally, ...]:
    """One tally per state and dtype: states in order of first appearance, the commonest dtype of each first."""
    states: dict[str, dict[DType, list[int]]] = {}
    for _, name, state in index.states():
        states.setdefault(name, {}).setdefault(state.dtype, []).append(state.numel)
    return tuple(
        StateTally(state=name, dtype=dtype, tensors=len(numels), numel=sum(numels), nbytes=sum(numels) * dtype.itemsize)
        for name, dtypes in states.items()
        for dtype, numels in sorted(dtypes.items(), key=lambda item: -len(item[1]))
    )


def count_patterns(index: Index) -> dict[str, int]:
    """Parameters laid out by each pattern over each axis, e.g. {"shard(dim=0) over tp": 12}."""
    return dict(
        Counter(f"{pattern} over {axis}" for atom in index.atoms.values() for axis, pattern in atom.patterns.items())
    )


def layout_lines(layouts: Iterable[tuple[str, str, Layout]]) -> tuple[str, ...]:
    """A line per pattern over an axis, with the number of its parameters. `layouts`: (parameter, state, layout).

    >>> from ucp.core.layout import AxisLayout
    >>> from ucp_patterns.chunk import Chunk
    >>> cut = Layout((AxisLayout("dp", 2, Chunk(0), "ZeRO-3"),))
    >>> layout_lines([("w", "weight", cut), ("b", "weight", cut), ("w", "exp_avg", Layout())])
    ('dp=2: chunk(dim=0), known from ZeRO-3: 2 parameters (weight only)',)
    """
    known_from: dict[str, dict[str, None]] = {}
    params: dict[str, dict[str, None]] = {}
    states: dict[str, dict[str, None]] = {}
    all_states: dict[str, None] = {}
    for param, state, layout in layouts:
        all_states[state] = None
        for what, known in layout.descriptions:
            known_from.setdefault(what, {})[known] = None
            params.setdefault(what, {})[param] = None
            states.setdefault(what, {})[state] = None
    lines = []
    for what, places in known_from.items():
        places.pop("", None)
        sources = [*places] if len(places) < 3 else [next(iter(places)), f"{len(places) - 1} others"]
        known = f", known from {' and '.join(sources)}" if sources else ""
        whose = f" ({', '.join(states[what])} only)" if len(states[what]) < len(all_states) else ""
        lines.append(f"{what}{known}: {format_count(len(params[what]), 'parameter')}{whose}")
    return tuple(lines)
