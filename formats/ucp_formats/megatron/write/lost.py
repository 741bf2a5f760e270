"""What of the source's tensors is in none of the files that were planned, and why: nothing is left behind unsaid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ucp.core.index import Index, Kind
from ucp.core.names import STEP, WEIGHT
from ucp.core.target import Placement
from ucp.errors import counted
from ucp_formats.megatron.write.run import TargetRun

__all__ = ["lost_lines", "lost_states"]


def lost_states(run: TargetRun, placements: Iterable[Placement]) -> dict[str, frozenset[str]]:
    """Parameter to its states that hold elements and are in no file; steps are in the groups of an optimizer."""
    written = {(place.slice.param, place.slice.state) for place in placements}
    found: dict[str, frozenset[str]] = {}
    for atom, name, state in run.index.states():
        counted_by_group = name == STEP and bool(run.chain)
        if state.numel and (atom.name, name) not in written and not counted_by_group:
            found[atom.name] = found.get(atom.name, frozenset()) | {name}
    return found


def lost_lines(run: TargetRun, lost: Mapping[str, frozenset[str]], placements: Iterable[Placement]) -> tuple[str, ...]:
    """A line for every set of states that are lost, and one for masters that are written as weights alone."""
    alike: dict[frozenset[str], int] = {}
    for states in lost.values():
        alike[states] = alike.get(states, 0) + 1
    lines = [f"{', '.join(sorted(own))} of {counted(n, 'parameter')}: {_why(run, own)}" for own, n in alike.items()]
    masters = set(_masters(run.index, placements))
    if masters:
        lines.append(
            f"masters of {counted(len(masters), 'parameter')}: {_why(run, ())}. Their weights are written in the type "
            "that the model computes in"
        )
    return tuple(lines)


def _masters(index: Index, placements: Iterable[Placement]) -> Iterator[str]:
    """Parameters whose master is in no file, only the weight that is made of it."""
    widest: dict[str, int] = {}
    for own in (place.slice for place in placements if place.slice.state == WEIGHT):
        widest[own.param] = max(widest.get(own.param, 0), own.dtype.itemsize)
    for atom in index.atoms.values():
        weight = atom.states.get(WEIGHT)
        if atom.kind is not Kind.PARAMETER or atom.model_dtype is None or weight is None:
            continue
        if 0 < widest.get(atom.name, 0) < weight.dtype.itemsize:
            yield atom.name


def _why(run: TargetRun, states: Iterable[str]) -> str:
    if WEIGHT in states:
        return "tensors that Megatron does not save"
    if run.chain:
        return "Megatron's optimizer has no place for them"
    if not run.index.groups:
        return (
            "the source records no parameter groups, and without them Megatron loads no optimizer: none is written "
            "(start the run with --no-load-optim)"
        )
    return "no parameter has a moment, and without Megatron loads no optimizer: none is written"
