"""One rank of an FSDP2 run of about 210M parameters that saves as accelerate does; torchrun starts four of them.

    torchrun --nproc-per-node 4 tests/bench/loading/fsdp_worker.py FOLDER

The model has the names and shapes of a Llama. Optimizer states are those of one step of AdamW.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

HIDDEN, FFN, LAYERS, VOCABULARY = 1024, 2816, 12, 28672


class Tree(nn.Module):
    """Parameters under dotted names; a forward pass is not needed."""

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        first, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(first, nn.Parameter(torch.randn(shape) / 32))
            return
        if first not in dict(self.named_children()):
            self.add_module(first, Tree())
        inner = self.get_submodule(first)
        assert isinstance(inner, Tree)
        inner.add(rest, shape)


def shapes() -> dict[str, tuple[int, ...]]:
    square, wide = (HIDDEN, HIDDEN), (FFN, HIDDEN)
    layer = {f"self_attn.{own}_proj.weight": square for own in "qkvo"}
    layer |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": wide[::-1]}
    layer |= {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    layers = {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    return {**ends, **layers, "lm_head.weight": (VOCABULARY, HIDDEN)}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Tree()
    for name, shape in shapes().items():
        model.add(name, shape)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for own in model.parameters():
        own.grad = torch.full_like(own, 0.125)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    folder = Path(sys.argv[1]) / "checkpoint-1"
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
