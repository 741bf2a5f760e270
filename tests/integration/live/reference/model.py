"""A Llama and a Mixtral, with tensor and expert parallelism by hand: parameters are plain tensors of this rank.

    built = Chunk(DENSE, [0, 1], Share(), first=True, last=False)

Names are those of Hugging Face. Layers and experts go by their number in the whole model, or (`Style.local`) are
counted from 0 on every rank; parameters carry the attributes that Megatron's do (`Style.marked`), or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.integration.live.reference.collectives import Group, copied, gathered, joined, scattered, summed
from tests.integration.live.reference.grid import cut_dim
from tests.integration.live.reference.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How parameters are named and marked."""

    local: bool = False
    """Layers and experts are counted from 0 on every rank."""
    marked: bool = False
    """Parameters carry Megatron's attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Ranks that share every tensor, and those that share the experts; None where there is one rank."""

    tp: Group | None = None
    ep: Group | None = None

    @property
    def tensor_ranks(self) -> int:
        """Ranks that a tensor is cut over."""
        return self.tp.size() if self.tp is not None else 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that the experts are dealt out to."""
        return self.ep.size() if self.ep is not None else 1

    def spread(self, own: Tensor) -> Tensor:
        """`own`, for parts of a matrix."""
        return own if self.tp is None else copied(own, self.tp)

    def sum(self, own: Tensor) -> Tensor:
        """The sum of what parts of a matrix made."""
        return own if self.tp is None else summed(own, self.tp)


class Chunk(nn.Module):
    """A run of layers; the first has the embedding, the last the head. Hidden states are [rows, sequence, hidden]."""

    def __init__(
        self,
        sizes: Sizes,
        layers: Sequence[int],
        share: Share,
        *,
        first: bool = True,
        last: bool = True,
        style: Style | None = None,
    ) -> None:
        super().__init__()
        self.model = _Body(sizes, layers, share, first=first, last=last, style=style or Style())
        self.share, self.first, self.last, self.hidden = share, first, last, sizes.hidden
        if last:
            self.lm_head = _linear(sizes.hidden, sizes.vocabulary // share.tensor_ranks)
        if style and style.marked:
            _mark(self, share)

    def forward(self, own: Tensor) -> Tensor:
        """Hidden states or logits, of tokens or of hidden states."""
        hidden = self.model(own)
        if not self.last:
            return hidden
        logits: Tensor = self.lm_head(self.share.spread(hidden))
        return logits if self.share.tp is None else joined(logits, self.share.tp)


class _Body(nn.Module):
    def __init__(
        self, sizes: Sizes, layers: Sequence[int], share: Share, *, first: bool, last: bool, style: Style
    ) -> None:
        super().__init__()
        if first:
            self.embed_tokens = _Embedding(sizes, share)
        self.layers = _numbered(layers, [_Layer(sizes, share, style) for _ in layers], style)
        if last:
            self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.first, self.last = first, last

    def forward(self, own: Tensor) -> Tensor:
        hidden = self.embed_tokens(own) if self.first else own
        for layer in self.layers.children():
            hidden = layer(hidden)
        return self.norm(hidden) if self.last else hidden


def _numbered(numbers: Iterable[int], modules: list[nn.Module], style: Style) -> nn.Module:
    if style.local:
        return nn.ModuleList(modules)
    return nn.ModuleDict({str(number): own for number, own in zip(numbers, modules, strict=True)})


class _Embedding(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.vocabulary // share.tensor_ranks, sizes.hidden))
        self.share = share

    def forward(self, tokens: Tensor) -> Tensor:
        if self.share.tp is None:
            return nn.functional.embedding(tokens, self.weight)
        own = tokens - self.share.tp.rank() * len(self.weight)
        held = (own >= 0) & (own < len(self.weight))
        rows = nn.functional.embedding(own.where(held, 0), self.weight)
        return summed(rows * held[..., None], self.share.tp)


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes, share: Share, style: Style) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.self_attn = _Attention(sizes, share)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        if sizes.experts:
            self.block_sparse_moe = _Experts(sizes, share, style)
        else:
            self.mlp = _FeedForward(sizes, share)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        then = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return hidden + then(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        queries, keys = (heads * sizes.head_dim // share.tensor_ranks for heads in (sizes.heads, sizes.groups))
        self.q_proj, self.o_proj = _linear(sizes.hidden, queries), _linear(queries, sizes.hidden)
        self.k_proj, self.v_proj = _linear(sizes.hidden, keys), _linear(sizes.hidden, keys)
        self.head_dim, self.share = sizes.head_dim, share

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.share.spread(hidden)
        q, k, v = (
            own(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for own in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)
        found: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return self.share.sum(found)


def _rotated(heads: Tensor) -> Tensor:
    """Rotary positions over the two halves of a head."""
    length, width = heads.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rates).repeat(1, 2)
    first, second = heads.chunk(2, -1)
    return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class _FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        own = sizes.ffn // share.tensor_ranks
        self.gate_proj, self.up_proj = _linear(sizes.hidden, own), _linear(sizes.hidden, own)
        self.down_proj, self.share = _linear(own, sizes.hidden), share

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.share.spread(hidden)
        return self.share.sum(self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class _Expert(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        own = sizes.ffn // share.tensor_ranks
        self.w1, self.w2, self.w3 = _linear(sizes.hidden, own), _linear(own, sizes.hidden), _linear(sizes.hidden, own)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.w2(silu(self.w1(hidden)) * self.w3(hidden))
        return found


class _Experts(nn.Module):
    """The two best of all experts for every token. Each rank has some; tokens of all ranks come to all."""

    def __init__(self, sizes: Sizes, share: Share, style: Style) -> None:
        super().__init__()
        self.gate = _linear(sizes.hidden, sizes.experts)
        each = sizes.experts // share.expert_ranks
        start = share.ep.rank() * each if share.ep is not None else 0
        self.numbers = range(start, start + each)
        self.experts = _numbered(self.numbers, [_Expert(sizes, share) for _ in self.numbers], style)
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        logits: Tensor = self.gate(rows)
        best, chosen = logits.topk(2)
        shares = torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1))
        rows, shares = self.share.spread(rows), self.share.spread(shares)
        if self.share.ep is not None:
            rows, shares = gathered(rows, self.share.ep), gathered(shares, self.share.ep)
        parts = [
            shares[:, number, None] * own(rows)
            for number, own in zip(self.numbers, self.experts.children(), strict=True)
        ]
        found = torch.stack(parts).sum(0)
        if self.share.ep is not None:
            found = scattered(found, self.share.ep)
        return self.share.sum(found).view_as(hidden)


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def _mark(chunk: nn.Module, share: Share) -> None:
    """As megatron-core's layers mark theirs (`set_tensor_model_parallel_attributes`, `allreduce` of experts)."""
    for name, param in chunk.named_parameters():
        own: Any = param
        dim = cut_dim(name)
        if dim is not None:
            own.tensor_model_parallel, own.partition_dim, own.partition_stride = True, dim, 1
        if ".experts." in name:
            own.allreduce = share.ep is None
