"""Where a rank stands among the others, and which part of a whole tensor it holds, in the order that Megatron has.

>>> grid = Grid.parse("tp2 pp2 dp2")
>>> grid.world, grid.at(5), grid.layers(8, stage=1)
(8, At(tp=1, dp=0, pp=1), [[4, 5, 6, 7]])
>>> Grid.parse("pp4 vpp2").layers(8, stage=1)
[[1], [5]]
>>> cut(torch.arange(8).view(4, 2), "model.layers.0.self_attn.o_proj.weight", rank=1, ranks=2).tolist()
[[1], [3], [5], [7]]
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Place of a rank."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks along each axis; tensor-parallel neighbours are next to each other, pipeline stages farthest apart."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Runs of layers on each stage."""
    dp: int = 1
    ep: int = 1
    """Ranks that share the experts, neighbours among those of `dp`."""

    @classmethod
    def parse(cls, text: str) -> Grid:
        """The grid of words like `tp2 pp2`."""
        return cls(**{name: int(number) for name, number in re.findall(r"([a-z]+)(\d+)", text)})

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    @property
    def topology(self) -> str:
        """As `ucp` writes it."""
        axes = {name: getattr(self, name) for name in ("dp", "tp", "pp", "vpp", "ep")}
        return ",".join(f"{name}={degree}" for name, degree in axes.items() if degree > 1) or "dp=1"

    def at(self, rank: int) -> At:
        """Place of `rank`."""
        return At(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // self.tp // self.dp)

    def layers(self, count: int, *, stage: int) -> list[list[int]]:
        """Numbers of the layers on `stage`, for each of its runs."""
        each = count // (self.pp * self.vpp)
        starts = [(run * self.pp + stage) * each for run in range(self.vpp)]
        return [list(range(start, start + each)) for start in starts]


_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3|embed_tokens)\.|^lm_head\.")
_COLUMNS = re.compile(r"\.(o_proj|down_proj|w2)\.")


def cut_dim(name: str) -> int | None:
    """The dim that tensor parallelism cuts a parameter along; None: every rank has all of it."""
    if _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None


def cut(whole: Tensor, name: str, *, rank: int, ranks: int) -> Tensor:
    """The part of a tensor that a tensor-parallel rank holds."""
    dim = cut_dim(name)
    return whole if dim is None else torch.chunk(whole, ranks, dim)[rank].contiguous()
