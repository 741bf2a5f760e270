"""Which optimizer states a checkpoint has for what an optimizer keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ucp.core.index import STEP, WEIGHT, AtomIndex, Index
from ucp.errors import counted
from ucp.live.match.findings import Findings
from ucp.live.match.tensors import is_castable, make_item, note_cast
from ucp.live.parts import LiveParam, LivePart, LoadItem


def match_states(
    params: Sequence[LiveParam],
    parts: Mapping[str, LivePart],
    matched: Mapping[str, str],
    index: Index,
    *,
    stepped: Collection[str],
    findings: Findings,
) -> tuple[list[LoadItem], list[str]]:
    """Optimizer states to bring, and the parameters that the saved optimizer had never stepped.

    `parts`: what the model holds of each tensor. `stepped`: atoms that the optimizer of any rank steps. A count is
    brought in the type it is stored in, whatever number the optimizer then makes of it.
    """
    known = {name for group in index.groups for name in group.params}
    has_optimizer = bool(known) or index.unnamed is not None or any(map(_states_of, index.atoms.values()))
    lost = [matched[own.name] for own in params if own.name in matched]
    findings.problems.extend(
        index.loss_reasons(name for name in lost if name in index.lost and not index.lost[name].is_chosen)
    )
    findings.problems.extend([] if index.unnamed is None else [index.unnamed.reason])
    wanted: list[LoadItem] = []
    fresh: list[str] = []
    for param in params:
        if param.name not in matched:
            continue
        atom = index.atoms[matched[param.name]]
        if param.keeps and (dtype := param.keeps.get(WEIGHT)):  # also where the checkpoint has no more than the weight
            note_cast(atom, WEIGHT, dtype, findings)
            wanted.append(make_item(param.name, atom, WEIGHT, dtype, param.part or parts[param.name], stepped=True))
        if not _states_of(atom):
            is_new = index.unnamed is None and has_optimizer and atom.name not in known
            if is_new and not param.is_frozen and 0 not in atom.global_shape:
                findings.problems.append(f"{param.name} is optimised, and was not when the checkpoint was saved")
            fresh.append(param.name)
        else:
            wanted.extend(_states(param, param.part or parts[param.name], atom, findings))
    if not has_optimizer and any(0 not in index.atoms[matched[name]].global_shape for name in fresh):
        findings.problems.append(
            "the checkpoint holds weights only, and no optimizer states: leave optimizer= out, or pass strict=False to "
            "start with a new optimizer"
        )
    bare = {own.name for own in params if own.keeps is not None and not own.keeps.keys() - {WEIGHT}}  # SGD's, say
    begun = (name for name in fresh if name not in bare and matched[name] in known)
    started = [name for name in begun if 0 not in index.atoms[matched[name]].global_shape]
    if started and all(want.state == WEIGHT for want in wanted) and index.step != 0:
        findings.problems.append(
            "the checkpoint holds no optimizer states: the optimizer would start afresh. Load without optimizer="
        )
    present = set(matched.values())
    for atom in index.atoms.values():
        if atom.name in present and atom.name not in stepped and _states_of(atom) and 0 not in atom.global_shape:
            findings.problems.append(
                f"{atom.name}: the checkpoint has {', '.join(_states_of(atom))}, and the optimizer does not step it"
            )
    return wanted, fresh


def note_rounded(weights: Sequence[LoadItem], params: Sequence[LiveParam], findings: Findings) -> None:
    """Say how many weights are stepped in a type that cannot hold what was saved; with masters none is."""
    stepped = {own.name for own in params}
    held = [own for own in weights if own.name in stepped and own.slice.dtype.itemsize < own.source.dtype.itemsize]
    if held:
        findings.notes.append(
            f"{counted(len(held), 'weight is', 'weights are')} stepped in {held[0].slice.dtype}, and "
            f"{held[0].source.dtype} in the checkpoint: no masters are kept, it goes on from what is rounded"
        )


def _states_of(atom: AtomIndex) -> list[str]:
    return [state for state in atom.states if state != WEIGHT]


def _states(param: LiveParam, part: LivePart, atom: AtomIndex, findings: Findings) -> list[LoadItem]:
    saved = _states_of(atom)
    keeps = dict.fromkeys(saved) if param.keeps is None else {**param.keeps}
    keeps.pop(WEIGHT, None)
    lacking = [state for state in keeps if state not in saved]
    surplus = [state for state in saved if state not in keeps and state != STEP]
    if lacking or surplus:
        findings.problems.append(
            f"{param.name}: the optimizer keeps {', '.join(keeps) or 'no states'}; the checkpoint has "
            f"{', '.join(saved)}"
        )
        return []
    if STEP not in keeps and STEP in saved:
        note = "step counts are left out: the optimizer keeps none"
        findings.notes.extend([note] if note not in findings.notes else [])
    wanted = []
    for state, dtype in keeps.items():
        stored = atom.states[state].dtype
        taken = stored if dtype is None or atom.is_count(state) else dtype
        if is_castable(stored, taken):
            note_cast(atom, state, taken, findings)
            wanted.append(make_item(param.name, atom, state, taken, param.apart.get(state, part), stepped=True))
        else:
            findings.problems.append(f"{param.name}/{state} is {taken} in the optimizer, {stored} in the checkpoint")
    return wanted
