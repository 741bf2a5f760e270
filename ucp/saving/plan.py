"""What a save holds, and which rank writes which part of it. Pure: names, boxes and bytes go in, shares come out.

Ranks that hold the same boxes of a state hold the same bytes (data-parallel replicas, tied stages): one of them writes.

>>> box = Box((0,), (4,))
>>> replicated = [SaveItem(param="w", state=state, boxes=(box,), nbytes=16) for state in ("weight", "exp_avg")]
>>> shares = plan_save([replicated, replicated])
>>> [[item.state for item in share] for share in shares]
[['exp_avg'], ['weight']]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Literal

from ucp.core.assign import deal
from ucp.core.region import Box
from ucp.errors import UnsupportedError, UsageError, format_list
from ucp.moe.layers import ExpertLayer, ExpertTensor, find_layers


@dataclass(frozen=True, slots=True)
class Full:
    """Save everything."""


@dataclass(frozen=True, slots=True)
class PartialExperts:
    """Save all tensors but those of experts, and of every layer `k` experts, others each time (MoC-System)."""

    k: int
    """Experts of a layer in one save."""
    select: Literal["sequential", "load"] = "sequential"
    """Which: by turns, so that each is saved once in ceil(experts / k) saves; or those with most tokens."""
    tokens: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """For "load": path of a layer's module to the tokens that each expert got since its last save, of all ranks."""
    written: int | None = None
    """With snapshots: of the k experts that are kept in memory, how many are written, too: those written longest ago
    (two-level saving). None for all."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise UsageError(f"expected PartialExperts(k) with k of 1 or more; got {self.k!r}")
        written = self.written
        if written is not None and (
            isinstance(written, bool) or not isinstance(written, int) or not 1 <= written <= self.k
        ):
            raise UsageError(f"expected written= of 1 to k={self.k}; got {self.written!r}")
        if self.select not in ("sequential", "load") or bool(self.tokens) != (self.select == "load"):
            raise UsageError(
                f'expected select="sequential", or select="load" and tokens=; got select={self.select!r} and tokens of '
                f"{len(self.tokens)} layers"
            )

    def raise_k(self, experts: int, *, lost: float, interval: float, limit: float = 0.0375) -> PartialExperts:
        """The plan with k doubled until the next recovery loses so little that all stay within `limit` (Dynamic-K).

        `experts`: of a layer. `lost`: proportion of the run's tokens that experts lost in recoveries so far (PLT).
        `interval`: share of the run between two saves. Call it at the start and after each recovery. Tokens are
        assumed to be spread evenly, and experts taken by turns. Raises UsageError for numbers that cannot be.

        >>> PartialExperts(1).raise_k(16, lost=0.02, interval=0.005).k
        4
        """
        if experts < 1 or not all(0 <= number < inf for number in (lost, interval, limit)):
            raise UsageError(
                f"expected experts of 1 or more, and lost, interval and limit of 0 or more; got {experts}, {lost}, "
                f"{interval} and {limit}"
            )
        k = min(self.k, experts)
        while k < experts and lost + mean_age(k, experts) * interval > limit:
            k = min(2 * k, experts)
        return replace(self, k=k)

    def find_unsaved(
        self, shapes: Mapping[str, tuple[int, ...]], *, turn: int, ep: int, last: Mapping[str, int] | None = None
    ) -> frozenset[str]:
        """Parameters that this save leaves out. `shapes`: of all parameters; `turn`: number of the save, from 0.

        `last`: parameter to the step at which it was last written; then only `written` of the k experts are saved.

        Raises UsageError for a model without experts, for tokens of other layers, and if `ep` does not divide the
        experts; UnsupportedError for experts that are rows of one tensor, as a link holds whole tensors.
        """
        layers = find_layers(shapes)
        stacked = [layer.module for layer in layers if any(map(_is_stacked, layer.experts.values()))]
        if stacked:
            raise UnsupportedError(
                "expected experts with tensors of their own; those of these layers are rows of one tensor:\n"
                f"{format_list(stacked)}\nSave them with plan=Full()"
            )
        if not layers or (self.tokens and self.tokens.keys() != {layer.module for layer in layers}):
            known = ", ".join(layer.module for layer in layers) or "none"
            raise UsageError(f"expected layers with experts, and tokens of each; the model has {known}")
        unsaved: set[str] = set()
        for number, layer in enumerate(layers):
            chosen = self._choose(layer, number, turn=turn, ep=ep)
            if last is not None:
                params = {expert: next(iter(layer.experts[expert].values())).param for expert in chosen}
                chosen = sorted(chosen, key=lambda expert: last.get(params[expert], -1))[: self.written]
            others = (tensors for expert, tensors in layer.experts.items() if expert not in chosen)
            unsaved.update(tensor.param for tensors in others for tensor in tensors.values())
        return frozenset(unsaved)

    def next_turn(self, shapes: Mapping[str, tuple[int, ...]], held: Collection[str], *, ep: int) -> int:
        """Number of the save after one that holds the parameters `held`: from 0 again after one of all experts."""
        layer = next(iter(find_layers(shapes)), None)
        if layer is None or self.select == "load":
            return 0
        saved = {
            expert
            for expert, tensors in layer.experts.items()
            if any(tensor.param in held for tensor in tensors.values())
        }
        turns = range(0 if len(saved) == layer.num_experts else layer.num_experts)
        return next((turn + 1 for turn in turns if saved == {*self._choose(layer, 0, turn=turn, ep=ep)}), 0)

    def _choose(self, layer: ExpertLayer, number: int, *, turn: int, ep: int) -> Sequence[int]:
        count = layer.num_experts
        if self.select == "sequential":
            return choose_by_turns(min(self.k, count), turn=turn, layer=number, experts=count, ep=ep)
        tokens = self.tokens[layer.module]
        if len(tokens) != count or not isfinite(sum(tokens)):
            raise UsageError(f"expected finite tokens of {count} experts of {layer.module}; got {len(tokens)} numbers")
        return sorted(range(count), key=lambda expert: (-tokens[expert], expert))[: self.k]


def _is_stacked(tensors: Mapping[str, ExpertTensor]) -> bool:
    return any(tensor.row is not None for tensor in tensors.values())


def mean_age(k: int, experts: int) -> float:
    """Saves since an expert was last saved, the mean over experts that take turns, k in each save.

    >>> mean_age(1, 16), mean_age(4, 16)
    (7.5, 1.5)
    """
    rounds, rest = divmod(experts, k)
    return (k * rounds * (rounds - 1) / 2 + rest * rounds) / experts


def choose_by_turns(k: int, *, turn: int, layer: int, experts: int, ep: int) -> tuple[int, ...]:
    """The experts of a layer that save number `turn` holds: successive ones are on successive ranks (MoC-System).

    `layer`: number among the layers with experts, by which layers take different turns, so that the ranks write equally
    many experts if k times the layers is a multiple of `ep`. Raises UsageError if `ep` does not divide `experts`.

    >>> [choose_by_turns(1, turn=0, layer=layer, experts=3, ep=3) for layer in range(4)]
    [(0,), (1,), (2,), (0,)]
    """
    if experts % ep:
        raise UsageError(f"expected ep to divide the {experts} experts of a layer; got {ep}")
    positions = [((turn + layer) * k + j) % experts for j in range(k)]
    return tuple((position % ep) * (experts // ep) + position // ep for position in positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveItem:
    """What a rank holds of a state; equal on all ranks that hold the same."""

    param: str
    """Parameter or buffer, by its name in the whole model."""
    state: str
    """Name of the state."""
    boxes: tuple[Box, ...]
    """Boxes of the global tensor, in the order in which the rank stores them."""
    nbytes: int
    """Bytes of these elements."""


def plan_save(items_by_rank: Sequence[Iterable[SaveItem]]) -> tuple[tuple[SaveItem, ...], ...]:
    """What each rank writes: every item once, by one of the ranks that hold it.

    `items_by_rank`: what each rank holds. Items of a single rank are its own; of the others, the largest goes first to
    the rank with the fewest bytes (MoC-System, adaptive sharding). All ranks compute the same shares.
    """
    holders: dict[SaveItem, list[int]] = {}
    for rank, items in enumerate(items_by_rank):
        for item in items:
            holders.setdefault(item, []).append(rank)
    ordered = sorted(holders, key=lambda item: (len(holders[item]) > 1, -item.nbytes, item.param, item.state))
    chosen = deal((holders[item] for item in ordered), (item.nbytes for item in ordered))
    writers = dict(zip(ordered, chosen, strict=True))
    return tuple(
        tuple(item for item in dict.fromkeys(items) if writers[item] == rank)
        for rank, items in enumerate(items_by_rank)
    )
