"""Frozen parameters: told by a reader where states show them, or by the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from ucp.core.index import Kind
from ucp.errors import UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which one matrix is frozen, and another got no gradient."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("frozen", "unused", "used")})
    model["frozen"].weight.requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"](model["frozen"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    (tmp_path / "run").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run" / "checkpoint.pt")
    return tmp_path / "run"


def kinds(folder: Path) -> dict[str, Kind]:
    return {name: atom.kind for name, atom in ucp.inspect(folder).atoms.items()}


def test_a_parameter_without_states_is_frozen_where_others_have_theirs(run: Path, tmp_path: Path) -> None:
    frozen = {"frozen.weight": Kind.FROZEN, "unused.weight": Kind.FROZEN, "used.weight": Kind.PARAMETER}
    assert kinds(run) == frozen
    (note,) = (note for note in ucp.inspect(run).notes if "--set frozen=none" in note)
    assert "unused.weight" in note
    for to in ("ucp", "dcp", "torch", "deepspeed"):
        ucp.convert(run, tmp_path / to, to=to, topology="dp=2,zero=1" if to == "deepspeed" else None, verify=True)
        assert kinds(tmp_path / to) == frozen


@pytest.mark.parametrize(
    ("said", "frozen"),
    [("none", set()), ("frozen.*", {"frozen.weight"}), ("frozen.weight,unu*", {"frozen.weight", "unused.weight"})],
)
def test_the_user_says_which_are(said: str, frozen: set[str], run: Path, tmp_path: Path) -> None:
    ucp.convert(run, tmp_path / "out", to="ucp", settings={"frozen": said}, verify=True)
    assert {name for name, kind in kinds(tmp_path / "out").items() if kind is Kind.FROZEN} == frozen
    for to in ("torch", "dcp"):
        ucp.convert(run, tmp_path / to, to=to, settings={"frozen": said}, verify=True)


@pytest.mark.parametrize(("said", "message"), [("used.*", r"\n +used\.weight"), ("us*,nothing", "matches nothing")])
def test_what_cannot_be_frozen_is_refused(said: str, message: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        ucp.convert(run, tmp_path / "out", settings={"frozen": said})


def test_a_new_optimizer_leaves_frozen_parameters_out(run: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    ucp.convert(run, weights, to="huggingface", settings={"config": "none"}, names="huggingface:huggingface")
    ucp.convert(weights, tmp_path / "out", optimizer="zero", settings={"frozen": "frozen.*", "lr": 0.1})
    index = ucp.inspect(tmp_path / "out")
    assert index.atoms["frozen.weight"].kind is Kind.FROZEN
    assert [group.params for group in index.groups] == [("unused.weight", "used.weight")]
