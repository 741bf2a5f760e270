"""Places of ranks: by a topology, and by a DeviceMesh of torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ucp.core.topology import Topology
from ucp.errors import TopologyError, UsageError
from ucp.live.run.mesh import RunMesh, is_device_mesh


@dataclass
class Mesh:
    """What `RunMesh` asks of a DeviceMesh, without process groups; the real one is in tests/integration/live."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    order: tuple[int, ...] = ()

    @property
    def mesh(self) -> torch.Tensor:
        count = torch.Size(self.shape).numel()
        ranks = torch.arange(count).reshape(self.shape)
        return ranks.permute(self.order) if self.order else ranks

    def get_coordinate(self) -> None:
        """There is none."""


def test_without_a_topology_nothing_is_known():
    mesh = RunMesh.from_topology(None, rank=3)
    assert (mesh.topology, mesh.coords, mesh.coords_of(1), mesh.degree("tp")) == (None, {}, {}, 1)


def test_replicas_of_shards():
    mesh = RunMesh.from_topology(Topology(dp_replicate=2, dp_shard=2, tp=2), rank=7)
    assert {axis: mesh.coords[axis] for axis in ("dp", "dp_replicate", "dp_shard", "tp")} == {
        "dp": 3,
        "dp_replicate": 1,
        "dp_shard": 1,
        "tp": 1,
    }
    assert mesh.coords_of(2)["dp_shard"] == 1


def test_experts_must_divide_the_ranks_of_a_stage():
    with pytest.raises(TopologyError, match=r"ep x etp .* 2 ranks .*ep=3: 3 x 1"):
        RunMesh.from_topology(Topology(dp=2, ep=3), rank=0)


def test_a_mesh_of_another_order():
    """tp outermost: rank 1 is a neighbour along pp."""
    mesh = RunMesh.from_device_mesh(Mesh((2, 2, 2), ("tp", "dp", "pp")), rank=1, count=8)
    assert str(mesh.topology) == "dp=2,tp=2,pp=2"
    assert (mesh.coords["tp"], mesh.coords["dp"], mesh.coords["pp"]) == (0, 0, 1)
    assert (mesh.coords_of(6)["tp"], mesh.coords_of(6)["dp"], mesh.coords_of(6)["pp"]) == (1, 1, 0)


def test_ranks_are_looked_up_where_the_mesh_has_them():
    """A transposed mesh: row-major place 1 is rank 2."""
    mesh = RunMesh.from_device_mesh(Mesh((2, 2), ("pp", "tp"), order=(1, 0)), rank=2, count=4)
    assert (mesh.coords["pp"], mesh.coords["tp"]) == (0, 1)


def test_experts_take_their_ranks_from_the_data_parallel_ones():
    mesh = RunMesh.from_device_mesh(Mesh((2, 2, 2), ("dp", "ep", "tp")), rank=6, count=8)
    assert str(mesh.topology) == "dp=4,tp=2,ep=2"
    assert {axis: mesh.coords[axis] for axis in ("dp", "ep", "edp", "tp", "etp")} == {
        "dp": 3,
        "ep": 1,
        "edp": 1,
        "tp": 0,
        "etp": 0,
    }


def test_experts_may_be_cut_over_ranks_of_their_own():
    mesh = RunMesh.from_device_mesh(Mesh((2, 2), ("ep", "etp")), rank=3, count=4)
    assert (mesh.degree("etp"), mesh.degree("tp"), mesh.degree("ep")) == (2, 1, 2)
    assert (mesh.coords["dp"], mesh.coords["etp"], mesh.coords["tp"]) == (3, 1, 0)


def test_fsdp_is_a_name_for_shards():
    mesh = RunMesh.from_device_mesh(Mesh((2, 2), ("dp_replicate", "fsdp")), rank=2, count=4)
    assert str(mesh.topology) == "dp_replicate=2,dp_shard=2"
    assert (mesh.coords["dp_replicate"], mesh.coords["dp_shard"], mesh.coords["dp"]) == (1, 0, 2)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh((2,), ("model",)), "; got model"),
        (Mesh((2,), None), "; got none"),
        (Mesh((1, 2), ("fsdp", "dp_shard")), "; got fsdp, dp_shard"),
        (Mesh((4,), ("tp",)), r"2 ranks .*4: \[0, 1, 2, 3\]"),
    ],
)
def test_a_mesh_that_is_not_understood(mesh: Mesh, said: str):
    with pytest.raises(UsageError, match=said):
        RunMesh.from_device_mesh(mesh, rank=0, count=2)


def test_what_is_a_mesh():
    assert is_device_mesh(Mesh((2,), ("tp",)))
    assert not is_device_mesh(Topology())
    assert not is_device_mesh("tp=2")
