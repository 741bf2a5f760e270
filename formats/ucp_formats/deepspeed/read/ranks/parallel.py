"""Reads checkpoints of tensor, pipeline and expert parallelism: first each model-parallel rank, then it merges them.

The files of one model-parallel rank are read like those of a data-parallel run, with two additions: a pipeline keeps
its module in one file per layer (`pipeline`), and each expert has a separate file, named by its global number
(`experts`). `merge` merges the ranks by the rules of `universal_checkpoint_info` or of a model family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import WEIGHT, Doubt, DoubtKind, Extra
from ucp.core.layout import Overlap
from ucp.core.tensor import TensorRef
from ucp.core.union import ShardedTensor
from ucp.errors import format_count
from ucp.io.pickle.fields import Shape, require_mapping
from ucp_formats.deepspeed.experts import ExpertGroups, check_experts_saved, read_experts
from ucp_formats.deepspeed.extras import model_extras
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.module import ModelStates, SavedModule, add_stacks, module_of, read_module
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.sharded import read_sharded, with_shapes
from ucp_formats.deepspeed.read.ranks.merge import MergedRanks, Mesh, RankPart, Rules, merge_ranks
from ucp_formats.deepspeed.read.ranks.pipeline import layer_prefixes, pipeline_modules
from ucp_formats.deepspeed.read.ranks.unsharded import read_expert_ranks, read_stages, read_unsharded
from ucp_formats.deepspeed.read.run import TIED, SavedGrid
from ucp_formats.deepspeed.read.stacks import INFO, LAYERS
from ucp_formats.deepspeed.tp.family import FamilyRules, script_arguments
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo, recorded_layouts


def read_parallel(grid: SavedGrid, checksums: Checksums, options: SourceOptions, mesh: Mesh) -> MergedRanks:
    """Module and optimizer of all ranks; `options`: the model family that the user names. `mesh`: the axes."""
    where = str(grid.folder.path)
    infos: dict[str, tuple[SavedFile, object]] = {}
    for run in grid.runs.values():
        infos[run.model.name.name] = run.model.file, run.model.file.root.get(INFO)
        for file in list(run.optimizers.values())[:1]:
            infos[file.name.name] = file.file, file.saved.get(INFO)
    rules = tensor_rules(infos, where, options)
    parts = _read_parts(grid, checksums)
    merged = merge_ranks(parts, rules, checksums, where, mesh)
    layouts, module = merged.mesh.tensors, merged.module
    if grid.is_pipeline:
        layers, stages = _pipeline_record(grid, parts)
        module.extras.append(Extra(name="pipeline", value={"layers": layers, "stages": stages}))
        merged.warnings.extend(_tied_layers_without_file(layers, stages))
    if isinstance(rules, FamilyRules) and grid.tp > 1:
        module.extras.append(Extra(name=INFO, value=recorded_layouts(layouts)))
    means = [name for name, layout in layouts.items() if layout.overlap is Overlap.MEAN]
    averaged = (
        f"tensor-parallel ranks train separate copies of {format_count(len(means), 'parameter')}, whose weights and "
        f"moments are averaged: {', '.join(means[:8])}{', ...' if len(means) > 8 else ''}"
    )
    sizes = {name: rules.padded_vocabulary(name, layout.global_shape) for name, layout in layouts.items()}
    padded = [
        f"{name} has {layouts[name].global_shape[0]} rows: {size} of the vocabulary (original_vocab_size), then "
        "padding, which is kept"
        for name, size in sizes.items()
        if size is not None
    ]
    module.notes[:] = [*rules.notes, *module.notes, *([averaged] if means else []), *padded]
    return merged


def _pipeline_record(grid: SavedGrid, parts: Sequence[RankPart]) -> tuple[dict[int, str], list[list[str]]]:
    """What only the set of files shows: the name prefix of each layer, and the trained parameters of each stage."""
    firsts = [part for part in parts if part.tp == 0]
    groups = {part.order: part.optimizer.groups for part in firsts if part.optimizer.groups}
    stages = [[name for group in groups.get(stage, ()) for name in group.params] for stage in range(grid.pp)]
    weights = {name: states.get(WEIGHT) for part in firsts for name, states in part.optimizer.states.items()}
    numels = {name: prod(weight.shape) for name, weight in weights.items() if isinstance(weight, ShardedTensor)}
    return layer_prefixes(grid, 0, {name: numels.get(name) for stage in stages for name in stage}), stages


def _tied_layers_without_file(layers: Mapping[int, str], stages: Sequence[Sequence[str]]) -> Iterator[Doubt]:
    """A warning about tied layers that stages train but no file holds.

    Normally the first layer with a key has a file; a key has none only if all its layers have a `forward_fn`.
    """
    tied = (name.removeprefix(TIED) for names in stages for name in names if name.startswith(TIED))
    keys = dict.fromkeys(f"{TIED}{name.partition('.')[0]}." for name in tied)
    missing = [key for key in keys if key not in layers.values()]
    if missing:
        last = max(layers, default=-1)
        no_file = [f"layer_{layer:02d}" for layer in range(last) if layer not in layers]
        params, where = ", ".join(f"{key}*" for key in missing), ", ".join([*no_file, f"layers after {last}"])
        yield Doubt(
            kind=DoubtKind.MISSING_LAYERS,
            text=f"expected a file layer_*-model_states.pt with the tied parameters {params}, which stages train; none "
            f"has them. It is missing, or another layer's file replaced it (no file: {where}): copy it from "
            "where it was saved. DeepSpeed writes none if every layer with this key has a forward_fn",
        )


def tensor_rules(infos: Mapping[str, tuple[SavedFile, object]], where: str, options: SourceOptions) -> Rules:
    """The record that the files of all ranks share, or the rules of a model family.

    A family is used if there is no record or if the user names one in `options`. `infos`: name of a file to the file
    and its `universal_checkpoint_info`.
    """
    records = {
        # each rank's record of AutoEP has its own expert-parallel rank
        name: {key: value for key, value in require_mapping(info, f"{INFO} of {file.path}").items() if key != LAYERS}
        for name, (file, info) in infos.items()
        if info is not None
    }
    if not records or options != SourceOptions():
        # Megatron-DeepSpeed saves the arguments of the training script with the client state
        saved = next((file.root["args"] for file, _ in infos.values() if "args" in file.root), None)
        return FamilyRules(options, script_arguments(saved), where)
    problems = Problems()
    problems.check_agreement(INFO, records)
    problems.raise_any(where, "tensor parallelism")
    return UniversalCheckpointInfo(next(iter(records.values())), where)


def expert_degree(grid: SavedGrid) -> int:
    """Number of expert-parallel ranks; 1 without experts."""
    if grid.first.model.stacks.counts:
        return grid.first.model.stacks.ep
    if not grid.experts or not grid.first.optimizers:
        return max(1, len(grid.expert_optimizers))
    return max(ExpertGroups.of(run, run.names).ep for run in grid.runs.values())


def _read_parts(grid: SavedGrid, checksums: Checksums) -> list[RankPart]:
    """The module and optimizer of each rank."""
    problems = Problems()
    where = str(grid.folder.path)
    experts = {mp: read_experts([file for file in grid.experts if file.name.mp == mp], problems) for mp in grid.runs}
    stacked: dict[int, dict[str, ShardedTensor]] = {}
    for mp, run in grid.runs.items() if grid.first.stage != 3 else ():
        tensors = dict(experts[mp].tensors)
        stacked[mp] = run.model.stacks.take(tensors, problems)
        experts[mp] = replace(experts[mp], tensors=tensors)
    if grid.first.stage == 0:
        problems.raise_any(where, "experts")
        return _read_unsharded(grid, experts[0], stacked[0], checksums)
    runs = {mp: with_shapes(run, _module_shapes(grid, mp, experts[mp])) for mp, run in grid.runs.items()}
    trained = {}
    for mp, run in runs.items():
        groups = run.model.groups
        trained[mp] = ExpertGroups.of(run, groups).global_shapes(groups)
        check_experts_saved(experts[mp], trained[mp], f"model-parallel rank {mp}", problems)
    problems.raise_any(where, "experts")
    parts = []
    for tp in range(grid.tp) if grid.is_pipeline else ():  # each one's module, and further copies of its tied layers
        shapes = {name: shape for mp in grid.stages(tp) for name, shape in trained[mp].items()}
        for copy, model in enumerate(pipeline_modules(grid, tp, shapes)):
            module = read_module({0: model}, shapes, checksums, sharded=False)
            parts.append(RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=module))
    for mp, run in runs.items():
        optimizer = read_sharded(run, checksums)
        optimizer.extras[:0] = model_extras(run.models, checksums)
        untrained = tuple(run.model.untrained)
        part = RankPart(mp=mp, tp=mp % grid.tp, order=mp // grid.tp, optimizer=optimizer, untrained=untrained)
        if not grid.is_pipeline:
            models = {**run.models, 0: _with_experts(run.model, experts[mp])}
            module = read_module(models, trained[mp], checksums, sharded=run.stage == 3, cut=run.cuts)
            add_stacks(module, stacked.get(mp, {}), trained[mp])
            part = replace(part, module=module, untrained=tuple(module.entries))
        parts.append(part)
    return parts


def _read_unsharded(
    grid: SavedGrid, experts: SavedModule, stacked: Mapping[str, ShardedTensor], checksums: Checksums
) -> list[RankPart]:
    """The module and optimizer of each rank of a run without ZeRO."""
    parts = []
    if grid.is_pipeline:
        parts = read_stages(grid, checksums)
    elif grid.experts:
        parts = list(read_expert_ranks(grid, _with_experts(grid.first.model, experts), stacked, checksums))
    else:
        for mp, run in grid.runs.items():
            module, optimizer = read_unsharded(run.model, checksums)
            parts.append(RankPart(mp=mp, tp=mp, order=0, module=module, optimizer=optimizer))
    for mp, run in grid.runs.items():
        extras = OptimizerPart(extras=model_extras(run.models, checksums))
        untrained = tuple(run.model.untrained)
        part = RankPart(mp=mp, tp=mp % grid.tp, order=mp // grid.tp, optimizer=extras, untrained=untrained)
        parts.insert(mp, part)
    return parts


def _module_shapes(grid: SavedGrid, mp: int, experts: SavedModule) -> dict[str, Shape]:
    """Shapes of the module's tensors on model-parallel rank `mp`, for runs without `param_shapes`; else empty.

    `experts`: its experts by global numbers. Those of expert-parallel rank 0 have the same numbers in optimizer files.
    """
    if grid.first.model.param_shapes is not None:
        return {}
    models = [grid.runs[mp].model]
    if grid.is_pipeline:
        tp = mp % grid.tp
        groups = (numels for run in grid.stages(tp).values() for numels in run.recorded_numels)
        models = pipeline_modules(grid, tp, {name: numel for numels in groups for name, numel in numels.items()})
    modules = (module.tensors for model in models for module in (module_of(model), experts))
    return {name: ref.shape for tensors in modules for name, ref in tensors.items()}


def _with_experts(model: ModelStates, experts: SavedModule) -> ModelStates:
    """`model` with the experts in its module: those of a layer come after the last other tensor of that layer."""
    if not experts.tensors and not experts.others:
        return model
    module = module_of(model)
    by_layer: dict[str, dict[str, TensorRef]] = {}
    for expert, ref in experts.tensors.items():
        by_layer.setdefault(expert.partition("experts.")[0], {})[expert] = ref
    last = {start: name for name in module.tensors for start in by_layer if name.startswith(start)}
    tensors: dict[str, TensorRef] = {}
    for name, ref in module.tensors.items():
        tensors[name] = ref
        for start in [start for start, end in last.items() if end == name]:
            tensors |= by_layer.pop(start)
    for rest in by_layer.values():
        tensors |= rest
    others = {**module.others, **experts.others}
    return replace(model, module=SavedModule(tensors=tensors, others=others, versions=module.versions))
