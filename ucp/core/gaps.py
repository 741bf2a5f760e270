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
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import permutations

from ucp.core.index import WEIGHT, DoubtKind, Fragment, Index, Kind, LostStates, ParamGroup, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, find_gaps
from ucp.errors import CoverError, MalformedError, MissingStateError, counted, listed

_WHY = (
    "states or settings that others like these parameters have: part of the optimizer is lost. Copy the checkpoint "
    "again, or use another one"
)


def find_lacking_states(
    states: Mapping[str, frozenset[str]], kinds: Mapping[str, Hashable]
) -> dict[str, tuple[str, ...]]:
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


def find_state_gaps(index: Index) -> dict[str, tuple[str, ...]]:
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
        if atom.kind is Kind.PARAMETER and not (name in index.lost and index.lost[name].is_chosen)
    }
    states = {name: frozenset(atom.states.keys() - {WEIGHT}) for name, atom in trained.items()}
    kinds = {name: (switches.get(name), len(atom.global_shape) > 1) for name, atom in trained.items()}
    return find_lacking_states(states, kinds)


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


def add_state_gaps(index: Index) -> Index:
    """`index` with every gap among `lost`."""
    found = {
        name: LostStates(reason=_WHY, detail=", ".join(states))
        for name, states in _lacking_states(index).items()
        if name not in index.lost
    }
    return replace(index, lost={**index.lost, **found}) if found else index


def describe_state_gaps(lacking: Mapping[str, tuple[str, ...]]) -> str:
    """What to tell of `lacking`, where there is any: every parameter, with what it lacks."""
    lines = (f"{name}: {', '.join(states)}" for name, states in lacking.items())
    return f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} {_WHY}:\n{listed(lines)}"


def check_cover(index: Index) -> None:
    """Prove that the pieces of every state tile it. Raises CoverError listing every hole and overlap."""
    problems = [problem for atom, name, state in index.states() for problem in _describe_gaps(atom.name, name, state)]
    if problems:
        raise CoverError(
            f"the pieces in {index.path} do not tile {counted(len(problems), 'region')} of tensors exactly once:\n"
            f"{listed(problems)}\nfiles of this checkpoint are missing, or are from different runs"
        )


def check_doubts(index: Index, accepted: Collection[DoubtKind]) -> None:
    """Raise MalformedError with everything that speaks against the files of a checkpoint and was not accepted."""
    found = [doubt for doubt in index.doubts if doubt.kind not in accepted]
    if found:
        texts = "\n".join(doubt.text for doubt in found)
        kinds = " ".join(f"--accept {kind}" for kind in dict.fromkeys(doubt.kind for doubt in found))
        raise MalformedError(f"{texts}\nIf {index.path} is as it was saved, go on with {kinds}")


def check_names(index: Index) -> None:
    """Prove that groups and tied names are of parameters that are there, each in one group. Raises MalformedError."""
    held = Counter(name for group in index.groups for name in group.params)
    unknown = [f"group: {name}" for name in held if name not in index.atoms]
    unknown += [f"tied: {alias} = {name}" for alias, name in index.aliases.items() if name not in index.atoms]
    twice = [f"in several groups: {name}" for name, count in held.items() if count > 1]
    if unknown or twice:
        raise MalformedError(
            f"expected parameter groups and tied names of parameters that {index.path} holds, each in one group at "
            f"most; got\n{listed([*unknown, *twice])}\nIt is damaged, or was edited: copy it again"
        )


def check_weights(index: Index) -> None:
    """Prove that every parameter has a weight, as files of a framework do. Raises MissingStateError with all others."""
    bare = [
        f"{atom.name}: {', '.join(atom.states) or 'no state'}"
        for atom in index.atoms.values()
        if WEIGHT not in atom.states
    ]
    if bare:
        raise MissingStateError(
            f"expected the weight of every parameter, beside which a framework keeps its other states; of "
            f"{index.path} there are only\n{listed(bare)}\ntake the weights along where --include or --exclude leaves "
            "them out; a store that lacks them has to be made again from the checkpoint that has them"
        )


_FEW = 64
"""Pieces of a state, at most, whose cut is remembered."""


def _describe_gaps(param: str, name: str, state: StateIndex) -> Iterable[str]:
    if _is_tiled(state):
        return
    label = f"{param}/{name}"
    outside = [fragment for fragment in state.fragments if not _lies_in(fragment.box, state.global_shape)]
    if outside:
        for fragment in outside:
            yield f"{label} {fragment.box}, held by {fragment.path}, lies past {list(state.global_shape)}"
        return
    taken = [fragment for fragment in state.fragments if fragment.replica == 0]
    terms: dict[int, list[Fragment]] = {}
    for fragment in taken:
        terms.setdefault(fragment.term if state.overlap is Overlap.MEAN else 0, []).append(fragment)
    for _, pieces in sorted(terms.items()) or [(0, [])]:
        for gap in find_gaps(state.global_shape, [piece.box for piece in pieces]):
            what = "nothing" if not gap.owners else " and ".join(str(pieces[o].path) for o in gap.owners)
            yield f"{label} {gap.box} of {list(state.global_shape)}: held by {what}"


def _is_tiled(state: StateIndex) -> bool:
    """Whether all pieces lie inside, and those to take tile the whole: seen once for states that are cut alike."""
    if state.overlap is Overlap.MEAN:
        return False
    cut = tuple([(fragment.box.offsets, fragment.box.sizes, not fragment.replica) for fragment in state.fragments])
    return len(cut) <= _FEW and _tiles(state.global_shape, cut)


@lru_cache(maxsize=4096)
def _tiles(shape: tuple[int, ...], cut: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]) -> bool:
    boxes = [Box(offsets, sizes) for offsets, sizes, _ in cut]
    if not all(_lies_in(box, shape) for box in boxes):
        return False
    return not find_gaps(shape, [box for box, (_, _, is_taken) in zip(boxes, cut, strict=True) if is_taken])


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.sizes) == len(shape) and all(stop <= n for stop, n in zip(box.stops, shape, strict=True))
