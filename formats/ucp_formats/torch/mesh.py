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
from typing import NamedTuple

from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout, place
from ucp.core.region import Box
from ucp.core.topology import Topology

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


class _Degrees(NamedTuple):
    """Ranks along each axis, outermost first."""

    pp: int
    replicate: int
    tp: int
    shard: int


def mesh_of(tensors: Mapping[str, Boxes], holders: Mapping[str, set[int]], *, ranks: int) -> MeshLayouts:
    """The mesh of a run of `ranks` ranks.

    `tensors`: name to the boxes of the weight. `holders`: name to the ranks whose files have the weight or a state; of
    replicas (HSDP) each item is in the file of any one, so that only a stage keeps all of a parameter together.
    """
    cut = {name: own for name, own in tensors.items() if len(own[1]) > 1}
    stages = _stages(holders[name] for name in cut)
    if not cut or ranks % len(stages):
        return MeshLayouts(topology=Topology(dp=ranks), layouts=_all_whole(tensors, ranks))
    best, most = _Degrees(len(stages), ranks // len(stages), 1, 1), len(cut) // 2  # degrees of fewer are a chance
    for degrees in _degrees(ranks, len(stages)):
        placed = sum(_layout(own, degrees, 0) is not None for own in cut.values())
        if placed > most:
            best, most = degrees, placed
        if placed == len(cut):
            break
    stage_of = {rank: number for number, own in enumerate(stages) for rank in own}
    found = {
        name: layout
        for name, own in tensors.items()
        if (layout := _layout(own, best, stage_of.get(min(holders[name], default=0), 0))) is not None
    }
    is_split = best.replicate > 1 and best.shard > 1
    dp = {"dp_replicate": best.replicate, "dp_shard": best.shard} if is_split else {"dp": best.replicate * best.shard}
    return MeshLayouts(topology=Topology(**dp, tp=best.tp, pp=best.pp), layouts=found)


def _all_whole(tensors: Mapping[str, Boxes], ranks: int) -> dict[str, Layout]:
    """Layouts of a run in which every rank has every tensor whole (DDP)."""
    axes = (AxisLayout("dp_replicate", ranks, pattern("replicate"), KNOWN_FROM),) if ranks > 1 else ()
    return dict.fromkeys((name for name, (_, boxes) in tensors.items() if len(boxes) == 1), Layout(axes))


def _degrees(ranks: int, stages: int) -> Iterator[_Degrees]:
    """Degrees that `ranks` allow, the fewest cuts by tensor parallelism first."""
    each = ranks // stages
    for tp in range(1, each + 1):
        for shard in range(each // tp, 0, -1) if each % tp == 0 else ():
            if (each // tp) % shard == 0:
                yield _Degrees(stages, each // tp // shard, tp, shard)


def _stages(holders: Iterable[set[int]]) -> list[set[int]]:
    """The sets of ranks, of one size, into which the ranks fall that hold parts of the same tensors."""
    groups: list[set[int]] = []
    for own in holders:
        joined = [group for group in groups if group & own]
        groups = [group for group in groups if not group & own] + [own.union(*joined)]
    is_even = len({len(group) for group in groups}) == 1
    return sorted(groups, key=min) if is_even else [set().union(*groups)]


def _layout(boxes: Boxes, degrees: _Degrees, stage: int) -> Layout | None:
    """The layout whose parts are just the boxes recorded; None where these degrees have none."""
    shape, held = boxes
    wanted = frozenset(held)
    dims = [None, *range(len(shape))] if degrees.tp > 1 else [None]
    for dim, is_sharded in product(dims, (True, False) if degrees.shard > 1 and shape else (False,)):
        layout = _made(degrees, stage, dim, is_sharded)
        if wanted == _placed(layout, shape):
            return layout
    return None


@lru_cache(maxsize=4096)
def _made(degrees: _Degrees, stage: int, dim: int | None, is_sharded: bool) -> Layout:  # noqa: FBT001  # cached
    whole = pattern("replicate")
    axes = (
        AxisLayout("pp", degrees.pp, pattern("unique", owner=stage), KNOWN_FROM),
        AxisLayout("dp_replicate", degrees.replicate, whole, KNOWN_FROM),
        AxisLayout("tp", degrees.tp, whole if dim is None else pattern("chunk", dim=dim), KNOWN_FROM),
        AxisLayout("dp_shard", degrees.shard, pattern("chunk", dim=0) if is_sharded else whole, KNOWN_FROM),
    )
    return Layout(tuple(axis for axis in axes if axis.parts > 1))


@lru_cache(maxsize=4096)
def _placed(layout: Layout, shape: tuple[int, ...]) -> frozenset[Box]:
    """Boxes with elements that all ranks of a layout hold."""
    return frozenset(
        own.box for coords in layout.ranks() for own in place(layout, shape, coords=coords) if own.box.numel
    )
