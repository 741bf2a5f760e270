"""Which chunk of the model holds which parameters: pipeline stages, and virtual ones.

Layers are dealt out in order, chunk 0 of all stages before chunk 1 of any (transformer_layer.py:
get_transformer_layer_offset, core_v0.16). Stages are even, but the first and last may be told apart.

>>> stage_layers(8, pp=2, vpp=2, arguments={})
{(0, 0): range(0, 2), (1, 0): range(2, 4), (0, 1): range(4, 6), (1, 1): range(6, 8)}
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import UnsupportedError, UsageError
from ucp_formats.megatron.target_model import Model, ModelTensor

__all__ = ["Chunk", "chunk_tensors", "stage_layers"]

Chunk = tuple[int, int]
"""Pipeline stage, and which of its chunks."""

_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def stage_layers(layers: int, *, pp: int, vpp: int, arguments: Mapping[str, object]) -> dict[Chunk, range]:
    """Layers of every chunk, in the order of the layers. Raises UsageError when they cannot be dealt out."""
    counts = _counts(layers, pp=pp, vpp=vpp, arguments=arguments)
    found: dict[Chunk, range] = {}
    start = 0
    for chunk, count in counts.items():
        found[chunk] = range(start, start + count)
        start += count
    return found


def _counts(layers: int, *, pp: int, vpp: int, arguments: Mapping[str, object]) -> dict[Chunk, int]:
    if arguments.get("pipeline_model_parallel_layout"):
        raise UnsupportedError(
            "expected stages of equal length; the arguments have a pipeline_model_parallel_layout of their own, "
            "which is not written yet. Write torch_dist (--layout torch_dist), which fits any"
        )
    first, last = _number(arguments, _FIRST), _number(arguments, _LAST)
    embedding = bool(arguments.get("account_for_embedding_in_pipeline_split"))
    loss = bool(arguments.get("account_for_loss_in_pipeline_split"))
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0) + embedding + loss
    parts = middle * vpp
    uneven = any(own is not None and own % vpp for own in (first, last))
    if uneven or rest < 0 or rest % max(parts, 1) or (not parts and rest):
        raise UsageError(
            f"expected layers that {pp} stages of {vpp} chunks divide; got {layers} layers"
            + (f", {first or 'as many'} in the first stage, {last or 'as many'} in the last" if first or last else "")
            + ". Choose another pp or vpp"
        )
    counts = {}
    for virtual in range(vpp):
        for stage in range(pp):
            count = rest // parts if parts else 0
            if stage == 0 and first is not None:
                count = first // vpp
            if stage == pp - 1 and last is not None:
                count = last // vpp
            counts[stage, virtual] = count
    counts[0, 0] -= embedding
    counts[pp - 1, vpp - 1] -= loss
    return counts


def _number(arguments: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    found = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return found if isinstance(found, int) else None


def chunk_tensors(model: Model, stages: Mapping[Chunk, range]) -> dict[Chunk, tuple[ModelTensor, ...]]:
    """Tensors of every chunk, in the order in which it registers them.

    Raises UnsupportedError for modules whose stage is not known.
    """
    first, last = next(iter(stages)), list(stages)[-1]
    found: dict[Chunk, list[ModelTensor]] = {chunk: [] for chunk in stages}
    for own in model.tensors:
        if own.layer is not None:
            home = next(chunk for chunk, layers in stages.items() if own.layer in layers)
        elif own.name.startswith("mtp.") and first != last:
            raise UnsupportedError(
                f"{own.name}: stages of a model with multi-token prediction are not written yet. Write torch_dist "
                "(--layout torch_dist), which fits any"
            )
        else:
            home = first if own.name.startswith("embedding.") else last
        found[home].append(own)
    return {chunk: tuple(tensors) for chunk, tensors in found.items()}
