"""Parameters that lack a state which all others like them have: a gap, which nothing else shows.

Which states an optimizer keeps is not recorded, so what others have tells. A parameter without any is frozen, or was
never stepped. The states of Muon are not those of the Adam that trains the rest, so a gap is a *part* of what another
one has. Some optimizers keep more of matrices, or where they are told to: those with other hyper-parameters or
switches, or with one dimension and with more, are not alike.

>>> full = frozenset({"exp_avg", "exp_avg_sq"})
>>> gaps({"a": full, "b": full - {"exp_avg"}, "c": frozenset(), "muon": frozenset({"momentum_buffer"})}, {})
{'b': ('exp_avg',)}
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace

from ucp.core.index import Index, Kind, Loss, ParamGroup
from ucp.core.names import WEIGHT
from ucp.errors import counted, listed

__all__ = ["gap_text", "gaps", "state_gaps", "with_gaps"]

_WHY = (
    "states that others like these parameters have: part of the optimizer is lost. Copy the checkpoint again, or use "
    "another one"
)


def gaps(states: Mapping[str, frozenset[str]], kinds: Mapping[str, Hashable]) -> dict[str, tuple[str, ...]]:
    """Parameters that have a part of the states which another of their kind has, each with those that it lacks.

    `states`: parameter to its states. `kinds`: what sets apart parameters that are not alike, such as their optimizer,
    where that is known.
    """
    held = {name: (kinds.get(name), own) for name, own in states.items() if own}
    alike = set(held.values())
    wanted = {own: _largest(own, alike) for own in alike}
    return {name: tuple(sorted(lacking)) for name, own in held.items() if (lacking := wanted[own] - own[1])}


def _largest(
    own: tuple[Hashable, frozenset[str]], alike: Collection[tuple[Hashable, frozenset[str]]]
) -> frozenset[str]:
    """The states of the one with the most, among those of the same kind that have all of these."""
    kind, held = own
    return max((other for its, other in alike if its == kind and held <= other), key=len)


def state_gaps(index: Index) -> dict[str, tuple[str, ...]]:
    """Trained parameters of a checkpoint that lack states, which the user did not leave out, each with these."""
    switches = {name: own for group in index.groups for own in (_switches(group),) for name in group.params}
    trained = {
        name: atom
        for name, atom in index.atoms.items()
        if atom.kind is Kind.PARAMETER and not (name in index.lost and index.lost[name].chosen)
    }
    states = {name: frozenset(atom.states.keys() - {WEIGHT}) for name, atom in trained.items()}
    kinds = {name: (switches.get(name), len(atom.global_shape) > 1) for name, atom in trained.items()}
    return gaps(states, kinds)


def _switches(group: ParamGroup) -> frozenset[tuple[str, object]]:
    """What tells optimizers and their choices apart: names of hyper-parameters, values of such as `amsgrad`."""
    return frozenset((key, own if isinstance(own, bool | str | None) else ...) for key, own in group.hyper.items())


def with_gaps(index: Index) -> Index:
    """`index` with every gap among `lost`."""
    found = {
        name: Loss(why=_WHY, detail=", ".join(states))
        for name, states in state_gaps(index).items()
        if name not in index.lost
    }
    return replace(index, lost={**index.lost, **found}) if found else index


def gap_text(lacking: Mapping[str, tuple[str, ...]]) -> str:
    """What to tell of `lacking`, where there is any: every parameter, with the states that it lacks."""
    lines = (f"{name}: {', '.join(states)}" for name, states in lacking.items())
    return f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} {_WHY}:\n{listed(lines)}"
