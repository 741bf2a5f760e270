"""Models on the meta device: memory is made for them, and values for what no checkpoint has."""

import numpy as np
import pytest
import torch
from torch import nn, optim

from ucp.errors import LoadError
from ucp.live.load import load_into
from ucp.live.model.meta import find_device
from ucp.testing.handmade import Shards, make_index, write_checkpoint


class Net(nn.Module):
    """A tied head, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.emb.weight.mark = "kept"
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("ramp", torch.arange(3.0), persistent=False)
        self.register_buffer("mask", torch.eye(3, dtype=torch.bool), persistent=False)


class Computing(Net):
    def reset_parameters(self) -> None:
        self.ramp.copy_(torch.arange(3.0))
        self.mask = torch.eye(3, dtype=torch.bool)
        self.emb.reset_parameters()


@pytest.fixture
def saved(tmp_path):
    shards = Shards(tmp_path)
    weight = np.arange(15, dtype=np.float32).reshape(5, 3)
    arrays = {("emb.weight", "weight"): weight, ("seen", "weight"): np.array(7, dtype=np.int64)}
    arrays |= {("emb.weight", state): weight + at for at, state in enumerate(["exp_avg", "exp_avg_sq"], 1)}
    arrays["emb.weight", "step"] = np.array(4, dtype=np.int64)
    write_checkpoint(make_index(tmp_path, {key: shards.whole(own) for key, own in arrays.items()}))
    return tmp_path


def made(kind):
    with torch.device("meta"):
        return kind()


WEIGHT = torch.arange(15.0).view(5, 3)


def test_a_model_gets_memory_and_stays_what_it_is(saved):
    net = made(Computing)
    weight = net.emb.weight
    optimizer = optim.AdamW(net.parameters())
    load_into(net, checkpoint=saved, optimizer=optimizer)
    assert net.emb.weight is net.head.weight is weight is optimizer.param_groups[0]["params"][0]
    assert (weight.mark, weight.requires_grad, int(net.seen)) == ("kept", True, 7)
    assert torch.equal(weight, WEIGHT)
    assert torch.equal(optimizer.state[weight]["exp_avg"], WEIGHT + 1)
    assert torch.equal(net.ramp, torch.arange(3.0))
    assert torch.equal(net.mask, torch.eye(3, dtype=torch.bool))
    net.head(net.emb(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 5.0


def test_parameters_are_made_in_the_type_that_is_asked_for(saved):
    net = made(Computing)
    optimizer = optim.AdamW(net.parameters())
    report = load_into(net, checkpoint=saved, optimizer=optimizer, dtype="bfloat16")
    assert torch.equal(net.emb.weight, WEIGHT.bfloat16())
    assert optimizer.state[net.emb.weight]["exp_avg"].dtype is torch.bfloat16
    assert net.ramp.dtype is torch.float32
    assert "weight: float32 -> bfloat16 in 1 parameter" in report.casts


def test_what_is_not_computed_is_named_and_nothing_is_changed(saved):
    net = made(Net)
    with pytest.raises(LoadError, match=r"\n +ramp\n +mask\n.*no module"):
        load_into(net, checkpoint=saved)
    assert net.emb.weight.is_meta


def test_what_reset_parameters_leaves_out_is_named(saved):
    net = made(type("Lazy", (Net,), {"reset_parameters": lambda self: self.ramp.zero_()}))
    with pytest.raises(LoadError, match=r"\n +mask\nand reset_parameters"):
        load_into(net, checkpoint=saved)


def test_the_whole_model_may_compute_it(saved):
    def init_weights(self):
        self[0].ramp.copy_(torch.arange(3.0))
        self[0].mask.copy_(torch.eye(3, dtype=torch.bool))

    with torch.device("meta"):
        net = type("Outer", (nn.Sequential,), {"init_weights": init_weights})(Net())
    load_into(net, checkpoint=saved, rename=lambda name: name.removeprefix("0."))
    assert torch.equal(net[0].emb.weight, WEIGHT)
    assert torch.equal(net[0].mask, torch.eye(3, dtype=torch.bool))


def test_what_has_memory_keeps_its_values(saved):
    net = Net()
    net.emb.to_empty(device="meta")
    net.head.weight = net.emb.weight
    load_into(net, checkpoint=saved)
    assert torch.equal(net.head.weight, WEIGHT)
    assert torch.equal(net.ramp, torch.arange(3.0))


def test_a_buffer_that_is_assigned_anew_is_loaded(saved):
    def reset_parameters(self):
        Computing.reset_parameters(self)
        self.seen = torch.tensor(-1)

    net = made(type("Assigning", (Net,), {"reset_parameters": reset_parameters}))
    load_into(net, checkpoint=saved, verify=True)
    assert int(net.seen) == 7


def test_a_buffer_that_is_assigned_anew_in_another_type_is_refused(saved):
    def reset_parameters(self):
        Computing.reset_parameters(self)
        self.seen = torch.tensor(-1.0)

    net = made(type("Retyping", (Net,), {"reset_parameters": reset_parameters}))
    with pytest.raises(LoadError, match=r"\n +seen: is float32 \[\], and was int64 \[\]"):
        load_into(net, checkpoint=saved)


def test_a_parameter_that_is_assigned_anew_is_refused(saved):
    def reset_parameters(self):
        Computing.reset_parameters(self)
        self.emb.weight = nn.Parameter(torch.ones(5, 3))

    net = made(type("Replacing", (Net,), {"reset_parameters": reset_parameters}))
    with pytest.raises(LoadError, match=r"\n +emb\.weight: is another Parameter"):
        load_into(net, checkpoint=saved, optimizer=optim.AdamW(net.parameters()))


def test_what_has_values_and_is_not_brought_keeps_them(saved):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), 5.0))
            self.register_buffer("table", torch.full((2,), 6.0))
            self.register_buffer("run", torch.zeros(2, device="meta"), persistent=False)

        def reset_parameters(self):
            nn.init.ones_(self.weight)
            self.table, self.run = torch.ones(2), torch.ones(2)

    net = Net()
    net.own = Own()
    weight, table = net.own.weight, net.own.table
    report = load_into(net, checkpoint=saved, strict=False)
    assert report.missing == ("own.weight", "own.table")
    assert net.own.weight is weight
    assert net.own.table is table
    assert (net.own.weight.tolist(), net.own.table.tolist(), net.own.run.tolist()) == ([5, 5], [6, 6], [1, 1])


def test_nothing_is_made_when_the_checkpoint_does_not_fit(saved):
    net = made(Computing)
    net.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(LoadError, match=r"extra\.weight"):
        load_into(net, checkpoint=saved)
    assert net.emb.weight.is_meta
    load_into(net, checkpoint=saved, strict=False)
    assert not net.extra.weight.isnan().any()


def test_a_wrapper_may_have_buffers_of_its_own() -> None:
    wrapper = nn.Module()
    wrapper.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    wrapper.buffers = []  # type: ignore[assignment]  # as Megatron's DistributedDataParallel has
    assert find_device([wrapper]) == torch.device("cpu")
