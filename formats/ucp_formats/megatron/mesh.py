"""The mesh axes that family rules do not cover: pipeline stages and their chunks, expert-parallel ranks, replicas.

| axis | a parameter is | because |
|---|---|---|
| pp, vpp | in one chunk of one stage | layers are split over chunks; a tied embedding is on the first and last stage |
| ep | on one expert-parallel rank | experts are split over ranks |
| dp | on every rank | weights are replicated; so are states, unless the distributed optimizer shards them |

Layers are split in order: chunk 0 of all stages comes before chunk 1 of any (transformer_layer.py:
get_transformer_layer_offset, core_v0.16). All stages have equally many layers, except that arguments can set the number
for the first and the last.

>>> split_layers(8, pp=2, vpp=2, arguments={})
{(0, 0): range(0, 2), (1, 0): range(2, 4), (0, 1): range(4, 6), (1, 1): range(6, 8)}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate

from ucp.contract.layouts import holder_axes
from ucp.core.layout import AxisLayout, Layout
from ucp.core.topology import Topology
from ucp.errors import TopologyError, UnsupportedError


def count_replicas(topology: Topology, *, expert: bool) -> int:
    """Number of ranks that hold replicas of a shard of a dense parameter, or of an expert's parameter.

    >>> mesh = Topology(dp=2, tp=2, ep=2, etp=1)
    >>> count_replicas(mesh, expert=False), count_replicas(mesh, expert=True)
    (2, 2)
    """
    dense = topology.dp * topology.cp
    return max(dense * topology.tp // (topology.ep * topology.expert_tp), 1) if expert else dense


def pipeline_axes(pp: int, vpp: int, chunks: Collection[tuple[int, int]], known_from: str) -> tuple[AxisLayout, ...]:
    """The axes `pp` and `vpp` of a tensor in these chunks, each a stage and a chunk number.

    Without `vpp` if the chunk number differs between stages.
    """
    stage_axes = holder_axes("pp", pp, known_from, {stage for stage, _ in chunks})
    virtual_chunks = {chunk for _, chunk in chunks}
    return stage_axes + (holder_axes("vpp", vpp, known_from, virtual_chunks) if len(virtual_chunks) == 1 else ())


def with_source(layout: Layout, known_from: str) -> tuple[AxisLayout, ...]:
    """The axes of a layout over dims, each with `known_from` as the source it is known from."""
    return tuple(replace(axis, known_from=known_from) for axis in layout.axes)


Chunk = tuple[int, int]
"""Pipeline stage, and number of the chunk in it."""

_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
_EMBEDDING = "account_for_embedding_in_pipeline_split"
_LOSS = "account_for_loss_in_pipeline_split"
_LAYOUT = "pipeline_model_parallel_layout"
_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern")
_BAR = "|"
"""Separates the chunks in the pattern of a hybrid model (megatron-core 0.17 and later)."""


def split_layers(layers: int, *, pp: int, vpp: int, arguments: Mapping[str, object]) -> dict[Chunk, range]:
    """Layers of every chunk, in order. Raises TopologyError if the layers cannot be split over these stages."""
    if arguments.get(_LAYOUT):
        raise UnsupportedError(
            "expected stages of equal length; the arguments give a pipeline_model_parallel_layout, which ucp cannot "
            "write. Write torch_dist (--layout torch_dist), which can be loaded with any layout of stages"
        )
    problem = stage_problem(layers, pp=pp, vpp=vpp, arguments=arguments)
    if problem is not None:
        raise TopologyError(f"{problem}. Choose another pp or vpp")
    chunks = [(stage, virtual) for virtual in range(vpp) for stage in range(pp)]
    pattern = hybrid_pattern(arguments)
    if pattern and _BAR in pattern:
        counts = {chunk: len(letters) for chunk, letters in zip(chunks, pattern.split(_BAR), strict=True)}
        return _ranges(counts)
    first, last, rest, parts = _shares(layers, pp=pp, vpp=vpp, arguments=arguments)
    counts = {}
    for stage, virtual in chunks:
        count = rest // parts if parts else 0
        if stage == 0 and first is not None:
            count = first // vpp
        if stage == pp - 1 and last is not None:
            count = last // vpp
        counts[stage, virtual] = count
    counts[0, 0] -= bool(arguments.get(_EMBEDDING))
    counts[pp - 1, vpp - 1] -= bool(arguments.get(_LOSS))
    return _ranges(counts)


def _ranges(counts: Mapping[Chunk, int]) -> dict[Chunk, range]:
    stops = accumulate(counts.values())
    return {chunk: range(stop - counts[chunk], stop) for chunk, stop in zip(counts, stops, strict=True)}


def stage_problem(layers: int, *, pp: int, vpp: int, arguments: Mapping[str, object]) -> str | None:
    """Why the layers cannot be split over these stages; None if they can, or if the arguments list the stages."""
    if arguments.get(_LAYOUT):
        return None
    pattern = hybrid_pattern(arguments)
    if pattern and _BAR in pattern:
        if (segments := pattern.count(_BAR) + 1) == pp * vpp:
            return None
        return (
            f"layers: the pattern of the hybrid model has {segments} segments, expected pp x vpp = {pp * vpp}; give "
            "another pattern with --set hybrid_layer_pattern=..."
        )
    if pattern and vpp > 1:
        return f"layers: vpp={vpp}, but the pattern of the hybrid model has no {_BAR!r} between chunks"
    first, last, rest, parts = _shares(layers, pp=pp, vpp=vpp, arguments=arguments)
    uneven = any(count is not None and count % vpp for count in (first, last))
    if not uneven and rest >= 0 and rest % max(parts, 1) == 0 and (parts or not rest):
        return None
    fixed = [f"{n} in the {which} stage" for n, which in ((first, "first"), (last, "last")) if n]
    ends = f" ({' and '.join(fixed)}, as the arguments say)" if fixed else ""
    return f"layers: {pp} stages of {vpp} chunk{'s' if vpp > 1 else ''} do not divide {layers}{ends}"


def hybrid_pattern(arguments: Mapping[str, object]) -> str | None:
    """The letters of the layers of a hybrid model, without those of multi-token prediction."""
    letters = next((arguments[name] for name in _HYBRID if arguments.get(name)), None)
    return letters.partition("/")[0] if isinstance(letters, str) else None


def _shares(
    layers: int, *, pp: int, vpp: int, arguments: Mapping[str, object]
) -> tuple[int | None, int | None, int, int]:
    """Layers of the first and last stage (None if not set), layers of the other stages, and chunks that share these."""
    first, last = _number(arguments, _FIRST), _number(arguments, _LAST)
    middle = pp - (first is not None) - (last is not None)
    pseudo = bool(arguments.get(_EMBEDDING)) + bool(arguments.get(_LOSS))
    return first, last, layers - (first or 0) - (last or 0) + pseudo, middle * vpp


def _number(arguments: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    number = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return number if isinstance(number, int) else None
