"""A frozen parameter in a group of torch's optimizer: real DeepSpeed, which leaves it out, loads what ucp writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from tests.integration.torch.test_dcp_resume import ranks, run

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

FROZEN = "2.weight"


def saved(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of plain torch whose optimizer has all parameters, and its states by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model.get_parameter(FROZEN).requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    folder.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, folder / "checkpoint.pt")
    truth = {f"{name}/weight": own.detach() for name, own in model.named_parameters()}
    for name, own in model.named_parameters():
        truth |= {
            f"{name}/{state}": optimizer.state[own][state] for state in ("exp_avg", "exp_avg_sq") if own.requires_grad
        }
    return folder, truth


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_it(stage: int, tmp_path: Path) -> None:
    source, truth = saved(tmp_path / "source")
    ucp.convert(source, tmp_path / "written", to="deepspeed", topology=f"dp=2,zero={stage}", verify=True)
    assert ucp.diff(source, tmp_path / "written").equal
    assert ucp.verify(tmp_path / "written", against=source).ok
    worker = Path(__file__).with_name("frozen_worker.py")
    run([*ranks(2), str(worker), str(tmp_path / "written"), str(stage), str(tmp_path / "saved")])
    again = ucp.open(tmp_path / "saved")
    assert again.index.atoms[FROZEN].kind == "frozen"
    for name, own in truth.items():
        param, _, state = name.rpartition("/")
        assert torch.equal(again.read(param, state), own), name
