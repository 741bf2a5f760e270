"""Reads runs without ZeRO, whose optimizer is in the model-states file and does not name its parameters.

The names come from the module (`zero0`). With several ranks:

- each tensor-parallel rank has its module and its optimizer in one file;
- the optimizer of a pipeline stage steps consecutive layers, but does not record which ones: either torch kept the
  names of its parameters, or exactly one assignment of layers to stages must fit the shapes;
- each expert-parallel rank has an optimizer file, for the parameters that all ranks share and for its experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ucp.contract.ranks import Checksums
from ucp.core.index import Kind
from ucp.core.layout import Layout
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.core.union import ShardedTensor, ShardSet, StoredShard
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import ExpertNumbers, merge_names
from ucp_formats.deepspeed.extras import unsharded_extras
from ucp_formats.deepspeed.read.module import ModelStates, ModulePart, add_stacks, module_of, read_module
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.saved import UnshardedOptimizer
from ucp_formats.deepspeed.read.optimizer.zero0 import INFERRED, REMEDY, names_by_shape, read_optimizer, slots_of
from ucp_formats.deepspeed.read.ranks.merge import RankPart
from ucp_formats.deepspeed.read.ranks.pipeline import pipeline_modules
from ucp_formats.deepspeed.read.run import SavedGrid


def read_unsharded(
    model: ModelStates, checksums: Checksums, order: Sequence[Sequence[str]] | None = None
) -> tuple[ModulePart, OptimizerPart]:
    """Module and optimizer of one model-states file; `order`: parameters of each group, if the user states them."""
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
        name: entry.tensor.first
        for name, entry in module.entries.items()
        if entry.kind is not Kind.BUFFER and entry.tensor is not None
    }


def _trained(module: ModulePart, parts: Iterable[OptimizerPart]) -> dict[str, Shape]:
    return {name: module.entries[name].shape for part in parts for group in part.groups for name in group.params}


def read_stages(grid: SavedGrid, checksums: Checksums) -> list[RankPart]:
    """Modules and optimizers of a pipeline."""
    parts = []
    for tp in range(grid.tp):
        optimizers: dict[int, UnshardedOptimizer] = {}
        recorded: dict[int, dict[str, Shape | None]] = {}  # parameter names that ucp or torch recorded in the file
        for mp, run in grid.stages(tp).items():
            optimizer = run.model.optimizer
            if optimizer is None:
                raise MalformedError(f"expected a dict for optimizer of {run.model.file.path}; got None")
            optimizers[mp] = optimizer
            shapes: dict[str, Shape | None] = {
                name: shape for group in optimizer.recorded for name, shape in group.items()
            }
            names = (name for group in optimizer.torch.groups for name in group.names or ())
            recorded[mp] = shapes or dict.fromkeys(names)
        models = pipeline_modules(grid, tp, {name: s for shapes in recorded.values() for name, s in shapes.items()})
        module = _module(models[0], None, checksums)
        params = _params(module)
        orders: Sequence[Sequence[Sequence[str]] | None] = [None] * len(optimizers)
        if not all(recorded.values()):
            orders = _infer_stage_names(optimizers.values(), params, checksums, str(grid.folder.path))
        stages = {
            mp: read_optimizer(optimizer, params, checksums, order)
            for (mp, optimizer), order in zip(optimizers.items(), orders, strict=True)
        }
        for mp, part in stages.items():
            part.notes += [] if recorded[mp] else [INFERRED]
            part.extras += unsharded_extras(optimizers[mp])
            parts.append(RankPart(mp=mp, tp=tp, order=mp // grid.tp, optimizer=part))
        trained = _trained(module, stages.values())
        parts += [
            RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=_module(model, trained, checksums))
            for copy, model in enumerate(models)
        ]
    return parts


def _infer_stage_names(
    optimizers: Collection[UnshardedOptimizer], params: Mapping[str, TensorRef], checksums: Checksums, where: str
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Parameter names of each group of each stage's optimizer, inferred: a stage has consecutive layers."""
    layers: dict[str, dict[str, TensorRef]] = {}
    for name, ref in params.items():
        number, _, local_name = name.partition(".")
        layers.setdefault(number, {})[local_name] = ref
    for (number, first), (other, second) in combinations(layers.items(), 2):
        if any(len(ref.shape) > 1 for ref in first.values()) and checksums.is_same(first, second):
            raise UnsupportedError(
                f"layers {number} and {other} in {where} hold equal weights, as tied layers do, and the optimizers "
                f"do not name their parameters: it is not known which stage trains which of the two. {REMEDY}"
            )
    params_by_layer = [{f"{number}.{name}": ref for name, ref in tensors.items()} for number, tensors in layers.items()]
    return names_by_shape([slots_of(optimizer) for optimizer in optimizers], params_by_layer, where)


def read_expert_ranks(
    grid: SavedGrid, model: ModelStates, stacked: Mapping[str, ShardedTensor], checksums: Checksums
) -> Iterator[RankPart]:
    """Module and optimizers of a run with experts; `model`: model states whose module contains the experts.

    `stacked`: the experts that AutoEP stacked.
    """
    optimizers = grid.expert_optimizers
    if len(grid.runs) > 1 or not optimizers:
        raise UnsupportedError(
            f"expected one model-parallel rank, and an optimizer file for each expert-parallel rank, in "
            f"{grid.folder.path}, which was saved without ZeRO; got {len(grid.runs)} model-parallel ranks and "
            f"{len(optimizers)} optimizer files. Resume with ZeRO stage 1 and save again"
        )
    first = _module(model, None, checksums)
    add_stacks(first, stacked, ())
    params = _params(first)
    numbers = ExpertNumbers.of(module_of(model).tensors)
    ep = len(optimizers)
    parts = []
    for rank, saved in enumerate(optimizers):
        names = {numbers.local_name(n, ep): n for n in params if numbers.owner(n, ep) in (rank, None)}
        recorded = tuple({numbers.local_name(n, ep): shape for n, shape in group.items()} for group in saved.recorded)
        routers = tuple(f"{layer}.router." for layer in model.stacks.layers)
        # AutoEP appends the parameters it makes, so an optimizer has the routers after all others
        local_params = {local: params[names[local]] for local in sorted(names, key=lambda n: n.startswith(routers))}
        for name, tensor in stacked.items():
            shape = model.stacks.local_shape(name, tensor.shape, rank)
            local_params[name] = tensor.first.strided(0, shape, contiguous_strides(shape))
        part = read_optimizer(replace(saved, recorded=recorded), local_params, checksums, stacked=stacked)
        for name in stacked.keys() & part.states.keys():
            held = Layout((model.stacks.axis(name),))
            for key, state in part.states[name].items():
                if isinstance(state, ShardedTensor):
                    shards = ShardSet(held, (StoredShard({"ep": rank, "dp": 0}, state.first),))
                    part.states[name][key] = replace(state, shape=stacked[name].shape, shard_sets=(shards,))
        part.extras += unsharded_extras(saved) if rank == 0 else []
        part.states = {names[local]: states for local, states in part.states.items()}
        part.lost = {names[local]: loss for local, loss in part.lost.items()}
        part.groups = [replace(group, params=tuple(names[n] for n in group.params)) for group in part.groups]
        parts.append(part)
    counts = {len(part.groups) for part in parts}
    if len(counts) > 1:
        raise MalformedError(
            f"expected the same number of parameter groups in each expp_rank_* file of {grid.folder.path}; got "
            f"{', '.join(map(str, sorted(counts)))}. The files are from different runs"
        )
    trained = _trained(first, parts)
    module = _module(model, trained, checksums)
    add_stacks(module, stacked, trained)
    parts[0].groups = [
        replace(groups[0], params=merge_names([group.params for group in groups]))
        for groups in zip(*(part.groups for part in parts), strict=True)
    ]
    yield RankPart(mp=0, tp=0, order=0, module=module, optimizer=parts[0])
    step = grid.first.ranks // ep if grid.first.config.groups_experts else 1
    for rank, part in enumerate(parts[1:], start=1):
        yield RankPart(mp=0, tp=0, order=rank, dp=rank * step, optimizer=part)
