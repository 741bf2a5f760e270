"""`ucp.stream` of kept checkpoints of every framework, and of their atom stores: layers have the bits of `ucp.open`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ucp
from ucp.core.tensor import DType

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = [
    "deepspeed/z1-autoep2/checkpoint",
    "deepspeed/z2-dp4-bf16/checkpoint",
    "deepspeed/z3-dp4-fp32/checkpoint",
    "deepspeed/z1-ep2-two-layers/checkpoint",
    "huggingface/gpt2-bin-sharded/model",
    "huggingface/llama-dcp/model",
    "huggingface/llama-sharded/model",
    "huggingface/mixtral/model",
    "megatron/deepseek-tp2-ep2-dp2-torch-zero/checkpoint",
    "megatron/gpt-tp2-pp2-torch/checkpoint",
    "megatron/llama-tp2-dp2-dp/checkpoint",
    "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "megatron/mixtral-ep4-dp4-full/checkpoint",
]
TRUTH: dict[str, Tensor] = {}
NUMBERED = re.compile(r"l(\d)\.")
"""Layers of the small DeepSpeed model, which has no list: l1.weight; here they are layers.0.weight."""


class Node(nn.Module):
    """A module with any parameters; it compares them with the truth when it is called, and calls those in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, full in self.names.items():
            value = getattr(self, name)
            value = value if isinstance(value, Tensor) else torch.stack([value[row] for row in range(len(value))])
            assert torch.equal(value, TRUTH[full].to(value.dtype)), full
        for child in self.children():
            for module in child.children() if isinstance(child, nn.ModuleList) else [child]:
                x = module(x)
        return x + len(self.names)


def build(shapes: Mapping[str, tuple[tuple[int, ...], DType]]) -> Node:
    """A model with parameters of these names."""
    root = Node()
    for full, (shape, dtype) in shapes.items():
        *path, name = full.split(".")
        module: nn.Module = root
        for part, following in pairwise([*path, name]):
            if not hasattr(module, part):
                module.add_module(part, nn.ModuleList() if following.isdigit() else Node())
            module = getattr(module, part)
        assert isinstance(module, Node)
        module.names[name] = full
        data = torch.empty(shape, dtype=getattr(torch, dtype.value), device="meta")
        module.register_parameter(name, nn.Parameter(data, requires_grad=False))
    return root


def to_model(name: str) -> str:
    """The name in the model."""
    return NUMBERED.sub(lambda match: f"layers.{int(match[1]) - 1}.", name)


def rename(name: str) -> str:
    """The name in the checkpoint."""
    return re.sub(r"^layers\.(\d)\.(weight|bias)$", lambda m: f"l{int(m[1]) + 1}.{m[2]}", name)


def check_layers(source: Path, *checkpoints: Path | str) -> None:
    """Stream checkpoints with the contents of `source`, and compare every parameter at its turn."""
    whole = ucp.open(source)
    states = {name: atom.states["weight"] for name, atom in whole.index.atoms.items()}
    TRUTH.clear()
    TRUTH.update({to_model(name): whole.read(name) for name in states})
    for checkpoint in checkpoints:
        model = build({to_model(name): (state.global_shape, state.dtype) for name, state in states.items()})
        lists = [
            name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1
        ]
        layers = min(lists, key=lambda name: (len(re.findall(r"\d+", name)), -len(name)))
        stream = ucp.stream(model, checkpoint, layers=layers, cache_nbytes=1, rename=rename)
        assert [float(model(torch.zeros(()))) for _ in range(3)] == [len(states)] * 3
        assert stream.nbytes_read
        stream.close()


@pytest.mark.parametrize("source", SOURCES)
def test_every_layer_is_that_of_the_checkpoint(source: str, tmp_path: Path) -> None:
    ucp.convert(FIXTURES / source, tmp_path / "atoms", fsync=False)
    check_layers(FIXTURES / source, FIXTURES / source, tmp_path / "atoms")
