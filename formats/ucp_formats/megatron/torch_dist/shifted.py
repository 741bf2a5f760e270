"""Masters that are not the weights, and among them those that megatron-core itself wrote wrongly, which are left out.

When it saves `fully_reshardable`, it takes the states of a parameter out of a buffer without the padding at the ends of
buckets by offsets that count it (distrib_optimizer.py, core_v0.16: sharded_param_state_fully_reshardable, "issue
#504"). Those of a second or later bucket lie so many elements too early in the file, what belongs at their front is
lost, and zeros stand at their end. A tied embedding of a pipeline has a bucket of its own. Megatron loads such states
without a word. Since 0.20 it counts rightly. They are known by their contents: the first elements of the master are
elements of the weight, further on.

    weight   w0 w1 w2 w3 w4 w5 w6 w7        master   w2 w3 w4 w5 w6 w7 0 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ucp.core.index import WEIGHT, AtomIndex, Fragment, Kind, LostStates, StateIndex
from ucp.errors import listed
from ucp.transfer.probe import Prober
from ucp_formats.megatron.names import EMBEDDING

_PROBED = 256
"""Masters looked at, at most, unless one of them is shifted."""
_WINDOW = 64
"""Elements looked at of each."""
_MOST_SHIFT = 1 << 20
"""Elements that a master may be shifted by: buckets end at a multiple of dp, 128 and 65536 elements."""
_WHY = (
    "megatron-core (0.16 to 0.19) wrote the states of these parameters shifted, as it does with "
    "--dist-ckpt-optim-fully-reshardable where a bucket is padded, and lost part of them. The weights are sound; "
    "masters and moments are left out. Megatron itself resumes from this checkpoint with the wrong ones. While the run "
    "is alive, save again without that flag (0.20 needs no such care), and convert that; else go on from an earlier "
    "checkpoint, or take the weights (--include '*/weight') and start the optimizer anew"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMasters:
    """What a look at the masters gave."""

    atoms: Mapping[str, AtomIndex]
    """All parameters, without the states that are known to be wrong."""
    notes: tuple[str, ...]
    """Masters that are not the weights, and nothing says why."""
    dropped: tuple[str, ...]
    """States that were left out, for people."""
    lost: Mapping[str, LostStates]
    """Every parameter whose states were left out, and why."""


def check_masters(atoms: Mapping[str, AtomIndex], *, layout: str, tied: bool) -> CheckedMasters:
    """`atoms`, after a few windows of the masters were compared with the weights.

    `layout`: of the states. `tied`: whether the output layer is the embedding.
    """
    trained = [atom for atom in atoms.values() if atom.kind is Kind.PARAMETER and len(atom.states) > 1]
    some = {atom.name: atom for atom in trained[:: max(1, len(trained) // _PROBED)]}
    if tied and EMBEDDING in atoms:
        some[EMBEDDING] = atoms[EMBEDDING]
    with Prober() as prober:
        found = _shifts(some, prober)
        if layout == "fully_reshardable" and any(found.values()):
            found = _shifts({atom.name: atom for atom in trained}, prober)
        elif layout != "fully_reshardable":
            found = dict.fromkeys(found, 0)
    shifted = {name: shift for name, shift in found.items() if shift}
    odd = [name for name, shift in found.items() if not shift]
    lines = listed(f"{name}: by {shift} elements" for name, shift in shifted.items())
    return CheckedMasters(
        atoms={name: _weight_alone(atom) if name in shifted else atom for name, atom in atoms.items()},
        notes=(f"the master is not the weight for {', '.join(odd)}",) if odd else (),
        dropped=(f"{_WHY}:\n{lines}",) if shifted else (),
        lost={name: LostStates(reason=_WHY, detail=f"by {shift} elements") for name, shift in shifted.items()},
    )


def _weight_alone(atom: AtomIndex) -> AtomIndex:
    """The parameter as the model holds it."""
    weight = atom.states[WEIGHT]
    pieces = [piece for piece in weight.fragments if piece.ref.dtype is not weight.dtype]
    first = min(piece.replica for piece in pieces)
    own = StateIndex(
        dtype=pieces[0].ref.dtype,
        global_shape=weight.global_shape,
        fragments=tuple(replace(piece, replica=piece.replica - first, derived=False) for piece in pieces),
    )
    return replace(atom, states={WEIGHT: own}, model_dtype=None)


def _shifts(atoms: Mapping[str, AtomIndex], prober: Prober) -> dict[str, int]:
    """Names of those whose master is not the weight, and by how many elements it is shifted; 0 if it is not."""
    shifts = {}
    for atom in atoms.values():
        weight = atom.states[WEIGHT]
        master = next((piece for piece in weight.fragments if piece.replica == 0), None)
        if master is None or not master.box.numel:
            continue
        copies = (piece for piece in weight.fragments if piece.ref.dtype is not weight.dtype)
        copy = next((piece for piece in copies if piece.box.offsets == master.box.offsets), None)
        if copy is None:
            continue
        count = min(_WINDOW, *(own.box.sizes[-1] if own.box.sizes else 1 for own in (master, copy)))  # of the first row
        first = prober.window(master.ref, 0, count, dtype=copy.ref.dtype)
        if first != prober.window(copy.ref, 0, count, dtype=copy.ref.dtype):
            shifts[atom.name] = _shift(master, copy, prober)
    return shifts


def _shift(master: Fragment, copy: Fragment, prober: Prober) -> int:
    """Elements of the weight that are missing at the front of the master; 0 if that is not what it is."""
    if master.box != copy.box or master.box.numel < 2:
        return 0
    numel, item = copy.ref.numel, copy.ref.dtype.itemsize
    held = prober.window(copy.ref, 0, min(numel, _MOST_SHIFT + _WINDOW), dtype=copy.ref.dtype)
    for count in (min(_WINDOW, numel // 2), 8):  # a short tensor may be shifted so far that little of it is left
        wanted = prober.window(master.ref, 0, min(count, numel), dtype=copy.ref.dtype)
        at = held.find(wanted, item)
        while at > 0 and at % item:
            at = held.find(wanted, at + 1)
        shift = at // item
        left = numel - shift  # what is left of the master is the weight in the middle and at its end too
        ends = ((low, min(low + _WINDOW, left)) for low in (left // 2, max(left - _WINDOW, 0)))
        goes_on = (
            prober.window(master.ref, low, high, dtype=copy.ref.dtype)
            == prober.window(copy.ref, low + shift, high + shift, dtype=copy.ref.dtype)
            for low, high in ends
        )
        if at > 0 and any(wanted) and all(goes_on):
            return shift
    return 0
