"""The model that is pretended: a mixture of experts of about 1T parameters, or a smaller one of its kind."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A decoder of attention and gated experts; lengths in elements."""

    layers: int = 61
    experts: int = 256
    hidden: int = 7168
    ffn: int = 3072
    head: int = 128
    groups: int = 8
    vocabulary: int = 131072

    @property
    def qkv(self) -> int:
        """Rows of queries, keys and values together."""
        return self.hidden + 2 * self.groups * self.head

    def attention(self) -> dict[str, Shape]:
        """Everything in a layer but its experts, by the names of megatron-core."""
        return {
            "self_attention.linear_proj.weight": (self.hidden, self.hidden),
            "self_attention.linear_qkv.layer_norm_weight": (self.hidden,),
            "self_attention.linear_qkv.weight": (self.qkv, self.hidden),
            "mlp.linear_fc1.layer_norm_weight": (self.hidden,),
            "mlp.router.weight": (self.experts, self.hidden),
        }

    def ends(self) -> dict[str, Shape]:
        """What stands before and after the layers."""
        return {
            "embedding.word_embeddings.weight": (self.vocabulary, self.hidden),
            "decoder.final_layernorm.weight": (self.hidden,),
            "output_layer.weight": (self.vocabulary, self.hidden),
        }

    @property
    def numel(self) -> int:
        """Parameters."""
        layer = sum(map(prod, self.attention().values())) + self.experts * 3 * self.ffn * self.hidden
        return self.layers * layer + sum(map(prod, self.ends().values()))


LARGE = Moe()
"""About 1.05T parameters."""
