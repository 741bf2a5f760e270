"""What a rank has of the reference model: its runs of layers, and the name of every parameter in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.integration.live.reference.grid import Grid, cut
from tests.integration.live.reference.model import Chunk, Share, Style
from tests.integration.live.reference.sizes import Sizes, initial


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter of this rank, and which of the whole model it is part of."""

    name: str
    """With the layer's and the expert's number in the whole model."""
    param: nn.Parameter


class RankModel:
    """The chunks of one rank, with their first weights. `share`: ranks beside it, as process groups or stand-ins."""

    def __init__(self, sizes: Sizes, grid: Grid, rank: int, share: Share, *, style: Style, seed: str = "") -> None:
        self.sizes, self.grid, self.style, self.at = sizes, grid, style, grid.at(rank)
        self.numbers = grid.layers(sizes.layers, stage=self.at.pp)
        ends = [(self.at.pp == run == 0, self.at.pp == grid.pp - 1 and run == grid.vpp - 1) for run in range(grid.vpp)]
        self.chunks = [
            Chunk(sizes, layers, share, first=first, last=last, style=style)
            for layers, (first, last) in zip(self.numbers, ends, strict=True)
        ]
        self.held = list(self._held())
        whole = initial(sizes, seed=seed)
        with torch.no_grad():
            for own in self.held:
                own.param.copy_(self.cut(own.name, whole))

    @property
    def model(self) -> nn.Module | list[nn.Module]:
        """What is loaded into."""
        return list(self.chunks) if len(self.chunks) > 1 else self.chunks[0]

    def _held(self) -> Iterator[Held]:
        """Every parameter, under the name that it has in the whole model."""
        first = self.at.dp % self.grid.ep * (self.sizes.experts // self.grid.ep)
        for chunk, layers in zip(self.chunks, self.numbers, strict=True):
            for name, param in chunk.named_parameters():
                words = name.split(".")
                if self.style.local and words[1] == "layers":
                    words[2] = str(layers[int(words[2])])
                if self.style.local and "experts" in words:
                    words[5] = str(int(words[5]) + first)
                yield Held(name=".".join(words), param=param)

    def cut(self, name: str, whole: Mapping[str, Tensor]) -> Tensor:
        """The part of a whole tensor that this rank holds."""
        return cut(whole[name], name, rank=self.at.tp, ranks=self.grid.tp)
