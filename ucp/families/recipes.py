"""An index under other names: tensors joined, split, transposed and permuted, by reference.

A tensor that is to be made is told by regions of others (`RegionPair`, whose `source` is named), which are followed one
after another down to the stored bytes (`arranged`); none of them moves any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

from ucp.core.index import AtomIndex, Fragment, Index, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box, RegionPair
from ucp.core.union import add_copies, map_fragment
from ucp.errors import MissingStateError, UnsupportedError, listed


class TensorRecipe(NamedTuple):
    """A tensor that is to be made of others."""

    shape: tuple[int, ...]
    """Elements per dim."""
    patches: tuple[RegionPair, ...]
    """Elements of others, by name, which it is made of; they tile it."""

    @classmethod
    def identity(cls, source: str, shape: tuple[int, ...]) -> TensorRecipe:
        """A tensor as it is."""
        return cls(shape, (RegionPair(Box.full(shape), Box.full(shape), source=source),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it is made of."""
        return tuple(dict.fromkeys(patch.source for patch in self.patches))

    @property
    def is_rename(self) -> bool:
        """Whether it is one other tensor as it is, under another name at most, as far as patches tell."""
        return len(self.patches) == 1 and self == TensorRecipe.identity(self.patches[0].source, self.shape)


def permute_view(
    source: str, shape: Sequence[int], view: Sequence[int], order: Sequence[int], rank: int
) -> TensorRecipe:
    """A tensor looked at in the shape `view`, its dims then put in `order`; the first merge, so that `rank` are left.

    Raises ValueError where the dims of `view` do not divide those of the tensor.

    >>> made = rearranged("w", (4, 8), (2, 2, 8), (1, 0, 2), 2)  # rows 0, 2, 1, 3
    >>> made.shape, [(str(patch.local), str(patch.whole), patch.steps) for patch in made.patches]
    ((4, 8), [('[0:2, 0:8]', '[0:3, 0:8]', (2, 1)), ('[2:4, 0:8]', '[1:4, 0:8]', (2, 1))])
    """
    if not view:
        return TensorRecipe.identity(source, ())
    parents = _parents(shape, view)
    lead = len(view) - rank + 1
    groups = [list(order[:lead]), *([dim] for dim in order[lead:])]
    runs = [_run(group, view, parents) for group in groups]
    taken: set[int] = set()
    for at, run in reversed(list(enumerate(runs))):  # along a dim of the source runs one dim of a box at most
        parent = parents[run[0]][0]
        runs[at] = [] if parent in taken else run
        taken.add(parent)
    loose = [dim for group, run in zip(groups, runs, strict=True) for dim in group[: len(group) - len(run)]]
    weights = {dim: prod(view[own] for own in group[at + 1 :]) for group in groups for at, dim in enumerate(group)}
    sizes = tuple(prod(view[dim] for dim in run) for run in runs)
    patches = []
    for numbers in product(*(range(view[dim]) for dim in loose)):
        chosen = dict(zip(loose, numbers, strict=True))
        start = [0] * len(shape)
        for dim, number in chosen.items():
            start[parents[dim][0]] += number * parents[dim][1]
        offsets = tuple(sum(chosen.get(dim, 0) * weights[dim] for dim in group) for group in groups)
        dims = tuple(parents[run[-1]][0] if run else None for run in runs)
        steps = tuple(parents[run[-1]][1] if run else 1 for run in runs)
        patches.append(RegionPair.strided(Box(offsets, sizes), source, start, dims, steps))
    return TensorRecipe(tuple(prod(view[dim] for dim in group) for group in groups), tuple(patches))


def _parents(shape: Sequence[int], view: Sequence[int]) -> list[tuple[int, int]]:
    """Per dim of a view: the dim of the tensor that it is part of, and the elements of that to step."""
    found: list[tuple[int, int]] = []
    at = 0
    for dim, length in enumerate(shape):
        first, size = at, 1
        while at < len(view) and (size < length or at == first or dim + 1 == len(shape)):
            size *= view[at]
            at += 1
        if size != length or at == first:
            raise ValueError(f"a tensor of shape {list(shape)} is not {list(view)} with its dims taken apart")
        found += [(dim, prod(view[own + 1 : at])) for own in range(first, at)]
    return found


def _run(group: Sequence[int], view: Sequence[int], parents: Sequence[tuple[int, int]]) -> list[int]:
    """The last dims of a group that are steps of equal length along one dim of the source."""
    run = [group[-1]]
    for dim in reversed(group[:-1]):
        parent, step = parents[run[0]]
        if parents[dim] != (parent, step * view[run[0]]):
            break
        run.insert(0, dim)
    return run


def apply_recipes(index: Index, recipes: Mapping[str, TensorRecipe]) -> Index:
    """`index` with the tensors of `made` for its own; groups and losses follow.

    Raises UnsupportedError for a tensor whose sources differ in type, kind or parameter group, MissingStateError for
    one whose sources have not the same states.
    """
    _check_once(index, recipes)
    atoms = {name: _atom(name, own, [index.atoms[source] for source in own.sources]) for name, own in recipes.items()}
    names: dict[str, list[str]] = {}
    for name, own in recipes.items():
        for source in own.sources:
            names.setdefault(source, []).append(name)
    numbers = {name: number for number, group in enumerate(index.groups) for name in group.params}
    for name, own in recipes.items():
        if len({numbers.get(source) for source in own.sources}) > 1:
            raise UnsupportedError(
                f"{name} is made of tensors in different parameter groups of the optimizer: {', '.join(own.sources)}. "
                "Leave the optimizer out (--include '*/weight')"
            )
    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(new for old in group.params for new in names.get(old, ()))))
        for group in index.groups
    )
    lost = {new: loss for old, loss in index.lost.items() for new in names.get(old, ())}
    return replace(index, atoms=atoms, groups=groups, aliases={}, lost=lost)


def _check_once(index: Index, made: Mapping[str, TensorRecipe]) -> None:
    """Prove that patches fill what is made, and take every element of what they take from once, and once only."""
    taken: Counter[str] = Counter()
    problems = []
    for name, own in made.items():
        if sum(patch.local.numel for patch in own.patches) != prod(own.shape) or not own.patches:
            problems.append(f"{name} {list(own.shape)}: {', '.join(own.sources) or 'nothing'} does not fill it")
        for patch in own.patches:
            taken[patch.source] += patch.local.numel
    for source, count in taken.items():
        numel = prod(index.atoms[source].global_shape)
        if count != numel:
            problems.append(f"{source}: {count:,} of its {numel:,} elements would be taken")
    if problems:
        raise UnsupportedError(
            f"expected names and shapes under which every element is kept, and kept once; got\n{listed(problems)}\n"
            "Correct the rules that tensors are joined and split by"
        )


def add_copy(atom: AtomIndex, other: AtomIndex) -> AtomIndex:
    """An atom and another that has to be equal to it, as a further replica. Raises UnsupportedError."""
    states = {}
    for name, state in atom.states.items():
        copy = other.states.get(name)
        if copy is None or (copy.global_shape, copy.dtype) != (state.global_shape, state.dtype):
            raise UnsupportedError(
                f"{atom.name} and {other.name} are the same tensor under two names; they differ in shape or type"
            )
        states[name] = replace(state, fragments=add_copies(state.fragments, copy.fragments))
    return replace(atom, states=states)


def _atom(name: str, made: TensorRecipe, sources: Sequence[AtomIndex]) -> AtomIndex:
    first = sources[0]
    if made.is_rename and first.global_shape == made.shape:
        return replace(first, name=name)
    for own in sources[1:]:
        _check_alike(name, first, own)
    states = dict(first.states)
    for key, state in first.states.items():
        if first.is_count(key):  # one for all
            continue
        if any(own.states[key].global_shape != own.global_shape for own in sources):
            raise UnsupportedError(
                f"{name} is made of {', '.join(made.sources)}, whose {key} has not the shape of the parameter and "
                f"cannot be joined or split with it. Leave it out (--exclude '*/{key}')"
            )
        states[key] = apply_recipe(state, made, {own.name: own.states[key].fragments for own in sources})
    layouts = {own.name: own.layout for own in sources if own.layout.all_axes}
    for own in sources:
        layouts |= own.made_of
    return replace(first, name=name, global_shape=made.shape, states=states, layout=Layout(), made_of=layouts)


def _check_alike(name: str, first: AtomIndex, own: AtomIndex) -> None:
    if own.states.keys() != first.states.keys():
        raise MissingStateError(
            f"{name} is made of {first.name} with the states {', '.join(first.states)} and of {own.name} with "
            f"{', '.join(own.states)}: expected the same of both. Take the weights alone (--include '*/weight')"
        )
    types = [
        (each.kind, each.model_dtype, *(each.states[state].dtype for state in first.states)) for each in (first, own)
    ]
    if types[0] != types[1]:
        shown = (
            ", ".join((each.kind, *(f"{state} {stored.dtype}" for state, stored in each.states.items())))
            for each in (first, own)
        )
        raise UnsupportedError(
            f"{name} is made of {first.name} and {own.name}, which differ in kind or type ({'; '.join(shown)})"
        )


def apply_recipe(state: StateIndex, made: TensorRecipe, sources: Mapping[str, Sequence[Fragment]]) -> StateIndex:
    """`state`, made of the fragments of `sources`, by name."""
    pieces = (map_fragment(patch, piece) for patch in made.patches for piece in sources[patch.source])
    made_of = tuple(piece for piece in pieces if piece is not None)
    return replace(state, global_shape=made.shape, fragments=made_of, layout=None, digests=(), digest_nbytes=0)
