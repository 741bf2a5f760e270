"""Atoms out of the weights and optimizer states of a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ucp.atom import AtomIndex, Kind, StateIndex
from ucp.dtypes import DType
from ucp.fragment import Fragment
from ucp.io.probe import Prober
from ucp.state import STEP, WEIGHT
from ucp_formats.megatron.dist_groups import DistGroups
from ucp_formats.megatron.dist_names import DistNames
from ucp_formats.megatron.dist_pieces import Whole
from ucp_formats.megatron.dist_states import DistStates, state_dtype

__all__ = ["EMBEDDING", "atom_of", "suspicious_states", "tied_output"]

_PROBED = 256
"""Moments looked at for being all zero, at most."""
EMBEDDING = "embedding.word_embeddings.weight"
_SHIFTED = (
    ": megatron-core (0.16.1) writes the states of parameters of a second bucket shifted when it saves "
    "fully_reshardable and the first is padded, and loses part of them; a tied embedding of a pipeline has a bucket of "
    "its own. "
    "--drift cannot settle this: save again without --dist-ckpt-optim-fully-reshardable"
)
_WINDOW = 64
"""Elements looked at of each."""


def atom_of(whole: Whole, states: DistStates, groups: DistGroups, names: DistNames) -> AtomIndex:
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
    )


def _state(whole: Whole, pieces: Iterable[Fragment]) -> StateIndex:
    fragments = tuple(pieces)
    return StateIndex(dtype=state_dtype(fragments), global_shape=whole.shape, fragments=fragments)


def _weight(whole: Whole, master: Iterable[Fragment]) -> StateIndex:
    """The master where there is one, and the model's own tensor as a copy of it."""
    taken = tuple(master)
    replica = 1 + max((piece.replica for piece in taken), default=-1)
    model = (Fragment(box=piece.box, ref=piece.ref, replica=replica) for piece in whole.pieces)
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
    output = "output_layer.weight"
    return {} if EMBEDDING not in atoms or output in atoms or untied else {output: EMBEDDING}


def suspicious_states(atoms: Mapping[str, AtomIndex], *, layout: str, tied: bool) -> Iterator[str]:
    """What is wrong with optimizer states, as far as a few windows of some of them show; for notes.

    `layout`: of the states. `tied`: whether the output layer is the embedding.
    """
    trained = [atom for atom in atoms.values() if atom.kind is Kind.PARAMETER and len(atom.states) > 1]
    some = trained[:: max(1, len(trained) // _PROBED)]
    with Prober() as prober:
        if some and all(STEP in atom.states for atom in some) and not any(_has_moments(atom, prober) for atom in some):
            yield (
                "the moments are zero wherever they were looked at, although steps were taken: the run that wrote this "
                "had not loaded its optimizer"
            )
        wrong = [atom.name for atom in (*some, *_embedding(atoms, tied=tied)) if _differs(atom.states[WEIGHT], prober)]
    if wrong:
        cause = _SHIFTED if layout == "fully_reshardable" else ""
        yield f"the master is not the weight for {', '.join(dict.fromkeys(wrong))}{cause}"


def _embedding(atoms: Mapping[str, AtomIndex], *, tied: bool) -> tuple[AtomIndex, ...]:
    return (atoms[EMBEDDING],) if tied and EMBEDDING in atoms else ()


def _has_moments(atom: AtomIndex, prober: Prober) -> bool:
    moments = [state for key, state in atom.states.items() if key not in (WEIGHT, STEP)]
    return any(any(_first(state.fragments[0], prober)) for state in moments if state.numel)


def _differs(weight: StateIndex, prober: Prober) -> bool:
    """Whether the first elements of the master, cast, are not those of the weight that begins at the same place."""
    master = next((piece for piece in weight.fragments if piece.replica == 0), None)
    if master is None or not master.box.numel:
        return False
    copies = (piece for piece in weight.fragments if piece.ref.dtype is not weight.dtype)
    copy = next((piece for piece in copies if piece.box.offsets == master.box.offsets), None)
    if copy is None:
        return False
    count = min(_row(master), _row(copy), _WINDOW)
    return _first(master, prober, count, copy.ref.dtype) != _first(copy, prober, count, copy.ref.dtype)


def _row(piece: Fragment) -> int:
    """Elements of the first row of a piece."""
    return piece.box.sizes[-1] if piece.box.sizes else 1


def _first(piece: Fragment, prober: Prober, count: int = _WINDOW, dtype: DType | None = None) -> bytes:
    return prober.window(piece.ref, 0, min(piece.ref.numel, count), dtype=dtype)
