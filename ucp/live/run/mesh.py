"""Where a rank stands among all: its coordinates on the axes of the run.

Ranks are numbered as Megatron and DeepSpeed number them: tensor-parallel ranks are neighbours, then context and data
parallel ones, then pipeline stages. A torch DeviceMesh says it itself.

>>> RunMesh.of(Topology(dp=2, tp=2, pp=2), rank=5).coords
{'pp': 1, 'dp': 0, 'cp': 0, 'tp': 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ucp.core.topology import Topology

__all__ = ["RunMesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMesh:
    """The axes of a run, and one rank's place on them."""

    topology: Topology | None = None
    """Degrees that the user gave; None where the model alone says what is cut."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Axis to this rank's place on it; empty where no topology was given."""

    @classmethod
    def of(cls, topology: Topology | None, *, rank: int) -> RunMesh:
        """The place of `rank` in a run of that topology."""
        if topology is None:
            return cls()
        coords: dict[str, int] = {}
        for axis in ("tp", "cp", "dp", "pp"):
            rank, coords[axis] = divmod(rank, getattr(topology, axis))
        return cls(topology=topology, coords=dict(reversed(coords.items())))
