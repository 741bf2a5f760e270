"""Atoms under the names of a target that joins them: what was written is compared with the source so.

A target with names of its own (Megatron's) may make one tensor of several atoms (query, key and value). Which stretches
of which atoms fill it is what its plan says; here the source's pieces are brought into the joined tensor, by reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.region import Box, RegionPair, compose
from ucp.core.tensor import InlineTensor, Tensor

__all__ = ["Stretch", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Where an atom lies in a tensor of the target."""

    atom: str
    """Name of the atom."""
    whole: Box
    """Elements of the tensor."""
    local: Box
    """The same elements in the atom."""


def joined(index: Index, made: Mapping[str, Sequence[Stretch]]) -> Index:
    """`index` with the atoms of `made` under its names; those that nothing is made of keep theirs.

    Groups and tied names are left out: they go by the names of the source.
    """
    used = {own.atom for stretches in made.values() for own in stretches}
    atoms = {
        name: _joined(name, [(index.atoms[own.atom], own) for own in stretches])
        for name, stretches in made.items()
        if all(own.atom in index.atoms for own in stretches)
    }
    atoms |= {name: atom for name, atom in index.atoms.items() if name not in used}
    return replace(index, atoms=atoms, groups=(), aliases={})


def _joined(name: str, parts: Sequence[tuple[AtomIndex, Stretch]]) -> AtomIndex:
    first = parts[0][0]
    shape = tuple(map(max, zip(*(own.whole.stops for _, own in parts), strict=True)))
    states: dict[str, StateIndex] = {}
    for state, held in first.states.items():
        if held.global_shape != first.global_shape:  # a count: one for all
            states[state] = held
        elif all(state in atom.states for atom, _ in parts):
            pieces = tuple(piece for atom, own in parts for piece in _moved(atom.states[state], own))
            states[state] = replace(held, global_shape=shape, fragments=pieces, digests=(), digest_nbytes=0)
    return replace(first, name=name, global_shape=shape, states=states)


def _moved(state: StateIndex, own: Stretch) -> Iterator[Fragment]:
    """Pieces of the atom that lie in the stretch, as pieces of the joined tensor."""
    for piece in state.fragments:
        stored = RegionPair(piece.box, Box.whole(piece.box.sizes))
        for pair in compose((RegionPair(own.whole, own.local),), (stored,)):
            yield replace(piece, box=pair.whole, ref=_cut(piece.ref, pair.local))


def _cut(ref: Tensor, box: Box) -> Tensor:
    """The elements of a stored tensor in `box`."""
    if box == Box.whole(ref.shape):
        return ref
    if isinstance(ref, InlineTensor) and ref.repeats:
        return replace(ref, shape=box.sizes)
    if isinstance(ref, InlineTensor):
        item = ref.dtype.itemsize
        rows = (Box((*at, box.offsets[-1]), (*(1 for _ in at), box.sizes[-1])) for at in _outer(box))
        starts = (row.flat_start(ref.shape) * item for row in rows)
        data = b"".join(ref.data[start : start + box.sizes[-1] * item] for start in starts)
        return replace(ref, data=data, shape=box.sizes)
    skipped = ref.dtype.itemsize * sum(n * step for n, step in zip(box.offsets, ref.strides, strict=True))
    if ref.codec:
        return replace(ref, codec_start=ref.codec_start + skipped, shape=box.sizes)
    return replace(ref, offset=ref.offset + skipped, shape=box.sizes)


def _outer(box: Box) -> Iterator[tuple[int, ...]]:
    """Offsets of the rows of a box, in all dims but the last."""
    found: list[tuple[int, ...]] = [()]
    for low, count in zip(box.offsets[:-1], box.sizes[:-1], strict=True):
        found = [(*head, low + n) for head in found for n in range(count)]
    yield from found
