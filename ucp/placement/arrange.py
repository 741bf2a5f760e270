"""Ways to give the experts of a layer replicas, and to put these on nodes.

- `allocate`: replicas in proportion to tokens, each expert at least some (Lazarus eq. 1);
- `group_replicas`: experts with about as many replicas share nodes of their own (Lazarus, "maximum rank overlap");
- `spread_replicas`: in turn over all nodes;
- `pack_replicas`: onto the GPU with the fewest tokens (the greedy packing of DeepSeek's EPLB).

All are pure, and of one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace


def allocate(loads: Sequence[float], *, slots: int, least: int) -> tuple[int, ...]:
    """Replicas of each expert, `slots` in all, each at least `least` (Lazarus eq. 1).

    `loads`: tokens of each expert. Needs least * experts <= slots.

    >>> allocate([10, 10, 80], slots=9, least=2)
    (2, 2, 5)
    """
    replicas = [0] * len(loads)
    exact = [Fraction(float(load)) for load in loads]  # rounded sums would give equal experts unequal numbers
    slots_left, tokens = slots, sum(exact)
    order = sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    for position, expert in enumerate(order):
        share = slots_left * exact[expert] / tokens if tokens else Fraction(slots_left, len(order) - position)
        others = len(order) - position - 1
        replicas[expert] = slots_left if not others else min(max(least, int(share)), slots_left - least * others)
        slots_left, tokens = slots_left - replicas[expert], tokens - exact[expert]
    return tuple(replicas)


def replicate_busiest(loads: Sequence[float], *, slots: int, least: int) -> tuple[int, ...]:
    """Replicas of each expert, `slots` in all: the next one always for the expert with most tokens a replica (EPLB).

    >>> replicate_busiest([10, 10, 80], slots=9, least=2)
    (2, 2, 5)
    """
    replicas = [least] * len(loads)
    heap = [(-load / least, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(slots - least * len(loads)):
        expert = heap[0][1]
        replicas[expert] += 1
        heapreplace(heap, (-loads[expert] / replicas[expert], expert))
    return tuple(replicas)


def group_replicas(replicas: Sequence[int], *, nodes: int, slots: int) -> list[list[int]]:
    """Experts on each node: each group of `slots` experts has nodes of its own (Lazarus, MRO).

    `slots`: of a node. Groups are of experts with similar numbers of replicas, fewest first. Replicas that find no room
    in their group fill vacant slots, those of experts on the fewest nodes first. If the groups do not fit, this need
    not be the best placement, which Lazarus states it is: see docs/explanation/papers.md.
    """
    order = sorted(range(len(replicas)), key=lambda expert: (replicas[expert], expert))
    experts_by_node: list[list[int]] = [[] for _ in range(nodes)]
    unplaced = list(replicas)
    used = 0
    for start in range(0, len(order), slots):
        group = order[start : start + slots]
        width = min(replicas[group[0]], nodes - used)
        for node in range(used, used + width):
            experts_by_node[node] = list(group)
        for expert in group:
            unplaced[expert] -= width
        used += width
    vacant = [node for node in range(nodes) if len(experts_by_node[node]) < slots]
    heap = [
        (replicas[expert] - unplaced[expert], rank, expert) for rank, expert in enumerate(order) if unplaced[expert]
    ]
    heapify(heap)
    while heap:
        width, rank, expert = heap[0]
        node = min(vacant, key=lambda n: (expert in experts_by_node[n], len(experts_by_node[n]), n))
        width += expert not in experts_by_node[node]
        experts_by_node[node].append(expert)
        if len(experts_by_node[node]) == slots:
            vacant.remove(node)
        unplaced[expert] -= 1
        if unplaced[expert]:
            heapreplace(heap, (width, rank, expert))
        else:
            heappop(heap)
    return experts_by_node


def spread_replicas(replicas: Sequence[int], *, nodes: int) -> list[list[int]]:
    """Experts on each node: replica after replica in turn, so that those of one expert are on distinct nodes.

    >>> spread_replicas((2, 2, 2), nodes=3)
    [[0, 1], [0, 2], [1, 2]]
    """
    order = sorted(range(len(replicas)), key=lambda expert: (replicas[expert], expert))
    flat = [expert for expert in order for _ in range(replicas[expert])]
    return [flat[node::nodes] for node in range(nodes)]


def pack_replicas(
    loads: Sequence[float], replicas: Sequence[int], *, nodes: int, gpus: int, slots: int
) -> list[list[int]]:
    """Experts on each node: the replica with most tokens next, to the GPU with fewest (EPLB).

    `gpus`: of a node; `slots`: of a GPU. A node that lacks the expert is preferred.
    """
    experts_by_gpu: list[list[int]] = [[] for _ in range(nodes * gpus)]
    present: set[tuple[int, int]] = set()
    vacant = [(0.0, gpu) for gpu in range(nodes * gpus)]  # a heap: tokens, GPU
    shares = [load / count for load, count in zip(loads, replicas, strict=True)]
    for expert in sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(replicas[expert]):
            skipped = []
            while vacant and (expert, vacant[0][1] // gpus) in present:
                skipped.append(heappop(vacant))
            tokens, gpu = heappop(vacant) if vacant else skipped.pop(0)
            for entry in skipped:
                heappush(vacant, entry)
            experts_by_gpu[gpu].append(expert)
            present.add((expert, gpu // gpus))
            if len(experts_by_gpu[gpu]) < slots:
                heappush(vacant, (tokens + shares[expert], gpu))
    return [
        [expert for gpu in range(node * gpus, (node + 1) * gpus) for expert in experts_by_gpu[gpu]]
        for node in range(nodes)
    ]


def balance_nodes(
    slots: Sequence[Sequence[int]],
    loads: Sequence[float],
    *,
    present: Sequence[Collection[int]] = (),
    limit: float = 0.0,
) -> list[list[int]]:
    """The placement with experts exchanged so that nodes get about as many tokens each; survival stays what it is.

    `slots`: experts on each node. Experts exchange all of their slots with others of as many replicas. `present`:
    experts that each node has now; they stay where nodes get at most `limit` tokens.
    """
    places: dict[int, Counter[int]] = {}
    for node, experts in enumerate(slots):
        for expert in experts:
            places.setdefault(expert, Counter())[node] += 1
    free: dict[int, Counter[tuple[tuple[int, int], ...]]] = {}
    for place in places.values():
        free.setdefault(place.total(), Counter())[tuple(place.items())] += 1
    tokens = [0.0] * len(slots)
    balanced: list[list[int]] = [[] for _ in slots]
    shares = {expert: loads[expert] / place.total() for expert, place in places.items()}

    def lacking(expert: int, place: tuple[tuple[int, int], ...]) -> int:
        return sum(expert not in present[node] for node, _ in place)

    moving = dict.fromkeys(places, 0)
    if present:
        moving = {expert: min(lacking(expert, place) for place in free[places[expert].total()]) for expert in places}
    for expert in sorted(places, key=lambda expert: (moving[expert], -shares[expert], expert)):
        candidates = free[places[expert].total()]
        share = shares[expert]

        def peak_of(place: tuple[tuple[int, int], ...]) -> float:
            return max(tokens[node] + count * share for node, count in place)  # noqa: B023  # called at once

        def cost_of(place: tuple[tuple[int, int], ...]) -> tuple[float, int, float]:
            peak = peak_of(place)
            return max(peak, limit), lacking(expert, place), peak  # noqa: B023

        chosen = min(candidates, key=cost_of if present else peak_of)
        candidates[chosen] -= 1
        if not candidates[chosen]:
            del candidates[chosen]
        for node, count in chosen:
            tokens[node] += count * share
            balanced[node].extend([expert] * count)
    return balanced


def deal_to_gpus(experts: Sequence[int], shares: Sequence[float], *, gpus: int, slots: int) -> list[int]:
    """The experts of a node, GPU after GPU, so that GPUs get about as many tokens each.

    `shares`: tokens of a replica, by expert; `slots`: of a GPU.
    """
    by_gpu: list[list[int]] = [[] for _ in range(gpus)]
    tokens = [0.0] * gpus
    for expert in sorted(experts, key=lambda expert: (-shares[expert], expert)):
        gpu = min((gpu for gpu in range(gpus) if len(by_gpu[gpu]) < slots), key=lambda gpu: (tokens[gpu], gpu))
        by_gpu[gpu].append(expert)
        tokens[gpu] += shares[expert]
    return [expert for on_gpu in by_gpu for expert in on_gpu]
