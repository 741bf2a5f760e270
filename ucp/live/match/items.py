"""Match the tensors of a model and its optimizer with a checkpoint: what to load, and everything that does not fit.

>>> from ucp.core.topology import Topology
>>> live = LiveTensor(names=("w",), dtype=DType.FLOAT32, part=LivePart.full((2,)))
>>> index = Index(path="ckpt", format="ucp", evidence=(), producer="", topology=Topology(), step=None, atoms={})
>>> findings = Findings()
>>> match_tensors([live], index, findings=findings), findings.missing
({}, ['w'])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.core.index import STEP, WEIGHT, AtomIndex, Index
from ucp.core.target import full_slice
from ucp.core.tensor import DType
from ucp.errors import LoadError, format_count, format_list
from ucp.live.parts import LiveParam, LivePart, LiveTensor, LoadItem, is_memory

_MOST_RENAMES = 3
"""Functions for `rename=` that a message proposes."""


@dataclass(slots=True)
class Findings:
    """What matching found; each list is one kind of finding, one line each."""

    missing: list[str] = field(default_factory=list)
    """Tensors of the model that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Atoms of the checkpoint that the model lacks."""
    problems: list[str] = field(default_factory=list)
    """Whatever else does not fit."""
    hints: list[str] = field(default_factory=list)
    """What may help."""
    notes: list[str] = field(default_factory=list)
    """What fits, but the user should know."""
    casts: Counter[str] = field(default_factory=Counter)
    """Changes of dtype, and how many tensors each concerns."""

    def check(self, path: str) -> None:
        """Raise one LoadError that lists everything that does not fit."""
        if text := self._describe():
            remedy = "; ".join([*self.hints, "strict=False loads what fits and reports the rest"])
            raise LoadError(f"the model and the checkpoint {path} do not fit; nothing was loaded:\n{text}\n{remedy}")

    def make_no_match_error(self, path: str) -> LoadError:
        """The error for a checkpoint from which no tensor can be loaded into the model."""
        what = "fits the model" if self.problems else "has a name of the model"
        remedies = self.hints or ["`ucp inspect` lists its names and shapes"]
        text = f"{self._describe()}\n{'; '.join(remedies)}"
        return LoadError(f"no tensor of {path} {what}; nothing was loaded:\n{text}")

    def _describe(self) -> str:
        """Everything that does not fit, kind by kind."""
        kinds = (
            ("tensor of the model is not", "tensors of the model are not", " in the checkpoint", self.missing),
            ("tensor of the checkpoint is not", "tensors of the checkpoint are not", " in the model", self.unexpected),
            ("thing does not fit", "things do not fit", "", self.problems),
        )
        return "\n".join(
            f"{format_count(len(lines), one, many)}{where}:\n{format_list(lines)}"
            for one, many, where, lines in kinds
            if lines
        )


def match_tensors(
    tensors: Sequence[LiveTensor],
    index: Index,
    *,
    rename: Callable[[str], str] | None = None,
    findings: Findings,
) -> dict[str, str]:
    """Tensor of the model to the atom with one of its names, if there is one.

    `rename`: from a name in the model to the name in the checkpoint.
    """
    matched: dict[str, str] = {}
    for tensor in tensors:
        atoms = find_atoms(tensor, index, rename)
        if not atoms and 0 in tensor.part.local_shape:
            findings.notes.append(f"{tensor.name} has no elements, and is not in the checkpoint")
            continue
        if not atoms:
            name = tensor.global_names[0]
            renamed = rename(name) if rename else name
            in_model = f" ({name} in the whole model)" if name != tensor.name else ""
            findings.missing.append(tensor.name + in_model + (f" (renamed {renamed})" if renamed != name else ""))
            continue
        if len(atoms) > 1:
            findings.problems.append(
                f"{' and '.join(tensor.names)} are one tensor in the model, and {len(atoms)} in the checkpoint: "
                f"{' and '.join(atoms)}. Untie them, or load from a checkpoint where they are tied"
            )
        matched[tensor.name] = atoms[0]
    users: dict[str, list[LiveTensor]] = {}
    for tensor in tensors:
        if tensor.name in matched:
            users.setdefault(matched[tensor.name], []).append(tensor)
    for atom, several in users.items():
        if len(several) > 1:
            are_replicas = len({tensor.global_names for tensor in several}) == 1
            tied = "they were tied when saved" if atom in index.aliases.values() else "`rename` gives both its name"
            names = " and ".join(tensor.name for tensor in several)
            why = "replicas of it" if are_replicas else tied
            findings.notes.append(f"{names} are loaded from one tensor of the checkpoint, {atom}: {why}")
    return matched


def find_atoms(tensor: LiveTensor, index: Index, rename: Callable[[str], str] | None) -> list[str]:
    """Atoms with the names of a tensor; several if the model ties names that the checkpoint does not."""
    names = (rename(name) if rename else name for name in tensor.global_names)
    return [name for name in dict.fromkeys(index.aliases.get(name, name) for name in names) if name in index.atoms]


def filter_fitting(
    tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, findings: Findings
) -> dict[str, str]:
    """Those of `matched` whose atoms have the shape of the tensor, and a dtype that can be cast to its dtype."""
    fitting = {}
    for tensor in tensors:
        if tensor.name in matched and _fits(tensor, index.atoms[matched[tensor.name]], findings):
            fitting[tensor.name] = matched[tensor.name]
    return fitting


def _fits(tensor: LiveTensor, atom: AtomIndex, findings: Findings) -> bool:
    part = tensor.part
    if WEIGHT not in atom.states:
        findings.missing.append(f"{tensor.name}: the checkpoint has only {', '.join(atom.states)} of it")
        return False
    try:
        part.to_slice(atom.name, WEIGHT, atom.global_shape, tensor.dtype)
    except ValueError as error:
        findings.problems.append(f"{tensor.name} {error} in the checkpoint{part.hint and f'; {part.hint}'}")
        return False
    if part.unassigned:
        findings.unexpected.append(f"{atom.name}: {part.unassigned}")
    if part.global_shape is not None and part.global_shape != atom.global_shape:
        stored, rows = atom.global_shape[0], part.global_shape[0]
        effect = (
            f"rows {stored} to {rows - 1} are zeros" if rows > stored else f"rows {rows} to {stored - 1} are not loaded"
        )
        findings.notes.append(
            f"{tensor.name} has {rows} rows in the model, with padding, and {stored} in the checkpoint: {effect}, in "
            "every state"
        )
    dtype = atom.states[WEIGHT].dtype
    if not is_castable(dtype, tensor.dtype):
        findings.problems.append(f"{tensor.name} is {tensor.dtype} in the model and {dtype} in the checkpoint")
        return False
    return True


def find_unexpected(tensors: Sequence[LiveTensor], used: Collection[str], index: Index, findings: Findings) -> None:
    """Find atoms that no rank's model has, and propose functions for `rename=`. `used`: atoms that some model has."""
    findings.unexpected.extend(name for name in index.atoms if name not in used)
    if not findings.missing or not findings.unexpected:
        return
    names = [tensor.global_names[0] for tensor in tensors]
    stored = {*index.atoms, *index.aliases}
    first = names[0]
    added = sorted(name.removesuffix(first) for name in stored if name.endswith(f".{first}"))
    removed = sorted(first.removesuffix(name) for name in stored if first.endswith(f".{name}"))
    renames = [
        *(
            f"rename=lambda name: {prefix!r} + name"
            for prefix in added
            if all(prefix + name in stored for name in names)
        ),
        *(
            f"rename=lambda name: name.removeprefix({prefix!r})"
            for prefix in removed
            if all(name.startswith(prefix) and name.removeprefix(prefix) in stored for name in names)
        ),
    ]
    if not (renames or used or findings.hints):
        renames.append("rename=FUNCTION, from a name in the model to the name in the checkpoint")
    if renames:
        findings.hints.append(f"pass {', or '.join(renames[:_MOST_RENAMES])}")


def plan_weights(
    tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, *, findings: Findings
) -> list[LoadItem]:
    """The weight of every matched tensor, in the dtype of the model."""
    items = []
    for tensor in tensors:
        if tensor.name in matched:
            atom = index.atoms[matched[tensor.name]]
            note_cast(atom, WEIGHT, tensor.dtype, findings)
            items.append(make_item(tensor.name, atom, WEIGHT, tensor.dtype, tensor.part))
    return items


def match_states(
    params: Sequence[LiveParam],
    parts: Mapping[str, LivePart],
    matched: Mapping[str, str],
    index: Index,
    *,
    optimized: Collection[str],
    findings: Findings,
) -> tuple[list[LoadItem], list[str]]:
    """Optimizer states to load, and the parameters that the saved optimizer had never stepped.

    `parts`: part of each tensor that the model holds. `optimized`: atoms that the optimizer of any rank steps. A count
    is loaded in its stored dtype; the optimizer converts it.
    """
    grouped = {name for group in index.groups for name in group.params}
    has_optimizer = bool(grouped) or index.unnamed is not None or any(map(_list_states, index.atoms.values()))
    params = [param for param in params if param.name in matched]
    lost = [name for param in params if (name := matched[param.name]) in index.lost and not index.lost[name].is_chosen]
    findings.problems.extend(index.loss_reasons(lost))
    findings.problems.extend([] if index.unnamed is None else [index.unnamed.reason])
    items: list[LoadItem] = []
    without_states: list[LiveParam] = []
    for param in params:
        atom, part = index.atoms[matched[param.name]], param.part or parts[param.name]
        if param.keeps and (dtype := param.keeps.get(WEIGHT)):  # even if the checkpoint has only the weight
            note_cast(atom, WEIGHT, dtype, findings)
            items.append(make_item(param.name, atom, WEIGHT, dtype, part, is_optimizer_state=True))
        if _list_states(atom):
            items.extend(_plan_states(param, part, atom, findings))
            continue
        is_new = index.unnamed is None and has_optimizer and atom.name not in grouped
        if is_new and not param.is_frozen and 0 not in atom.global_shape:
            findings.problems.append(f"{param.name} is optimised now, but was not when the checkpoint was saved")
        without_states.append(param)
    filled = [param for param in without_states if 0 not in index.atoms[matched[param.name]].global_shape]
    # without those of optimizers that keep no states, such as SGD without momentum
    stateful = [param for param in filled if param.keeps is None or param.keeps.keys() - {WEIGHT}]
    has_states = any(item.state != WEIGHT for item in items)
    has_states |= any(atom.is_cast for atom in index.atoms.values())  # a replay brings the others
    if not has_optimizer and filled:
        remedy = "leave optimizer= out (an engine of DeepSpeed: optimizer=False), or pass strict=False to start with"
        findings.problems.append(
            "the snapshot in memory holds no optimizer states: it was taken without the optimizer. Pass it to "
            f"Snapshots.take; now, load without snapshots=, {remedy} a new optimizer"
            if _is_from_memory(index)
            else f"the checkpoint holds weights only, and no optimizer states: {remedy} a new optimizer"
        )
    if any(matched[param.name] in grouped for param in stateful) and not has_states and index.step != 0:
        findings.problems.append(
            "the checkpoint holds no optimizer states: the optimizer would start afresh. Load without optimizer="
        )
    present = set(matched.values())
    for atom in index.atoms.values():
        if atom.name in present and atom.name not in optimized and _list_states(atom) and 0 not in atom.global_shape:
            findings.problems.append(
                f"{atom.name}: the checkpoint has {', '.join(_list_states(atom))}, but the optimizer does not step it"
            )
    return items, [param.name for param in without_states]


def note_rounded(weights: Sequence[LoadItem], params: Sequence[LiveParam], findings: Findings) -> None:
    """Note how many weights the optimizer steps in a narrower dtype than was saved; with master weights, none."""
    names = {param.name for param in params}
    rounded = [
        item for item in weights if item.name in names and item.slice.dtype.itemsize < item.source.dtype.itemsize
    ]
    if rounded:
        findings.notes.append(
            f"{format_count(len(rounded), 'weight is', 'weights are')} stepped in {rounded[0].slice.dtype}, but saved "
            f"in {rounded[0].source.dtype}: without master weights, training continues from rounded weights"
        )


def _is_from_memory(index: Index) -> bool:
    return any(is_memory(fragment.path) for _, _, state in index.states() for fragment in state.fragments)


def _list_states(atom: AtomIndex) -> list[str]:
    return [state for state in atom.states if state != WEIGHT]


def _plan_states(param: LiveParam, part: LivePart, atom: AtomIndex, findings: Findings) -> list[LoadItem]:
    saved = _list_states(atom)
    keeps = dict.fromkeys(saved) if param.keeps is None else {**param.keeps}
    keeps.pop(WEIGHT, None)
    if any(state not in saved for state in keeps) or any(state not in keeps and state != STEP for state in saved):
        findings.problems.append(
            f"{param.name}: the optimizer keeps {', '.join(keeps) or 'no states'}; the checkpoint has "
            f"{', '.join(saved)}"
        )
        return []
    note = "step counts are dropped: the optimizer keeps none"
    if STEP not in keeps and STEP in saved and note not in findings.notes:
        findings.notes.append(note)
    items = []
    for state, live_dtype in keeps.items():
        stored = atom.states[state].dtype
        dtype = stored if live_dtype is None or atom.is_count(state) else live_dtype
        if is_castable(stored, dtype):
            note_cast(atom, state, dtype, findings)
            state_part = param.apart.get(state, part)
            items.append(make_item(param.name, atom, state, dtype, state_part, is_optimizer_state=True))
        else:
            findings.problems.append(f"{param.name}/{state} is {dtype} in the optimizer, {stored} in the checkpoint")
    return items


def is_castable(stored: DType, dtype: DType) -> bool:
    """Whether a state of one dtype can be loaded into a tensor of another."""
    return stored is dtype or (stored.is_floating and dtype.is_floating)


def make_item(
    name: str, atom: AtomIndex, state: str, dtype: DType, part: LivePart, *, is_optimizer_state: bool = False
) -> LoadItem:
    """Item that loads `part` of a state; a count, or a state not shaped like its parameter, is whole on every rank."""
    source = atom.states[state]
    is_full = part.is_full or source.global_shape != atom.global_shape or atom.is_count(state)
    piece = (
        full_slice(atom.name, state, source, dtype=dtype)
        if is_full
        else part.to_slice(atom.name, state, source.global_shape, dtype)
    )
    return LoadItem(name=name, slice=piece, source=source, is_optimizer_state=is_optimizer_state)


def note_cast(atom: AtomIndex, state: str, dtype: DType, findings: Findings) -> None:
    """Count a change of dtype."""
    stored = atom.states[state].dtype
    if stored is not dtype:
        findings.casts[f"{state}: {stored} -> {dtype}"] += 1
