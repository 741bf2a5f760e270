"""A small GPT with the names, the param groups and the file of nanoGPT (karpathy/nanoGPT, model.py and train.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 64, "block_size": 8}
CONFIG = {**SIZES, "n_positions": 8, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
"""The same sizes, as a config.json of transformers."""


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["n_embd"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.attn["c_attn"](self.ln_1(hidden)).split(width, 2)
        query, key, value = (part.view(batch, length, SIZES["n_head"], -1).transpose(1, 2) for part in projected)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attn["c_proj"](attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(hidden))))


class SmallGPT(nn.Module):
    """nanoGPT's model, with its tied head."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["n_embd"]
        modules = {
            "wte": nn.Embedding(SIZES["vocab_size"], width),
            "wpe": nn.Embedding(SIZES["block_size"], width),
            "h": nn.ModuleList(Block() for _ in range(SIZES["n_layer"])),
            "ln_f": nn.LayerNorm(width),
        }
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(width, SIZES["vocab_size"], bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            hidden = block(hidden)
        return self.lm_head(self.transformer["ln_f"](hidden))


def make_run(seed: int) -> tuple[SmallGPT, torch.optim.AdamW]:
    """A model and its optimizer, in nanoGPT's two groups."""
    torch.manual_seed(seed)
    model = SmallGPT()
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def train(model: SmallGPT, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Losses of three steps."""
    losses = []
    for step in range(first, first + 3):
        ids = torch.randint(SIZES["vocab_size"], (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
