"""Optimizers that number their parameters, as real frameworks save them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from tests.integration.torch.test_dcp_resume import ranks, run

pytestmark = pytest.mark.integration


def test_what_torch_deals_out_over_ranks_keeps_the_order_of_the_model(tmp_path: Path) -> None:
    run([*ranks(2), str(Path(__file__).with_name("numbered_worker.py")), str(tmp_path)])
    checkpoint = ucp.open(tmp_path / "one")
    truth = torch.load(tmp_path / "one.pt")
    assert [*checkpoint.index.atoms] == [*truth]
    for name, moment in truth.items():
        assert torch.equal(checkpoint.read(name, "exp_avg"), moment), name
    unnamed = ucp.inspect(tmp_path / "halves").unnamed
    assert unnamed is not None  # its ranks loaded it by the order of their optimizer
    assert unnamed.states == ("exp_avg", "exp_avg_sq", "step")
