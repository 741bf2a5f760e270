"""Local numbers of layers and experts as global ones.

A file numbers its layers from 0. Which they are in the model follows from the layers that are there: chunks of a
virtual pipeline interleave, so chunk 0 of all stages comes before chunk 1 of any (transformer_layer.py:
get_transformer_layer_offset). Counting is stronger than the formula: it holds for uneven stages, too.

>>> names = {(0, 0): ["decoder.layers.0.norm.weight"], (1, 0): ["decoder.layers.0.norm.weight"]}
>>> numbers = count_layers(names, num_layers=2)
>>> numbers.renamed("decoder.layers.0.norm.weight", (1, 0), first_expert=0)
'decoder.layers.1.norm.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from ucp.errors import MalformedError, listed
from ucp_formats.megatron.run.stages import Chunk

__all__ = ["LayerNumbers", "count_layers"]

_LAYER = re.compile(r"\A(?P<stack>decoder|encoder)\.layers\.(?P<number>\d+)\.")
"""Example: decoder.layers.12."""
_EXPERT = re.compile(r"\.local_experts\.(?P<number>\d+)\.")
"""Example: .local_experts.3."""


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """The first layer of every chunk of every stack of layers."""

    firsts: Mapping[tuple[str, Chunk], int]
    """Stack ("decoder") and chunk to the global number of its layer 0."""

    def renamed(self, name: str, chunk: Chunk, *, first_expert: int) -> str:
        """A canonical name with global numbers. `first_expert`: global number of expert 0 of the file."""
        layer = _LAYER.match(name)
        if layer is not None:
            number = int(layer["number"]) + self.firsts[layer["stack"], chunk]
            name = f"{layer['stack']}.layers.{number}.{name[layer.end() :]}"
        return _EXPERT.sub(lambda found: f".local_experts.{int(found['number']) + first_expert}.", name)


def count_layers(names: Mapping[Chunk, Iterable[str]], *, num_layers: int | None) -> LayerNumbers:
    """Numbers that follow from the canonical local names of every chunk.

    `num_layers`: layers of the model, where the arguments say so.

    Raises
    ------
    MalformedError
        A chunk lacks a layer in between, or there are more or fewer layers than the model has.
    """
    there: dict[str, dict[Chunk, set[int]]] = {}
    for chunk, own in names.items():
        for name in own:
            found = _LAYER.match(name)
            if found is not None:
                there.setdefault(found["stack"], {}).setdefault(chunk, set()).add(int(found["number"]))
    order = sorted(names, key=lambda chunk: (chunk[1], chunk[0]))
    firsts: dict[tuple[str, Chunk], int] = {}
    for stack, by_chunk in there.items():
        counts = [1 + max(by_chunk.get(chunk, {-1})) for chunk in order]
        _check_dense(stack, by_chunk)
        if len(there) == 1 and num_layers not in (None, sum(counts)):
            lines = (f"{_shown(chunk)}: {count} layers" for chunk, count in zip(order, counts, strict=True))
            raise MalformedError(
                f"expected {num_layers} layers, as the arguments say; there are {sum(counts)} in {stack}.layers:\n"
                f"{listed(lines)}\nFiles of this checkpoint are missing, or are from different runs"
            )
        begins = accumulate(counts, initial=0)
        firsts |= {(stack, chunk): first for chunk, first in zip(order, begins, strict=False)}
    return LayerNumbers(firsts)


def _shown(chunk: Chunk) -> str:
    return f"stage {chunk[0]}, chunk {chunk[1]}"


def _check_dense(stack: str, by_chunk: Mapping[Chunk, set[int]]) -> None:
    lacking = [
        f"{_shown(chunk)}: {stack}.layers.{number}"
        for chunk, own in by_chunk.items()
        for number in range(max(own))
        if number not in own
    ]
    if lacking:
        raise MalformedError(
            f"expected layers without a gap in every file; {len(lacking)} have no parameter:\n{listed(lacking)}\n"
            "Copy the files again; where the model has layers without parameters, their numbers are not known"
        )
