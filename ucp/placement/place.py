"""Choose a placement: every layer's experts by load, and so that lost nodes cost no expert.

1. Give every expert replicas, and put them on nodes in each of the ways of `ucp.placement.arrange`.
2. Exchange slots while that makes survival likelier, then exchange experts so that nodes are balanced.
3. Take one way for each layer: that which survives best together with the layers before it; or one way for all layers,
   if that survives better.
4. Deal the experts of a node to its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ucp.errors import UsageError, format_count, format_list
from ucp.placement.arrange import (
    allocate,
    balance_nodes,
    deal_to_gpus,
    group_replicas,
    pack_replicas,
    replicate_busiest,
    spread_replicas,
)
from ucp.placement.placement import Cluster, Placement
from ucp.placement.survival import LostNodes, exchange_slots, mask_of

Goal = Literal["survival", "balance"]
"""What is wanted most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One way to place a layer."""

    way: str
    """Its name."""
    experts: tuple[int, ...]
    """Expert in each slot."""
    fatal: NDArray[np.bool_]
    """Which sets of lost nodes lose an expert."""
    risk: float
    """Share of sets of lost nodes that do."""
    peak: float
    """Tokens of the busiest GPU."""


def place(
    loads: Mapping[int, Sequence[float]], cluster: Cluster, *, threshold: int = 2, goal: Goal = "survival"
) -> Placement:
    """The placement of all layers.

    `loads`: number of a layer to the tokens of each of its experts. `threshold`: distinct nodes that every expert is
    on, at least; fewer lost nodes than that lose no expert. `goal`: what is wanted most; the other decides between
    equals. Raises UsageError if there are too few slots or nodes, or loads are not numbers.
    """
    if goal not in get_args(Goal):
        raise UsageError(f"expected a goal of {', '.join(get_args(Goal))}; got {goal!r}")
    _check(loads, cluster, threshold)
    sets = LostNodes.of(cluster.nodes)
    candidates = {layer: _list_candidates(tokens, cluster, threshold, sets) for layer, tokens in loads.items()}
    if goal == "balance":
        chosen = {layer: min(choices, key=lambda c: (c.peak, c.risk)) for layer, choices in candidates.items()}
    else:
        chosen = _choose_together(candidates, sets)
    return Placement(
        cluster=cluster,
        layers={layer: candidate.experts for layer, candidate in chosen.items()},
        threshold=threshold,
        loads={layer: tuple(map(float, tokens)) for layer, tokens in loads.items()},
    )


def _check(loads: Mapping[int, Sequence[float]], cluster: Cluster, threshold: int) -> None:
    """Raise UsageError for what cannot be placed."""
    if isinstance(threshold, bool) or not isinstance(threshold, int) or not 1 <= threshold <= cluster.nodes:
        raise UsageError(
            f"expected a threshold of 1 to {cluster.nodes}, as there are {format_count(cluster.nodes, 'node')}; got "
            f"{threshold!r}"
        )
    if not loads:
        raise UsageError("expected the loads of at least one layer with experts")
    wrong = [
        f"layer {layer}: {tokens[number]!r} for expert {number}"
        for layer, tokens in loads.items()
        for number in range(len(tokens))
        if not isfinite(tokens[number]) or tokens[number] < 0
    ]
    if wrong:
        raise UsageError(f"expected tokens of each expert, 0 or more; got\n{format_list(wrong)}")
    short = [
        f"layer {layer}: {len(tokens)} experts" for layer, tokens in loads.items()
        if not 0 < len(tokens) * threshold <= cluster.num_slots
    ]  # fmt: skip
    if short:
        most = max(len(tokens) for tokens in loads.values())
        raise UsageError(
            f"expected {threshold} slots for every expert, one on each of {threshold} nodes; there are "
            f"{cluster.num_slots} slots for\n{format_list(short)}\nPass a threshold of "
            f"{max(cluster.num_slots // max(most, 1), 0)} or less, or more nodes, GPUs or slots"
        )


def _list_candidates(loads: Sequence[float], cluster: Cluster, threshold: int, sets: LostNodes) -> list[_Candidate]:
    """Ways to place a layer in which every expert is on enough distinct nodes."""
    nodes, slots = cluster.nodes, cluster.slots_per_node
    shared = allocate(loads, slots=cluster.num_slots, least=threshold)
    busiest = replicate_busiest(loads, slots=cluster.num_slots, least=threshold)
    grouped = group_replicas(shared, nodes=nodes, slots=slots)
    arrangements = {
        "grouped": grouped,
        "exchanged": exchange_slots(grouped) if _overflows(shared, nodes=nodes, slots=slots) else grouped,
        "spread": spread_replicas(shared, nodes=nodes),
        "packed": pack_replicas(loads, busiest, nodes=nodes, gpus=cluster.gpus, slots=cluster.slots),
    }
    candidates = []
    for way, placed in arrangements.items():
        balanced = placed if way == "packed" else balance_nodes(placed, loads)
        masks = _masks_of(balanced)
        if min(mask.bit_count() for mask in masks) < threshold:
            continue
        counts = Counter(expert for experts in balanced for expert in experts)
        shares = [loads[expert] / counts[expert] for expert in range(len(loads))]
        experts: list[int] = []
        for node in balanced:
            experts += deal_to_gpus(node, shares, gpus=cluster.gpus, slots=cluster.slots)
        width = cluster.slots
        peak = max(sum(shares[e] for e in experts[start : start + width]) for start in range(0, len(experts), width))
        fatal = sets.fatal(masks)
        candidates.append(_Candidate(way=way, experts=tuple(experts), fatal=fatal, risk=sets.score(fatal), peak=peak))
    return candidates


def _overflows(replicas: Sequence[int], *, nodes: int, slots: int) -> bool:
    """Whether groups do not fit on nodes of their own: only then is there a better way than to group."""
    ordered = sorted(replicas)
    return sum(ordered[::slots]) > nodes


def _choose_together(candidates: Mapping[int, Sequence[_Candidate]], sets: LostNodes) -> dict[int, _Candidate]:
    """A way for each layer, so that survival of all layers together is likeliest."""
    greedy: dict[int, _Candidate] = {}
    fatal = np.zeros_like(sets.sizes, dtype=bool)
    for layer, choices in candidates.items():
        greedy[layer] = min(choices, key=lambda way: (sets.score(fatal | way.fatal), way.risk, way.peak))
        fatal = fatal | greedy[layer].fatal
    plans = [
        greedy,
        {layer: min(choices, key=lambda way: (way.risk, way.peak)) for layer, choices in candidates.items()},
    ]
    for name in dict.fromkeys(way.way for choices in candidates.values() for way in choices):
        same = {layer: way for layer, choices in candidates.items() for way in choices if way.way == name}
        if len(same) == len(candidates):
            plans.append(same)
    return min(plans, key=lambda plan: _score_plan(plan, sets))


def _score_plan(plan: Mapping[int, _Candidate], sets: LostNodes) -> tuple[float, float, float]:
    fatal = np.logical_or.reduce([candidate.fatal for candidate in plan.values()])
    return sets.score(fatal), sum(c.risk for c in plan.values()), sum(c.peak for c in plan.values())


def _masks_of(slots: Sequence[Sequence[int]]) -> list[int]:
    """Nodes of each expert. `slots`: experts on each node."""
    nodes: dict[int, set[int]] = {}
    for node, experts in enumerate(slots):
        for expert in experts:
            nodes.setdefault(expert, set()).add(node)
    return [mask_of(nodes[expert]) for expert in sorted(nodes)]
