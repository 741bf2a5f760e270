"""Runs without ZeRO: the optimizer lies in the model-states file, and does not name its parameters.

The names come from the module (`whole_source`). With several ranks there are more places to look:

- a tensor-parallel rank has its own module and optimizer in one file;
- the optimizer of a pipeline stage goes with some layers, one after another, and which these are is not recorded: its
  own names tell where torch kept them, else exactly one way to deal the layers out must fit the shapes;
- every expert-parallel rank has an optimizer file, over what all ranks share and over its own experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ucp.contract.rank_extras import Checksums
from ucp.core.index import Kind
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape, mapping, sequence, shapes
from ucp_formats.deepspeed.experts import Experts, Numbered, ranks_joined
from ucp_formats.deepspeed.read.extras import whole_optimizer_extras
from ucp_formats.deepspeed.read.grid import SavedGrid
from ucp_formats.deepspeed.read.merge_ranks import RankPart
from ucp_formats.deepspeed.read.module import ModulePart, read_whole_module
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.zero0 import (
    INFERRED,
    REMEDY,
    WholeOptimizer,
    names_by_shape,
    read_whole,
    slots_of,
)
from ucp_formats.deepspeed.read.pipeline import pipeline_modules
from ucp_formats.deepspeed.read.run import SavedFile

__all__ = ["read_expert_ranks", "read_stages", "read_unsharded"]


def read_unsharded(
    file: SavedFile, checksums: Checksums, order: Sequence[Sequence[str]] | None = None
) -> tuple[ModulePart, OptimizerPart]:
    """Module and optimizer of one model-states file; `order`: names of every group, when the user says so."""
    saved = file.root.get("optimizer")
    first = read_whole_module(file, None)
    if saved is None:
        trained = {name: entry.shape for name, entry in first.entries.items() if entry.kind is Kind.FROZEN}
        part = OptimizerPart(notes=["saved without an optimizer: every parameter counts as trained"])
        return read_whole_module(file, trained), part
    part = _read(file, saved, _params(first), checksums, order)
    return read_whole_module(file, _trained(first, part)), part


def _read(
    file: SavedFile,
    saved: object,
    params: Mapping[str, TensorRef],
    checksums: Checksums,
    order: Sequence[Sequence[str]] | None = None,
) -> OptimizerPart:
    whole = _optimizer(file, saved, params)
    part = read_whole(whole, checksums, order)
    part.extras += whole_optimizer_extras(whole.saved, whole.kind)
    return part


def _optimizer(file: SavedFile, saved: object, params: Mapping[str, TensorRef]) -> WholeOptimizer:
    recorded = file.root.get("param_shapes")
    where = f"param_shapes of {file.path}"
    groups = sequence(recorded, where) if isinstance(recorded, list) else [recorded] if recorded is not None else []
    return WholeOptimizer(
        where=file.name.name,
        saved=mapping(saved, f"optimizer of {file.path}"),
        params=params,
        recorded=tuple(shapes(group, where) for group in groups),
    )


def _params(module: ModulePart) -> dict[str, TensorRef]:
    """Tensors that can be parameters."""
    return {
        name: own.tensor.first
        for name, own in module.entries.items()
        if own.kind is not Kind.BUFFER and own.tensor is not None
    }


def _trained(module: ModulePart, part: OptimizerPart) -> dict[str, Shape]:
    return {name: module.entries[name].shape for group in part.groups for name in group.params}


def read_stages(grid: SavedGrid, checksums: Checksums) -> list[RankPart]:
    """Modules and optimizers of a pipeline."""
    parts = []
    for tp in range(grid.tp):
        runs = {mp: run for mp, run in grid.runs.items() if grid.slice(mp) == tp}
        named = {mp: _names(run.model) for mp, run in runs.items()}
        files = pipeline_modules(grid, tp, {name: shape for own in named.values() for name, shape in own.items()})
        module = read_whole_module(files[0], None)
        optimizers = {
            mp: _optimizer(run.model, run.model.root.get("optimizer"), _params(module)) for mp, run in runs.items()
        }
        orders: Sequence[Sequence[Sequence[str]] | None] = [None] * len(runs)
        if not all(named.values()):
            orders = _names_of_stages(optimizers.values(), _params(module), checksums, str(grid.folder.path))
        read = {
            mp: read_whole(own, checksums, order) for (mp, own), order in zip(optimizers.items(), orders, strict=True)
        }
        trained = {name: shape for part in read.values() for name, shape in _trained(module, part).items()}
        for mp, part in read.items():
            part.notes += [] if named[mp] else [INFERRED]
            part.extras += whole_optimizer_extras(optimizers[mp].saved, optimizers[mp].kind)
            parts.append(RankPart(mp=mp, tp=tp, order=grid.stage(mp), optimizer=part))
        parts += [
            RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=read_whole_module(file, trained))
            for copy, file in enumerate(files)
        ]
    return parts


def _names_of_stages(
    optimizers: Collection[WholeOptimizer], params: Mapping[str, TensorRef], checksums: Checksums, where: str
) -> list[tuple[tuple[str, ...], ...]]:
    """Names of every group of the optimizer of each stage, which has layers one after another."""
    layers: dict[str, dict[str, TensorRef]] = {}
    for name, ref in params.items():
        number, _, own = name.partition(".")
        layers.setdefault(number, {})[own] = ref
    for (one, first), (other, second) in combinations(layers.items(), 2):
        if any(len(ref.shape) > 1 for ref in first.values()) and checksums.same(first, second):
            raise UnsupportedError(
                f"layers {one} and {other} in {where} hold the same numbers, as tied layers do, and the optimizers do "
                f"not name their parameters: where theirs stand among the others of a stage is not known. {REMEDY}"
            )
    named = [{f"{number}.{name}": ref for name, ref in own.items()} for number, own in layers.items()]
    return names_by_shape([slots_of(own) for own in optimizers], named, where)


def _names(file: SavedFile) -> dict[str, Shape | None]:
    """Names, and shapes where they are known, that the file or torch kept of an optimizer's parameters."""
    recorded = _optimizer(file, file.root.get("optimizer"), {}).recorded
    if recorded:
        return {name: shape for own in recorded for name, shape in own.items()}
    return dict.fromkeys(_torch_names(file.root.get("optimizer")))


def _torch_names(saved: object) -> list[str]:
    """Names that torch kept in the parameter groups of an optimizer; none where it kept none."""
    inner = saved.get("optimizer_state_dict", saved) if isinstance(saved, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    own = [group.get("param_names") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [str(name) for names in own if isinstance(names, list) for name in names]


def read_expert_ranks(grid: SavedGrid, file: SavedFile, experts: Experts, checksums: Checksums) -> Iterator[RankPart]:
    """Module and optimizers of a mixture of experts; `file`: model states with the experts among the module."""
    optimizers = grid.expert_optimizers
    if len(grid.runs) > 1 or not optimizers:
        raise UnsupportedError(
            f"expected one model-parallel rank, and an optimizer file for each expert-parallel rank, in "
            f"{grid.folder.path}, which was saved without ZeRO; got {len(grid.runs)} ranks and {len(optimizers)} "
            "files. Resume with ZeRO stage 1 and save again"
        )
    first = read_whole_module(file, None)
    params = _params(first)
    numbered = Numbered.of(experts.tensors)
    ep = len(optimizers)
    parts = []
    for rank, own in enumerate(optimizers):
        names = {numbered.local(n, ep): n for n in params if numbered.owner(n, ep) in (rank, None)}
        saved = mapping(own.root.get("optimizer"), f"optimizer of {own.path}")
        whole = _optimizer(own, saved, {local: params[name] for local, name in names.items()})
        recorded = tuple({numbered.local(n, ep): shape for n, shape in group.items()} for group in whole.recorded)
        part = read_whole(replace(whole, recorded=recorded), checksums, None)
        part.extras += whole_optimizer_extras(whole.saved, whole.kind) if rank == 0 else []
        part.states = {names[local]: states for local, states in part.states.items()}
        part.lost = {names[local]: loss for local, loss in part.lost.items()}
        part.groups = [replace(group, params=tuple(names[n] for n in group.params)) for group in part.groups]
        parts.append(part)
    trained = {name: shape for part in parts for name, shape in _trained(first, part).items()}
    counts = {len(part.groups) for part in parts}
    if len(counts) > 1:
        raise MalformedError(
            f"expected as many parameter groups in each expp_rank_* file of {grid.folder.path}; got "
            f"{', '.join(map(str, sorted(counts)))}. The files are of different runs"
        )
    members = [
        ranks_joined([group.params for group in ranks]) for ranks in zip(*(p.groups for p in parts), strict=True)
    ]
    parts[0].groups = [replace(group, params=own) for group, own in zip(parts[0].groups, members, strict=True)]
    yield RankPart(mp=0, tp=0, order=0, module=read_whole_module(file, trained), optimizer=parts[0])
    contiguous = grid.first.config.raw.get("use_data_before_expert_parallelism") is True
    for rank, part in enumerate(parts[1:], start=1):
        yield RankPart(
            mp=0, tp=0, order=rank, dp=rank * (grid.first.ranks // ep) if contiguous else rank, optimizer=part
        )
