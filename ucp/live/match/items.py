"""States to bring, as slices of the checkpoint."""

from __future__ import annotations

from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex
from ucp.core.slices import whole_slice
from ucp.live.match.findings import Findings
from ucp.live.parts import LivePart, LoadItem

__all__ = ["castable", "item_of", "note_cast"]


def castable(stored: DType, wanted: DType) -> bool:
    """Whether a state of one type can be brought into memory of another."""
    return stored is wanted or (stored.is_floating and wanted.is_floating)


def item_of(name: str, atom: AtomIndex, state: str, dtype: DType, part: LivePart, *, stepped: bool = False) -> LoadItem:
    """What `part` is of a state; a count, or a state of another shape than its parameter, is whole on every rank."""
    source = atom.states[state]
    is_whole = part.is_whole or source.global_shape != atom.global_shape or atom.is_count(state)
    wanted = (
        whole_slice(atom.name, state, source, dtype=dtype)
        if is_whole
        else part.slice_of(atom.name, state, source.global_shape, dtype)
    )
    return LoadItem(name=name, slice=wanted, source=source, stepped=stepped)


def note_cast(atom: AtomIndex, state: str, dtype: DType, findings: Findings) -> None:
    """Count a change of type."""
    stored = atom.states[state].dtype
    if stored is not dtype:
        findings.casts[f"{state}: {stored} to {dtype}"] += 1
