"""Detects moments that are all zero although the optimizer has stepped: the optimizer state was lost.

A run that loads its weights without its optimizer starts with zero moments, but may continue to count steps. The
checkpoint that it saves looks like any other, but a run that resumes from it has silently lost its optimizer state. A
conversion, and `load_into` with an optimizer, refuse such a checkpoint by default:

    error   stop, after reading every element (the default)
    keep    keep the zeros

Usually the first window of the first moment is not zero, and nothing more is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from ucp.contract.optimizer import read_step_counts
from ucp.core.index import STEP, WEIGHT, AtomIndex, Doubt, DoubtKind, Index, Kind, StateIndex
from ucp.core.tensor import DType, Tensor, TensorRef
from ucp.errors import MalformedError, SourceError, format_count, format_list
from ucp.io.elements import viewed
from ucp.transfer.probe import Prober

_PROBED = 256
"""Most parameters that are sampled before every element is read."""
_WINDOW = 64
"""Elements of a window; three are read per piece, at both ends and in the middle."""
_BLOCK = 1 << 20
"""Elements per read when all are read."""


class ZeroMoments(StrEnum):
    """What to do about moments that are all zero although steps were taken."""

    ERROR = "error"
    """Stop."""
    KEEP = "keep"
    """Keep the zeros."""


def detect_first_step(index: Index) -> Index:
    """`index` as of step 0, with a note, if its optimizer is new: its states were created only to be saved.

    `get_state_dict` of torch steps a new optimizer once with gradients of zero, so that its states exist: it counts 1,
    and its moments are zero. A run with such an optimizer that records a later step had lost its optimizer.
    """
    if index.step is not None or not _find_zero_moments(index):
        return index
    try:
        with Prober() as prober:
            is_new = read_step_counts(index, prober) == [1]
    except SourceError:
        return index
    if not is_new:
        return index
    note = (
        "the optimizer has not stepped yet: its step count is 1 with moments of zero, because torch's get_state_dict "
        "steps a new optimizer once to create its states. The checkpoint is read as step 0"
    )
    return replace(index, step=0, notes=(*index.notes, note))


def describe_zero_moments(index: Index) -> str | None:
    """A note about moments that are zero in all sampled windows; None if they are not."""
    if not _find_zero_moments(index):
        return None
    return (
        "the optimizer's moments are zero wherever they were sampled, although steps were taken: the run that "
        "wrote this had lost its optimizer. It is converted only with --zero-moments keep"
    )


def check_moments(index: Index, policy: ZeroMoments, *, selection: Index | None = None) -> None:
    """Prove that some moment is not zero, if there are moments and steps were taken. Raises MalformedError.

    `selection`: the part of `index` that is wanted; if it has no moments, nothing is checked. Otherwise all of `index`
    is judged, not the part: even in a healthy run, experts that saw no token have moments of zero.
    """
    wanted = (selection or index).atoms.values()
    if policy is ZeroMoments.KEEP or not any(True for atom in wanted for _ in iter_moments(atom)):
        return
    atoms = _find_zero_moments(index)
    with Prober() as prober:
        if not atoms or not _are_zero(atoms, prober, read_all=True):
            return
    states = dict.fromkeys(name for atom in atoms for name, _ in iter_moments(atom))
    left_out = " ".join(f"--exclude '*/{name}'" for name in states)
    raise MalformedError(
        f"expected moments that are not zero, as steps were taken; in {index.path} every element of "
        f"{', '.join(states)} is zero for all {len(atoms):,} trained parameters. The run that wrote it had lost its "
        "optimizer state, and a run that resumes from it would not report that. Convert a checkpoint from before that; "
        f"or leave the moments out, so that the optimizer starts anew ({left_out}; ucp.load_into without optimizer); "
        "or, if they are meant to be zero, keep them (--zero-moments keep; zero_moments='keep' in Python)"
    )


def _find_zero_moments(index: Index) -> list[AtomIndex]:
    """All parameters with moments, if a sample of them is zero although the optimizer has stepped; else none."""
    if index.groups and all(group.hyper.get("lr") == 0 for group in index.groups):
        return []
    atoms = [atom for atom in index.atoms.values() if atom.kind is Kind.PARAMETER and any(iter_moments(atom))]
    some = atoms[:: max(1, len(atoms) // _PROBED)]
    with Prober() as prober:
        if not atoms or not _are_zero(some, prober, read_all=False):
            return []
        return atoms if any(_has_stepped(atom, index, prober) for atom in some) else []


def iter_moments(atom: AtomIndex) -> Iterator[tuple[str, StateIndex]]:
    """Iterate over states with a value per element, without the weight."""
    for name, state in atom.states.items():
        is_moment = name not in (WEIGHT, STEP) and state.dtype.is_floating and state.numel > 0
        if is_moment and state.global_shape == atom.global_shape:
            yield name, state


def _has_stepped(atom: AtomIndex, index: Index, prober: Prober) -> bool:
    """Whether the optimizer has stepped a parameter, as recorded with the parameter, its group or the run.

    In a run that took no step, or only skipped ones, it has not, whatever the optimizer counts: some wrappers step once
    without gradients when they are built.
    """
    if index.step is not None and index.step <= index.skipped:
        return False
    if STEP in atom.states:
        ref = atom.states[STEP].fragments[0].ref
        return _is_zero(ref, prober, read_all=True) is not True
    group = next((candidate for candidate in index.groups if atom.name in candidate.params), None)
    step = None if group is None else group.hyper.get(STEP)
    if step is None:
        step = index.step
    return isinstance(step, int | float) and step > 0


def _are_zero(atoms: Iterable[AtomIndex], prober: Prober, *, read_all: bool) -> bool:
    """Whether some moments can be read, and all of these are zero."""
    is_read = False
    for piece in (piece for atom in atoms for _, state in iter_moments(atom) for piece in state.fragments):
        is_zero = _is_zero(piece.ref, prober, read_all=read_all)
        if is_zero is False:
            return False
        is_read = is_read or is_zero is True
    return is_read


def _is_zero(ref: Tensor, prober: Prober, *, read_all: bool) -> bool | None:
    """Whether all elements are zero (without `read_all`: those of three windows); None if they cannot be read."""
    if read_all and isinstance(ref, TensorRef):  # read in the order of the file, so that reads are long
        dims = sorted(range(len(ref.shape)), key=lambda dim: -ref.strides[dim])
        shape, strides = (tuple(sizes[dim] for dim in dims) for sizes in (ref.shape, ref.strides))
        ref = replace(ref, shape=shape, strides=strides)
    step, last = (_BLOCK, 0) if read_all else (_WINDOW, max(ref.numel - _WINDOW, 0))
    starts = range(0, ref.numel, step) if read_all else sorted({0, last // 2, last})
    windows = ((start, min(start + step, ref.numel)) for start in starts)
    try:
        return all(_holds_nothing(prober.window(ref, start, stop), ref.dtype) for start, stop in windows)
    except SourceError:
        return None


def _holds_nothing(data: bytes, dtype: DType) -> bool:
    """Whether every value is zero, positive or negative."""
    if data.count(0) == len(data):
        return True
    if not dtype.is_floating or data.translate(None, b"\0\x80"):  # a byte that no zero has
        return False
    return not viewed(memoryview(data), dtype).any()


_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""States that torch's optimizers keep in the shape of the parameter."""


def find_odd_moments(index: Index) -> Iterator[Doubt]:
    """A doubt that lists moments whose shape is not that of their parameter, if there are any."""
    odd = [
        f"{atom.name}: {name} has the shape {list(state.global_shape)}, the parameter {list(atom.global_shape)}"
        for atom, name, state in index.states()
        if name in _ELEMENTWISE and state.global_shape != atom.global_shape
    ]
    if odd:
        text = (
            f"expected moments in the shapes of their parameters; {index.path} has {format_count(len(odd), 'moment')} "
            f"of another shape:\n{format_list(odd)}\nThe optimizer belongs to another model, or keeps moments in "
            "another form (GaLore projects them). Save it again together with this model, or take the weights alone "
            "(--include '*/weight'; ucp.load_into without optimizer)"
        )
        yield Doubt(kind=DoubtKind.MOMENT_SHAPES, text=text)
