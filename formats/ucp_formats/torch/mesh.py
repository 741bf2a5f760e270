"""How the ranks of a PyTorch run cut its tensors, found from the boxes that `.metadata` records.

FSDP cuts dim 0 of every parameter as `torch.chunk` does, after tensor parallelism has cut any dim of it in the same
way; a pipeline stage holds parameters of its own. So the degrees are few numbers for a whole run, and a run is only
said to have them when the patterns place every box of every tensor just where it was recorded. What no such degrees
place (experts that a script cuts by itself, say) keeps its boxes, and no layout is stated.

>>> box = lambda at, rows: Box((at, 0), (rows, 4))
>>> found = mesh_of({"w": ((9, 4), [box(0, 5), box(5, 4)])}, {"w": {0, 1}}, ranks=2)
>>> str(found.topology), [axis.axis for axis in found.layouts["w"].axes]
('dp=2', ['dp_shard'])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Layout, place
from ucp.core.region import Box
from ucp.core.topology import Topology

__all__ = ["Boxes", "MeshLayouts", "mesh_of"]

Boxes = tuple[tuple[int, ...], Sequence[Box]]
"""Shape of a tensor, and the boxes of it that were saved."""

KNOWN_FROM = "boxes of .metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayouts:
    """Degrees of a run, and the layout of each tensor."""

    topology: Topology
    """The degrees."""
    layouts: Mapping[str, Layout]
    """Tensor to its layout; those are left out that the degrees do not place."""


def mesh_of(tensors: Mapping[str, Boxes], holders: Mapping[str, set[int]], *, ranks: int) -> MeshLayouts:
    """The mesh of a run of `ranks` ranks.

    `tensors`: name to the boxes of the weight. `holders`: name to the ranks whose files have the weight or a state; of
    replicas (HSDP) each item is in the file of any one, so that only a stage keeps all of a parameter together.
    """
    cut = {name: own for name, own in tensors.items() if len(own[1]) > 1}
    stages = _stages(holders[name] for name in cut)
    if not cut or ranks % stages:
        return MeshLayouts(topology=Topology(dp=ranks), layouts={})
    best: tuple[int, int, dict[str, Layout]] = (1, 1, {})
    for tp, shard in _degrees(ranks // stages):
        found = {name: layout for name, own in cut.items() if (layout := _layout(own, tp, shard)) is not None}
        if len(found) > len(best[2]):
            best = (tp, shard, found)
        if len(found) == len(cut):
            break
    tp, _, layouts = best
    return MeshLayouts(topology=Topology(dp=ranks // stages // tp, tp=tp, pp=stages), layouts=layouts)


def _degrees(ranks: int) -> Iterator[tuple[int, int]]:
    """Tensor-parallel and sharding degrees that `ranks` allow, the fewest cuts by tensor parallelism first."""
    for tp in range(1, ranks + 1):
        for shard in range(ranks // tp, 0, -1) if ranks % tp == 0 else ():
            if (ranks // tp) % shard == 0:
                yield tp, shard


def _stages(holders: Iterable[set[int]]) -> int:
    """Into how many sets of ranks, of one size, the ranks fall that hold parts of the same tensors."""
    groups: list[set[int]] = []
    for own in holders:
        joined = [group for group in groups if group & own]
        groups = [group for group in groups if not group & own] + [own.union(*joined)]
    return len(groups) if len({len(group) for group in groups}) == 1 else 1


def _layout(boxes: Boxes, tp: int, shard: int) -> Layout | None:
    """The layout whose parts are just the boxes recorded; None where these degrees have none."""
    shape, held = boxes
    wanted = frozenset(held)
    dims = [None, *range(len(shape))] if tp > 1 else [None]
    for dim, is_sharded in product(dims, (True, False) if shard > 1 else (False,)):
        layout = _made(dim, tp, shard if is_sharded else 1)
        if layout.axes and wanted == _placed(layout, shape):
            return layout
    return None


@lru_cache(maxsize=4096)
def _made(dim: int | None, tp: int, shard: int) -> Layout:
    axes = [AxisLayout("tp", tp, pattern("chunk", dim=dim), KNOWN_FROM)] if dim is not None else []
    axes += [AxisLayout("dp_shard", shard, pattern("chunk", dim=0), KNOWN_FROM)] if shard > 1 else []
    return Layout(tuple(axes))


@lru_cache(maxsize=4096)
def _placed(layout: Layout, shape: tuple[int, ...]) -> frozenset[Box]:
    """Boxes with elements that all ranks of a layout hold."""
    return frozenset(
        own.box for coords in layout.ranks() for own in place(layout, shape, coords=coords) if own.box.numel
    )
