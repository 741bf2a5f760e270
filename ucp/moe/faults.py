"""Find faults in the experts of a checkpoint, without the configuration of the model.

From the index alone:

* an expert is missing: a number is left out, or the router has more rows than there are experts (KempnerForge#202
  renumbers the experts of every rank from 0, verl#2086 leaves ranks out, Megatron-LM#1836 overwrites them);
* an expert lacks a tensor that the others of its layer have, or holds it in another shape or dtype;
* an expert has a tensor under two names;
* a bias or a count does not have a value for each row of the router.

From the bytes of experts and routers:

* two experts of a layer are equal in every state (megablocks#160, DeepSpeed#6589);
* no expert of a layer has ever been trained although the router has (Megatron-LM#5844, imp#1190: experts that a
  converter dropped keep their initialisation);
* an expert is zero, or holds NaN or infinity; a second moment is negative; two rows of a router are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ucp.core.index import WEIGHT, AtomIndex, Doubt, DoubtKind, Index
from ucp.core.text.units import ranges_text, shape_text
from ucp.errors import format_count, format_list
from ucp.moe.layers import ExpertLayer, Role, find_layers
from ucp.moe.measure import MOMENT, Measure, Measures


def find_odd_experts(index: Index) -> Iterator[Doubt]:
    """A doubt that lists the faults of experts that the index alone shows, if any. Reads no tensor."""
    faults = [fault for layer in find_layers(index.shapes) for fault in _find_structural(index.atoms, layer)]
    if faults:
        text = (
            f"expected all experts of every layer, each with the same tensors; in {index.path}:\n"
            f"{format_list(faults)}\nThey were lost when it was saved, so a run that resumes would initialise "
            "them anew. Save it again, from every rank. If it is one save of a chain, which leaves experts out on "
            "purpose, read the chain: the folder with chain.json"
        )
        yield Doubt(kind=DoubtKind.EXPERTS, text=text)


def _find_structural(atoms: Mapping[str, AtomIndex], layer: ExpertLayer) -> Iterator[str]:
    """A line for each fault of a layer that is found without reading tensors."""
    rows = layer.rows.get(Role.ROUTER)
    count = format_count(layer.num_experts, "expert")
    if layer.missing:
        why = f"as the router has {rows} rows" if rows == layer.num_experts else "by their numbers"
        gaps = ", ".join(f"{gap[0]}-{gap[-1]}" if len(gap) > 1 else str(gap[0]) for gap in layer.missing)
        yield f"{layer.module}: expected {count}, {why}; missing: {gaps}"
    if rows is not None and rows < layer.num_experts:
        yield f"{layer.module}: expected a row of the router for each of {count}; got {rows} rows"
    for role, number in layer.rows.items():
        if rows is not None and number != rows:
            name = layer.routing[role]
            yield f"{layer.module}: expected a value of {name} for each of {rows} rows of the router; got {number}"
    usual = {name for tensors in layer.experts.values() for name in tensors}
    for expert, tensors in layer.experts.items():
        if absent := sorted(usual - tensors.keys()):
            yield f"{layer.module}: expert {expert} lacks {', '.join(absent)}, which others have"
    for first, second in layer.twice:
        yield f"{layer.module}: expected one tensor of that name and number; got {first} and {second}"
    for name in sorted(usual):
        yield from _find_unlike(atoms, layer, name)


def _find_unlike(atoms: Mapping[str, AtomIndex], layer: ExpertLayer, name: str) -> Iterator[str]:
    """A line for each expert whose tensor differs from that of most experts, in shape or in the dtype of a state."""
    looks = {
        expert: tuple(
            (state, stored.dtype, stored.global_shape) for state, stored in atoms[tensors[name].param].states.items()
        )
        for expert, tensors in layer.experts.items()
        if name in tensors and not atoms[tensors[name].param].is_cast
    }
    if not looks:
        return
    ((usual, _),) = Counter(looks.values()).most_common(1)
    for expert, look in looks.items():
        unlike = set(look) - set(usual)
        if unlike:
            got, most = (
                ", ".join(f"{state} {dtype} {shape_text(shape)}" for state, dtype, shape in sorted(states))
                for states in (unlike, usual)
            )
            yield f"{layer.module}: expert {expert} has {name} as {got}; most have {most}"


def describe_unequal_counts(layers: Sequence[ExpertLayer]) -> str | None:
    """A note that layers have different numbers of experts; None if they do not."""
    counts = Counter(layer.num_experts for layer in layers)
    if len(counts) < 2:
        return None
    shown = ", ".join(f"{number} in {format_count(times, 'layer')}" for number, times in counts.most_common())
    return f"layers differ in the number of experts: {shown}"


def find_content_faults(measures: Measures) -> tuple[list[str], list[str]]:
    """What is wrong with the bytes of experts and routers, and what may be: (faults, notes)."""
    faults, notes = [], []
    for module, by_role in measures.items():
        experts, rows = by_role.get(Role.EXPERT, {}), by_role.get(Role.ROUTER, {})
        faults += [f"{module}: {fault}" for fault in _find_bad_numbers(by_role)]
        moments, router_moments = _list_moments(experts), _list_moments(rows)
        is_untrained = all(moment.is_zero for moment in moments)
        for group in _find_equal(experts):
            line = f"{module}: experts {ranges_text(group)} are equal in {', '.join(experts[group[0]])}"
            if is_untrained and len(group) == len(experts):
                notes.append(f"{line}, as in a model whose experts were copied from a dense layer and not yet trained")
            else:
                faults.append(f"{line}: one was saved or loaded twice, and another is lost")
        faults += [f"{module}: rows {ranges_text(group)} of the router are equal" for group in _find_equal(rows)]
        if moments and is_untrained and not all(moment.is_zero for moment in router_moments):
            faults.append(
                f"{module}: no expert has been trained (every moment is zero) although the router has: the experts "
                "were not loaded, and keep their initialisation"
            )
    return faults, notes


def _find_bad_numbers(by_role: Mapping[Role, Mapping[int, Mapping[str, Measure]]]) -> Iterator[str]:
    """A line for each state with NaN, infinity or a negative square, and one for experts whose weights are zero."""
    for role, states_by_number in by_role.items():
        for name in dict.fromkeys(name for states in states_by_number.values() for name in states):
            wrong = [n for n, states in states_by_number.items() if name in states and not states[name].is_finite]
            if wrong:
                yield f"{name} of {role} {ranges_text(sorted(wrong))} is not finite everywhere (NaN or infinity)"
        negative = [n for n, states in states_by_number.items() if MOMENT in states and states[MOMENT].is_negative]
        if negative:
            yield f"{MOMENT} of {role} {ranges_text(sorted(negative))} has negative elements; it is a mean of squares"
    zero = [number for number, states in by_role.get(Role.EXPERT, {}).items() if states[WEIGHT].is_zero]
    if zero:
        yield f"the weights of experts {ranges_text(sorted(zero))} are all zero"


def _find_equal(states_by_number: Mapping[int, Mapping[str, Measure]]) -> list[list[int]]:
    """Groups of experts, or rows, with equal bytes in every state; those whose weights are zero are left out."""
    groups: dict[frozenset[tuple[object, ...]], list[int]] = {}
    for number, states in states_by_number.items():
        if not states[WEIGHT].is_zero:
            digests = frozenset((name, *item) for name, state in states.items() for item in state.digests.items())
            groups.setdefault(digests, []).append(number)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _list_moments(states_by_number: Mapping[int, Mapping[str, Measure]]) -> list[Measure]:
    return [state for states in states_by_number.values() for name, state in states.items() if name != WEIGHT]
