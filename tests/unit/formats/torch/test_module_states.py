"""What modules keep beside their tensors (`get_extra_state`, as FP8 layers do): one entry, whatever it holds."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_map

import ucp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for saves and loads of one process

AMAX = torch.tensor([1.0, 2.0, 3.0])
STATES = {
    "dict": {"amax": AMAX, "format": "e4m3", "history": [AMAX + 1, AMAX + 2]},
    "tensor": AMAX,
    "flat": {"margin": 3},
}
ZERO = {"to": "deepspeed", "topology": "dp=1,zero=1"}


def model_of(state: object) -> torch.nn.Module:
    class Layer(torch.nn.Linear):
        state = None

        def get_extra_state(self):
            return state if self.state is None else self.state

        def set_extra_state(self, given):
            self.state = given

    return torch.nn.Sequential(Layer(4, 4))


def loaded(module: dict[str, object]) -> object:
    """The state that a strict load gives to the layer."""
    model = model_of({})
    model.load_state_dict(module)
    return model[0].state


def zero_module(folder: Path) -> dict[str, object]:
    (file,) = folder.glob("*/mp_rank_00_model_states.pt")
    return torch.load(file, weights_only=False)["module"]


def save(kind: str, state: object, path: Path) -> Path:
    model = model_of(state)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if kind == "torch":
        path.mkdir()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "all.pt")
    else:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path, no_dist=True)
    return path


def assert_same(found: object, state: object) -> None:
    if isinstance(state, dict):
        assert found.keys() == state.keys()  # DCP saves tensors apart from the rest, so that their order is not kept
        for key, value in state.items():
            assert_same(found[key], value)
    elif isinstance(state, list):
        for one, two in zip(found, state, strict=True):
            assert_same(one, two)
    else:
        assert torch.equal(found, state) if isinstance(state, torch.Tensor) else found == state


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_it_goes_through_deepspeed_and_back(tmp_path, kind, state):
    source = save(kind, state, tmp_path / "source")
    assert [extra.name for extra in ucp.inspect(source).extras] == ["module/0._extra_state"]
    report = ucp.convert(source, tmp_path / "zero", **ZERO)
    assert not report.dropped
    assert_same(loaded(zero_module(tmp_path / "zero")), state)
    ucp.convert(tmp_path / "zero", tmp_path / "again", **ZERO)
    assert_same(loaded(zero_module(tmp_path / "again")), state)
    ucp.convert(tmp_path / "zero", tmp_path / "file", to="torch")
    assert_same(loaded(torch.load(tmp_path / "file" / "checkpoint.pt", weights_only=True)["model"]), state)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("through", ["zero", "dcp", "atoms"])
def test_dcp_loads_it(tmp_path, state, through):
    source = save("dcp", state, tmp_path / "source")
    options = {"zero": ZERO, "dcp": {"to": "dcp"}, "atoms": {"to": "ucp"}}[through]
    ucp.convert(source, tmp_path / through, **options)
    ucp.convert(tmp_path / through, tmp_path / "out", to="dcp", topology="dp=2")
    fresh = model_of(tree_map(lambda own: torch.zeros_like(own) if isinstance(own, torch.Tensor) else None, state))
    weights = fresh.state_dict()
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(loaded(weights), state)
