"""An index under other names: tensors joined, split, transposed and permuted, by reference.

A patch says which elements of a tensor that is to be made are which elements of one that is there. Patches are followed
one after another (`Patch.after`) down to the stored bytes (`arranged`); none of them moves any.

>>> turned = Patch(Box((0, 0), (3, 2)), "w", (0, 0), (1, 0), (1, 1))  # w is [2, 3]
>>> turned.after(Patch(Box((0, 1), (2, 2)), "columns", (0, 0), (0, 1), (1, 1)))
Patch(box=Box(offsets=(1, 0), sizes=(2, 2)), source='columns', start=(0, 0), dims=(1, 0), steps=(1, 1))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

from ucp.core.fragments import Fragment, with_copies
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box
from ucp.core.slices import starts_of
from ucp.core.tensor import InlineTensor, Tensor
from ucp.errors import MissingStateError, UnsupportedError, listed

__all__ = ["Made", "Patch", "arranged", "patched", "rearranged", "with_copy"]


class Patch(NamedTuple):
    """Elements of one tensor that are elements of another."""

    box: Box
    """Where they are in the tensor that is made."""
    source: str
    """Name of the tensor that they are taken from."""
    start: tuple[int, ...]
    """Coordinates there of the first of them."""
    dims: tuple[int | None, ...]
    """Per dim of the box, the dim of the source that it runs along; None for a dim of one element, along none."""
    steps: tuple[int, ...]
    """Elements to step along that dim."""

    def within(self, box: Box) -> Patch | None:
        """The part whose elements lie in `box` of the source; None where none does."""
        lows, highs = [0] * len(self.dims), list(self.box.sizes)
        along = {dim: at for at, dim in enumerate(self.dims) if dim is not None}
        for dim, (first, low, stop) in enumerate(zip(self.start, box.offsets, box.stops, strict=True)):
            at = along.get(dim)
            if at is None:
                if not low <= first < stop:
                    return None
                continue
            step = self.steps[at]
            lows[at] = max(0, -((first - low) // step))
            highs[at] = min(highs[at], -((first - stop) // step))
            if lows[at] >= highs[at]:
                return None
        start = list(self.start)
        for dim, at in along.items():
            start[dim] += lows[at] * self.steps[at]
        sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
        offsets = tuple(map(int.__add__, self.box.offsets, lows))
        return self._replace(box=Box(offsets, sizes), start=tuple(start))

    def after(self, inner: Patch) -> Patch | None:
        """The same elements taken from where `inner` takes those of this patch's source; None where it has none."""
        own = self.within(inner.box)
        if own is None:
            return None
        start = list(inner.start)
        for at, first, dim, step in zip(own.start, inner.box.offsets, inner.dims, inner.steps, strict=True):
            if dim is not None:
                start[dim] += (at - first) * step
        ways = [(None, 1) if dim is None else (inner.dims[dim], inner.steps[dim]) for dim in own.dims]
        return Patch(
            box=own.box,
            source=inner.source,
            start=tuple(start),
            dims=tuple(dim for dim, _ in ways),
            steps=tuple(step * further for step, (_, further) in zip(own.steps, ways, strict=True)),
        )

    def of(self, fragment: Fragment) -> Fragment | None:
        """The elements that a fragment of the source stores, as a fragment of the tensor that is made."""
        own = self.within(fragment.box)
        if own is None:
            return None
        ref = fragment.ref
        first = sum(
            (at - low) * step for at, low, step in zip(own.start, fragment.box.offsets, ref.strides, strict=True)
        )
        steps = tuple(
            0 if dim is None else ref.strides[dim] * step for dim, step in zip(own.dims, own.steps, strict=True)
        )
        return replace(fragment, box=own.box, ref=_picked(ref, first, own.box.sizes, steps))


class Made(NamedTuple):
    """A tensor that is to be made of others."""

    shape: tuple[int, ...]
    """Elements per dim."""
    patches: tuple[Patch, ...]
    """They tile it."""

    @classmethod
    def whole(cls, source: str, shape: tuple[int, ...]) -> Made:
        """A tensor as it is."""
        return cls(shape, (_whole_patch(source, shape),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it is made of."""
        return tuple(dict.fromkeys(patch.source for patch in self.patches))

    @property
    def renames(self) -> bool:
        """Whether it is one other tensor as it is, under another name at most, as far as patches tell."""
        return len(self.patches) == 1 and self.patches[0] == _whole_patch(self.patches[0].source, self.shape)


def _whole_patch(source: str, shape: tuple[int, ...]) -> Patch:
    """All of a tensor, as it is."""
    return Patch(Box.whole(shape), source, (0,) * len(shape), tuple(range(len(shape))), (1,) * len(shape))


def rearranged(source: str, shape: Sequence[int], view: Sequence[int], order: Sequence[int], rank: int) -> Made:
    """A tensor looked at in the shape `view`, its dims then put in `order`; the first merge, so that `rank` are left.

    Raises ValueError where the dims of `view` do not divide those of the tensor.

    >>> made = rearranged("w", (4, 8), (2, 2, 8), (1, 0, 2), 2)  # rows 0, 2, 1, 3
    >>> made.shape, [(str(patch.box), patch.start, patch.steps) for patch in made.patches]
    ((4, 8), [('[0:2, 0:8]', (0, 0), (2, 1)), ('[2:4, 0:8]', (1, 0), (2, 1))])
    """
    if not view:
        return Made.whole(source, ())
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
        patches.append(Patch(Box(offsets, sizes), source, tuple(start), dims, steps))
    return Made(tuple(prod(view[dim] for dim in group) for group in groups), tuple(patches))


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


def arranged(index: Index, made: Mapping[str, Made]) -> Index:
    """`index` with the tensors of `made` for its own; groups and losses follow.

    Raises UnsupportedError for a tensor whose sources differ in type, kind or parameter group, MissingStateError for
    one whose sources have not the same states.
    """
    _check_once(index, made)
    atoms = {name: _atom(name, own, [index.atoms[source] for source in own.sources]) for name, own in made.items()}
    names: dict[str, list[str]] = {}
    for name, own in made.items():
        for source in own.sources:
            names.setdefault(source, []).append(name)
    _check_groups(index, made)
    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(new for old in group.params for new in names.get(old, ()))))
        for group in index.groups
    )
    lost = {new: loss for old, loss in index.lost.items() for new in names.get(old, ())}
    return replace(index, atoms=atoms, groups=groups, aliases={}, lost=lost)


def _check_once(index: Index, made: Mapping[str, Made]) -> None:
    """Prove that patches fill what is made, and take every element of what they take from once, and once only."""
    taken: Counter[str] = Counter()
    problems = []
    for name, own in made.items():
        if sum(patch.box.numel for patch in own.patches) != prod(own.shape) or not own.patches:
            problems.append(f"{name} {list(own.shape)}: {', '.join(own.sources) or 'nothing'} does not fill it")
        for patch in own.patches:
            taken[patch.source] += patch.box.numel
    for source, count in taken.items():
        numel = prod(index.atoms[source].global_shape)
        if count != numel:
            problems.append(f"{source}: {count:,} of its {numel:,} elements would be taken")
    if problems:
        raise UnsupportedError(
            f"expected names and shapes under which every element is kept, and kept once; got\n{listed(problems)}\n"
            "Correct the rules that tensors are joined and split by"
        )


def with_copy(atom: AtomIndex, other: AtomIndex) -> AtomIndex:
    """An atom and another that has to be equal to it, as a further replica. Raises UnsupportedError."""
    states = {}
    for name, state in atom.states.items():
        copy = other.states.get(name)
        if copy is None or (copy.global_shape, copy.dtype) != (state.global_shape, state.dtype):
            raise UnsupportedError(
                f"{atom.name} and {other.name} are the same tensor under two names; they differ in shape or type"
            )
        states[name] = replace(state, fragments=with_copies(state.fragments, copy.fragments))
    return replace(atom, states=states)


def _check_groups(index: Index, made: Mapping[str, Made]) -> None:
    numbers = {name: number for number, group in enumerate(index.groups) for name in group.params}
    for name, own in made.items():
        if len({numbers.get(source) for source in own.sources}) > 1:
            raise UnsupportedError(
                f"{name} is made of tensors in different parameter groups of the optimizer: {', '.join(own.sources)}. "
                "Leave the optimizer out (--include '*/weight')"
            )


def _atom(name: str, made: Made, sources: Sequence[AtomIndex]) -> AtomIndex:
    first = sources[0]
    if made.renames and first.global_shape == made.shape:
        return replace(first, name=name)
    for own in sources[1:]:
        _check_alike(name, first, own)
    states = {state: _state(name, state, made, sources) for state in first.states}
    layouts = {own.name: own.layout for own in sources if own.layout.every}
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
        raise UnsupportedError(
            f"{name} is made of {first.name} and {own.name}, which differ in kind or type "
            f"({_told(first)}; {_told(own)})"
        )


def _told(atom: AtomIndex) -> str:
    return ", ".join((atom.kind, *(f"{name} {state.dtype}" for name, state in atom.states.items())))


def _state(param: str, name: str, made: Made, sources: Sequence[AtomIndex]) -> StateIndex:
    first = sources[0]
    state = first.states[name]
    if first.is_count(name):  # one for all
        return state
    if any(own.states[name].global_shape != own.global_shape for own in sources):
        raise UnsupportedError(
            f"{param} is made of {', '.join(made.sources)}, whose {name} has not the shape of the parameter and cannot "
            f"be joined or split with it. Leave it out (--exclude '*/{name}')"
        )
    by_name = {own.name: own.states[name].fragments for own in sources}
    return patched(state, made, by_name)


def patched(state: StateIndex, made: Made, sources: Mapping[str, Sequence[Fragment]]) -> StateIndex:
    """`state`, made of the fragments of `sources`, by name."""
    pieces = (patch.of(own) for patch in made.patches for own in sources[patch.source])
    kept = tuple(piece for piece in pieces if piece is not None)
    return replace(state, global_shape=made.shape, fragments=kept, layout=None, digests=(), digest_nbytes=0)


def _picked(ref: Tensor, first: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Elements of a stored tensor from `first` on."""
    if isinstance(ref, InlineTensor) and ref.repeats:
        return replace(ref, shape=sizes)
    if isinstance(ref, InlineTensor):
        item = ref.dtype.itemsize
        places = (at * item for at in starts_of(sizes, strides, first=first))
        return replace(ref, data=b"".join(ref.data[at : at + item] for at in places), shape=sizes)
    if ref.codec:
        skipped = first * ref.dtype.itemsize
        return replace(ref, codec_start=ref.codec_start + skipped, shape=sizes, strides=strides)
    return ref.strided(first, sizes, strides)
