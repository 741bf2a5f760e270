"""Atoms out of the weights and optimizer states of a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import Layout
from ucp.core.names import STEP, WEIGHT
from ucp_formats.megatron.torch_dist.groups import DistGroups
from ucp_formats.megatron.torch_dist.names import DistNames
from ucp_formats.megatron.torch_dist.states.layouts import DistStates, state_dtype
from ucp_formats.megatron.torch_dist.unstack import Whole

__all__ = ["EMBEDDING", "OUTPUT", "atom_of", "tied_output"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def atom_of(whole: Whole, states: DistStates, groups: DistGroups, names: DistNames, layout: Layout) -> AtomIndex:
    """The atom of one parameter or buffer: the master is its weight where there is one."""
    own = states.fragments.get(whole.name, {})
    made = {key: _state(whole, pieces) for key, pieces in own.items() if key != WEIGHT}
    weight = _weight(whole, own.get(WEIGHT, ()))
    if whole.name in groups.steps and made:
        made[STEP] = groups.steps[whole.name]
    return AtomIndex(
        name=whole.name,
        global_shape=whole.shape,
        kind=_kind(whole.name, states, names),
        states={WEIGHT: weight, **made},
        model_dtype=whole.dtype if whole.dtype is not weight.dtype else None,
        layout=layout,
    )


def _state(whole: Whole, pieces: Iterable[Fragment]) -> StateIndex:
    fragments = tuple(pieces)
    return StateIndex(dtype=state_dtype(fragments), global_shape=whole.shape, fragments=fragments)


def _weight(whole: Whole, master: Iterable[Fragment]) -> StateIndex:
    """The master where there is one, and the model's own tensor as a copy of it."""
    taken = tuple(master)
    replica = 1 + max((piece.replica for piece in taken), default=-1)
    derived = bool(taken)
    model = (Fragment(box=piece.box, ref=piece.ref, replica=replica, derived=derived) for piece in whole.pieces)
    dtype = state_dtype(taken) if taken else whole.dtype
    return StateIndex(dtype=dtype, global_shape=whole.shape, fragments=(*taken, *model))


def _kind(name: str, states: DistStates, names: DistNames) -> Kind:
    if name in states.fragments:
        return Kind.PARAMETER
    if names.is_buffer(name):
        return Kind.BUFFER
    return Kind.FROZEN if states.fragments else Kind.PARAMETER


def tied_output(atoms: Mapping[str, AtomIndex], *, untied: bool | None) -> dict[str, str]:
    """The output layer that is the embedding, where the checkpoint holds it once.

    `untied`: whether the arguments say that it has a weight of its own.
    """
    return {} if EMBEDDING not in atoms or OUTPUT in atoms or untied else {OUTPUT: EMBEDDING}
