"""Find the names and parts in the whole model of a rank's tensors with local names and shapes, with all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ucp.contract.protocols import SourceOptions
from ucp.core.index import Index
from ucp.core.layout import Layout
from ucp.core.target import Slice
from ucp.errors import UsageError
from ucp.live.adapters import LiveModel, LiveRun
from ucp.live.model.parallel.experts import ExpertMap, PlacementLike
from ucp.live.model.parallel.layouts import Candidates, LayoutFinder, find_expert_layers, format_layout
from ucp.live.model.parallel.numbering import name_globally, survey_numbers
from ucp.live.run.mesh import RunMesh
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch


def place_run(
    run: LiveRun,
    index: Index,
    mesh: RunMesh,
    ranks: Ranks,
    *,
    options: SourceOptions,
    rename: Callable[[str], str] | None,
    placement: PlacementLike | None,
) -> LiveRun:
    """The run with names and parts of the whole model. Collective.

    `options`: which model family's rules say how tensors are cut. `rename`: from a name in the whole model to the name
    in the checkpoint. Raises LoadError if the numbers of layers or experts are not consecutive, FamilyError, and
    UsageError, e.g. for a map of experts that do not exist.
    """
    expert_map = run_together(ranks, lambda: parse_experts(placement, run, mesh))
    surveys = ranks.share(survey_numbers(run.model))
    model = run_together(
        ranks,
        lambda: (
            run.model
            if run.has_global_names  # on every rank, so that ranks whose modules differ still wait for one another
            else name_globally(
                run.model,
                surveys,
                mesh=mesh,
                rank=ranks.rank,
                experts=expert_map,
                stored=(*index.atoms, *index.aliases),
                rename=rename,
            )
        ),
    )
    finder = LayoutFinder(index, mesh, count=ranks.count, options=options, rename=rename, experts=expert_map)
    candidates = run_together(ranks, lambda: {} if run.has_global_parts else finder.find_candidates(model))
    names = {tensor.name: tensor.global_names[0] for tensor in model.tensors}
    open_layouts = {
        names[name]: frozenset(map(format_layout, choices.layouts))
        for name, choices in candidates.items()
        if choices.is_open and choices.layouts
    }
    shared = ranks.share((open_layouts, find_expert_layers(names.values())))
    expert_map.check_layers(set().union(*(layers for _, layers in shared)))
    model = _assign_layouts(model, candidates, [layouts for layouts, _ in shared], mesh)
    if any(choices.layouts for choices in candidates.values()):
        model = replace(model, notes=(*model.notes, *finder.notes))
    return replace(run, model=model)


def parse_experts(placement: PlacementLike | None, run: LiveRun, mesh: RunMesh) -> ExpertMap:
    """The map of experts that the user passed. Raises UsageError if it is wrong, or does not go with the run."""
    if mesh.topology is not None and mesh.topology.placement is not None:
        if placement is not None:
            raise UsageError("expected one placement, as placement= or in the topology; got both")
        placement = mesh.topology.placement
    if placement is not None and (run.has_global_parts or mesh.topology is None):
        has_layout = run.has_global_parts
        got = "a model whose layout is known" if has_layout else "no topology: pass one, such as dp=1"
        raise UsageError(f"expected placement= only with plain modules of local shapes and a topology; got {got}")
    return ExpertMap.parse(placement, ep=mesh.degree("ep"))


def _assign_layouts(
    model: LiveModel,
    candidates: Mapping[str, Candidates],
    of_ranks: Sequence[Mapping[str, frozenset[str]]],
    mesh: RunMesh,
) -> LiveModel:
    """The model with parts of global tensors. `of_ranks`: for each rank, global name to the layouts that fit."""
    tensors = []
    for tensor in model.tensors:
        choices = candidates.get(tensor.name)
        if choices is None:
            tensors.append(tensor)
            continue
        votes = [layouts[name] for layouts in of_ranks if (name := tensor.global_names[0]) in layouts]
        agreed = (layout for layout in choices.layouts if all(format_layout(layout) in keys for keys in votes))
        layout = next(agreed, None)
        part = replace(tensor.part, coords={**mesh.coords, **tensor.part.coords})
        if layout is None:
            hint = "no single layout gives the shapes on all ranks" if choices.layouts else choices.hint
            part = replace(part, hint=hint, layout=choices.refused)
        else:
            part = replace(
                part,
                layout=Layout(layout.axes, part.layout.flat),
                unassigned=choices.unassigned,
                global_shape=choices.padded,
                is_padded=choices.padded is not None,
            )
        tensors.append(replace(tensor, part=part))
    return replace(model, tensors=tuple(tensors))


def trim_padding(memory: torch.Tensor, piece: Slice) -> torch.Tensor:
    """The part of `memory` that the slice fills; the rest becomes zeros, as Megatron makes it.

    >>> import torch
    >>> from ucp.core.tensor import DType
    >>> rows = torch.ones(3, 2)
    >>> piece = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(2, 2), start=0, stop=4)
    >>> trim_padding(rows, piece).shape, rows[2].tolist()
    (torch.Size([2, 2]), [0.0, 0.0])
    """
    count = piece.stop - piece.start
    if memory.numel() <= count:
        return memory
    flat = memory.detach().view(-1)
    flat[count:].zero_()
    return flat[:count].view(piece.local_shape) if count == prod(piece.local_shape) else flat[:count]
