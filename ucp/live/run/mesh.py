"""Where ranks stand among all: their coordinates on the axes of the run.

Ranks are numbered as Megatron and DeepSpeed number them (megatron-core 0.16.1, parallel_state.py, order
tp-cp-ep-dp-pp): tensor-parallel ranks are neighbours, then context and data-parallel ones, then pipeline stages. The
ranks of a stage are numbered a second time for experts: expert-tensor-parallel ranks are neighbours, then
expert-parallel ones, and `edp` counts the copies. A run with another order says it with a torch DeviceMesh.

>>> mesh = RunMesh.of(Topology(dp=2, tp=2, pp=2, ep=2, etp=1), rank=5)
>>> mesh.coords["pp"], mesh.coords["dp"], mesh.coords["tp"], mesh.coords["ep"], mesh.coords["edp"]
(1, 0, 1, 1, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeGuard

from ucp.core.topology import Topology
from ucp.errors import TopologyError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIKE = {"fsdp": "dp_shard"}
"""Other names for a dim of a DeviceMesh."""
_KNOWN = ("dp", "dp_replicate", "dp_shard", "fsdp", "tp", "pp", "ep", "etp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMesh:
    """The axes of a run, and the places of its ranks on them."""

    topology: Topology | None = None
    """Degrees that the user gave; None where the model alone says what is cut."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Axis to this rank's place on it; empty where no topology was given."""
    grid: tuple[Mapping[str, int], ...] = ()
    """Places of all ranks, where a DeviceMesh says them; empty for the order above."""

    @classmethod
    def from_topology(cls, topology: Topology | None, *, rank: int) -> RunMesh:
        """The place of `rank` in a run of that topology. Raises TopologyError where experts do not divide the ranks."""
        if topology is None:
            return cls()
        stage, experts = topology.ranks // topology.pp, topology.ep * topology.expert_tp
        if stage % experts:
            raise TopologyError(
                f"expected ep x etp to divide the {stage} ranks of a stage (dp x cp x tp); got {topology}: "
                f"{topology.ep} x {topology.expert_tp}"
            )
        return cls(topology=topology, coords=_place(topology, rank))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, rank: int, count: int) -> RunMesh:
        """The places that a DeviceMesh over all `count` ranks says. Raises UsageError for a dim that is not known."""
        names = _names(mesh)
        members = [int(own) for own in mesh.mesh.flatten().tolist()]
        if sorted(members) != list(range(count)):
            raise UsageError(
                f"expected a DeviceMesh of all {count} ranks of the process group; got one of "
                f"{len(members)}: {members[:16]}. Pass the whole mesh, not a slice of it"
            )
        degrees = dict(zip(names, (int(own) for own in mesh.mesh.shape), strict=True))
        grid: list[Mapping[str, int]] = [{}] * count
        for at, member in enumerate(members):
            grid[member] = _joint(degrees, at)
        return cls(topology=_topology(degrees), coords=grid[rank], grid=tuple(grid))

    def coords_of(self, rank: int) -> Mapping[str, int]:
        """The place of any rank."""
        if self.topology is None:
            return {}
        return self.grid[rank] if self.grid else _place(self.topology, rank)

    def degree(self, axis: str) -> int:
        """Ranks along `tp`, `pp`, `ep` or `etp`; 1 where no topology was given."""
        if self.topology is None:
            return 1
        return self.topology.expert_tp if axis == "etp" else int(getattr(self.topology, axis))


def is_device_mesh(asked: object) -> TypeGuard[DeviceMesh]:
    """Whether a topology is said by a DeviceMesh of torch; imports none."""
    return hasattr(asked, "mesh_dim_names") and hasattr(asked, "get_coordinate")


def _place(topology: Topology, rank: int) -> Mapping[str, int]:
    stage, within = divmod(rank, topology.ranks // topology.pp)
    rest, tp = divmod(within, topology.tp)
    dp, cp = divmod(rest, topology.cp)
    rest, etp = divmod(within, topology.expert_tp)
    edp, ep = divmod(rest, topology.ep)
    replica, shard = divmod(dp, topology.shards)
    split = {"dp_replicate": replica, "dp_shard": shard} if topology.is_split else {}
    return {"pp": stage, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "edp": edp, **split}


def _names(mesh: DeviceMesh) -> list[str]:
    given = mesh.mesh_dim_names or ()
    names = [_ALIKE.get(name, name) for name in given]
    odd = [name for name in given if name not in _KNOWN]
    if odd or not names or len(set(names)) < len(names):
        said = ", ".join(given) or "none"
        raise UsageError(f"expected a DeviceMesh with dims named from {', '.join(_KNOWN)}, each once; got {said}")
    return names


def _topology(degrees: Mapping[str, int]) -> Topology:
    dense = prod(own for name, own in degrees.items() if name not in ("tp", "pp", "cp"))
    said = {name: degrees[name] for name in ("tp", "pp", "cp", "ep", "etp") if name in degrees}
    shared = any(name in degrees for name in ("dp", "ep", "etp"))
    split = {} if shared else {name: degrees[name] for name in ("dp_replicate", "dp_shard") if name in degrees}
    return Topology(dp=dense, **said, **split)


def _joint(degrees: dict[str, int], at: int) -> Mapping[str, int]:
    """Axes of the run at place `at` of a mesh in row-major order; several dims of a mesh may make one axis."""
    own: dict[str, int] = {}
    for name in reversed(degrees):
        at, own[name] = divmod(at, degrees[name])

    def joined(taken: Sequence[str]) -> int:
        number = 0
        for name in taken:
            number = number * degrees[name] + own[name]
        return number

    cuts_expert = {"pp", "ep", "etp" if "etp" in degrees else "tp"}
    return {
        **{axis: own.get(axis, 0) for axis in ("pp", "tp", "cp", "ep")},
        "etp": own.get("etp", own.get("tp", 0)),
        "dp": joined([name for name in degrees if name not in ("pp", "tp", "cp")]),
        "edp": joined([name for name in degrees if name not in cuts_expert]),
        **{axis: own[axis] for axis in ("dp_replicate", "dp_shard") if axis in own},
    }
