"""What a checkpoint lacks: elements of tensors, weights, names, states and settings of parameters.

No file records which states an optimizer keeps, so parameters are compared with others of their kind. A parameter
without any state is frozen or was never stepped; one with only *some* of the states of another has a gap. Parameters
are of different kinds if their optimizers (Muon beside Adam), their hyper-parameters or their numbers of dims differ.

A state name that was damaged appears as one state instead of another. Settings of parameter groups are compared in the
same way: if settings are stored per parameter, a damaged name of a setting moves the parameter to a separate group
that lacks the setting.

>>> full = frozenset({"exp_avg", "exp_avg_sq"})
>>> states = {"a": full, "b": full - {"exp_avg"}, "c": frozenset(), "muon": frozenset({"momentum_buffer"})}
>>> find_lacking_states(states, {})
{'b': ('exp_avg',)}
>>> find_lacking_states({"a": full, "b": full, "c": frozenset({"exp_avg", "exp_evg_sq"})}, {})
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
from ucp.errors import CoverError, MalformedError, MissingStateError, format_count, format_list

_WHY = (
    "states or settings that similar parameters have: part of the optimizer state is lost. Copy the checkpoint again, "
    "or use another one"
)


def find_lacking_states(
    states: Mapping[str, frozenset[str]], kinds: Mapping[str, Hashable]
) -> dict[str, tuple[str, ...]]:
    """Parameters that have only a part of the states of another one of their kind, with the states that they lack.

    `states`: parameter to its states. `kinds`: parameter to its kind, e.g. its optimizer, where that is known.
    """
    keys = {name: (kinds.get(name), state_names) for name, state_names in states.items() if state_names}
    counts = Counter(keys.values())
    expected = {key: _expected_states(key, counts) for key in counts}
    return {name: tuple(sorted(lacking)) for name, key in keys.items() if (lacking := expected[key] - key[1])}


_KindAndStates = tuple[Hashable, frozenset[str]]


def _expected_states(key: _KindAndStates, counts: Counter[_KindAndStates]) -> frozenset[str]:
    """The states that parameters with this kind and these states should have.

    That is the largest set of the same kind that includes these states. If it is this set, and one of the states occurs
    in no other, its name may be damaged: then it is the most common set that differs in this name alone.
    """
    kind, states = key
    alike = [other for other_kind, other in counts if other_kind == kind]
    largest = max((other for other in alike if states <= other), key=len)
    unique = states.difference(*(other for _, other in counts if other != states))
    if largest != states or len(unique) != 1:
        return largest
    commoner = (other for other in alike if counts[kind, other] > counts[key] and states & other)
    renamed = (other for other in commoner if states - other == unique and len(other - states) == 1)
    return max(renamed, key=lambda other: counts[kind, other], default=states)


def find_state_gaps(index: Index) -> dict[str, tuple[str, ...]]:
    """Trained parameters that lack states or a setting, each with what it lacks, unless the user left that out."""
    gaps = _lacking_states(index)
    for name, setting in _lacking_settings(index.groups):
        gaps[name] = (*gaps.get(name, ()), f"the setting {setting}")
    return gaps


def _lacking_states(index: Index) -> dict[str, tuple[str, ...]]:
    switches: dict[str, Hashable] = {}  # tell optimizers and their variants apart: SGD with momentum 0 has no buffer
    for group in index.groups:
        settings = frozenset(
            (key, bool(value) if key == "momentum" else value if isinstance(value, bool | str | None) else ...)
            for key, value in group.hyper.items()
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
    """Parameters alone in a group that equals another group but lacks one setting, each with this setting.

    All common settings are equal: a group with different values may well have different settings.
    """
    by_settings: dict[frozenset[str], list[ParamGroup]] = {}
    for group in groups:
        by_settings.setdefault(frozenset(group.hyper), []).append(group)
    counts = {settings: sum(len(group.params) for group in alike) for settings, alike in by_settings.items()}
    for settings, expected in permutations(by_settings, 2):
        if counts[settings] < counts[expected] and len(expected - settings) == 1 and len(settings - expected) <= 1:
            common = sorted(settings & expected)
            known = {repr([group.hyper[key] for key in common]) for group in by_settings[expected]}
            for group in by_settings[settings]:
                if len(group.params) == 1 and repr([group.hyper[key] for key in common]) in known:
                    yield group.params[0], min(expected - settings)


def add_state_gaps(index: Index) -> Index:
    """`index`, with every gap among its lost states."""
    gaps = {
        name: LostStates(reason=_WHY, detail=", ".join(states))
        for name, states in _lacking_states(index).items()
        if name not in index.lost
    }
    return replace(index, lost={**index.lost, **gaps}) if gaps else index


def describe_state_gaps(lacking: Mapping[str, tuple[str, ...]]) -> str:
    """Message about gaps: every parameter with what it lacks."""
    lines = (f"{name}: {', '.join(states)}" for name, states in lacking.items())
    return f"{format_count(len(lacking), 'parameter lacks', 'parameters lack')} {_WHY}:\n{format_list(lines)}"


def check_cover(index: Index) -> None:
    """Prove that the fragments of every state tile it. Raises CoverError listing every hole and overlap."""
    problems = [problem for atom, name, state in index.states() for problem in _describe_gaps(atom.name, name, state)]
    if problems:
        raise CoverError(
            f"the pieces in {index.path} do not tile {format_count(len(problems), 'region')} of tensors exactly once:\n"
            f"{format_list(problems)}\nfiles of this checkpoint are missing, or are from different runs"
        )


def check_doubts(index: Index, accepted: Collection[DoubtKind]) -> None:
    """Raise MalformedError with every suspicion about the files of a checkpoint that the user did not accept."""
    open_doubts = [item for item in index.doubts if item.kind not in accepted]
    if open_doubts:
        texts = "\n".join(item.text for item in open_doubts)
        kinds = " ".join(f"--accept {kind}" for kind in dict.fromkeys(item.kind for item in open_doubts))
        raise MalformedError(f"{texts}\nIf {index.path} is as it was saved, go on with {kinds}")


def check_names(index: Index) -> None:
    """Prove that groups and tied names refer to existing parameters, each in one group. Raises MalformedError."""
    counts = Counter(name for group in index.groups for name in group.params)
    problems = [f"group: {name}" for name in counts if name not in index.atoms]
    problems += [f"tied: {alias} = {name}" for alias, name in index.aliases.items() if name not in index.atoms]
    problems += [f"in several groups: {name}" for name, count in counts.items() if count > 1]
    if problems:
        raise MalformedError(
            f"expected parameter groups and tied names to refer to parameters of {index.path}, each in at most one "
            f"group; got\n{format_list(problems)}\nIt is damaged, or was edited: copy it again"
        )


def check_weights(index: Index) -> None:
    """Prove that every parameter has a weight. Raises MissingStateError with all that have none."""
    atoms = [atom for atom in index.atoms.values() if WEIGHT not in atom.states]
    if atoms:
        lines = format_list(f"{atom.name}: {', '.join(atom.states) or 'no state'}" for atom in atoms)
        raise MissingStateError(
            f"expected the weight of every parameter, because no framework saves other states without it; "
            f"{index.path} has only\n{lines}\nInclude the weights if --include or --exclude leaves them out; otherwise "
            "make the store again from a checkpoint that has them"
        )


_MOST_CACHED = 64
"""Fragments of a state above which the proof that they tile it is not cached."""


def _describe_gaps(param: str, name: str, state: StateIndex) -> Iterable[str]:
    if _is_tiled(state):
        return
    label = f"{param}/{name}"
    outside = [fragment for fragment in state.fragments if not _lies_in(fragment.box, state.global_shape)]
    if outside:
        for fragment in outside:
            yield f"{label} {fragment.box}, held by {fragment.path}, lies past {list(state.global_shape)}"
        return
    terms: dict[int, list[Fragment]] = {}
    for fragment in state.fragments:
        if _is_taken(fragment, state):
            terms.setdefault(fragment.term if state.overlap is Overlap.MEAN else 0, []).append(fragment)
    for _, pieces in sorted(terms.items()) or [(0, [])]:
        for gap in find_gaps(state.global_shape, [piece.box for piece in pieces]):
            owners = " and ".join(str(pieces[owner].path) for owner in gap.owners) or "nothing"
            yield f"{label} {gap.box} of {list(state.global_shape)}: held by {owners}"


def _is_tiled(state: StateIndex) -> bool:
    """Whether all fragments are inside the tensor and first copies tile it; cached, as many states are cut alike."""
    if state.overlap is Overlap.MEAN:
        return False
    cut = tuple([(piece.box.offsets, piece.box.sizes, _is_taken(piece, state)) for piece in state.fragments])
    return len(cut) <= _MOST_CACHED and _tiles(state.global_shape, cut)


def _is_taken(fragment: Fragment, state: StateIndex) -> bool:
    """Whether a fragment is one of those that tile the tensor: no further copy, and no patch."""
    return not fragment.replica and not (state.overlap is Overlap.PATCHED and fragment.term)


@lru_cache(maxsize=4096)
def _tiles(shape: tuple[int, ...], cut: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]) -> bool:
    boxes = [Box(offsets, sizes) for offsets, sizes, _ in cut]
    if not all(_lies_in(box, shape) for box in boxes):
        return False
    return not find_gaps(shape, [box for box, (_, _, is_taken) in zip(boxes, cut, strict=True) if is_taken])


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.sizes) == len(shape) and all(stop <= n for stop, n in zip(box.stops, shape, strict=True))
