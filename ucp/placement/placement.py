"""A placement: which expert is in which slot of which GPU, for every layer.

>>> cluster = Cluster(nodes=2, gpus=1, slots=2)
>>> placement = Placement(cluster=cluster, layers={3: (0, 1, 1, 0)})
>>> placement.experts_of(layer=3, node=1)
(1, 0)
>>> placement.survival()  # no lost node, one, both
(1.0, 1.0, 0.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from ucp.core.text.page import Page, Report, facts, lines, table
from ucp.core.text.units import ranges_text
from ucp.core.topology import ExpertsByRank
from ucp.errors import UsageError, format_count, format_list
from ucp.placement.survival import LostNodes

EMPTY = -1
"""A slot without an expert."""
_MOST_NODES, _MOST_SLOTS = 512, 1 << 16
"""More would take hours, and gigabytes for sets of lost nodes."""
_MOST_LOST = 4
"""Numbers of lost nodes that a page shows the survival of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with GPUs, which have room for experts."""

    nodes: int
    """Nodes."""
    gpus: int = 1
    """GPUs of a node."""
    slots: int
    """Experts of a layer that fit on a GPU."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "slots"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"expected {name} of 1 or more; got {count!r}")
        if self.nodes > _MOST_NODES or self.num_slots > _MOST_SLOTS:
            raise UsageError(
                f"expected at most {_MOST_NODES:,} nodes and {_MOST_SLOTS:,} slots for the experts of a layer; got "
                f"{self.nodes:,} nodes and {self.num_slots:,} slots"
            )

    @property
    def slots_per_node(self) -> int:
        """Experts of a layer that fit on a node."""
        return self.gpus * self.slots

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus

    @property
    def num_slots(self) -> int:
        """Experts of a layer that fit on all nodes."""
        return self.num_gpus * self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Report):
    """Which expert is in which slot, for every layer with experts."""

    cluster: Cluster
    """Where the slots are."""
    layers: Mapping[int, tuple[int, ...]]
    """Number of a layer to the expert in each slot (or EMPTY), GPU after GPU, node after node."""
    threshold: int = 1
    """Distinct nodes that every expert is on, at least."""
    loads: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Number of a layer to the tokens of each expert, where known."""
    notes: tuple[str, ...] = ()
    """What you should know, but need not act on."""

    def __post_init__(self) -> None:
        problems = [problem for layer in self.layers for problem in self._problems_of(layer)]
        if not self.layers:
            problems.append("there is no layer")
        if problems:
            raise UsageError(f"expected a placement of all experts; got one with problems:\n{format_list(problems)}")

    def _problems_of(self, layer: int) -> list[str]:
        experts = self.layers[layer]
        if len(experts) != self.cluster.num_slots:
            return [f"layer {layer}: {len(experts)} slots, where the GPUs have {self.cluster.num_slots}"]
        present = set(experts) - {EMPTY}
        count = max(self.num_experts(layer), max(present, default=0) + 1)
        if count > len(experts):  # any number may be in a file: nothing of its size is made
            return [f"layer {layer}: {count} experts, where the GPUs have {len(experts)} slots"]
        absent = sorted(set(range(count)) - present)
        problems = [f"layer {layer}: no slot has experts {ranges_text(absent)}"] if absent else []
        if min(present, default=0) < 0:
            problems.append(f"layer {layer}: an expert has number {min(present)}")
        if self.threshold > 1:
            masks = self.masks_of(layer)
            few = [expert for expert in present if masks[expert].bit_count() < self.threshold]
            if few:
                problems.append(
                    f"layer {layer}: experts {ranges_text(sorted(few))} on fewer than {self.threshold} nodes"
                )
        return problems

    @classmethod
    def of_ranks(cls, layers: Mapping[int, ExpertsByRank], *, nodes: int, gpus: int = 1) -> Placement:
        """The placement of experts by rank, each a GPU: as many slots as the fullest has, EMPTY where one has fewer."""
        slots = max((len(experts) for ranks in layers.values() for experts in ranks), default=0)
        return cls(
            cluster=Cluster(nodes=nodes, gpus=gpus, slots=max(slots, 1)),
            layers={
                layer: tuple(chain(*(experts + (EMPTY,) * (slots - len(experts)) for experts in ranks)))
                for layer, ranks in layers.items()
            },
        )

    def num_experts(self, layer: int) -> int:
        """Experts of a layer."""
        return len(self.loads[layer]) if layer in self.loads else max(self.layers[layer]) + 1

    def experts_of(self, *, layer: int, node: int) -> tuple[int, ...]:
        """Experts of a layer in the slots of a node."""
        return tuple(expert for expert in self.slots_of(layer=layer, node=node) if expert != EMPTY)

    def slots_of(self, *, layer: int, node: int) -> tuple[int, ...]:
        """Expert, or EMPTY, in each slot of a node."""
        width = self.cluster.slots_per_node
        return self.layers[layer][node * width : (node + 1) * width]

    @property
    def experts_by_rank(self) -> dict[int, ExpertsByRank]:
        """Number of a layer to the experts of each expert-parallel rank: of each GPU, in the order of its slots."""
        return {layer: self.experts_by_gpu(layer) for layer in self.layers}

    def experts_by_gpu(self, layer: int) -> ExpertsByRank:
        """Experts of a layer in the slots of each GPU."""
        width, slots = self.cluster.slots, self.layers[layer]
        by_gpu = (slots[start : start + width] for start in range(0, len(slots), width))
        return tuple(tuple(expert for expert in experts if expert != EMPTY) for experts in by_gpu)

    def masks_of(self, layer: int) -> dict[int, int]:
        """Expert of a layer to the nodes that hold it: bit n for node n."""
        masks: dict[int, int] = {}
        for node in range(self.cluster.nodes):
            for expert in self.experts_of(layer=layer, node=node):
                masks[expert] = masks.get(expert, 0) | 1 << node
        return masks

    def survival(self, layer: int | None = None) -> tuple[float, ...]:
        """Probability that all experts are left when k nodes are lost, for k = 0 to all nodes.

        Of one layer, or of all together. Every set of k nodes is equally likely. Exact up to 20 nodes, else sampled.
        """
        layers = self.layers if layer is None else [layer]
        masks = {mask for number in layers for mask in self.masks_of(number).values()}
        return LostNodes.of(self.cluster.nodes).survival(masks)

    def balance(self, layer: int) -> float | None:
        """Tokens of the busiest GPU relative to the mean of all, 1 at best; None where loads are not known.

        Tokens of an expert are divided equally among its slots.
        """
        if layer not in self.loads:
            return None
        loads, counts = self.loads[layer], Counter(self.layers[layer])
        by_gpu = [sum(loads[expert] / counts[expert] for expert in experts) for experts in self.experts_by_gpu(layer)]
        mean = sum(by_gpu) / len(by_gpu)
        return max(by_gpu) / mean if mean else 1.0

    def page(self) -> Page:
        """Where there is room, what survives, how balanced it is, and a row for each layer."""
        cluster, balances = self.cluster, [self.balance(layer) for layer in self.layers]
        known = [balance for balance in balances if balance is not None]
        survival = self.survival()[1 : _MOST_LOST + 1]
        gpus = f"{format_count(cluster.gpus, 'GPU')} of {format_count(cluster.slots, 'slot')}"
        yield facts(
            [
                ("room", f"{format_count(cluster.nodes, 'node')}, each with {gpus}"),
                ("layers", f"{len(self.layers):,}"),
                ("on distinct nodes", f"{self.threshold} or more for every expert"),
                ("survival", "; ".join(f"{lost} lost: {rate:.1%}" for lost, rate in enumerate(survival, 1))),
                ("busiest GPU", f"{max(known):.2f} times the mean at most" if known else ""),
            ]
        )
        rows = []
        for layer, balance in zip(self.layers, balances, strict=True):
            counts = Counter(expert for expert in self.layers[layer] if expert != EMPTY).values()
            rates = (f"{rate:.1%}" for rate in self.survival(layer)[1 : _MOST_LOST + 1])
            rows.append((str(layer), f"{len(counts):,}", f"{min(counts)} to {max(counts)}", "  ".join(rates),
                         "" if balance is None else f"{balance:.2f}"))  # fmt: skip
        lost = f">survival, 1 to {len(survival)} lost"
        columns = (">layer", ">experts", ">replicas", lost, ">busiest GPU")
        yield table("Layers", columns, rows, most=128, all_in="--json")
        yield lines("Notes", self.notes)
