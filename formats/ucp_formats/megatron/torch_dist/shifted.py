"""Masters that differ from the weights; those that megatron-core itself wrote wrongly are left out.

With `fully_reshardable`, megatron-core reads the states of a parameter from a buffer without the padding at the ends of
buckets, but by offsets that count the padding (distrib_optimizer.py, core_v0.16: sharded_param_state_fully_reshardable,
"issue #504"). In a second or later bucket the states are shifted by the padding: their first elements are lost, and
zeros follow at their end. With pipeline parallelism, a tied embedding has a separate bucket. Megatron loads these
states without an error. Version 0.20 fixed the bug. Shifted masters are recognised by content: their first elements
equal later elements of the weight.

    weight   w0 w1 w2 w3 w4 w5 w6 w7        master   w2 w3 w4 w5 w6 w7 0 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ucp.core.index import WEIGHT, AtomIndex, Fragment, Kind, LostStates, StateIndex
from ucp.errors import format_list
from ucp.transfer.probe import Prober
from ucp_formats.megatron.names import EMBEDDING

_PROBED = 256
"""Number of masters to compare; if one of them is shifted, all are compared."""
_WINDOW = 64
"""Elements to compare of each."""
_MOST_SHIFT = 1 << 20
"""Elements that a master may be shifted by, at most: buckets end at a multiple of dp, 128 and 65536 elements."""
_WHY = (
    "megatron-core (0.16 to 0.19) wrote the states of these parameters shifted, and lost part of them: a bug with "
    "--dist-ckpt-optim-fully-reshardable if a bucket is padded. The weights are correct; masters and moments are left "
    "out. Megatron itself resumes from this checkpoint with the wrong states. If the run is still alive, save again "
    "without that flag (or with 0.20, which fixed the bug) and convert that checkpoint. Otherwise resume from an "
    "earlier checkpoint, or take the weights alone (--include '*/weight') and let the run reinitialize the optimizer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMasters:
    """The result of comparing masters with weights."""

    atoms: Mapping[str, AtomIndex]
    """All parameters, without the states that are known to be wrong."""
    notes: tuple[str, ...]
    """Masters that differ from the weights for no known reason."""
    dropped: tuple[str, ...]
    """States that were left out, for people."""
    lost: Mapping[str, LostStates]
    """Parameters whose states were left out, and why."""


def check_masters(atoms: Mapping[str, AtomIndex], *, layout: str, tied: bool) -> CheckedMasters:
    """`atoms`, after a few windows of the masters were compared with the weights.

    `layout`: of the states. `tied`: whether the output layer is the embedding.
    """
    trained = [atom for atom in atoms.values() if atom.kind is Kind.PARAMETER and len(atom.states) > 1]
    samples = {atom.name: atom for atom in trained[:: max(1, len(trained) // _PROBED)]}
    if tied and EMBEDDING in atoms:
        samples[EMBEDDING] = atoms[EMBEDDING]
    with Prober() as prober:
        shifts = _find_shifts(samples.values(), prober)
        if layout != "fully_reshardable":
            shifts = dict.fromkeys(shifts, 0)
        elif any(shifts.values()):
            shifts = _find_shifts(trained, prober)
    shifted = {name: f"by {shift} elements" for name, shift in shifts.items() if shift}
    odd = [name for name, shift in shifts.items() if not shift]
    lines = format_list(f"{name}: {shift}" for name, shift in shifted.items())
    return CheckedMasters(
        atoms={name: _drop_states(atom) if name in shifted else atom for name, atom in atoms.items()},
        notes=(f"the master differs from the weight for {', '.join(odd)}",) if odd else (),
        dropped=(f"{_WHY}:\n{lines}",) if shifted else (),
        lost={name: LostStates(reason=_WHY, detail=shift) for name, shift in shifted.items()},
    )


def _drop_states(atom: AtomIndex) -> AtomIndex:
    """The parameter with the model's own tensor as its only state."""
    weight = atom.states[WEIGHT]
    copies = [fragment for fragment in weight.fragments if fragment.ref.dtype is not weight.dtype]
    first = min(fragment.replica for fragment in copies)
    state = StateIndex(
        dtype=copies[0].ref.dtype,
        global_shape=weight.global_shape,
        fragments=tuple(replace(fragment, replica=fragment.replica - first, derived=False) for fragment in copies),
    )
    return replace(atom, states={WEIGHT: state}, model_dtype=None)


def _find_shifts(atoms: Iterable[AtomIndex], prober: Prober) -> dict[str, int]:
    """Parameters whose master differs from the weight, with the elements it is shifted by; 0 if it is not shifted."""
    shifts = {}
    for atom in atoms:
        weight = atom.states[WEIGHT]
        master = next((fragment for fragment in weight.fragments if fragment.replica == 0), None)
        if master is None or not master.box.numel:
            continue
        copies = (fragment for fragment in weight.fragments if fragment.ref.dtype is not weight.dtype)
        copy = next((fragment for fragment in copies if fragment.box.offsets == master.box.offsets), None)
        if copy is None:
            continue
        row = min(fragment.box.sizes[-1] if fragment.box.sizes else 1 for fragment in (master, copy))
        first = prober.window(master.ref, 0, min(_WINDOW, row), dtype=copy.ref.dtype)
        if first != prober.window(copy.ref, 0, min(_WINDOW, row), dtype=copy.ref.dtype):
            shifts[atom.name] = _find_shift(master, copy, prober)
    return shifts


def _find_shift(master: Fragment, copy: Fragment, prober: Prober) -> int:
    """Elements of the weight that are missing at the front of the master; 0 if it is not shifted."""
    if master.box != copy.box or master.box.numel < 2:
        return 0
    numel, dtype = copy.ref.numel, copy.ref.dtype
    weight = prober.window(copy.ref, 0, min(numel, _MOST_SHIFT + _WINDOW), dtype=dtype)
    for count in (min(_WINDOW, numel // 2), 8):  # a short tensor has few elements left
        first = prober.window(master.ref, 0, min(count, numel), dtype=dtype)
        position = weight.find(first, dtype.itemsize)
        while position > 0 and position % dtype.itemsize:
            position = weight.find(first, position + 1)
        shift = position // dtype.itemsize
        remaining = numel - shift  # these must equal the weight in the middle and at the end, too
        windows = ((low, min(low + _WINDOW, remaining)) for low in (remaining // 2, max(remaining - _WINDOW, 0)))
        matches = (
            prober.window(master.ref, low, high, dtype=dtype)
            == prober.window(copy.ref, low + shift, high + shift, dtype=dtype)
            for low, high in windows
        )
        if position > 0 and any(first) and all(matches):
            return shift
    return 0
