"""What a live model wants of a checkpoint, and everything in which the two do not fit. Names and shapes only.

>>> from ucp.core.tensor import DType
>>> from ucp.core.topology import Topology
>>> from ucp.live.parts import LivePart
>>> live = LiveTensor(names=("w",), dtype=DType.FLOAT32, part=LivePart.whole((2,)))
>>> index = Index(path="ckpt", format="ucp", evidence=(), producer="", topology=Topology(), step=None, atoms={})
>>> findings = Findings()
>>> match_tensors([live], index, findings=findings), findings.missing
({}, ['w'])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ucp.core.index import WEIGHT, AtomIndex, Index
from ucp.core.target import full_slice
from ucp.core.tensor import DType
from ucp.live.match.findings import Findings
from ucp.live.parts import LivePart, LiveTensor, LoadItem

_MOST_WAYS = 3
"""Ways to rename that are named."""


def match_tensors(
    tensors: Sequence[LiveTensor],
    index: Index,
    *,
    rename: Callable[[str], str] | None = None,
    findings: Findings,
) -> dict[str, str]:
    """Atom of every tensor of the model that has one by name.

    `rename`: from a name in the model to the name in the checkpoint.
    """
    matched: dict[str, str] = {}
    for own in tensors:
        held = find_atoms(own, index, rename)
        if not held and 0 in own.part.local_shape:
            findings.notes.append(f"{own.name} has no elements, and is not in the checkpoint")
            continue
        if not held:
            whole = own.global_names[0]
            renamed = rename(whole) if rename else whole
            in_whole = f" ({whole} in the whole model)" if whole != own.name else ""
            findings.missing.append(own.name + in_whole + (f" (renamed {renamed})" if renamed != whole else ""))
            continue
        if len(held) > 1:
            findings.problems.append(
                f"{' and '.join(own.names)} are one tensor in the model, and {len(held)} in the checkpoint: "
                f"{' and '.join(held)}. Untie them, or load from a checkpoint where they are tied"
            )
        matched[own.name] = held[0]
    _note_shared(tensors, matched, index, findings)
    return matched


def filter_fitting(
    tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, findings: Findings
) -> dict[str, str]:
    """Those whose atoms have their shape, and a type that can be cast to their own."""
    return {
        own.name: matched[own.name] for own in tensors if own.name in matched and _fits(own, matched, index, findings)
    }


def find_unexpected(tensors: Sequence[LiveTensor], used: Collection[str], index: Index, findings: Findings) -> None:
    """Find atoms that no rank has in its model, and the ways to rename that would cure it. `used`: by all ranks."""
    findings.unexpected.extend(name for name in index.atoms if name not in used)
    if not findings.missing or not findings.unexpected:
        return
    names = [own.global_names[0] for own in tensors]
    stored = {*index.atoms, *index.aliases}
    first = names[0]
    longer = sorted(name.removesuffix(first) for name in stored if name.endswith(f".{first}"))
    shorter = sorted(first.removesuffix(name) for name in stored if first.endswith(f".{name}"))
    ways = [
        *(f"rename=lambda name: {own!r} + name" for own in longer if all(f"{own}{name}" in stored for name in names)),
        *(
            f"rename=lambda name: name.removeprefix({own!r})"
            for own in shorter
            if all(name.startswith(own) and name.removeprefix(own) in stored for name in names)
        ),
    ]
    if not ways and not used:
        ways.append("rename=FUNCTION, from a name in the model to the name in the checkpoint")
    if ways:
        findings.hints.append(f"pass {', or '.join(ways[:_MOST_WAYS])}")


def find_atoms(own: LiveTensor, index: Index, rename: Callable[[str], str] | None) -> list[str]:
    """Atoms of its names; several where the model ties what the checkpoint does not."""
    names = (rename(name) if rename else name for name in own.global_names)
    return [name for name in dict.fromkeys(index.aliases.get(name, name) for name in names) if name in index.atoms]


def _note_shared(tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, findings: Findings) -> None:
    takers: dict[str, list[LiveTensor]] = {}
    for own in tensors:
        if own.name in matched:
            takers.setdefault(matched[own.name], []).append(own)
    for atom, several in takers.items():
        if len(several) > 1:
            alike = len({own.global_names for own in several}) == 1
            tied = "they were tied when saved" if atom in index.aliases.values() else "`rename` gives both its name"
            why = "replicas of it" if alike else tied
            names = " and ".join(own.name for own in several)
            findings.notes.append(f"{names} are loaded from one atom, {atom}: {why}")


def _fits(own: LiveTensor, matched: Mapping[str, str], index: Index, findings: Findings) -> bool:
    atom = index.atoms[matched[own.name]]
    if WEIGHT not in atom.states:
        findings.missing.append(f"{own.name}: the checkpoint has only {', '.join(atom.states)} of it")
        return False
    try:
        own.part.to_slice(atom.name, WEIGHT, atom.global_shape, own.dtype)
    except ValueError as error:
        findings.problems.append(f"{own.name} {error} in the checkpoint{own.part.hint and f'; {own.part.hint}'}")
        return False
    if own.part.unassigned:
        findings.unexpected.append(f"{atom.name}: {own.part.unassigned}")
    if own.part.global_shape not in (None, atom.global_shape):
        stored, rows = atom.global_shape[0], (own.part.global_shape or (0,))[0]
        extra = (
            f"rows {stored} to {rows - 1} are zeros" if rows > stored else f"rows {rows} to {stored - 1} are left out"
        )
        findings.notes.append(
            f"{own.name} is padded to {rows} rows in the model and {stored} in the checkpoint: {extra}, in every state"
        )
    dtype = atom.states[WEIGHT].dtype
    if not is_castable(dtype, own.dtype):
        findings.problems.append(f"{own.name} is {own.dtype} in the model and {dtype} in the checkpoint")
        return False
    return True


def plan_weights(
    tensors: Sequence[LiveTensor], matched: Mapping[str, str], index: Index, *, findings: Findings
) -> list[LoadItem]:
    """The weight of every matched tensor, in the type that the model has it in."""
    wanted = []
    for own in tensors:
        if own.name in matched:
            atom = index.atoms[matched[own.name]]
            note_cast(atom, WEIGHT, own.dtype, findings)
            wanted.append(make_item(own.name, atom, WEIGHT, own.dtype, own.part))
    return wanted


def is_castable(stored: DType, wanted: DType) -> bool:
    """Whether a state of one type can be brought into memory of another."""
    return stored is wanted or (stored.is_floating and wanted.is_floating)


def make_item(
    name: str, atom: AtomIndex, state: str, dtype: DType, part: LivePart, *, stepped: bool = False
) -> LoadItem:
    """What `part` is of a state; a count, or a state of another shape than its parameter, is whole on every rank."""
    source = atom.states[state]
    is_whole = part.is_full or source.global_shape != atom.global_shape or atom.is_count(state)
    wanted = (
        full_slice(atom.name, state, source, dtype=dtype)
        if is_whole
        else part.to_slice(atom.name, state, source.global_shape, dtype)
    )
    return LoadItem(name=name, slice=wanted, source=source, is_optimizer_state=stepped)


def note_cast(atom: AtomIndex, state: str, dtype: DType, findings: Findings) -> None:
    """Count a change of type."""
    stored = atom.states[state].dtype
    if stored is not dtype:
        findings.casts[f"{state}: {stored} to {dtype}"] += 1
