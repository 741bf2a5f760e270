"""The axes that no family speaks of: stages, chunks of stages, owners of experts, and ranks that hold copies.

| axis | a parameter is | because |
|---|---|---|
| pp, vpp | on one stage, in one of its chunks | layers are dealt out; a tied embedding is on the first and the last |
| ep | on one expert-parallel rank | experts are dealt out |
| dp | on every rank | weights are; states too, unless the distributed optimizer cuts them |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ucp.contract.axes import along
from ucp.core.layout import AxisLayout, Layout
from ucp.core.topology import Topology

__all__ = ["data_parallel", "known", "stages"]


def data_parallel(topology: Topology, *, expert: bool) -> int:
    """Ranks that hold copies of a dense parameter, or of an expert's.

    >>> mesh = Topology(dp=2, tp=2, ep=2, etp=1)
    >>> data_parallel(mesh, expert=False), data_parallel(mesh, expert=True)
    (2, 2)
    """
    dense = topology.dp * topology.cp
    return max(dense * topology.tp // (topology.ep * topology.expert_tp), 1) if expert else dense


def stages(pp: int, vpp: int, chunks: Collection[tuple[int, int]], known_from: str) -> tuple[AxisLayout, ...]:
    """The axes of a pipeline, for a tensor that is in these chunks, each a stage and the number of its chunk.

    That of the chunks is left out where they differ by stage.
    """
    there = along("pp", pp, known_from, {stage for stage, _ in chunks})
    within = {chunk for _, chunk in chunks}
    return there + (along("vpp", vpp, known_from, within) if len(within) == 1 else ())


def known(layout: Layout, known_from: str) -> tuple[AxisLayout, ...]:
    """The axes of a layout over dims, with where they are known from."""
    return tuple(replace(axis, known_from=known_from) for axis in layout.axes)
