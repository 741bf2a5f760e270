"""From tensors under the names of Hugging Face to what a rank of Megatron holds, and back: by hand, without `ucp`.

Queries, keys and values of a group of heads lie together in `linear_qkv`; gate and up projection make `linear_fc1`,
whose tensor-parallel ranks hold a part of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.integration.live.reference.grid import Grid, cut
from tests.integration.live.reference.sizes import Sizes

_PLAIN = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "block_sparse_moe.gate",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)")


def _parts(name: str) -> tuple[str, ...]:
    """Names of Hugging Face that make up a tensor of Megatron, whose layer and expert are those of the whole model."""
    found = _LAYER.fullmatch(name)
    if not found:
        return (f"{_PLAIN[name.removesuffix('.weight')]}.weight",)
    layer, module = found.groups()
    if expert := _EXPERT.fullmatch(module):
        words = ("w1", "w3") if expert[2] == "fc1" else ("w2",)
        modules = tuple(f"block_sparse_moe.experts.{expert[1]}.{word}" for word in words)
    else:
        fused = {
            "self_attention.linear_qkv": _QKV,
            "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.linear_fc2": ("mlp.down_proj",),
        }
        modules = fused[module] if module in fused else (_PLAIN[module],)
    return tuple(f"model.layers.{layer}.{own}.weight" for own in modules)


def local_tensor(name: str, whole: Callable[[str], Tensor], sizes: Sizes, grid: Grid, *, rank: int) -> Tensor:
    """What a tensor-parallel rank of Megatron holds of `name`. `whole`: the tensor of a name of Hugging Face."""
    names = _parts(name)
    parts = [cut(whole(own), own, rank=rank, ranks=grid.tp) for own in names]
    if len(parts) == 3:
        groups = sizes.groups // grid.tp
        return torch.cat([own.unflatten(0, (groups, -1)) for own in parts], 1).flatten(0, 1)
    return torch.cat(parts)


def separated(tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Whole tensors of Megatron under the names of Hugging Face; others as they are."""
    found = {}
    for name, tensor in tensors.items():
        names = _parts(name) if name.startswith(("embedding.", "decoder.", "output_layer.")) else (name,)
        if len(names) == 3:
            heads = tensor.unflatten(0, (sizes.groups, -1))
            lengths = [sizes.heads // sizes.groups * sizes.head_dim, sizes.head_dim, sizes.head_dim]
            parts = [own.flatten(0, 1) for own in heads.split(lengths, 1)]
        else:
            parts = list(tensor.chunk(len(names)))
        found |= {own: part.contiguous() for own, part in zip(names, parts, strict=True)}
    return found
