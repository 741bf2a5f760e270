"""The optimizer of a checkpoint as DeepSpeed's flat buffers want it: groups of parameters with their states.

A flat group has one tensor per state and one step count. A parameter that was never stepped has zeros there, as in
DeepSpeed's own buffers; parameters that counted different steps cannot share a group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from struct import unpack

from ucp.contract.rank_extras import Checksums
from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, Kind, check_weights
from ucp.core.names import STEP, WEIGHT
from ucp.core.tensor import InlineTensor, Tensor, TensorRef
from ucp.errors import MissingStateError, UnsupportedError, listed
from ucp_formats.deepspeed.write.optimizer.step_forms import StepForm, from_elsewhere

__all__ = [
    "Group",
    "Scalar",
    "check_flat",
    "inline_number",
    "is_optimized",
    "optimizer_groups",
    "stored_dtype",
    "without_groups",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A count that a flat group keeps once, such as `step`."""

    param: str
    """Parameter whose value is taken; all others of the group agree with it."""
    number: int | float | None
    """The value, where it was a Python number; None for a 0-d tensor."""
    certain: bool
    """Whether the others are known to agree, by values in the index or recorded checksums."""


@dataclass(frozen=True, kw_only=True)  # no slots: what all of its parameters share is asked for by every rank, and kept
class Group:
    """One parameter group."""

    params: tuple[AtomIndex, ...]
    """Parameters that the optimizer steps, in its order: trained, with at least one element."""
    hyper: Mapping[str, object]
    """Everything in the group but its parameters."""
    elementwise: Mapping[str, DType]
    """States with a value per element, and the type to store each flat tensor of them in; never the weight."""
    scalars: tuple[str, ...]
    """States with one value per parameter."""
    checksums: Checksums = field(repr=False)
    """Recorded checksums of the source, to compare counts that are tensors."""
    steps: StepForm = StepForm.FOUND
    """How the files keep its steps."""
    from_elsewhere: bool = False
    """Whether its hyper-parameters are those of another framework."""

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and elements of each parameter."""
        return tuple((atom.name, atom.states[WEIGHT].numel) for atom in self.params)

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """All states but the weight, in the order in which a parameter has them."""
        known = {*self.elementwise, *self.scalars}
        ordered = [name for atom in self.params for name in atom.states if name in known]
        return tuple(dict.fromkeys(ordered))

    def never_stepped(self) -> tuple[str, ...]:
        """Parameters that lack some state which others of the group have."""
        wanted = {*self.elementwise, *self.scalars}
        return tuple(atom.name for atom in self.params if not wanted <= atom.states.keys())

    def weight_dtype(self, dtypes: Mapping[str, str]) -> DType:
        """Type of a flat tensor of the weights."""
        return _common(stored_dtype(atom, WEIGHT, dtypes) for atom in self.params)

    @cached_property
    def _shared(self) -> dict[str, Scalar]:
        return {}

    def scalar(self, state: str, params: Iterable[str] | None = None) -> Scalar:
        """The value of a count for `params` (all, if not given). Raises UnsupportedError when they differ."""
        if params is not None:
            return self._scalar(state, set(params))
        if state not in self._shared:
            self._shared[state] = self._scalar(state, {atom.name for atom in self.params})
        return self._shared[state]

    def _scalar(self, state: str, chosen: Container[str]) -> Scalar:
        holders = [atom for atom in self.params if state in atom.states and atom.name in chosen]
        holders = holders or [atom for atom in self.params if state in atom.states]
        first = holders[0].states[state].fragments[0].ref
        same = [(atom, self._same(first, atom.states[state].fragments[0].ref)) for atom in holders]
        if any(answer is False for _, answer in same):
            counts = [f"{atom.name}: {_shown(atom.states[state].fragments[0].ref)}" for atom, _ in same]
            raise UnsupportedError(
                f"expected one {state} for all parameters of an optimizer group, as stages 1 to 3 keep it; got\n"
                f"{listed(counts)}\nwrite stage-0 files (--to deepspeed --topology zero=0): one per parameter"
            )
        certain = all(answer for _, answer in same)
        return Scalar(param=holders[0].name, number=inline_number(holders[0], state), certain=certain)

    def _same(self, a: Tensor, b: Tensor) -> bool | None:
        """Whether two counts are equal; None where that is not known before their bytes are read."""
        if isinstance(a, TensorRef) and isinstance(b, TensorRef):
            return self.checksums.same_bytes(a, b)
        if isinstance(a, InlineTensor) and isinstance(b, InlineTensor):
            return a == b
        return None


def inline_number(atom: AtomIndex, state: str) -> int | float | None:
    """Value of a 0-d state that was a Python number, else None."""
    ref = atom.states[state].fragments[0].ref
    if not isinstance(ref, InlineTensor) or ref.shape:
        return None
    if ref.dtype is DType.BOOL:
        return bool(ref.data[0])
    if ref.dtype.is_floating:
        return float(unpack("<d", ref.data)[0]) if ref.dtype is DType.FLOAT64 else None
    return int.from_bytes(ref.data, "little", signed=True)


def _shown(ref: Tensor) -> str:
    """A count for a message."""
    if isinstance(ref, TensorRef):
        return f"a tensor at {ref.offset} in {ref.path}"
    if ref.dtype is DType.FLOAT32:
        return f"{unpack('<f', ref.data)[0]:g}"
    return str(int.from_bytes(ref.data, "little", signed=True))


def is_optimized(atom: AtomIndex) -> bool:
    """Whether DeepSpeed's optimizers own the parameter (`is_optimized_parameter`, runtime/utils.py, 0.19.8)."""
    return atom.kind is Kind.PARAMETER and 0 not in atom.global_shape


def stored_dtype(atom: AtomIndex, state: str, dtypes: Mapping[str, str]) -> DType:
    """Type to store a state in: the one asked for, else its own."""
    own = atom.states[state].dtype
    return DType(dtypes[state]) if state in dtypes and own.is_floating else own


def without_groups(index: Index) -> str:
    """What a source without optimizer groups holds: weights only, or states that no optimizer takes without groups."""
    states = dict.fromkeys(name for _, name, _ in index.states() if name != WEIGHT)
    return f"has {', '.join(states)}, and no optimizer groups to take them with" if states else "holds weights only"


def optimizer_groups(index: Index, dtypes: Mapping[str, str], steps: StepForm = StepForm.FOUND) -> tuple[Group, ...]:
    """Groups of the source, their parameters narrowed to those an optimizer owns. Groups may come out empty.

    Raises MissingStateError for a trained parameter without a group, or without a weight.
    """
    _check_complete(index)
    checksums = Checksums(index.records)
    counts = {name for atom, name, _ in index.states() if is_optimized(atom) and atom.is_count(name)}
    groups = []
    for group in index.groups:
        params = [index.atoms[name] for name in group.params if is_optimized(index.atoms[name])]
        hyper = {key: value for key, value in group.hyper.items() if key != "params"}
        elementwise, scalars = _states(params, counts, dtypes)
        groups.append(
            Group(
                params=tuple(params),
                hyper=hyper,
                elementwise=elementwise,
                scalars=scalars,
                checksums=checksums,
                steps=_form(params, steps),
                from_elsewhere=from_elsewhere(index),
            )
        )
    return tuple(groups)


def check_flat(groups: Iterable[Group]) -> None:
    """Raise UnsupportedError for states that are neither one number nor of the shape of their parameter."""
    odd = [
        f"{atom.name}/{name}: {list(atom.states[name].global_shape)} for a parameter of {list(atom.global_shape)}"
        for group in groups
        for atom in group.params
        for name in group.elementwise
        if name in atom.states and atom.states[name].global_shape != atom.global_shape
    ]
    if odd:
        raise UnsupportedError(
            f"a flat buffer of DeepSpeed holds states of the shape of their parameters only; got\n{listed(odd)}\n"
            "write stage-0 files (--to deepspeed --topology zero=0)"
        )


def _check_complete(index: Index) -> None:
    grouped = {name for group in index.groups for name in group.params}
    lost = [atom.name for atom in index.atoms.values() if is_optimized(atom) and atom.name not in grouped]
    if lost:
        whole = f"{listed(lost)}\nconvert from a checkpoint with the whole optimizer"
        raise MissingStateError(
            f"expected every trained parameter in an optimizer group; {index.path} has {len(lost)} in none:\n"
            + ("\n".join(index.reasons(lost)) or whole)
        )
    check_weights(index)


def _states(
    params: Sequence[AtomIndex], counts: Container[str], dtypes: Mapping[str, str]
) -> tuple[dict[str, DType], tuple[str, ...]]:
    """Element-wise states with their types, and counts.

    `counts`: states that are one number for a parameter anywhere; for one with a single element it looks the same.
    """
    names = dict.fromkeys(state for atom in params for state in atom.states if state != WEIGHT)
    elementwise: dict[str, DType] = {}
    scalars: list[str] = []
    for name in names:
        holders = [atom for atom in params if name in atom.states]
        if name in counts and all(atom.states[name].numel == 1 for atom in holders):
            scalars.append(name)
            continue
        elementwise[name] = _common(stored_dtype(atom, name, dtypes) for atom in holders)
    return elementwise, tuple(scalars)


def _form(params: Sequence[AtomIndex], wanted: StepForm) -> StepForm:
    """Form in which steps can be written: a tensor, whose value is not known yet, only becomes one of another float."""
    holders = [atom for atom in params if STEP in atom.states]
    if all(inline_number(atom, STEP) is not None for atom in holders):
        return wanted
    floating = all(atom.states[STEP].dtype.is_floating for atom in holders)
    return wanted if wanted is StepForm.FLOATING and floating else StepForm.FOUND


def _common(dtypes: Iterable[DType]) -> DType:
    """The one type, or the narrowest that holds all values of several floating types."""
    seen = set(dtypes)
    if len(seen) == 1:
        return seen.pop()
    return DType.FLOAT64 if DType.FLOAT64 in seen else DType.FLOAT32
