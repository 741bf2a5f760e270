"""What a live model wants of a checkpoint, and everything in which the two do not fit. Names and shapes only.

>>> from ucp.core.topology import Topology
>>> live = LiveTensor(names=("w",), shape=(2,), dtype=DType.FLOAT32)
>>> index = Index(path="ckpt", format="ucp", evidence=(), producer="", topology=Topology(), step=None, atoms={})
>>> findings = Findings()
>>> match_tensors([live], index, findings=findings), findings.missing
({}, ['w'])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.names import STEP, WEIGHT
from ucp.core.slices import Slice, whole_slice
from ucp.errors import LoadError, counted, listed

__all__ = [
    "Findings",
    "LiveParam",
    "LiveTensor",
    "LoadItem",
    "match_states",
    "match_tensors",
    "want_weights",
]

_MOST_WAYS = 3
"""Ways to rename that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or buffer of the model."""

    names: tuple[str, ...]
    """Names it goes by, the first of them its own; several when it is tied."""
    shape: tuple[int, ...]
    """Elements per dim."""
    dtype: DType
    """Element type."""

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveParam:
    """A parameter that the optimizer steps."""

    name: str
    """Name in the model."""
    keeps: Mapping[str, DType | None] | None
    """States that the optimizer keeps of it, None where it is a Python number; None when that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadItem:
    """A state to bring into the model or its optimizer."""

    name: str
    """Parameter or buffer, as the model calls it."""
    slice: Slice
    """What of it this rank holds, as the checkpoint calls it."""
    source: StateIndex
    """Where it lies."""

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.slice.state

    @property
    def cost(self) -> float:
        """Source bytes to read for a byte of the slice."""
        return self.source.dtype.itemsize / self.slice.dtype.itemsize


@dataclass(slots=True)
class Findings:
    """What was found while matching; each list is one kind of thing, one line each."""

    missing: list[str] = field(default_factory=list)
    """Tensors of the model that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Atoms of the checkpoint that the model lacks."""
    problems: list[str] = field(default_factory=list)
    """Whatever else does not fit."""
    hints: list[str] = field(default_factory=list)
    """What may cure it."""
    notes: list[str] = field(default_factory=list)
    """What is right, and worth knowing."""
    casts: Counter[str] = field(default_factory=Counter)
    """Changes of dtype, and how many tensors each concerns."""

    def check(self, path: str) -> None:
        """Raise one LoadError that lists everything that does not fit."""
        found = self._told()
        if found:
            cure = "; ".join([*self.hints, "strict=False loads what fits and reports the rest"])
            raise LoadError(f"the model and the checkpoint {path} do not fit, nothing was loaded:\n{found}\n{cure}")

    def nothing(self, path: str) -> LoadError:
        """The error for a checkpoint of which not one tensor goes into the model."""
        what = "fits the model" if self.problems else "has a name of the model"
        cure = self.hints or ["`ucp inspect` lists the names and shapes there"]
        return LoadError(f"nothing in {path} {what}, nothing was loaded:\n{self._told()}\n{'; '.join(cure)}")

    def _told(self) -> str:
        """Everything that does not fit, kind by kind."""
        lists = {
            ("tensor of the model is not", "tensors of the model are not", "in the checkpoint"): self.missing,
            ("tensor of the checkpoint is not", "tensors of the checkpoint are not", "in the model"): self.unexpected,
            ("thing does not fit", "things do not fit", ""): self.problems,
        }
        found = [
            f"{counted(len(lines), one, several)} {where}".rstrip() + f":\n{listed(lines)}"
            for (one, several, where), lines in lists.items()
            if lines
        ]
        return "\n".join(found)


def match_tensors(
    tensors: Sequence[LiveTensor],
    index: Index,
    *,
    rename: Callable[[str], str] | None = None,
    findings: Findings,
) -> dict[str, str]:
    """Atom of every tensor of the model that has one of its shape and a type that can be cast to its own.

    `rename`: from a name in the model to the name in the checkpoint.
    """
    called = {name: rename(name) if rename else name for own in tensors for name in own.names}
    matched: dict[str, str] = {}
    for own in tensors:
        held = [name for name in _atoms_of(own, called, index) if name in index.atoms]
        if not held and 0 in own.shape:
            findings.notes.append(f"{own.name} has no elements, and is not in the checkpoint")
            continue
        if not held:
            findings.missing.append(_told(own.name, called[own.name]))
            continue
        if len(held) > 1:
            findings.problems.append(
                f"{' and '.join(own.names)} are one tensor in the model, and {len(held)} in the checkpoint: "
                f"{' and '.join(held)}. Untie them, or load from a checkpoint where they are tied"
            )
        matched[own.name] = held[0]
    used = set(matched.values())
    findings.unexpected.extend(name for name in index.atoms if name not in used)
    if findings.missing and findings.unexpected:
        _hint_names([own.name for own in tensors], index, findings, is_any_held=bool(matched))
    _note_untied(matched, findings)
    fitting = [own for own in tensors if own.name in matched and _fits(own, matched, index, findings)]
    return {own.name: matched[own.name] for own in fitting}


def _atoms_of(own: LiveTensor, called: Mapping[str, str], index: Index) -> list[str]:
    names = (called[name] for name in own.names)
    return list(dict.fromkeys(index.aliases.get(name, name) for name in names))


def _told(name: str, called: str) -> str:
    return name if name == called else f"{name} (renamed {called})"


def _hint_names(names: Sequence[str], index: Index, findings: Findings, *, is_any_held: bool) -> None:
    """Name the prefixes by which all names may differ, if there are any; else say how to map them where none agrees."""
    held = {*index.atoms, *index.aliases}
    ways: list[str] = []
    first = names[0]
    longer = [name.removesuffix(first) for name in held if name.endswith(f".{first}")]
    for prefix in sorted(longer):
        if all(f"{prefix}{name}" in held for name in names):
            ways.append(f"rename=lambda name: {prefix!r} + name")
    shorter = [first.removesuffix(name) for name in held if first.endswith(f".{name}")]
    for prefix in sorted(shorter):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in held for name in names):
            ways.append(f"rename=lambda name: name.removeprefix({prefix!r})")
    if not ways and not is_any_held:
        ways.append("rename=FUNCTION, from a name in the model to the name in the checkpoint")
    if ways:
        findings.hints.append(f"pass {', or '.join(ways[:_MOST_WAYS])}")


def _note_untied(matched: Mapping[str, str], findings: Findings) -> None:
    takers: dict[str, list[str]] = {}
    for name, atom in matched.items():
        takers.setdefault(atom, []).append(name)
    for atom, names in takers.items():
        if len(names) > 1:
            findings.notes.append(f"{' and '.join(names)} are loaded from one atom, {atom}: they were tied when saved")


def _fits(own: LiveTensor, matched: Mapping[str, str], index: Index, findings: Findings) -> bool:
    atom = index.atoms[matched[own.name]]
    if WEIGHT not in atom.states:
        findings.missing.append(f"{own.name}: the checkpoint has only {', '.join(atom.states)} of it")
        return False
    if atom.global_shape != own.shape:
        findings.problems.append(
            f"{own.name} has shape {list(own.shape)} in the model and {list(atom.global_shape)} in the checkpoint"
        )
        return False
    stored = atom.states[WEIGHT].dtype
    if not _castable(stored, own.dtype):
        findings.problems.append(f"{own.name} is {own.dtype} in the model and {stored} in the checkpoint")
        return False
    return True


def _castable(stored: DType, wanted: DType) -> bool:
    return stored is wanted or (stored.is_floating and wanted.is_floating)


def want_weights(
    tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, *, findings: Findings
) -> list[LoadItem]:
    """The weight of every matched tensor, in the type that the model has it in."""
    wanted = []
    for own in tensors:
        if own.name in matched:
            atom = index.atoms[matched[own.name]]
            wanted.append(_want(own.name, atom, WEIGHT, own.dtype, findings))
    return wanted


def _want(name: str, atom: AtomIndex, state: str, dtype: DType, findings: Findings) -> LoadItem:
    source = atom.states[state]
    if source.dtype is not dtype:
        findings.casts[f"{state}: {source.dtype} to {dtype}"] += 1
    return LoadItem(name=name, slice=whole_slice(atom.name, state, source, dtype=dtype), source=source)


def match_states(
    params: Sequence[LiveParam], matched: Mapping[str, str], index: Index, *, findings: Findings
) -> tuple[list[LoadItem], list[str]]:
    """Optimizer states to bring, and the parameters that the saved optimizer had never stepped.

    A count is brought in the type it is stored in, whatever number the optimizer then makes of it.
    """
    known = {name for group in index.groups for name in group.params}
    lost = [matched[own.name] for own in params if own.name in matched]
    findings.problems.extend(index.reasons(name for name in lost if name in index.lost and not index.lost[name].chosen))
    wanted: list[LoadItem] = []
    fresh: list[str] = []
    for param in params:
        if param.name not in matched:
            continue
        atom = index.atoms[matched[param.name]]
        if not _held(atom):
            if atom.name not in known and 0 not in atom.global_shape:
                findings.problems.append(f"{param.name} is optimised, and was not when the checkpoint was saved")
            fresh.append(param.name)
        else:
            wanted.extend(_states(param, atom, findings))
    stepped = [name for name in fresh if matched[name] in known and 0 not in index.atoms[matched[name]].global_shape]
    if stepped and not wanted and index.step != 0:
        findings.problems.append(
            "the checkpoint holds no optimizer states: the optimizer would start afresh. Load without optimizer="
        )
    _check_left_over(params, matched, index, findings)
    return wanted, fresh


def _held(atom: AtomIndex) -> list[str]:
    return [state for state in atom.states if state != WEIGHT]


def _states(param: LiveParam, atom: AtomIndex, findings: Findings) -> list[LoadItem]:
    held = _held(atom)
    keeps = dict.fromkeys(held) if param.keeps is None else dict(param.keeps)
    lacking = [state for state in keeps if state not in held]
    surplus = [state for state in held if state not in keeps and state != STEP]
    if lacking or surplus:
        findings.problems.append(
            f"{param.name}: the optimizer keeps {', '.join(keeps) or 'no states'}; the checkpoint has {', '.join(held)}"
        )
        return []
    if STEP not in keeps and STEP in held:
        note = "step counts are left out: the optimizer keeps none"
        findings.notes.extend([note] if note not in findings.notes else [])
    wanted = []
    for state, dtype in keeps.items():
        stored = atom.states[state].dtype
        taken = stored if dtype is None or atom.is_count(state) else dtype
        if _castable(stored, taken):
            wanted.append(_want(param.name, atom, state, taken, findings))
        else:
            findings.problems.append(f"{param.name}/{state} is {taken} in the optimizer, {stored} in the checkpoint")
    return wanted


def _check_left_over(params: Sequence[LiveParam], matched: Mapping[str, str], index: Index, findings: Findings) -> None:
    """Find states that no parameter of the optimizer takes."""
    stepped = {matched[param.name] for param in params if param.name in matched}
    present = set(matched.values())
    for atom in index.atoms.values():
        if atom.name in present - stepped and _held(atom):
            findings.problems.append(
                f"{atom.name}: the checkpoint has {', '.join(_held(atom))}, and the optimizer does not step it"
            )
