"""Atoms out of the weights and optimizer states of a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import Layout
from ucp.core.names import STEP, WEIGHT
from ucp.core.union import Union
from ucp_formats.megatron.torch_dist.groups import DistGroups
from ucp_formats.megatron.torch_dist.names import DistNames
from ucp_formats.megatron.torch_dist.states.layouts import DistStates, state_dtype
from ucp_formats.megatron.torch_dist.unstack import Whole

__all__ = ["EMBEDDING", "OUTPUT", "atom_of", "tied_output"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def atom_of(whole: Whole, states: DistStates, groups: DistGroups, names: DistNames, layout: Layout) -> AtomIndex:
    """The atom of one parameter or buffer: the master is its weight where there is one."""
    made = {
        key: StateIndex(dtype=state_dtype(pieces), global_shape=whole.shape, fragments=tuple(pieces))
        for key, pieces in states.fragments.get(whole.name, {}).items()
    }
    if whole.name in groups.steps and made.keys() - {WEIGHT}:
        made[STEP] = groups.steps[whole.name]
    pieces = tuple(Fragment(box=piece.box, ref=piece.ref) for piece in whole.pieces)
    model = StateIndex(dtype=whole.dtype, global_shape=whole.shape, fragments=pieces)
    kind = _kind(whole.name, states, names)
    return Union().atom(whole.name, kind=kind, layout=layout, states=made, model=model)


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
