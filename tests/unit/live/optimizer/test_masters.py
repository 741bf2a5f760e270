"""Weights in low precision, stepped as masters in fp32."""

import numpy as np
import pytest
import torch
from torch import nn, optim

from ucp.errors import LoadError, UsageError
from ucp.live.load import load_into
from ucp.testing.handmade import Shards, make_index, write_checkpoint

RANDOM = np.random.default_rng(3)
SHAPES = {"0.weight": (3, 3), "0.bias": (3,), "1.weight": (3, 3), "1.bias": (3,)}


@pytest.fixture(params=[True, False], ids=["moments", "no-moments"])
def saved(request, tmp_path):
    """A checkpoint of two linears, and its arrays; of Adam, or of SGD, which keeps nothing."""
    arrays = {(name, "weight"): RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    if request.param:
        for name, shape in SHAPES.items():
            arrays |= {(name, own): RANDOM.random(shape).astype(np.float32) for own in ("exp_avg", "exp_avg_sq")}
            arrays[name, "step"] = np.array(4, dtype=np.int64)
    shards = Shards(tmp_path)
    write_checkpoint(make_index(tmp_path, {key: shards.whole(own) for key, own in arrays.items()}))
    return tmp_path, arrays


def net_and_masters():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    return net, {name: own.detach().clone().float().requires_grad_() for name, own in net.named_parameters()}


def stepper(params, arrays):
    return optim.AdamW(params) if ("0.bias", "step") in arrays else optim.SGD(params, lr=0.1)


def check(net, optimizer, masters, arrays):
    live = dict(net.named_parameters())
    assert all(optimizer.state.values())  # no parameter has an empty entry
    for (name, state), array in arrays.items():
        if state == "weight":
            assert torch.equal(masters[name], torch.from_numpy(array))
            assert torch.equal(live[name], torch.from_numpy(array).bfloat16())
        else:
            own = optimizer.state[masters[name]][state]
            assert own.dtype is torch.float32
            assert torch.equal(own, torch.from_numpy(array).float())
        assert "weight" not in optimizer.state[masters[name]]


def test_masters_in_the_order_of_the_model_are_known(saved):
    folder, arrays = saved
    net, masters = net_and_masters()
    optimizer = stepper(masters.values(), arrays)
    report = load_into(net, checkpoint=folder, optimizer=optimizer, strict="step" in report_states(arrays))
    check(net, optimizer, masters, arrays)
    assert "4 weights are cast from masters that the optimizer steps" in report.notes
    assert not any("goes on from what is rounded" in note for note in report.notes)
    assert set(report.names) == set(SHAPES)


def report_states(arrays):
    return {state for _, state in arrays}


def test_masters_in_groups_are_said(saved):
    folder, arrays = saved
    net, masters = net_and_masters()
    groups = [{"params": [own for own in masters.values() if own.ndim == dims]} for dims in (2, 1)]
    optimizer = stepper(groups, arrays)
    with pytest.raises(LoadError, match=r"parameter \d of group 1, .*\[3\](.*\n)+.*masters=\{"):
        load_into(net, checkpoint=folder, optimizer=optimizer, strict=False)
    load_into(net, checkpoint=folder, optimizer=optimizer, masters=masters, strict="step" in report_states(arrays))
    check(net, optimizer, masters, arrays)


def test_masters_of_other_values_are_not_taken_for_such(saved):
    folder, arrays = saved
    net, masters = net_and_masters()
    with torch.no_grad():
        masters["1.bias"] += 1
    with pytest.raises(LoadError, match=r"parameter \d of group 0, .*\[3\](.*\n)+.*masters=\{"):
        load_into(net, checkpoint=folder, optimizer=stepper(masters.values(), arrays))


def test_masters_that_order_alone_tells_apart_are_noted(saved):
    folder, arrays = saved
    net, _ = net_and_masters()
    for own in (net[0].bias, net[1].bias):
        nn.init.zeros_(own)
    masters = {name: own.detach().clone().float().requires_grad_() for name, own in net.named_parameters()}
    strict = "step" in report_states(arrays)
    report = load_into(net, checkpoint=folder, optimizer=stepper(masters.values(), arrays), strict=strict)
    (note,) = (note for note in report.notes if "order alone" in note)
    assert "2 of these masters" in note
    assert "(0.bias, 1.bias)" in note
    said = load_into(
        net, checkpoint=folder, optimizer=stepper(masters.values(), arrays), masters=masters, strict=strict
    )
    assert not any("order alone" in note for note in said.notes)


def test_masters_that_are_none_are_refused_all_at_once(saved):
    folder, arrays = saved
    net, masters = net_and_masters()
    optimizer = stepper(masters.values(), arrays)
    wrong = {**masters, "2.weight": masters["1.bias"], "0.bias": torch.zeros(3), "1.bias": masters["1.weight"]}
    with pytest.raises(UsageError) as error:
        load_into(net, checkpoint=folder, optimizer=optimizer, masters=wrong)
    assert "2.weight: the model" in str(error.value)
    assert "0.bias: the optimizer" in str(error.value)
    assert "1.bias: has shape [3, 3], " in str(error.value)


def test_an_optimizer_without_masters_is_said_to_go_on_from_rounded_weights(saved):
    folder, arrays = saved
    net, _ = net_and_masters()
    report = load_into(net, checkpoint=folder, optimizer=stepper(net.parameters(), arrays), strict=False)
    assert any("4 weights are stepped in bfloat16, but saved in float32" in note for note in report.notes)
