"""How the ranks of a PyTorch run sharded its tensors, inferred from the boxes that `.metadata` records.

FSDP shards dim 0 of every parameter as `torch.chunk` does, after tensor parallelism has sharded any dim in the same
way; each pipeline stage holds its own parameters. One set of degrees applies to the whole run: `mesh_of` takes the
degrees that place the most tensors exactly in the recorded boxes. A tensor that these do not place (experts sharded by
a script, for example) keeps its boxes and has no layout.

>>> box = lambda row, rows: Box((row, 0), (rows, 4))
>>> mesh = mesh_of({"w": ((9, 4), [box(0, 5), box(5, 4)])}, {"w": {0, 1}}, ranks=2)
>>> str(mesh.topology), [axis.axis for axis in mesh.layouts["w"].axes]
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
    """Layouts by tensor; none for tensors that the degrees do not place."""


class _Degrees(NamedTuple):
    """Ranks along each axis, outermost first."""

    pp: int
    replicate: int
    tp: int
    shard: int


def mesh_of(tensors: Mapping[str, Boxes], holders: Mapping[str, set[int]], *, ranks: int) -> MeshLayouts:
    """The mesh of a run of `ranks` ranks.

    `tensors`: name to the boxes of the weight. `holders`: name to the ranks whose files have the weight or a state.
    If there are replicas (HSDP), DCP writes each chunk in the file of any one of them: the files with a parameter show
    its pipeline stage, but not how the stage is divided.
    """
    sharded = {name: boxes for name, boxes in tensors.items() if len(boxes[1]) > 1}
    stages = _stages(holders[name] for name in sharded)
    if not sharded or ranks % len(stages):  # every rank has every tensor in full (DDP)
        axes = (AxisLayout("dp_replicate", ranks, pattern("replicate"), KNOWN_FROM),) if ranks > 1 else ()
        names = (name for name, (_, boxes) in tensors.items() if len(boxes) == 1)
        return MeshLayouts(topology=Topology(dp=ranks), layouts=dict.fromkeys(names, Layout(axes)))
    best, most = _Degrees(len(stages), ranks // len(stages), 1, 1), len(sharded) // 2  # fewer may fit by chance
    for degrees in _degrees(ranks, len(stages)):
        placed = sum(_find_layout(boxes, degrees, 0) is not None for boxes in sharded.values())
        if placed > most:
            best, most = degrees, placed
        if placed == len(sharded):
            break
    stage_of = {rank: number for number, members in enumerate(stages) for rank in members}
    layouts = {
        name: layout
        for name, boxes in tensors.items()
        if (layout := _find_layout(boxes, best, stage_of.get(min(holders[name], default=0), 0))) is not None
    }
    is_split = best.replicate > 1 and best.shard > 1
    replicate, shard = (best.replicate, best.shard) if is_split else (None, None)
    topology = Topology(dp=best.replicate * best.shard, dp_replicate=replicate, dp_shard=shard, tp=best.tp, pp=best.pp)
    return MeshLayouts(topology=topology, layouts=layouts)


def _degrees(ranks: int, stages: int) -> Iterator[_Degrees]:
    """Degrees that `ranks` allow, the least tensor parallelism first, then the most shards."""
    in_stage = ranks // stages
    for tp in (tp for tp in range(1, in_stage + 1) if in_stage % tp == 0):
        for shard in range(in_stage // tp, 0, -1):
            if (in_stage // tp) % shard == 0:
                yield _Degrees(stages, in_stage // tp // shard, tp, shard)


def _stages(holders: Iterable[set[int]]) -> list[set[int]]:
    """Pipeline stages: sets of ranks so that each tensor is in one set alone; a single set if their sizes differ."""
    groups: list[set[int]] = []
    for ranks in holders:
        overlapping = [group for group in groups if group & ranks]
        groups = [group for group in groups if not group & ranks] + [ranks.union(*overlapping)]
    is_even = len({len(group) for group in groups}) == 1
    return sorted(groups, key=min) if is_even else [set().union(*groups)]


def _find_layout(boxes: Boxes, degrees: _Degrees, stage: int) -> Layout | None:
    """The layout that places exactly the recorded boxes; None if no layout of these degrees does."""
    shape, recorded = boxes
    dims = [None, *range(len(shape))] if degrees.tp > 1 else [None]
    for dim, is_sharded in product(dims, (True, False) if degrees.shard > 1 and shape else (False,)):
        layout = _layout_of(degrees, stage, dim, is_sharded)
        if frozenset(recorded) == _boxes_of(layout, shape):
            return layout
    return None


@lru_cache(maxsize=4096)
def _layout_of(degrees: _Degrees, stage: int, dim: int | None, is_sharded: bool) -> Layout:  # noqa: FBT001  # cached
    replicate = pattern("replicate")
    axes = (
        AxisLayout("pp", degrees.pp, pattern("unique", owner=stage), KNOWN_FROM),
        AxisLayout("dp_replicate", degrees.replicate, replicate, KNOWN_FROM),
        AxisLayout("tp", degrees.tp, replicate if dim is None else pattern("chunk", dim=dim), KNOWN_FROM),
        AxisLayout("dp_shard", degrees.shard, pattern("chunk", dim=0) if is_sharded else replicate, KNOWN_FROM),
    )
    return Layout(tuple(axis for axis in axes if axis.parts > 1))


@lru_cache(maxsize=4096)
def _boxes_of(layout: Layout, shape: tuple[int, ...]) -> frozenset[Box]:
    """The boxes that the ranks of a layout hold, without empty ones."""
    placed = (piece for coords in layout.ranks() for piece in place(layout, shape, coords=coords))
    return frozenset(piece.box for piece in placed if piece.box.numel)
