"""Parameters that lack a state or a setting which all others like them have: a gap, which nothing else shows.

Which states an optimizer keeps is not recorded, so what others have tells. A parameter without any is frozen, or was
never stepped. The states of Muon are not those of the Adam that trains the rest, so a gap is a *part* of what another
one has. Some optimizers keep more of matrices, or where they are told to: those with other hyper-parameters or
switches, or with one dimension and with more, are not alike.

A damaged name gives a parameter another state instead of one. Settings are compared likewise: where a group does not
record its parameters, a damaged name takes a setting from one of them, which then is a group of its own.

>>> full = frozenset({"exp_avg", "exp_avg_sq"})
>>> gaps({"a": full, "b": full - {"exp_avg"}, "c": frozenset(), "muon": frozenset({"momentum_buffer"})}, {})
{'b': ('exp_avg',)}
>>> gaps({"a": full, "b": full, "c": frozenset({"exp_avg", "exp_evg_sq"})}, {})
{'c': ('exp_avg_sq',)}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations

from ucp.core.index import Index, Kind, Loss, ParamGroup
from ucp.core.names import WEIGHT
from ucp.errors import counted, listed

_WHY = (
    "states or settings that others like these parameters have: part of the optimizer is lost. Copy the checkpoint "
    "again, or use another one"
)


def gaps(states: Mapping[str, frozenset[str]], kinds: Mapping[str, Hashable]) -> dict[str, tuple[str, ...]]:
    """Parameters that have a part of the states which another of their kind has, each with those that it lacks.

    `states`: parameter to its states. `kinds`: what sets apart parameters that are not alike, such as their optimizer,
    where that is known.
    """
    held = {name: (kinds.get(name), own) for name, own in states.items() if own}
    counts = Counter(held.values())
    wanted = {own: _expected_states(own, counts) for own in counts}
    return {name: tuple(sorted(lacking)) for name, own in held.items() if (lacking := wanted[own] - own[1])}


_KindAndStates = tuple[Hashable, frozenset[str]]


def _expected_states(own: _KindAndStates, counts: Counter[_KindAndStates]) -> frozenset[str]:
    """The states of the one with the most, among those of the same kind that have all of these.

    Where no other has all of them, as one of the names is a state of no parameter with other states: those of more
    parameters that have other states in common and differ in this name alone.
    """
    kind, states = own
    alike = [other for its_kind, other in counts if its_kind == kind]
    largest = max((other for other in alike if states <= other), key=len)
    unique = states.difference(*(other for _, other in counts if other != states))
    if largest != states or len(unique) != 1:
        return largest
    more = (other for other in alike if counts[kind, other] > counts[own] and states & other)
    renamed = (other for other in more if states - other == unique and len(other - states) == 1)
    return max(renamed, key=lambda other: counts[kind, other], default=states)


def state_gaps(index: Index) -> dict[str, tuple[str, ...]]:
    """Trained parameters that lack states or a setting, which the user did not leave out, each with what it lacks."""
    found = _lacking_states(index)
    for name, setting in _lacking_settings(index.groups):
        found[name] = (*found.get(name, ()), f"the setting {setting}")
    return found


def _lacking_states(index: Index) -> dict[str, tuple[str, ...]]:
    switches: dict[str, Hashable] = {}  # what tells optimizers and their choices apart: SGD keeps no zero momentum
    for group in index.groups:
        settings = frozenset(
            (key, bool(own) if key == "momentum" else own if isinstance(own, bool | str | None) else ...)
            for key, own in group.hyper.items()
        )
        switches |= dict.fromkeys(group.params, settings)
    trained = {
        name: atom
        for name, atom in index.atoms.items()
        if atom.kind is Kind.PARAMETER and not (name in index.lost and index.lost[name].chosen)
    }
    states = {name: frozenset(atom.states.keys() - {WEIGHT}) for name, atom in trained.items()}
    kinds = {name: (switches.get(name), len(atom.global_shape) > 1) for name, atom in trained.items()}
    return gaps(states, kinds)


def _lacking_settings(groups: tuple[ParamGroup, ...]) -> Iterator[tuple[str, str]]:
    """Parameters alone in a group that is another one but for one setting, each with this setting.

    All settings that both have are equal: a group with values of its own may have settings of its own, too.
    """
    by_settings: dict[frozenset[str], list[ParamGroup]] = {}
    for group in groups:
        by_settings.setdefault(frozenset(group.hyper), []).append(group)
    for settings, others in permutations(by_settings, 2):
        is_rarer = _count_params(by_settings[settings]) < _count_params(by_settings[others])
        if is_rarer and len(others - settings) == 1 and len(settings - others) <= 1:
            common = sorted(settings & others)
            known = {repr([other.hyper[key] for key in common]) for other in by_settings[others]}
            for group in by_settings[settings]:
                if len(group.params) == 1 and repr([group.hyper[key] for key in common]) in known:
                    yield group.params[0], min(others - settings)


def _count_params(groups: Iterable[ParamGroup]) -> int:
    return sum(len(group.params) for group in groups)


def with_gaps(index: Index) -> Index:
    """`index` with every gap among `lost`."""
    found = {
        name: Loss(why=_WHY, detail=", ".join(states))
        for name, states in _lacking_states(index).items()
        if name not in index.lost
    }
    return replace(index, lost={**index.lost, **found}) if found else index


def gap_text(lacking: Mapping[str, tuple[str, ...]]) -> str:
    """What to tell of `lacking`, where there is any: every parameter, with what it lacks."""
    lines = (f"{name}: {', '.join(states)}" for name, states in lacking.items())
    return f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} {_WHY}:\n{listed(lines)}"
