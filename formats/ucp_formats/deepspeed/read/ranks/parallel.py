"""Checkpoints of tensor, pipeline and expert parallelism: what each model-parallel rank holds, then all as one.

A rank's own files are those of a data-parallel run and are read as such, with two additions: a pipeline keeps its
modules in files of layers (`pipeline`), and experts are in files of their own, named by numbers that optimizer files do
not use (`experts`). `merge` joins the ranks, by the rules of `universal_checkpoint_info` or of a model family.
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
from ucp.errors import counted
from ucp.io.pickle.fields import Shape, mapping
from ucp_formats.deepspeed.experts import ExpertGroups, Experts
from ucp_formats.deepspeed.extras import model_extras
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.module import ModelStates, SavedModule, module_of, read_module
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.sharded import read_sharded, with_shapes
from ucp_formats.deepspeed.read.ranks.merge import Merged, Mesh, RankPart, Rules, merge
from ucp_formats.deepspeed.read.ranks.pipeline import layer_starts, pipeline_modules
from ucp_formats.deepspeed.read.ranks.unsharded import read_expert_ranks, read_stages, read_unsharded
from ucp_formats.deepspeed.read.run import TIED, SavedGrid
from ucp_formats.deepspeed.tp.family import FamilyRules, arguments_of
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo, recorded_layouts

_INFO = "universal_checkpoint_info"


def read_parallel(grid: SavedGrid, checksums: Checksums, options: SourceOptions, mesh: Mesh) -> Merged:
    """Module and optimizer of all ranks; `options`: what the user says of the layout. `mesh`: the axes."""
    where = str(grid.folder.path)
    infos: dict[str, tuple[SavedFile, object]] = {}
    for run in grid.runs.values():
        infos[run.model.name.name] = run.model.file, run.model.file.root.get(_INFO)
        for own in list(run.optimizers.values())[:1]:
            infos[own.name.name] = own.file, own.saved.get(_INFO)
    rules = tensor_rules(infos, where, options)
    parts = _parts(grid, checksums)
    merged = merge(parts, rules, checksums, where, mesh)
    merged.module.notes[:0] = rules.notes
    if grid.is_pipeline:
        # what only the names of files and their places say: names of each layer, trained parameters of each stage
        firsts = [part for part in parts if part.tp == 0]
        members = {part.order: part.optimizer.groups for part in firsts if part.optimizer.groups}
        stages = [[name for group in members.get(stage, ()) for name in group.params] for stage in range(grid.pp)]
        weights = {name: states.get(WEIGHT) for part in firsts for name, states in part.optimizer.states.items()}
        numels = {name: prod(weight.shape) for name, weight in weights.items() if isinstance(weight, ShardedTensor)}
        layers = layer_starts(grid, 0, {name: numels.get(name) for stage in stages for name in stage})
        merged.module.extras.append(Extra(name="pipeline", value={"layers": layers, "stages": stages}))
        merged.doubts.extend(_without_file(layers, stages))
    if isinstance(rules, FamilyRules) and grid.tp > 1:
        merged.module.extras.append(Extra(name=_INFO, value=recorded_layouts(merged.mesh.tensors)))
    means = [name for name, layout in merged.mesh.tensors.items() if layout.overlap is Overlap.MEAN]
    if means:
        merged.module.notes.append(
            f"{counted(len(means), 'parameter is', 'parameters are')} "
            f"trained by each tensor-parallel rank for itself, and are the mean of all, as "
            f"their moments are: {', '.join(means[:8])}{', ...' if len(means) > 8 else ''}"
        )
    for name, layout in merged.mesh.tensors.items():
        size = rules.padded_vocabulary(name, layout.global_shape)
        if size is not None:
            merged.module.notes.append(
                f"{name} has {layout.global_shape[0]} rows, of which {size} are the vocabulary (original_vocab_size) "
                "and the rest is padding; it is kept as it is"
            )
    return merged


def _without_file(layers: Mapping[int, str], stages: Sequence[Sequence[str]]) -> Iterator[Doubt]:
    """A doubt for all tied layers that stages train and no file has.

    The first layer of a key has a file as a rule; only where every one has a `forward_fn` there is none.
    """
    tied = (name.removeprefix(TIED) for names in stages for name in names if name.startswith(TIED))
    keys = dict.fromkeys(f"{TIED}{name.partition('.')[0]}." for name in tied)
    lost = [key for key in keys if key not in layers.values()]
    if lost:
        last = max(layers, default=-1)
        bare = [f"layer_{layer:02d}" for layer in range(last) if layer not in layers]
        named, where = ", ".join(f"{key}*" for key in lost), ", ".join([*bare, f"layers after {last}"])
        yield Doubt(
            kind=DoubtKind.MISSING_LAYERS,
            text=f"expected a file layer_*-model_states.pt with the tied parameters {named}, which stages train; none "
            f"has them. It is missing, or another layer's lies in its place (there is none for {where}): copy it from "
            "where it was saved. DeepSpeed writes none where every layer that is tied so has a forward_fn",
        )


def tensor_rules(infos: Mapping[str, tuple[SavedFile, object]], where: str, options: SourceOptions) -> Rules:
    """Rules out of what files of all ranks record, which is the same; else, or where the user says so, of a family.

    `infos`: name of a file to the file and its `universal_checkpoint_info`.
    """
    found = {name: mapping(info, f"{_INFO} of {file.path}") for name, (file, info) in infos.items() if info is not None}
    if not found or options != SourceOptions():
        # Megatron-DeepSpeed saves the arguments of the training script with the client state
        saved = next((file.root["args"] for file, _ in infos.values() if "args" in file.root), None)
        return FamilyRules(options, arguments_of(saved), where)
    problems = Problems()
    problems.check_agreement(_INFO, found)
    problems.raise_any(where, "tensor parallelism")
    return UniversalCheckpointInfo(next(iter(found.values())), where)


def expert_degree(grid: SavedGrid) -> int:
    """Expert-parallel ranks; 1 without experts."""
    if not grid.experts or not grid.first.optimizers:
        return max(1, len(grid.expert_optimizers))
    return max(ExpertGroups.of(run, run.names).ep for run in grid.runs.values())


def _parts(grid: SavedGrid, checksums: Checksums) -> list[RankPart]:
    """Everything in the files, rank by rank."""
    problems = Problems()
    where = str(grid.folder.path)
    experts = {mp: Experts.of([file for file in grid.experts if file.name.mp == mp], problems) for mp in grid.runs}
    if grid.first.stage == 0:
        problems.raise_any(where, "experts")
        return _unsharded_parts(grid, experts[0], checksums)
    runs = {mp: with_shapes(run, _module_shapes(grid, mp, experts[mp])) for mp, run in grid.runs.items()}
    trained = {}
    for mp, run in runs.items():
        groups = run.model.groups
        trained[mp] = ExpertGroups.of(run, groups).trained(groups)
        experts[mp].check(trained[mp], f"model-parallel rank {mp}", problems)
    problems.raise_any(where, "experts")
    parts = []
    for tp in range(grid.tp) if grid.is_pipeline else ():  # a module each, and further copies of tied layers
        own = {name: shape for mp in grid.stages(tp) for name, shape in trained[mp].items()}
        for copy, model in enumerate(pipeline_modules(grid, tp, own)):
            module = read_module({0: model}, own, checksums, sharded=False)
            parts.append(RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=module))
    for mp, run in runs.items():
        optimizer = read_sharded(run, checksums)
        optimizer.extras[:0] = model_extras(run.models, checksums)
        untrained = tuple(run.model.untrained)
        part = RankPart(mp=mp, tp=mp % grid.tp, order=mp // grid.tp, optimizer=optimizer, untrained=untrained)
        if not grid.is_pipeline:
            models = {**run.models, 0: _with_experts(run.model, experts[mp])}
            module = read_module(models, trained[mp], checksums, sharded=run.stage == 3)
            part = replace(part, module=module, untrained=tuple(module.entries))
        parts.append(part)
    return parts


def _unsharded_parts(grid: SavedGrid, experts: Experts, checksums: Checksums) -> list[RankPart]:
    """Everything of a run without ZeRO."""
    parts = []
    if grid.is_pipeline:
        parts = read_stages(grid, checksums)
    elif grid.experts:
        parts = list(read_expert_ranks(grid, _with_experts(grid.first.model, experts), checksums))
    else:
        for mp, run in grid.runs.items():
            module, optimizer = read_unsharded(run.model, checksums)
            parts.append(RankPart(mp=mp, tp=mp, order=0, module=module, optimizer=optimizer))
    for mp, run in grid.runs.items():
        extras = OptimizerPart(extras=model_extras(run.models, checksums))
        untrained = tuple(run.model.untrained)
        own = RankPart(mp=mp, tp=mp % grid.tp, order=mp // grid.tp, optimizer=extras, untrained=untrained)
        parts.insert(mp, own)
    return parts


def _module_shapes(grid: SavedGrid, mp: int, experts: Experts) -> dict[str, Shape]:
    """Shapes of tensors that the module of a rank can have, for runs that record none.

    `experts`: its experts by global numbers, of which the first are those of expert-parallel rank 0.
    """
    if grid.first.model.param_shapes is not None:
        return {}
    models = [grid.runs[mp].model]
    if grid.is_pipeline:
        tp = mp % grid.tp
        groups = (own for run in grid.stages(tp).values() for own in run.recorded_numels)
        models = pipeline_modules(grid, tp, {name: numel for own in groups for name, numel in own.items()})
    tensors = (own for model in models for own in (module_of(model).tensors, experts.tensors))
    return {name: ref.shape for own in tensors for name, ref in own.items()}


def _with_experts(model: ModelStates, experts: Experts) -> ModelStates:
    """Model states whose module has the experts too, those of a layer after what else the layer has of this name."""
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
    own = SavedModule(tensors=tensors, others={**module.others, **experts.others}, versions=module.versions)
    return replace(model, module=own)
