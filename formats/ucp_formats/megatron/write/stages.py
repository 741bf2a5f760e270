"""Which tensors each chunk of the model holds: those of its layers, and at the ends those of no layer."""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import TopologyError
from ucp_formats.megatron.run.stages import Chunk
from ucp_formats.megatron.write.model import Model, ModelTensor

__all__ = ["chunk_tensors"]


def chunk_tensors(model: Model, stages: Mapping[Chunk, range]) -> dict[Chunk, tuple[ModelTensor, ...]]:
    """Tensors of every chunk, in the order in which it registers them.

    Raises TopologyError for modules whose stage is not known.
    """
    first, last = next(iter(stages)), list(stages)[-1]
    found: dict[Chunk, list[ModelTensor]] = {chunk: [] for chunk in stages}
    for own in model.tensors:
        if own.layer is not None:
            home = next(chunk for chunk, layers in stages.items() if own.layer in layers)
        elif own.name.startswith("mtp.") and first != last:
            raise TopologyError(
                f"{own.name}: stages of a model with multi-token prediction are not written yet. Choose pp=1, or write "
                "torch_dist (--layout torch_dist), which fits any"
            )
        else:
            home = first if own.name.startswith("embedding.") else last
        found[home].append(own)
    return {chunk: tuple(tensors) for chunk, tensors in found.items()}
