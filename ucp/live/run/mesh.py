"""Coordinates of ranks on the axes of the run.

Ranks are numbered as Megatron and DeepSpeed number them (megatron-core 0.16.1, parallel_state.py, order
tp-cp-ep-dp-pp): tensor-parallel ranks are neighbours, then context and data-parallel ones, then pipeline stages. The
ranks of a stage are numbered a second time for experts: expert-tensor-parallel ranks are neighbours, then
expert-parallel ones, and `edp` counts the replicas. For a run with another order, pass a torch DeviceMesh.

>>> mesh = RunMesh.from_topology(Topology(dp=2, tp=2, pp=2, ep=2, etp=1), rank=5)
>>> mesh.coords["pp"], mesh.coords["dp"], mesh.coords["tp"], mesh.coords["ep"], mesh.coords["edp"]
(1, 0, 1, 1, 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from ucp.core.topology import Topology
from ucp.errors import TopologyError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SYNONYMS = {"fsdp": "dp_shard"}
"""Other names for a dim of a DeviceMesh."""
_DIMS = ("dp", "dp_replicate", "dp_shard", "fsdp", "tp", "pp", "ep", "etp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMesh:
    """The axes of a run, and the coordinates of its ranks on them."""

    topology: Topology | None = None
    """Degrees that the user gave; None if only the model says how it is cut."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Axis to this rank's coordinate on it; empty if no topology was given."""
    grid: tuple[Mapping[str, int], ...] = ()
    """Coordinates of all ranks, from a DeviceMesh; empty if ranks are numbered as in Megatron."""

    @classmethod
    def from_topology(cls, topology: Topology | None, *, rank: int) -> RunMesh:
        """The coordinates of `rank` in a run of that topology. Raises TopologyError if experts do not divide ranks."""
        if topology is None:
            return cls()
        stage, experts = topology.ranks // topology.pp, topology.ep * topology.expert_tp
        if stage % experts:
            raise TopologyError(
                f"expected ep x etp to divide the {stage} ranks of a stage (dp x cp x tp); got {topology}: "
                f"{topology.ep} x {topology.expert_tp}"
            )
        return cls(topology=topology, coords=_find_coords(topology, rank))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, rank: int, count: int) -> RunMesh:
        """The coordinates on a DeviceMesh over all `count` ranks. Raises UsageError for an unknown dim."""
        dims = mesh.mesh_dim_names or ()
        axes = [_SYNONYMS.get(dim, dim) for dim in dims]
        if any(dim not in _DIMS for dim in dims) or not axes or len(set(axes)) < len(axes):
            got = ", ".join(dims) or "none"
            raise UsageError(f"expected a DeviceMesh with dims named from {', '.join(_DIMS)}, each once; got {got}")
        members = [int(member) for member in mesh.mesh.flatten().tolist()]
        if sorted(members) != list(range(count)):
            raise UsageError(
                f"expected a DeviceMesh of all {count} ranks of the process group; got one of "
                f"{len(members)}: {members[:16]}. Pass the whole mesh, not a slice of it"
            )
        degrees = dict(zip(axes, (int(length) for length in mesh.mesh.shape), strict=True))
        grid: list[Mapping[str, int]] = [{}] * count
        for position, member in enumerate(members):
            grid[member] = _unravel(degrees, position)
        return cls(topology=_make_topology(degrees), coords=grid[rank], grid=tuple(grid))

    def coords_of(self, rank: int) -> Mapping[str, int]:
        """The coordinates of any rank."""
        if self.topology is None:
            return {}
        return self.grid[rank] if self.grid else _find_coords(self.topology, rank)

    def degree(self, axis: str) -> int:
        """Ranks along `tp`, `pp`, `ep` or `etp`; 1 if no topology was given."""
        if self.topology is None:
            return 1
        return self.topology.expert_tp if axis == "etp" else int(getattr(self.topology, axis))


def is_device_mesh(topology: object) -> TypeGuard[DeviceMesh]:
    """Whether a topology is given as a DeviceMesh of torch; does not import torch."""
    return hasattr(topology, "mesh_dim_names") and hasattr(topology, "get_coordinate")


def _find_coords(topology: Topology, rank: int) -> Mapping[str, int]:
    stage, within = divmod(rank, topology.ranks // topology.pp)
    rest, tp = divmod(within, topology.tp)
    dp, cp = divmod(rest, topology.cp)
    rest, etp = divmod(within, topology.expert_tp)
    edp, ep = divmod(rest, topology.ep)
    replica, shard = divmod(dp, topology.shards)
    split = {"dp_replicate": replica, "dp_shard": shard} if topology.is_split else {}
    return {"pp": stage, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "edp": edp, **split}


def _make_topology(degrees: Mapping[str, int]) -> Topology:
    dense = prod(degree for axis, degree in degrees.items() if axis not in ("tp", "pp", "cp"))
    known: dict[str, Any] = {axis: degrees[axis] for axis in ("tp", "pp", "cp", "ep", "etp") if axis in degrees}
    is_shared = any(axis in degrees for axis in ("dp", "ep", "etp"))
    if not is_shared:
        known |= {axis: degrees[axis] for axis in ("dp_replicate", "dp_shard") if axis in degrees}
    return Topology(dp=dense, **known)


def _unravel(degrees: Mapping[str, int], position: int) -> Mapping[str, int]:
    """Coordinates on the axes of the run at `position` of a mesh in row-major order; dims may combine to one axis."""
    coords: dict[str, int] = {}
    for axis in reversed(list(degrees)):
        position, coords[axis] = divmod(position, degrees[axis])

    def join(axes: Iterable[str]) -> int:
        joined = 0
        for axis in axes:
            joined = joined * degrees[axis] + coords[axis]
        return joined

    cuts_expert = {"pp", "ep", "etp" if "etp" in degrees else "tp"}
    return {
        **{axis: coords.get(axis, 0) for axis in ("pp", "tp", "cp", "ep")},
        "etp": coords.get("etp", coords.get("tp", 0)),
        "dp": join(axis for axis in degrees if axis not in ("pp", "tp", "cp")),
        "edp": join(axis for axis in degrees if axis not in cuts_expert),
        **{axis: coords[axis] for axis in ("dp_replicate", "dp_shard") if axis in coords},
    }
