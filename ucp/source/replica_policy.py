"""Which value a conversion takes if copies that should be equal differ.

Norms and biases that every tensor-parallel rank holds can drift apart during training (BLOOM's did). A conversion
refuses such copies unless the user says which value to take:

    error   stop, naming every parameter (the default; found while the bytes are copied)
    first   take what the first rank holds
    mean    take the mean of all ranks, computed in float32 or wider (the paper's Partial pattern)

`first` and `mean` read all copies once before the work is planned; a note lists the states whose copies differ.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ucp.contract.protocols import Observer
from ucp.core.index import Fragment, Index, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import find_gaps
from ucp.errors import ReplicaError, format_count, format_list


class Drift(StrEnum):
    """What to do about copies that differ (`--drift`)."""

    ERROR = "error"
    """Stop."""
    FIRST = "first"
    """Take the first rank's."""
    MEAN = "mean"
    """Take the mean of all ranks'."""


def resolve_drift(index: Index, drift: Drift, observer: Observer, *, memory: int) -> Index:
    """`index` with one value for every state whose copies differ; unchanged when none does, or for `Drift.ERROR`.

    Reads every state that has copies, within `memory` bytes. Raises ReplicaError if the copies have no mean.
    """
    if drift is Drift.ERROR:
        return index
    from ucp.transfer.compare import find_drifting_states, fit_threads  # not needed by most conversions

    lines_by_state = find_drifting_states(index, observer, threads=fit_threads(memory))
    if not lines_by_state:
        return index
    atoms = dict(index.atoms)
    for param, name in lines_by_state:
        atom, state = atoms[param], atoms[param].states[name]
        if drift is Drift.MEAN:
            state = _take_mean(state, f"{param}/{name}")
        else:
            state = replace(state, fragments=tuple(fragment for fragment in state.fragments if fragment.replica == 0))
        atoms[param] = replace(atom, states={**atom.states, name: state})
    action = "the first rank's value was taken" if drift is Drift.FIRST else "their mean was taken"
    lines = [line for _, differences in sorted(lines_by_state.items()) for line in sorted(differences)]
    states = format_count(len(lines_by_state), "state")
    note = f"copies of {states} differ, and {action}, as asked with --drift {drift}:\n{format_list(lines)}"
    return replace(index, atoms=atoms, notes=(*index.notes, note))


def _take_mean(state: StateIndex, label: str) -> StateIndex:
    """The state as the mean of its copies in its own dtype, each of them complete, without derived ones."""
    terms: dict[int, list[Fragment]] = {}
    for fragment in state.fragments:
        if fragment.ref.dtype is state.dtype and not fragment.derived:
            terms.setdefault(fragment.replica, []).append(fragment)
    if len(terms) < 2 or state.overlap is Overlap.MEAN or not state.dtype.is_floating:
        raise ReplicaError(
            f"{label}: expected several complete copies in {state.dtype} to take the mean of; got {len(terms)}. What "
            "differs is a copy in another precision, or the model's weight beside its master: take the first with "
            "--drift first"
        )
    for replica, pieces in terms.items():
        gaps = find_gaps(state.global_shape, [fragment.box for fragment in pieces], most=1)
        if gaps:
            raise ReplicaError(
                f"{label}: copy {replica} does not hold {gaps[0].box} of {list(state.global_shape)}, so there is no "
                "mean of complete copies; take the first with --drift first"
            )
    fragments = (
        replace(fragment, replica=0, term=n)
        for n, (_, pieces) in enumerate(sorted(terms.items()))
        for fragment in pieces
    )
    return replace(state, fragments=tuple(fragments), overlap=Overlap.MEAN)
