"""An index under other names: tensors joined, split, transposed and permuted, by reference.

A recipe describes a new tensor by regions of other tensors (`RegionPair`, whose `source` is a name). `apply_recipe`
maps the regions to stored bytes; it moves no data.
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
from ucp.errors import MissingStateError, UnsupportedError, format_list


class TensorRecipe(NamedTuple):
    """How to make a tensor from others."""

    shape: tuple[int, ...]
    """Elements per dim."""
    patches: tuple[RegionPair, ...]
    """Regions of other tensors that it is made of; they tile it."""

    @classmethod
    def identity(cls, source: str, shape: tuple[int, ...]) -> TensorRecipe:
        """The recipe for a tensor that does not change."""
        return cls(shape, (RegionPair(Box.full(shape), Box.full(shape), source=source),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it is made of."""
        return tuple(dict.fromkeys(patch.source for patch in self.patches))

    @property
    def is_rename(self) -> bool:
        """Whether it is one other tensor, unchanged but for its name, as far as the patches show."""
        return len(self.patches) == 1 and self == TensorRecipe.identity(self.patches[0].source, self.shape)


def permute_view(
    source: str, shape: Sequence[int], view: Sequence[int], order: Sequence[int], rank: int
) -> TensorRecipe:
    """A tensor viewed in the shape `view`, then permuted to `order`; its first dims are merged so that `rank` remain.

    Raises ValueError if the dims of `view` do not divide those of the tensor.

    >>> made = permute_view("w", (4, 8), (2, 2, 8), (1, 0, 2), 2)  # rows 0, 2, 1, 3
    >>> made.shape, [(str(patch.local), str(patch.global_box), patch.steps) for patch in made.patches]
    ((4, 8), [('[0:2, 0:8]', '[0:3, 0:8]', (2, 1)), ('[2:4, 0:8]', '[1:4, 0:8]', (2, 1))])
    """
    if not view:
        return TensorRecipe.identity(source, ())
    parents = _parents(shape, view)
    lead = len(view) - rank + 1
    groups = [list(order[:lead]), *([dim] for dim in order[lead:])]
    runs = [_run(group, view, parents) for group in groups]
    used_dims: set[int] = set()
    for position, run in reversed(list(enumerate(runs))):  # at most one dim of a box runs along a dim of the source
        parent = parents[run[0]][0]
        runs[position] = [] if parent in used_dims else run
        used_dims.add(parent)
    loose = [dim for group, run in zip(groups, runs, strict=True) for dim in group[: len(group) - len(run)]]
    weights = {
        dim: prod(view[inner_dim] for inner_dim in group[position + 1 :])
        for group in groups
        for position, dim in enumerate(group)
    }
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
    """Per dim of a view: the dim of the tensor that it is part of, and the step along that dim, in elements."""
    parents: list[tuple[int, int]] = []
    stop = 0
    for dim, length in enumerate(shape):
        first, size = stop, 1
        while stop < len(view) and (size < length or stop == first or dim + 1 == len(shape)):
            size *= view[stop]
            stop += 1
        if size != length or stop == first:
            raise ValueError(f"dims of the view {list(view)} do not divide those of a tensor of shape {list(shape)}")
        parents += [(dim, prod(view[view_dim + 1 : stop])) for view_dim in range(first, stop)]
    return parents


def _run(group: Sequence[int], view: Sequence[int], parents: Sequence[tuple[int, int]]) -> list[int]:
    """The last dims of a group that together run evenly along one dim of the source."""
    run = [group[-1]]
    for dim in reversed(group[:-1]):
        parent, step = parents[run[0]]
        if parents[dim] != (parent, step * view[run[0]]):
            break
        run.insert(0, dim)
    return run


def apply_recipes(index: Index, recipes: Mapping[str, TensorRecipe]) -> Index:
    """`index` with the tensors that `recipes` make, by name; parameter groups and lost states follow.

    Raises UnsupportedError for a tensor whose sources differ in type, kind or parameter group, MissingStateError for
    one whose sources have different states.
    """
    _check_once(index, recipes)
    atoms = {
        name: _atom(name, recipe, [index.atoms[source] for source in recipe.sources])
        for name, recipe in recipes.items()
    }
    names: dict[str, list[str]] = {}
    for name, recipe in recipes.items():
        for source in recipe.sources:
            names.setdefault(source, []).append(name)
    numbers = {name: number for number, group in enumerate(index.groups) for name in group.params}
    for name, recipe in recipes.items():
        if len({numbers.get(source) for source in recipe.sources}) > 1:
            raise UnsupportedError(
                f"{name} is made of tensors in different parameter groups of the optimizer: "
                f"{', '.join(recipe.sources)}. Leave the optimizer out (--include '*/weight')"
            )
    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(new for old in group.params for new in names.get(old, ()))))
        for group in index.groups
    )
    lost = {new: loss for old, loss in index.lost.items() for new in names.get(old, ())}
    return replace(index, atoms=atoms, groups=groups, aliases={}, lost=lost)


def _check_once(index: Index, recipes: Mapping[str, TensorRecipe]) -> None:
    """Prove that patches fill every new tensor, and take every element of each source exactly once."""
    counts: Counter[str] = Counter()
    problems = []
    for name, recipe in recipes.items():
        if sum(patch.local.numel for patch in recipe.patches) != prod(recipe.shape) or not recipe.patches:
            problems.append(f"{name} {list(recipe.shape)}: {', '.join(recipe.sources) or 'nothing'} does not fill it")
        for patch in recipe.patches:
            counts[patch.source] += patch.local.numel
    for source, count in counts.items():
        numel = prod(index.atoms[source].global_shape)
        if count != numel:
            problems.append(f"{source}: {count:,} of its {numel:,} elements would be taken")
    if problems:
        raise UnsupportedError(
            "expected rules that keep every element exactly once; "
            f"got\n{format_list(problems)}\nCorrect the rules by which tensors are joined and split"
        )


def add_copy(atom: AtomIndex, other: AtomIndex) -> AtomIndex:
    """An atom, with another that has to be equal to it as a further replica. Raises UnsupportedError."""
    states = {}
    for name, state in atom.states.items():
        copy = other.states.get(name)
        if copy is None or (copy.global_shape, copy.dtype) != (state.global_shape, state.dtype):
            raise UnsupportedError(
                f"{atom.name} and {other.name} should be one tensor under two names, but differ in shape or type"
            )
        states[name] = replace(state, fragments=add_copies(state.fragments, copy.fragments))
    return replace(atom, states=states)


def keep_rows(atom: AtomIndex, rows: int) -> AtomIndex:
    """An atom without its rows from `rows` on, in every state that has its shape."""
    recipe = TensorRecipe.identity(atom.name, (rows, *atom.global_shape[1:]))
    states = {
        name: apply_recipe(state, recipe, {atom.name: state.fragments})
        if state.global_shape == atom.global_shape
        else state
        for name, state in atom.states.items()
    }
    return replace(atom, global_shape=recipe.shape, states=states, layout=Layout())


def _atom(name: str, recipe: TensorRecipe, sources: Sequence[AtomIndex]) -> AtomIndex:
    first = sources[0]
    if recipe.is_rename and first.global_shape == recipe.shape:
        return replace(first, name=name)
    for source in sources[1:]:
        _check_alike(name, first, source)
    states = dict(first.states)
    for key, state in first.states.items():
        if first.is_count(key):  # one count for all
            continue
        if any(source.states[key].global_shape != source.global_shape for source in sources):
            raise UnsupportedError(
                f"{name} is made of {', '.join(recipe.sources)}, whose {key} has another shape than the parameter "
                f"and cannot be joined or split with it. Leave it out (--exclude '*/{key}')"
            )
        states[key] = apply_recipe(state, recipe, {source.name: source.states[key].fragments for source in sources})
    layouts = {source.name: source.layout for source in sources if source.layout.all_axes}
    for source in sources:
        layouts |= source.made_of
    return replace(first, name=name, global_shape=recipe.shape, states=states, layout=Layout(), made_of=layouts)


def _check_alike(name: str, first: AtomIndex, other: AtomIndex) -> None:
    if other.states.keys() != first.states.keys():
        raise MissingStateError(
            f"{name} is made of {first.name} with the states {', '.join(first.states)} and of {other.name} with "
            f"{', '.join(other.states)}: expected the same of both. Take the weights alone (--include '*/weight')"
        )
    types = [
        (atom.kind, atom.model_dtype, *(atom.states[state].dtype for state in first.states)) for atom in (first, other)
    ]
    if types[0] != types[1]:
        shown = (
            ", ".join((atom.kind, *(f"{state} {stored.dtype}" for state, stored in atom.states.items())))
            for atom in (first, other)
        )
        raise UnsupportedError(
            f"{name} is made of {first.name} and {other.name}, which differ in kind or type ({'; '.join(shown)})"
        )


def apply_recipe(state: StateIndex, recipe: TensorRecipe, sources: Mapping[str, Sequence[Fragment]]) -> StateIndex:
    """`state`, made by `recipe`. `sources`: name to the fragments of that tensor."""
    pieces = (map_fragment(patch, piece) for patch in recipe.patches for piece in sources[patch.source])
    made_of = tuple(piece for piece in pieces if piece is not None)
    unproved = replace(state, layout=None, digests=(), digest_nbytes=0, checksum="")
    return replace(unproved, global_shape=recipe.shape, fragments=made_of)
