"""Describe a rank's part of a run for a save: by names and parts of the whole model.

DTensors, FSDP1 and DeepSpeed record how ranks cut tensors. Plain tensors do not: a checkpoint of the same model
(`like`) has their global shapes, and how they are cut follows as for a load (`ucp.live.model.parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ucp.contract.protocols import SourceOptions
from ucp.contract.run_extras import LR_SCHEDULER
from ucp.core.index import WEIGHT, Index
from ucp.errors import UnsupportedError, UsageError, format_list
from ucp.live.adapters import LiveRequest, LiveRun
from ucp.live.match.items import find_atoms
from ucp.live.model.describe import describe_run
from ucp.live.model.parallel.experts import ExpertMap, PlacementLike
from ucp.live.model.parallel.layouts import find_expert_layers
from ucp.live.model.parallel.numbering import NumberSurvey, name_globally, survey_numbers
from ucp.live.model.parallel.place import parse_experts, place_run
from ucp.live.parts import LiveTensor
from ucp.live.resume.scheduler import Stateful
from ucp.live.run.mesh import RunMesh
from ucp.live.run.ranks import run_together
from ucp.live.run.shared_index import read_once
from ucp.source.read import index_of


def describe_parts(
    live: LiveRequest, like: Path | None, first_link: Path | None, placement: PlacementLike | None
) -> LiveRun:
    """This rank's part of the run, by names and parts of the whole model. Collective.

    `like`: a checkpoint of the same model, if the user passed one; else `first_link` serves, if ranks cut tensors.
    Raises UnsupportedError if it is not known how tensors are cut, SourceError if `like` cannot be read.
    """
    ranks, mesh = live.ranks, live.mesh
    run = run_together(ranks, lambda: describe_run(live))
    is_known = all(ranks.share(run.has_global_parts))
    cutting = [f"{axis}={mesh.degree(axis)}" for axis in ("tp", "etp") if mesh.degree(axis) > 1]
    path = like or (first_link if cutting else None)
    if not is_known and path is not None:
        index = read_once(ranks, path, lambda: index_of(path))
        run = place_run(run, index, mesh, ranks, options=SourceOptions(), rename=None, placement=placement)
        return run_together(ranks, lambda: _take_shapes(run, index))
    run_together(ranks, lambda: None if run.has_global_parts else _check_full(cutting))
    expert_map = run_together(ranks, lambda: parse_experts(placement, run, mesh))
    surveys = ranks.share(survey_numbers(run.model))
    named = run_together(
        ranks, lambda: run if run.has_global_names else _name(run, surveys, mesh, ranks.rank, expert_map)
    )
    names = (tensor.global_names[0] for tensor in named.model.tensors)
    layers = ranks.share(find_expert_layers(names) if expert_map.layers else set())
    expert_map.check_layers(set().union(*layers))
    return named


def _take_shapes(run: LiveRun, index: Index) -> LiveRun:
    """The run, with the global shapes of the checkpoint. Raises UnsupportedError for tensors that do not fit."""
    problems: list[str] = []

    def take() -> Iterator[LiveTensor]:
        for tensor in run.model.tensors:
            name, part = tensor.global_names[0], tensor.part
            try:
                stored = find_atoms(tensor, index, None)
                if not stored:
                    raise ValueError("is not there")
                shape = index.atoms[stored[0]].global_shape
                if part.is_padded:
                    raise ValueError(f"has padding rows, of {list(shape)} in all, which a save would have to leave out")
                part.to_slice(name, WEIGHT, shape, tensor.dtype)  # raises ValueError if it is another part
                yield replace(tensor, part=replace(part, global_shape=shape))
            except ValueError as error:
                problems.append(f"{name} {error}{part.hint and f'; {part.hint}'}")

    tensors = tuple(take())
    if problems:
        raise UnsupportedError(
            f"expected tensors of the model of {index.path}, cut as the topology says; these are not:\n"
            f"{format_list(problems)}"
        )
    return replace(run, model=replace(run.model, tensors=tensors))


def _check_full(cutting: list[str]) -> None:
    """Raise UnsupportedError if ranks may hold parts of plain tensors."""
    if cutting:
        raise UnsupportedError(
            f"expected DTensors, which say how they are cut, or complete tensors; got plain tensors and "
            f"{', '.join(cutting)}. Pass like=, a checkpoint of the same model: it has the global shapes"
        )


def _name(run: LiveRun, surveys: list[NumberSurvey], mesh: RunMesh, rank: int, experts: ExpertMap) -> LiveRun:
    named = name_globally(run.model, surveys, mesh=mesh, rank=rank, experts=experts, stored=(), rename=None)
    return replace(run, model=named)


def name_extras(scheduler: object, scaler: object, framework: Mapping[str, object]) -> dict[str, object]:
    """What a run has beside tensors, by names; `framework`: extras of the framework. Raises UsageError."""
    named = dict(framework)
    for name, value in ((LR_SCHEDULER, scheduler), ("scaler", scaler)):
        if value is not None:
            if not isinstance(value, Stateful):
                raise UsageError(f"expected a {name} with state_dict and load_state_dict; got a {type(value).__name__}")
            named[name] = value.state_dict()
    return named
