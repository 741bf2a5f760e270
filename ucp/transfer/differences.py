"""Finds how two checkpoints differ: in parameters, states, groups, extras, and element by element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import hypot, isnan

from ucp.contract.protocols import Observer
from ucp.contract.ranks import Checksums
from ucp.core.index import WEIGHT, Index, Kind, StateIndex
from ucp.errors import format_count
from ucp.io.pickle.fields import format_value
from ucp.io.pickle.values import Apart, find_differing_values
from ucp.transfer.compare import THREADS, Pair, compare_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One way in which two checkpoints differ."""

    param: str
    """Parameter, or extra (as "extra/NAME"), or "" if the difference is about the whole checkpoint."""
    state: str
    """State, hyper-parameter, or place inside the extra; "" for the whole of it."""
    what: str
    """"missing", "shape", "dtype", "kind", "alias", "group", "extra" or "values"."""
    a: str
    """What the first checkpoint has."""
    b: str
    """What the second checkpoint has."""
    numel: int = 0
    """Number of elements that differ."""
    largest: float = 0.0
    """Largest absolute difference."""
    norm: float = 0.0
    """Euclidean norm of the difference."""

    def swapped(self) -> Change:
        """The same difference, with the two checkpoints exchanged."""
        return replace(self, a=self.b, b=self.a)

    def __str__(self) -> str:
        whose = "/".join(filter(None, [self.param, self.state]))
        both = self.a if self.a == self.b else f"{self.a} and {self.b}"
        most = f" differ, by {self.largest:g} at most" if self.numel else ""
        return f"{whose}{': ' if whose else ''}{self.what}: {both}{most}"


def keeps_extras(a: Index, b: Index) -> bool:
    """Whether `b` should have all extras of `a` unchanged: it was converted from that format, for the same topology."""
    return bool(b.origin) and (b.origin, b.topology) == (a.origin or a.format, a.topology)


def compare(
    a: Index, b: Index, observer: Observer, *, cast: bool = False, extras: bool = False, threads: int = THREADS
) -> list[Change]:
    """Every difference between two checkpoints; empty when their atoms are equal bit for bit.

    `cast`: whether values of `a` are cast to `b`'s dtype before they are compared, where dtypes differ. `extras`:
    whether to compare extras too.
    """
    changes = list(_compare_structure(a, b, cast=cast))
    shared = [pair for pair in pair_states(a, b) if pair.a.global_shape == pair.b.global_shape]
    if extras:
        extra_differences = list(_compare_extras(a, b))
        changes += [item for item in extra_differences if isinstance(item, Change)]
        shared += [item for item in extra_differences if not isinstance(item, Change)]
    for (name, state, total), parts in sorted(compare_states(shared, observer, cast=cast, threads=threads).items()):
        numel = sum(part.numel for part in parts)
        largest = max((part.largest for part in parts), key=lambda value: (isnan(value), value))
        norm = hypot(*sorted(part.norm for part in parts))  # threads find the parts in any order
        text = f"{numel:,} of {format_count(total, 'element')}"
        changes.append(
            Change(param=name, state=state, what="values", a=text, b=text, numel=numel, largest=largest, norm=norm)
        )
    return changes


def pair_states(a: Index, b: Index) -> Iterator[Pair]:
    """States that both checkpoints have."""
    for atom, name, state in a.states():
        other = b.atoms.get(atom.name)
        if other is not None and name in other.states:
            yield Pair(atom.name, name, state, other.states[name])


def describe_casts(a: Index, b: Index) -> tuple[str, ...]:
    """Changes of dtype from `a` to `b`: a line per state and pair of dtypes, with the number of parameters."""
    changed = Counter(
        f"{pair.state}: {pair.a.dtype} -> {pair.b.dtype}"
        for pair in pair_states(a, b)
        if pair.a.dtype is not pair.b.dtype and pair.a.numel
    )
    return tuple(f"{change} in {format_count(count, 'parameter')}" for change, count in changed.items())


def find_equal_casts(
    a: Index, b: Index, changes: Iterable[Change], observer: Observer, *, threads: int = THREADS
) -> list[str]:
    """A line for each change of dtype that explains all differences: the wider values, cast, equal the narrower ones.

    Reads the states of such `changes` again.
    """
    casts: dict[tuple[str, str], list[Pair]] = {}
    for change in (change for change in changes if change.what == "dtype"):
        both = [index.atoms[change.param].states[change.state] for index in (a, b)]
        if all(state.dtype.is_floating for state in both):
            wide, narrow = sorted(both, key=lambda state: -state.dtype.itemsize)
            pair = Pair(change.param, change.state, wide, narrow)
            casts.setdefault((change.state, f"{wide.dtype} -> {narrow.dtype}"), []).append(pair)
    return [
        f"{state}: equal after the cast {cast}, in {format_count(len(pairs), 'parameter')}"
        for (state, cast), pairs in casts.items()
        if not compare_states(pairs, observer, cast=True, threads=threads)
    ]


def _compare_structure(a: Index, b: Index, *, cast: bool) -> Iterator[Change]:
    unstepped = _unstepped(a) & _unstepped(b)
    for name in dict.fromkeys((*a.atoms, *b.atoms)):
        if name not in b.atoms or name not in a.atoms:
            yield _missing_change(name, "", in_a=name in a.atoms)
            continue
        atom_a, atom_b = a.atoms[name], b.atoms[name]
        trained = Kind.PARAMETER in (atom_a.kind, atom_b.kind)  # to an optimizer, frozen and buffer are the same
        is_either = name in unstepped or 0 in atom_a.global_shape  # such a parameter may count as either
        if trained and atom_a.kind is not atom_b.kind and not is_either:
            yield Change(param=name, state="", what="kind", a=atom_a.kind, b=atom_b.kind)
        for state in dict.fromkeys((*atom_a.states, *atom_b.states)):
            if state not in atom_a.states or state not in atom_b.states:
                yield _missing_change(name, state, in_a=state in atom_a.states)
                continue
            state_a, state_b = atom_a.states[state], atom_b.states[state]
            if state_a.global_shape != state_b.global_shape:
                shapes = str(list(state_a.global_shape)), str(list(state_b.global_shape))
                yield Change(param=name, state=state, what="shape", a=shapes[0], b=shapes[1])
            elif state_a.dtype is not state_b.dtype and not cast:
                yield Change(param=name, state=state, what="dtype", a=state_a.dtype, b=state_b.dtype)
    for alias in dict.fromkeys((*a.aliases, *b.aliases)):
        names = a.aliases.get(alias, "-"), b.aliases.get(alias, "-")
        if names[0] != names[1]:
            yield Change(param=alias, state="", what="alias", a=names[0], b=names[1])
    yield from _compare_groups(a, b)


def _unstepped(index: Index) -> set[str]:
    """Parameters that a group lists but that have no states: torch does not record whether they are frozen."""
    grouped = {name for group in index.groups for name in group.params}
    return {name for name, atom in index.atoms.items() if name in grouped and not atom.states.keys() - {WEIGHT}}


def _compare_extras(a: Index, b: Index) -> Iterator[Change | Pair]:
    """Differences between extras of the same name and rank, and pairs of their tensors that must still be compared."""
    values_a, values_b = ({(extra.name, extra.rank): extra.value for extra in index.extras} for index in (a, b))
    for key in dict.fromkeys((*values_a, *values_b)):
        name, rank = key
        label = f"extra/{name}" if rank is None else f"extra/{name}@rank{rank}"
        if key not in values_a or key not in values_b:
            yield _missing_change(label, "", in_a=key in values_a)
            continue
        for item in find_differing_values(values_a[key], values_b[key]):
            if isinstance(item, Apart):
                yield Change(param=label, state=item.place, what="extra", a=item.a, b=item.b)
            else:
                yield Pair(label, item.place, StateIndex.from_tensor(item.a), StateIndex.from_tensor(item.b))


def _missing_change(name: str, state: str, *, in_a: bool) -> Change:
    return Change(
        param=name, state=state, what="missing", a="present" if in_a else "missing", b="missing" if in_a else "present"
    )


def _compare_groups(a: Index, b: Index) -> Iterator[Change]:
    """Differences between the hyper-parameters of the parameters that both have.

    The order of groups, and of parameters in them, is layout and not compared. A parameter that only one checkpoint has
    in a group is a difference; if one of the two has no groups at all, that is a single difference.
    """
    hyper_a, hyper_b = ({name: group.hyper for group in index.groups for name in group.params} for index in (a, b))
    if bool(hyper_a) is not bool(hyper_b):
        sides = [f"{format_count(len(hyper), 'parameter')} in groups" if hyper else "-" for hyper in (hyper_a, hyper_b)]
        yield Change(param="", state="", what="group", a=sides[0], b=sides[1])
        return
    for name in sorted((set(hyper_a) ^ set(hyper_b)) & a.atoms.keys() & b.atoms.keys()):
        is_stepped = Kind.PARAMETER in (a.atoms[name].kind, b.atoms[name].kind) and 0 not in a.atoms[name].global_shape
        if is_stepped:  # torch lists frozen parameters in groups, DeepSpeed does not
            sides = ["in a group" if name in hyper else "-" for hyper in (hyper_a, hyper_b)]
            yield Change(param=name, state="", what="group", a=sides[0], b=sides[1])
    checksums = Checksums((*a.records, *b.records))
    settings_by_pair: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
    for name in sorted(set(hyper_a) & set(hyper_b)):
        pair = hyper_a[name], hyper_b[name]
        both = id(pair[0]), id(pair[1])
        if both not in settings_by_pair:
            settings_by_pair[both] = list(_compare_settings(*pair, checksums))
        for key, value_a, value_b in settings_by_pair[both]:
            yield Change(param=name, state=key, what="group", a=value_a, b=value_b)


def _compare_settings(
    a: Mapping[str, object], b: Mapping[str, object], checksums: Checksums
) -> Iterator[tuple[str, str, str]]:
    """Hyper-parameters that differ: name, and both values as text."""
    for key in sorted(set(a) | set(b)):
        sides = []
        for side in (a, b):  # a missing hyper-parameter has its implied value, if it is known
            implied = {**_IMPLIED, **({"initial_lr": side["lr"]} if "lr" in side else {})}
            sides.append([side[key]] if key in side else [implied[key]] if key in implied else [])
        plain = [[tuple(value) if isinstance(value, list) else value for value in side] for side in sides]
        if not checksums.is_same(*plain):  # JSON has lists where torch has tuples: betas
            value_a, value_b = (format_value(side[0]) if side else "-" for side in sides)
            yield key, value_a, value_b


_IMPLIED: Mapping[str, object] = {
    "bias_correction": True,
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused"), None),
    "decoupled_weight_decay": True,
}
"""Hyper-parameters of torch's AdamW that other programs do not write, with the values that their absence implies.

A missing `initial_lr` implies `lr`: torch's schedulers set it to the learning rate that they begin with.
"""
