"""A checkpoint on a page: what it is and where it comes from, what is missing, its states, its notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ucp.core.index import Index, Kind, check_cover
from ucp.core.state_gaps import gap_text, state_gaps
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.tally import count_kinds, count_states
from ucp.core.text.units import count_text, nbytes_text
from ucp.errors import CoverError, counted

__all__ = ["describe_missing", "overview", "remarks", "source_facts"]


def overview(index: Index) -> Iterator[Section]:
    """The head of the page, up to the states."""
    missing = describe_missing(index)
    pieces = sum(len(state.fragments) for _, _, state in index.states())
    no = "Missing" if missing else "In doubt" if index.doubts else ""
    complete = f"NO: see {no}" if no else f"yes: {counted(pieces, 'shard')} cover every tensor"
    yield facts([*source_facts(index), *_size_facts(index), ("complete", complete)])
    yield lines("Missing", missing)
    yield lines("In doubt", [doubt.text for doubt in index.doubts])
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
    lost = state_gaps(index)
    problems = [gap_text(lost)] if lost else []
    problems += [] if index.unnamed is None else [index.unnamed.why]
    try:
        check_cover(index)
    except CoverError as error:
        return [str(error), *problems]
    return problems


def source_facts(index: Index) -> Iterator[tuple[str, str]]:
    """What it is, where it comes from."""
    yield "checkpoint", index.path
    yield "format", f"{index.format} ({', '.join(index.evidence)})" if index.evidence else index.format
    yield "producer", index.producer
    yield "topology", str(index.topology)
    yield "step", "not recorded" if index.step is None else count_text(index.step)


def _size_facts(index: Index) -> Iterator[tuple[str, str]]:
    words = {Kind.PARAMETER: "trained", Kind.FROZEN: "frozen"}
    kinds = [
        (count_text(own.tensors) + f" {words[own.kind]}" if own.kind in words else counted(own.tensors, "buffer"), own)
        for own in count_kinds(index)
        if own.tensors
    ]
    yield "parameters", ", ".join(f"{many} of {count_text(own.numel)}" for many, own in kinds) + " elements"
    low = Counter(atom.model_dtype for atom in index.atoms.values() if atom.model_dtype is not None)
    yield "computes in", ", ".join(f"{dtype} ({counted(count, 'tensor')})" for dtype, count in low.items())
    stored = sum(file.nbytes for file in index.files)
    yield (
        "bytes",
        f"{nbytes_text(index.nbytes)} of tensors, in {counted(len(index.files), 'file')} of {nbytes_text(stored)}",
    )
