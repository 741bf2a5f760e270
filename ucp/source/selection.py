"""Selects what to take: parameters and states by --include and --exclude, extras by --set drop. Marks frozen ones.

DeepSpeed and Megatron leave frozen parameters (`requires_grad=False`) out of their optimizers, and fail to load
checkpoints that include them. torch lists them in groups like any other and does not record which are frozen. A reader
takes parameters without states for frozen if others have states. A trained parameter that never got a gradient looks
the same, so users can name the frozen ones (`--set frozen=GLOB,...`, or `none`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ucp.core.index import WEIGHT, AtomIndex, DoubtKind, Index, Kind, LostStates
from ucp.errors import UsageError, format_count, format_list
from ucp.source.moments import find_odd_moments

DROP = "drop"
"""Setting that every target takes: extras to leave out."""

_SELECTION = "left out by --include/--exclude"
"""Reason for what a selection leaves out."""


@dataclass(frozen=True, slots=True)
class NameFilter:
    """Keeps names that match an include pattern (all, if none is given) and no exclude pattern.

    A pattern is a shell glob over the whole name; `NAME/STATE` narrows it to one state.

    >>> NameFilter(include=("layers.*",), exclude=("*/exp_avg*",)).keeps("layers.0.weight", "exp_avg")
    False
    """

    include: tuple[str, ...] = ()
    """Globs to keep; empty keeps everything."""
    exclude: tuple[str, ...] = ()
    """Globs to leave out, stronger than include."""

    def keeps(self, param: str, state: str) -> bool:
        """Whether state `state` of parameter `param` is wanted."""
        wanted = not self.include or any(_matches(glob, param, state) for glob in self.include)
        return wanted and not any(_matches(glob, param, state) for glob in self.exclude)

    def check_used(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise UsageError for patterns that match none of `names` (parameter, state)."""
        pairs = list(names)
        unused = [g for g in (*self.include, *self.exclude) if not any(_matches(g, p, s) for p, s in pairs)]
        if unused:
            raise UsageError(f"no parameter matches {', '.join(map(repr, unused))}; {_hint(unused, pairs)}")


def select(index: Index, names: NameFilter) -> Index:
    """What `names` keeps of `index`. Raises UsageError when a glob matches nothing, or nothing is kept."""
    if names == NameFilter():
        return index
    states_of = [(atom.name, state) for atom, state, _ in index.states()]
    unnamed = (
        []
        if index.unnamed is None
        else [(name, unnamed_state) for name in index.atoms for unnamed_state in index.unnamed.states]
    )
    names.check_used([*states_of, *unnamed])
    atoms: dict[str, AtomIndex] = {}
    for atom in index.atoms.values():
        states = {name: state for name, state in atom.states.items() if names.keeps(atom.name, name)}
        if states:
            atoms[atom.name] = replace(atom, states=states)
    if not atoms:
        raise UsageError("--include and --exclude together leave nothing; `ucp plan` shows what a selection holds")
    groups = tuple(replace(g, params=tuple(p for p in g.params if p in atoms)) for g in index.groups)
    aliases = {alias: name for alias, name in index.aliases.items() if name in atoms}
    states_left = sum(len(index.atoms[name].states) - len(atom.states) for name, atom in atoms.items())
    params_left = len(index.atoms) - len(atoms)
    losses = [
        f"{format_count(params_left, 'parameter')} of {len(index.atoms):,}" if params_left else "",
        f"{format_count(states_left, 'state')} of {'the others' if params_left else 'parameters'}"
        if states_left
        else "",
    ]
    dropped = (*index.dropped, f"{', '.join(filter(None, losses))}: {_SELECTION}") if any(losses) else index.dropped
    problems = tuple(problem for problem in index.doubts if problem.kind is not DoubtKind.MOMENT_SHAPES)
    if len(problems) < len(index.doubts):  # keep those moment doubts that hold for the selection
        problems += tuple(find_odd_moments(replace(index, atoms=atoms)))
    return replace(
        index,
        atoms=atoms,
        groups=groups,
        aliases=aliases,
        dropped=dropped,
        doubts=problems,
        lost=_find_lost(index, atoms),
        unnamed=index.unnamed if any(names.keeps(*unnamed_state) for unnamed_state in unnamed) else None,
        unselected=index.unselected + params_left,
    )


def _find_lost(index: Index, atoms: Mapping[str, AtomIndex]) -> dict[str, LostStates]:
    """Parameters of `atoms` that lost states before, or lack states that the selection keeps for others."""
    lost = {name: loss for name, loss in index.lost.items() if name in atoms}
    kept_states = {state for atom in atoms.values() for state in atom.states}
    for name, atom in atoms.items():
        states = [
            missing for missing in index.atoms[name].states if missing in kept_states and missing not in atom.states
        ]
        if states and name not in lost:
            why = f"{', '.join(states)} of these parameters, {_SELECTION} but kept for others: include them, too"
            lost[name] = LostStates(reason=why, is_chosen=True)
    return lost


def describe_part(full: Index, index: Index) -> Iterator[str]:
    """Warnings about what frameworks do with `index`, if this selection from `full` is only a part of the model."""
    if index.unselected:
        part = f"{format_count(index.unselected, 'parameter')} of {index.unselected + len(index.atoms):,}: {_SELECTION}"
        yield (
            f"a part of the model is written: {part}. A run of the whole model does not resume from it: "
            "what is left out is missing when it loads, or stays as it was initialised. Drop --include and --exclude, "
            "or store the part as atoms (--to ucp)"
        )
    for state in dict.fromkeys(name for _, name, _ in index.states()):
        had = [name for name in index.atoms if state in full.atoms[name].states]
        lacking = [name for name in had if state not in index.atoms[name].states]
        if lacking:
            yield (
                f"{state} is left out for {format_count(len(lacking), 'parameter')} and kept for "
                f"{len(had) - len(lacking):,}: the optimizer starts afresh for "
                f"{lacking[0]}{', ...' if len(lacking) > 1 else ''} (or continues from zeros, if parameters are stored "
                f"flat), and resumes for the others. Leave it out for all (--exclude '*/{state}'), or for none"
            )


def drop_extras(index: Index, settings: Mapping[str, str]) -> tuple[Index, Mapping[str, str]]:
    """The index without the extras that --set drop=NAME,... names, and the other settings. Raises UsageError."""
    if DROP not in settings:
        return index, settings
    requested = settings[DROP].split(",")
    names = {extra.name: {extra.name, extra.name.partition("/")[0]} for extra in index.extras}
    known = sorted(set().union(*names.values()))
    unknown = [name for name in requested if name not in known]
    if unknown:
        raise UsageError(
            f"expected extras of {index.path} to leave out (--set drop); it has no {', '.join(unknown)}, only "
            f"{', '.join(known) or 'none'}"
        )
    matching = [name for name, spellings in names.items() if spellings.intersection(requested)]
    extras = tuple(extra for extra in index.extras if extra.name not in matching)
    lines = [f"{name}: not taken from the source, as asked (--set drop)" for name in matching]
    others = {name: text for name, text in settings.items() if name != DROP}
    return replace(index, extras=extras, dropped=(*index.dropped, *lines)), others


FROZEN = "frozen"
"""Setting that every target takes: globs of the parameters that are frozen."""


def set_frozen(index: Index, settings: Mapping[str, str]) -> tuple[Index, Mapping[str, str]]:
    """`index` with exactly the parameters frozen that --set frozen names, and the other settings. Raises UsageError."""
    if FROZEN not in settings:
        return index, settings
    globs = [] if settings[FROZEN] == "none" else settings[FROZEN].split(",")
    idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in index.atoms)]
    if idle:
        raise UsageError(f"--set frozen: no parameter of {index.path} matches {', '.join(idle)}")
    frozen = {
        name
        for name, atom in index.atoms.items()
        if name in globs or (atom.kind is not Kind.BUFFER and any(fnmatchcase(name, glob) for glob in globs))
    }
    with_states = [name for name in index.atoms if name in frozen and index.atoms[name].states.keys() - {WEIGHT}]
    if with_states:
        raise UsageError(
            "--set frozen: expected parameters without optimizer states; these were "
            f"stepped:\n{format_list(with_states)}"
        )
    grouped = {name for group in index.groups for name in group.params}
    atoms = dict(index.atoms)  # unlisted and unnamed ones stay, as do buffers that a glob matches
    for name, atom in index.atoms.items():
        if name in frozen:
            atoms[name] = replace(atom, kind=Kind.FROZEN)
        elif name in grouped and atom.kind is not Kind.BUFFER:
            atoms[name] = replace(atom, kind=Kind.PARAMETER)
    others = {name: value for name, value in settings.items() if name != FROZEN}
    return replace(index, atoms=atoms), others


def _matches(glob: str, param: str, state: str) -> bool:
    return fnmatchcase(param, glob) or fnmatchcase(f"{param}/{state}", glob)


def _hint(globs: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """What to write instead: a glob must match the whole name."""
    for glob in globs:
        wider = f"*{glob}*"
        matching = dict.fromkeys(param for param, state in pairs if _matches(wider, param, state))
        if matching:
            first, more = next(iter(matching)), len(matching) - 1
            return f"a glob must match the whole name: {wider!r} matches {first}{f' and {more:,} more' if more else ''}"
    known = dict.fromkeys(name for param, state in pairs for name in (param, f"{param}/{state}"))
    near = [name for glob in globs for name in get_close_matches(glob, known, 2)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}? `ucp inspect` lists the names"
    return "`ucp inspect` lists the names"
