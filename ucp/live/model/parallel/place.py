"""From a rank's local names and shapes to those of the whole model, together with all ranks.

1. Ranks share the numbers in their names: layers and experts get those of the whole model (`model.numbering`);
2. each finds how its tensors may be cut (`model.parallel`); they share where several ways fit, and take one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ucp.contract.protocols import SourceOptions
from ucp.core.index import Index
from ucp.core.target import Slice
from ucp.errors import UsageError
from ucp.live.adapters import LiveRun
from ucp.live.model.parallel.cuts import LayoutFinder, assign_layouts, expert_layers
from ucp.live.model.parallel.experts import ExpertMap, Experts
from ucp.live.model.parallel.numbering import Numbering, survey_numbers
from ucp.live.run.mesh import RunMesh
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingOptions:
    """What the user says of how the model lies over the ranks."""

    family: SourceOptions = field(default_factory=SourceOptions)
    """Rules to cut by."""
    rename: Callable[[str], str] | None = None
    """From a name in the whole model to the name in the checkpoint."""
    experts: Experts | None = None
    """Who holds which experts."""


def place_run(run: LiveRun, index: Index, mesh: RunMesh, ranks: Ranks, options: PlacingOptions) -> LiveRun:
    """The run with names and parts of the whole model. Collective.

    Raises LoadError where the numbers of layers or experts make no row, FamilyError, UsageError: also for a
    map of experts that are not there.
    """

    def expert_map() -> ExpertMap:
        if options.experts is not None and (run.has_global_parts or mesh.topology is None):
            got = (
                "a model that says itself how it lies"
                if run.has_global_parts
                else "no topology: pass one, such as dp=1"
            )
            raise UsageError(f"expected experts= with modules of local shapes and a topology; got {got}")
        return ExpertMap.of(options.experts, ep=mesh.degree("ep"))

    experts = run_together(ranks, expert_map)
    told = ranks.share(survey_numbers(run.model))
    stored = (*index.atoms, *index.aliases)
    numbering = Numbering(surveys=told, mesh=mesh, rank=ranks.rank, experts=experts, chunks=run.model.chunks)
    model = run_together(
        ranks, lambda: run.model if run.has_global_names else numbering.name_globally(run.model, stored, options.rename)
    )
    finder = LayoutFinder(
        index, mesh, count=ranks.count, options=options.family, rename=options.rename, experts=experts
    )
    ways = run_together(ranks, lambda: {} if run.has_global_parts else finder.ways(model))
    names = {own.name: own.global_names[0] for own in model.tensors}
    open_ways = {names[name]: own.keys() for name, own in ways.items() if own.is_open and own.layouts}
    votes, held = zip(*ranks.share((open_ways, expert_layers(names.values()))), strict=True)
    experts.check_layers(set().union(*held))
    model = assign_layouts(model, ways, votes, mesh)
    if any(own.layouts for own in ways.values()):
        model = replace(model, notes=(*model.notes, *finder.notes))
    return replace(run, model=model)


def trim_padding(memory: torch.Tensor, own: Slice) -> torch.Tensor:
    """The part of `memory` that the slice fills; what is past that becomes zeros, as Megatron makes it.

    >>> import torch
    >>> from ucp.core.tensor import DType
    >>> rows = torch.ones(3, 2)
    >>> own = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(2, 2), start=0, stop=4)
    >>> trim_padding(rows, own).shape, rows[2].tolist()
    (torch.Size([2, 2]), [0.0, 0.0])
    """
    count = own.stop - own.start
    if memory.numel() <= count:
        return memory
    flat = memory.detach().view(-1)
    flat[count:].zero_()
    return flat[:count].view(own.local_shape) if count == prod(own.local_shape) else flat[:count]
