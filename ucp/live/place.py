"""From a rank's local names and shapes to those of the whole model, together with all ranks.

1. Ranks share the numbers in their names: layers and experts get those of the whole model (`model.numbering`);
2. each finds how its tensors may be cut (`model.parallel`); they share where several ways fit, and take one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ucp.contract.protocols import SourceOptions
from ucp.core.index import Index
from ucp.live.adapters import LiveRun
from ucp.live.model.experts import ExpertMap, Experts
from ucp.live.model.numbering import Numbering, survey
from ucp.live.model.parallel import Finder, placed
from ucp.live.optimizer.placed import PlacedOptimizer
from ucp.live.run.mesh import RunMesh
from ucp.live.run.ranks import Ranks, together

__all__ = ["Placing", "place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What the user says of how the model lies over the ranks."""

    family: SourceOptions = field(default_factory=SourceOptions)
    """Rules to cut by."""
    rename: Callable[[str], str] | None = None
    """From a name in the whole model to the name in the checkpoint."""
    experts: Experts | None = None
    """Who holds which experts."""


def place(run: LiveRun, index: Index, mesh: RunMesh, ranks: Ranks, options: Placing) -> LiveRun:
    """The run with names and parts of the whole model. Collective.

    Raises LoadError where the numbers of layers or experts make no row, UsageError, FamilyError.
    """
    experts = together(ranks, lambda: ExpertMap.of(options.experts, ep=mesh.degree("ep")))
    told = ranks.share(survey(run.model))
    stored = (*index.atoms, *index.aliases)
    numbering = Numbering(told=told, mesh=mesh, rank=ranks.rank, experts=experts, chunks=run.model.chunks)
    model = together(ranks, lambda: run.model if run.is_placed else numbering.named(run.model, stored, options.rename))
    finder = Finder(index, mesh, count=ranks.count, options=options.family, rename=options.rename, experts=experts)
    ways = together(ranks, lambda: {} if run.is_placed else finder.ways(model))
    names = {own.name: own.whole_names[0] for own in model.tensors}
    votes = ranks.share({names[name]: own.keys() for name, own in ways.items() if own.is_open and own.layouts})
    model = placed(model, ways, votes, mesh)
    if any(own.layouts for own in ways.values()):
        model = replace(model, notes=(*model.notes, *finder.notes))
    if run.optimizer is None or run.is_placed:
        return replace(run, model=model)
    parts = {own.name: own.part for own in model.tensors}
    return replace(run, model=model, optimizer=PlacedOptimizer(own=run.optimizer, parts=parts))
