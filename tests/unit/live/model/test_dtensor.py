"""DTensors of torch itself, on one rank of a process group that only counts (torch's "fake" backend)."""

import pytest
import torch
from torch import distributed, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import UnsupportedError, UsageError
from ucp.live.model.dtensor import check_axes
from ucp.live.model.module import describe_modules
from ucp.live.optimizer.torch_optimizer import describe_optimizer

ROWS = torch.arange(20.0).view(5, 4)


@pytest.fixture
def mesh():
    distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    distributed.destroy_process_group()


def net_of(mesh, *placements):
    """A module with one parameter, of which this rank (dp 1, tp 1) holds what the placements say."""
    net = nn.Module()
    net.w = nn.Parameter(distribute_tensor(ROWS, mesh, placements, src_data_rank=None))
    return net


def slice_of(net):
    (own,) = describe_modules([net]).tensors
    return own.part.to_slice("w", "weight", (5, 4), DType.FLOAT32)


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(0))])
def test_a_part_is_what_the_placements_say(mesh, placements):
    net = net_of(mesh, *placements)
    found = slice_of(net)
    held = net.w.detach().to_local()
    assert found.local_shape == tuple(held.shape)
    for pair in found.pairs:
        whole = tuple(
            slice(low, high) for low, high in zip(pair.global_box.offsets, pair.global_box.stops, strict=True)
        )
        local = tuple(slice(low, high) for low, high in zip(pair.local.offsets, pair.local.stops, strict=True))
        assert torch.equal(ROWS[whole], held[local])
    assert sum(pair.global_box.numel for pair in found.pairs) == held.numel()
    assert describe_modules([net]).handles["w"].data_ptr() == held.data_ptr()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("experts", [4, 6])
def test_fsdp_cuts_what_expert_parallelism_leaves(mesh, experts, dim):
    """As torchtitan has it: DTensors of experts over one axis, then FSDP2 over the rest; 6 in 2 x 2 are uneven."""
    whole = torch.arange(experts * 4.0).view(experts, 4)
    net = nn.Module()
    net.w1 = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(net, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    live = describe_modules([net])
    (own,) = live.tensors
    (pair,) = own.part.to_slice("w1", "weight", (experts, 4), DType.FLOAT32).pairs
    assert len(own.part.layout.axes) == 2
    part = whole[
        tuple(slice(low, high) for low, high in zip(pair.global_box.offsets, pair.global_box.stops, strict=True))
    ]
    assert torch.equal(part, live.handles["w1"])


def test_a_sum_that_is_not_reduced_is_refused(mesh):
    net = nn.Module()
    net.w = nn.Parameter(DTensor.from_local(ROWS.clone(), mesh, [Replicate(), Partial()]))
    with pytest.raises(UnsupportedError, match=r"w: expected placements Shard and Replicate; got P"):
        describe_modules([net])


@pytest.mark.parametrize("told", ["dp=2,tp=2", "dp_replicate=2,dp_shard=1,tp=2", "cp=2,tp=2"])
def test_a_topology_may_say_it_again(mesh, told):
    check_axes(describe_modules([net_of(mesh, Shard(0), Shard(1))]).tensors, Topology.parse(told))


@pytest.mark.parametrize("told", ["dp=4", "tp=4", "dp=4,tp=2"])
def test_a_topology_of_other_degrees_is_refused(mesh, told):
    with pytest.raises(UsageError, match=r"; got\n +w: dp=2 x tp=2\n"):
        check_axes(describe_modules([net_of(mesh, Shard(0), Replicate())]).tensors, Topology.parse(told))


def test_states_lie_over_the_ranks_as_the_parameter_does(mesh):
    net = net_of(mesh, Shard(1), Shard(0))
    live = describe_optimizer(optim.AdamW(net.parameters()), describe_modules([net]))
    assert live.params([{}])[0].keeps == {"step": DType.FLOAT32, "exp_avg": DType.FLOAT32, "exp_avg_sq": DType.FLOAT32}
    local = live.landing("w", "exp_avg", DType.FLOAT32, (2, 2), counts=False)
    local.fill_(7.0)
    live.put({"w": {"exp_avg": local, "step": torch.tensor(3.0)}}, {"w": frozenset({"step"})})
    state = live.handle.state[net.w]
    assert (state["exp_avg"].placements, state["exp_avg"].shape) == (net.w.placements, net.w.shape)
    assert torch.equal(state["exp_avg"].to_local(), torch.full((2, 2), 7.0))
    assert type(state["step"]) is torch.Tensor
    assert live.landing("w", "exp_avg", DType.FLOAT32, (2, 2), counts=False).data_ptr() == local.data_ptr()
    row = live.landing("w", "row_var", DType.FLOAT32, (5, 1), counts=False)
    assert row.shape == (5, 1)
