"""The two models that every run of the matrix trains: their sizes, first weights and data, the same for any layout.

>>> shapes(DENSE)["model.layers.7.self_attn.k_proj.weight"], len(shapes(MOE))
((16, 32), 127)
>>> tokens(0).shape, bool((tokens(3) == tokens(3)).all())
(torch.Size([8, 17]), True)
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS, SEQUENCE = 8, 16
"""Samples of a global batch, and tokens that a sample predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A Llama, or with experts a Mixtral."""

    layers: int
    ffn: int
    """Rows of a feed-forward layer, or of one expert."""
    experts: int = 0
    """0: none"""
    lr: float = 5e-3
    """Of every run."""
    hidden: int = 32
    heads: int = 8
    groups: int = 4
    """Heads of keys and values."""
    head_dim: int = 4
    vocabulary: int = 128
    """Megatron pads none of them up to four tensor-parallel ranks, so losses can be compared."""


DENSE = Sizes(layers=8, ffn=48)
MOE = Sizes(layers=4, ffn=24, experts=8, lr=2e-3)


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, under the names of Hugging Face."""
    hidden, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, hidden)}
    for layer in range(sizes.layers):
        own = {"input_layernorm": (hidden,), "self_attn.q_proj": (q, hidden)}
        own |= {
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
        }
        own |= {"post_attention_layernorm": (hidden,)} | _feed_forward(sizes)
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (sizes.vocabulary, hidden)}


def _feed_forward(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    up, down = (sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)
    if not sizes.experts:
        return {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    found: dict[str, tuple[int, ...]] = {"block_sparse_moe.gate": (sizes.experts, sizes.hidden)}
    for expert in range(sizes.experts):
        found |= {
            f"block_sparse_moe.experts.{expert}.{name}": shape for name, shape in (("w1", up), ("w2", down), ("w3", up))
        }
    return found


def initial(sizes: Sizes, *, seed: str = "") -> dict[str, Tensor]:
    """First weights, whole: each depends on its name and `seed` alone."""
    return {name: _drawn(f"{seed}{name}", shape) for name, shape in shapes(sizes).items()}


def _drawn(text: str, shape: tuple[int, ...]) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))
    return 0.1 * noise if len(shape) > 1 else 1 + 0.1 * noise


def is_decayed(name: str) -> bool:
    """Whether weight decay applies: to all but the norms."""
    return "norm" not in name


def tokens(step: int) -> Tensor:
    """The global batch of a step [rows, sequence + 1]: each token follows from the last, up to one of three."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = torch.randint(0, 128, (ROWS, 1), generator=generator)
    for _ in range(SEQUENCE):
        chance = torch.randint(0, 3, (ROWS, 1), generator=generator)
        found = torch.cat([found, (5 * found[:, -1:] + 7 + chance) % 128], dim=1)
    return found
