"""What must move from one placement to another after nodes were lost: which node becomes which, and who sends what.

1. Nodes of the new placement become nodes that are left, so that as few experts as possible move: an assignment
   problem, which scipy solves exactly.
2. Every expert that a node lacks is sent by one that holds it: the one that has sent fewest bytes so far.
3. An expert that no node holds any more is read from storage.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ucp.core.assign import deal
from ucp.core.index import Index
from ucp.core.text.page import Page, Report, facts, table
from ucp.core.text.units import count_text, nbytes_text, seconds_text
from ucp.errors import MissingLibraryError, UsageError, format_count, format_list
from ucp.moe.layers import ExpertTensor, number_layers
from ucp.placement.arrange import balance_nodes, deal_to_gpus
from ucp.placement.placement import EMPTY, Placement

Expert = tuple[int, int]
"""Number of a layer, and of an expert in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An expert that a node needs."""

    expert: Expert
    """Layer and expert."""
    source: int | None
    """Node that sends it, in the numbering before; None for storage."""
    node: int
    """Node that gets it, in the numbering after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration(Report):
    """How nodes that are left get the experts of a new placement."""

    placement: Placement
    """The new placement; its nodes are in the order of `nodes`."""
    nodes: tuple[int | None, ...]
    """For each node of it, its number before; None for a node that was not there."""
    transfers: tuple[Transfer, ...]
    """What nodes need."""
    nbytes_per_expert: Mapping[int, int]
    """Number of a layer to the bytes of one of its experts, all states; empty if not given."""
    bandwidth: float | None = None
    """Bytes that a node sends or receives in a second."""

    def nbytes_of(self, transfer: Transfer) -> int:
        """Bytes of a transfer; 1 for each expert if bytes are not known."""
        return self.nbytes_per_expert.get(transfer.expert[0], 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return sum(map(self.nbytes_of, self.transfers))

    @property
    def bottleneck(self) -> int:
        """Bytes that the busiest node sends or receives."""
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for transfer in self.transfers:
            nbytes = self.nbytes_of(transfer)
            received[transfer.node] = received.get(transfer.node, 0) + nbytes
            if transfer.source is not None:
                sent[transfer.source] = sent.get(transfer.source, 0) + nbytes
        return max((*sent.values(), *received.values()), default=0)

    @property
    def seconds(self) -> float | None:
        """Time of the busiest node; None if bytes or bandwidth are not known."""
        return self.bottleneck / self.bandwidth if self.bandwidth and self.nbytes_per_expert else None

    def page(self) -> Page:
        """What moves, and the nodes."""
        stored = sum(transfer.source is None for transfer in self.transfers)
        known = bool(self.nbytes_per_expert)
        yield facts(
            [
                ("moved", format_count(len(self.transfers), "expert")),
                ("from storage", format_count(stored, "expert") if stored else ""),
                ("bytes", nbytes_text(self.nbytes) if known else ""),
                ("busiest node", nbytes_text(self.bottleneck) if known else format_count(self.bottleneck, "expert")),
                ("time", seconds_text(self.seconds) if self.seconds is not None else ""),
            ]
        )
        rows = [
            (
                str(node),
                "new" if before is None else str(before),
                count_text(sum(transfer.node == node for transfer in self.transfers)),
                "" if before is None else count_text(sum(transfer.source == before for transfer in self.transfers)),
            )
            for node, before in enumerate(self.nodes)
        ]
        yield table("Nodes", (">node", ">was", ">receives", ">sends"), rows, most=128, all_in="--json")


def plan_migration(
    before: Placement,
    after: Placement,
    *,
    lost: Collection[int],
    nbytes_per_expert: Mapping[int, int] | None = None,
    bandwidth: float | None = None,
    tolerance: float | None = None,
) -> Migration:
    """How to get from a placement to another one, without the nodes `lost`. Raises UsageError, MissingLibraryError.

    `tolerance`: experts may exchange their slots, so that fewer move, if the busiest GPU gets at most this share more
    tokens and survival stays what it is; None: they keep them.
    """
    if not isinstance(before, Placement) or not isinstance(after, Placement):
        kinds = f"{type(before).__name__} and {type(after).__name__}"
        raise UsageError(f"expected two placements (ucp.Placement); got {kinds}")
    try:
        lost = [*map(operator.index, lost)]
    except TypeError:
        raise UsageError(f"expected numbers of lost nodes, such as [2, 5]; got {lost!r}") from None
    for name, number in (("bandwidth", bandwidth), ("tolerance", tolerance)):
        if number is not None and not (isinstance(number, int | float) and 0 <= number < inf):
            raise UsageError(f"expected a {name} that is a number of 0 or more; got {number!r}")
    absent = sorted(set(lost) - set(range(before.cluster.nodes)))
    if absent:
        raise UsageError(f"expected lost nodes of 0 to {before.cluster.nodes - 1}; got {', '.join(map(str, absent))}")
    if before.layers.keys() != after.layers.keys():
        texts = (", ".join(map(str, sorted(placement.layers))) for placement in (after, before))
        raise UsageError("expected a placement until now of layers {}, as the new one; got {}".format(*texts))
    others = [
        f"layer {layer}: {after.num_experts(layer)} experts, {before.num_experts(layer)} until now"
        for layer in after.layers
        if after.num_experts(layer) != before.num_experts(layer)
    ]
    if others:
        raise UsageError(f"expected two placements of the same experts; got\n{format_list(others)}")
    survivors = [node for node in range(before.cluster.nodes) if node not in set(lost)]
    present = [_experts_on(before, node) for node in survivors]
    wanted = [_experts_on(after, node) for node in range(after.cluster.nodes)]
    node_of = _assign(present, wanted)
    order = sorted(range(len(wanted)), key=lambda node: node_of.get(node, len(survivors) + node))
    layers = {
        layer: tuple(expert for node in order for expert in after.slots_of(layer=layer, node=node))
        for layer in after.layers
    }
    nodes = tuple(survivors[node_of[node]] if node in node_of else None for node in order)
    placed = replace(after, layers=layers)
    if tolerance is not None:
        placed = _exchange(placed, [present[node_of[n]] if n in node_of else frozenset() for n in order], tolerance)
    sizes = dict(nbytes_per_expert or {})
    owners: dict[Expert, list[int]] = {}
    for survivor, experts in zip(survivors, present, strict=True):
        for expert in experts:
            owners.setdefault(expert, []).append(survivor)
    return Migration(
        placement=placed,
        nodes=nodes,
        transfers=tuple(_deal([_experts_on(placed, node) for node in range(len(order))], nodes, owners, sizes)),
        nbytes_per_expert=sizes,
        bandwidth=bandwidth,
    )


def _exchange(placement: Placement, present: Sequence[frozenset[Expert]], tolerance: float) -> Placement:
    """The placement with experts of as many replicas exchanged, where fewer move then. `present`: by node."""
    layers, cluster = dict(placement.layers), placement.cluster
    for layer, slots in placement.layers.items():
        balance = placement.balance(layer)
        if balance is None or EMPTY in slots:
            continue
        loads, counts = placement.loads[layer], Counter(slots)
        shares = [loads[expert] / counts[expert] for expert in range(len(loads))]
        by_node = [placement.experts_of(layer=layer, node=node) for node in range(cluster.nodes)]
        here = [{expert for number, expert in experts if number == layer} for experts in present]
        limit = (1 + tolerance) * max(sum(shares[expert] for expert in experts) for experts in by_node)
        exchanged = balance_nodes(by_node, loads, present=here, limit=limit)
        tried: list[int] = []
        for experts in exchanged:
            tried += deal_to_gpus(experts, shares, gpus=cluster.gpus, slots=cluster.slots)
        other = replace(placement, layers={layer: tuple(tried)})
        moved = [sum(len({*e} - h) for e, h in zip(nodes, here, strict=True)) for nodes in (by_node, exchanged)]
        if moved[1] < moved[0] and (other.balance(layer) or 0.0) <= (1 + tolerance) * balance:
            layers[layer] = tuple(tried)
    return replace(placement, layers=layers)


def measure_experts(index: Index) -> dict[int, int]:
    """Number of a layer to the bytes of its largest expert, with all states of a checkpoint."""
    sizes: dict[int, int] = {}
    for number, layer in number_layers(index.shapes):
        experts = (sum(_nbytes_of(index, tensor) for tensor in tensors.values()) for tensors in layer.experts.values())
        sizes[number] = max(experts, default=0)
    return sizes


def _nbytes_of(index: Index, tensor: ExpertTensor) -> int:
    atom = index.atoms[tensor.param]
    rows = 1 if tensor.row is None else atom.global_shape[0]
    return sum(state.numel * state.dtype.itemsize for state in atom.states.values()) // rows


def _deal(
    wanted: Sequence[Collection[Expert]],
    nodes: Sequence[int | None],
    owners: Mapping[Expert, Sequence[int]],
    sizes: Mapping[int, int],
) -> list[Transfer]:
    """What each node needs, and who sends it. `wanted`: experts by new node; `nodes`: their numbers before."""
    needs = [
        (expert, node)
        for node, experts in enumerate(wanted)
        for expert in sorted(experts)
        if nodes[node] not in owners.get(expert, ())
    ]
    needs.sort(key=lambda need: (len(owners.get(need[0], ())), need))  # least choice first
    sources = deal((owners.get(e, ()) for e, _ in needs), (sizes.get(layer, 1) for (layer, _), _ in needs))
    transfers = (Transfer(expert=e, source=source, node=node) for (e, node), source in zip(needs, sources, strict=True))
    return sorted(transfers, key=lambda transfer: (transfer.node, transfer.expert))


def _experts_on(placement: Placement, node: int) -> frozenset[Expert]:
    layers = placement.layers
    return frozenset((layer, e) for layer in layers for e in placement.experts_of(layer=layer, node=node))


def _assign(present: Sequence[frozenset[Expert]], wanted: Sequence[frozenset[Expert]]) -> dict[int, int]:
    """Node of the new placement to the position of the survivor that becomes it, so that fewest experts move."""
    if not present:
        return {}
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingLibraryError(
            "expected scipy, which assigns nodes so that fewest experts move; it is not installed. Install it "
            "(pip install 'universal-checkpoint[place]')"
        ) from error
    lacking = [[len(experts - survivor) for survivor in present] for experts in wanted]
    rows, columns = linear_sum_assignment(lacking)
    return dict(zip(rows.tolist(), columns.tolist(), strict=True))
