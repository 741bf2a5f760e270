"""Runs without ZeRO: the optimizer lies in the model-states file, and does not name its parameters.

The names come from the module (`zero0`). With several ranks there are more places to look:

- a tensor-parallel rank has its own module and optimizer in one file;
- the optimizer of a pipeline stage goes with some layers, one after another, and which these are is not recorded: its
  own names tell where torch kept them, else exactly one way to deal the layers out must fit the shapes;
- every expert-parallel rank has an optimizer file, over what all ranks share and over its own experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ucp.contract.ranks import Checksums
from ucp.core.index import Kind
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import Numbered, ranks_joined
from ucp_formats.deepspeed.extras import unsharded_extras
from ucp_formats.deepspeed.read.module import ModelStates, ModulePart, module_of, read_module
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.saved import UnshardedOptimizer
from ucp_formats.deepspeed.read.optimizer.zero0 import INFERRED, REMEDY, names_by_shape, read_optimizer, slots_of
from ucp_formats.deepspeed.read.ranks.merge import RankPart
from ucp_formats.deepspeed.read.ranks.pipeline import pipeline_modules
from ucp_formats.deepspeed.read.run import SavedGrid


def read_unsharded(
    model: ModelStates, checksums: Checksums, order: Sequence[Sequence[str]] | None = None
) -> tuple[ModulePart, OptimizerPart]:
    """Module and optimizer of one model-states file; `order`: names of every group, when the user says so."""
    first = _module(model, None, checksums)
    if model.optimizer is None:
        trained = {name: entry.shape for name, entry in first.entries.items() if entry.kind is Kind.FROZEN}
        part = OptimizerPart(notes=["saved without an optimizer: every parameter counts as trained"])
    else:
        part = read_optimizer(model.optimizer, _params(first), checksums, order)
        part.extras += unsharded_extras(model.optimizer)
        trained = _trained(first, [part])
    return _module(model, trained, checksums), part


def _module(model: ModelStates, trained: Mapping[str, Shape] | None, checksums: Checksums) -> ModulePart:
    return read_module({0: model}, trained, checksums, sharded=False)


def _params(module: ModulePart) -> dict[str, TensorRef]:
    """Tensors that can be parameters."""
    return {
        name: own.tensor.first
        for name, own in module.entries.items()
        if own.kind is not Kind.BUFFER and own.tensor is not None
    }


def _trained(module: ModulePart, parts: Iterable[OptimizerPart]) -> dict[str, Shape]:
    return {name: module.entries[name].shape for part in parts for group in part.groups for name in group.params}


def read_stages(grid: SavedGrid, checksums: Checksums) -> list[RankPart]:
    """Modules and optimizers of a pipeline."""
    parts = []
    for tp in range(grid.tp):
        optimizers: dict[int, UnshardedOptimizer] = {}
        named: dict[int, dict[str, Shape | None]] = {}  # what the file or torch kept
        for mp, run in grid.stages(tp).items():
            optimizer = run.model.optimizer
            if optimizer is None:
                raise MalformedError(f"expected a dict for optimizer of {run.model.file.path}; got None")
            optimizers[mp] = optimizer
            recorded = {name: shape for group in optimizer.recorded for name, shape in group.items()}
            kept = (name for group in optimizer.torch.groups for name in group.names or ())
            named[mp] = {**recorded} or dict.fromkeys(kept)
        models = pipeline_modules(grid, tp, {name: shape for own in named.values() for name, shape in own.items()})
        module = _module(models[0], None, checksums)
        params = _params(module)
        orders: Sequence[Sequence[Sequence[str]] | None] = [None] * len(optimizers)
        if not all(named.values()):
            orders = _names_of_stages(optimizers.values(), params, checksums, str(grid.folder.path))
        read = {
            mp: read_optimizer(own, params, checksums, order)
            for (mp, own), order in zip(optimizers.items(), orders, strict=True)
        }
        for mp, part in read.items():
            part.notes += [] if named[mp] else [INFERRED]
            part.extras += unsharded_extras(optimizers[mp])
            parts.append(RankPart(mp=mp, tp=tp, order=mp // grid.tp, optimizer=part))
        trained = _trained(module, read.values())
        parts += [
            RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=_module(model, trained, checksums))
            for copy, model in enumerate(models)
        ]
    return parts


def _names_of_stages(
    optimizers: Collection[UnshardedOptimizer], params: Mapping[str, TensorRef], checksums: Checksums, where: str
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of every group of the optimizer of each stage, which has layers one after another."""
    layers: dict[str, dict[str, TensorRef]] = {}
    for name, ref in params.items():
        number, _, own = name.partition(".")
        layers.setdefault(number, {})[own] = ref
    for (one, first), (other, second) in combinations(layers.items(), 2):
        if any(len(ref.shape) > 1 for ref in first.values()) and checksums.is_same(first, second):
            raise UnsupportedError(
                f"layers {one} and {other} in {where} hold the same numbers, as tied layers do, and the optimizers do "
                f"not name their parameters: where theirs stand among the others of a stage is not known. {REMEDY}"
            )
    named = [{f"{number}.{name}": ref for name, ref in own.items()} for number, own in layers.items()]
    return names_by_shape([slots_of(own) for own in optimizers], named, where)


def read_expert_ranks(grid: SavedGrid, model: ModelStates, checksums: Checksums) -> Iterator[RankPart]:
    """Module and optimizers of a mixture of experts; `model`: model states with the experts among the module."""
    optimizers = grid.expert_optimizers
    if len(grid.runs) > 1 or not optimizers:
        raise UnsupportedError(
            f"expected one model-parallel rank, and an optimizer file for each expert-parallel rank, in "
            f"{grid.folder.path}, which was saved without ZeRO; got {len(grid.runs)} ranks and {len(optimizers)} "
            "files. Resume with ZeRO stage 1 and save again"
        )
    first = _module(model, None, checksums)
    params = _params(first)
    numbered = Numbered.of(module_of(model).tensors)
    ep = len(optimizers)
    parts = []
    for rank, saved in enumerate(optimizers):
        names = {numbered.local(n, ep): n for n in params if numbered.owner(n, ep) in (rank, None)}
        recorded = tuple({numbered.local(n, ep): shape for n, shape in own.items()} for own in saved.recorded)
        local = {own: params[name] for own, name in names.items()}
        part = read_optimizer(replace(saved, recorded=recorded), local, checksums)
        part.extras += unsharded_extras(saved) if rank == 0 else []
        part.states = {names[local]: states for local, states in part.states.items()}
        part.lost = {names[local]: loss for local, loss in part.lost.items()}
        part.groups = [replace(group, params=tuple(names[n] for n in group.params)) for group in part.groups]
        parts.append(part)
    counts = {len(part.groups) for part in parts}
    if len(counts) > 1:
        raise MalformedError(
            f"expected as many parameter groups in each expp_rank_* file of {grid.folder.path}; got "
            f"{', '.join(map(str, sorted(counts)))}. The files are of different runs"
        )
    trained = _trained(first, parts)
    members = [ranks_joined([own.params for own in ranks]) for ranks in zip(*(p.groups for p in parts), strict=True)]
    parts[0].groups = [replace(group, params=own) for group, own in zip(parts[0].groups, members, strict=True)]
    yield RankPart(mp=0, tp=0, order=0, module=_module(model, trained, checksums), optimizer=parts[0])
    contiguous = grid.first.config.raw.get("use_data_before_expert_parallelism") is True
    each = grid.first.ranks // ep if contiguous else 1
    for rank, part in enumerate(parts[1:], start=1):
        yield RankPart(mp=0, tp=0, order=rank, dp=rank * each, optimizer=part)
