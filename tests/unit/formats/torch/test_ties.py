"""A file of weights alone: names that share one stored tensor are tied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ucp


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(20, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight, self.last = self.embed.weight, self.norm


@pytest.mark.parametrize("tied", [True, False])
def test_weights_saved_alone_load_into_a_tied_model_and_another(tied: bool, tmp_path: Path) -> None:
    saved = Model(tied=True)
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    assert ucp.inspect(tmp_path / "weights.pt").aliases == {
        "head.weight": "embed.weight",
        "last.weight": "norm.weight",
        "last.bias": "norm.bias",
    }
    model = Model(tied=tied)
    ucp.load_into(model, tmp_path / "weights.pt")
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_views_of_one_tensor_are_not_tied(tmp_path: Path) -> None:
    matrix = torch.arange(32.0).reshape(4, 8)
    views = {"a": matrix, "transposed": matrix.t(), "reshaped": matrix.view(8, 4), "rows": matrix[:2]}
    torch.save({**views, "empty": torch.empty(0), "none": torch.empty(0)}, tmp_path / "weights.pt")
    assert ucp.inspect(tmp_path / "weights.pt").aliases == {}
