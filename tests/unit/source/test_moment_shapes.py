"""Moments in another shape than their parameter are a problem on the page, and refused by what needs them."""

from pathlib import Path

import pytest
import torch

import ucp
from ucp.errors import MalformedError


def save(path: Path, reshape) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    states["state"][0]["exp_avg"] = reshape(states["state"][0]["exp_avg"])
    torch.save({"model": model.state_dict(), "optimizer": states}, path)
    return model, optimizer


@pytest.mark.parametrize("reshape", [torch.t, torch.flatten], ids=["4x6", "24"])
def test_another_shape_of_as_many_elements_is_refused(tmp_path, reshape):
    source = tmp_path / "all.pt"
    model, optimizer = save(source, reshape)
    (doubt,) = ucp.inspect(source).doubts
    assert (doubt.kind, "weight: exp_avg has the shape " in doubt.text) == ("moment-shapes", True)
    with pytest.raises(MalformedError, match="--accept moment-shapes"):
        ucp.plan(source, to="dcp")
    with pytest.raises(MalformedError, match=r"weight: .*exp_avg .*\[6, 4\]"):
        ucp.load_into(model, source, optimizer=optimizer)
    assert ucp.plan(source, to="dcp", accept=["moment-shapes"]).warnings


def test_weights_alone_are_taken(tmp_path):
    source = tmp_path / "all.pt"
    model, _ = save(source, torch.t)
    assert not ucp.plan(source, to="dcp", include=["*/weight"]).warnings
    fresh = torch.nn.Linear(4, 6, bias=False)
    ucp.load_into(fresh, source)
    assert torch.equal(fresh.weight, model.weight)


def test_the_shape_of_the_parameter_is_no_doubt(tmp_path):
    save(tmp_path / "all.pt", torch.clone)
    assert not ucp.inspect(tmp_path / "all.pt").doubts
