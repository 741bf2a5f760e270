"""Which boxes of a tensor the ranks of the target run hold, and in which rank's file each box is written.

Ranks are numbered as in torch's meshes: pipeline stages outermost, then replicas, shards and tensor-parallel ranks.
Tensor parallelism shards a dim first, then FSDP shards dim 0 of what that leaves: `_StridedShard` if both shard dim 0.
A box that several ranks hold is written in the file of one of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain

from ucp.contract.layouts import holder_axes
from ucp.contract.plugins import pattern
from ucp.contract.registry import target_family
from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.layout import AxisLayout, Layout, place
from ucp.core.region import Box
from ucp.core.target import TargetOptions
from ucp.core.topology import Topology
from ucp.errors import UnknownFamilyError
from ucp.families.match import find_cut_dim

_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")
"""`layers.3`: what stays together on one stage of a pipeline."""


class TargetSharding:
    """Boxes and ranks for the run of `topology`."""

    def __init__(self, index: Index, topology: Topology, options: TargetOptions) -> None:
        self.notes: list[str] = []
        """How tensor-parallel ranks shard, and from where that is known."""
        self.ranks = topology.ranks
        self._known_from = "the source"
        dims = self._tp_dims(index, topology.tp, options) if topology.tp > 1 else {}
        tp = topology.tp if dims is not None else 1
        self._axes = {"dp_replicate": topology.replicas, "dp_shard": topology.shards * (topology.tp // tp), "tp": tp}
        self._tp_dim = dims or {}
        self._pp = topology.pp
        self._stage, self._stage_known_from = _stages(index, topology.pp)
        self._turns: Counter[tuple[object, ...]] = Counter()

    def _tp_dims(self, index: Index, tp: int, options: TargetOptions) -> Mapping[str, int | None] | None:
        """Dim that tensor-parallel ranks shard, by name; None if neither source nor family tells."""
        recorded = {
            atom.name: atom.layout.dim("tp", atom.global_shape)
            for atom in index.atoms.values()
            for axis in atom.layout.axes
            if axis.axis == "tp" and axis.parts > 1
        }
        if recorded:
            return recorded
        try:
            family, why = target_family(index, options)
        except UnknownFamilyError:
            self.notes.append(
                f"no rule says which dim tp={tp} shards: every tensor is in chunks of dim 0 over all ranks of a stage. "
                "That loads, but a tensor-parallel rank reads more than its shard. Name a family (--family), or pass "
                "rules (--patterns)"
            )
            return None
        self._known_from = f"family {family.name}"
        self.notes.append(f"tensor-parallel sharding from the family {family.name}: {', '.join(why)}")
        return {name: find_cut_dim(family, name) for name in index.atoms}

    def axes(self, param: str) -> tuple[AxisLayout, ...]:
        """The axes of the run for a parameter; ranks of its stage hold copies of what `layout` does not shard."""
        copies = (holder_axes(axis, parts, "FSDP") for axis, parts in self._axes.items() if axis != "tp")
        tp = holder_axes("tp", self._axes["tp"], self._known_from)
        return (
            *holder_axes("pp", self._pp, self._stage_known_from, (self._stage.get(param, 0),)),
            *tp,
            *chain(*copies),
        )

    def layout(self, atom: AtomIndex, shape: tuple[int, ...]) -> Layout:
        """How the ranks of a stage shard a state of `shape`."""
        if not shape or atom.kind is Kind.BUFFER:  # FSDP shards parameters alone
            return Layout()
        dim = self._tp_dim.get(atom.name) if shape == atom.global_shape else None
        return _layout(self._axes["dp_shard"], self._axes["tp"], dim, self._known_from)

    def chunks(self, atom: AtomIndex, shape: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
        """Boxes of a state of `shape`, each with a rank that has it."""
        for box, coords in _boxes(self.layout(atom, shape), shape):
            yield box, self.rank(atom.name, coords)

    def rank(self, param: str = "", coords: Mapping[str, int] | None = None) -> int:
        """A rank at `coords`, in the stage of a parameter; ranks that hold the same take turns."""
        known, rank = coords or {}, self._stage.get(param, 0)
        place = (rank, *known.items())
        turn = self._turns[place]
        self._turns[place] += 1
        for axis, parts in self._axes.items():
            turn, coord = (turn, known[axis]) if axis in known else divmod(turn, parts)
            rank = rank * parts + coord
        return rank


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[Box, Mapping[str, int]], ...]:
    """Boxes with elements, and the coordinates of the rank that has each."""
    return tuple(
        (placed.box, coords)
        for coords in layout.ranks()
        for placed in place(layout, shape, coords=coords)
        if placed.box.numel or not shape
    )


@cache
def _layout(shards: int, tp: int, dim: int | None, known_from: str) -> Layout:
    tp_axes = () if dim is None else (AxisLayout("tp", tp, pattern("chunk", dim=dim), known_from),)
    axes = (*tp_axes, AxisLayout("dp_shard", shards, pattern("chunk", dim=0), "FSDP"))
    return Layout(tuple(axis for axis in axes if axis.parts > 1))


def _stages(index: Index, pp: int) -> tuple[dict[str, int], str]:
    """Stage of every parameter, and where that is known from: the source, or else layers in the order of the model."""
    if pp == 1:
        return {}, ""
    owners = {
        atom.name: min(axis.holders(atom.global_shape), default=0)
        for atom in index.atoms.values()
        for axis in atom.layout.axes
        if axis.axis == "pp" and axis.parts == pp
    }
    if len(owners) == len(index.atoms):
        return owners, "the source"
    layer_of = {name: match[1] if (match := _LAYER.match(name)) else name for name in index.atoms}
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layer_of.values()))}
    stages = {name: numbers[layer] * pp // len(numbers) for name, layer in layer_of.items()}
    return stages, "layers in the order of the model, divided evenly over the stages"
