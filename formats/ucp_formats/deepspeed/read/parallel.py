"""Checkpoints of tensor, pipeline and expert parallelism: what each model-parallel rank holds, then all as one.

A rank's own files are those of a data-parallel run and are read as such (`flat_source`, `chunked_source`,
`whole_source`), with two additions: a pipeline keeps its modules in files of layers (`pipeline_module`), and experts
are in files of their own, named by numbers that optimizer files do not use (`experts`). `merging` joins the ranks, by
the rules of `universal_checkpoint_info` (`tensor_rules`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ucp.contract.problems import Problems
from ucp.contract.protocols import SourceOptions
from ucp.contract.rank_extras import Checksums
from ucp.core.index import Doubt, DoubtKind, Extra
from ucp.core.layout import Overlap
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import Stub
from ucp.errors import counted
from ucp.io.pickle.fields import Shape, mapping
from ucp_formats.deepspeed.experts import ExpertGroups, Experts
from ucp_formats.deepspeed.read.extras import model_extras, optimizer_extras
from ucp_formats.deepspeed.read.grid import SavedGrid
from ucp_formats.deepspeed.read.merge_ranks import RankPart, merge
from ucp_formats.deepspeed.read.merged import Merged, Mesh
from ucp_formats.deepspeed.read.module import ModulePart, read_sharded_module, read_whole_module
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.slice_records import recorded_numels, with_shapes
from ucp_formats.deepspeed.read.optimizer.stored import StoredTensor
from ucp_formats.deepspeed.read.optimizer.zero0_ranks import read_expert_ranks, read_stages, read_unsharded
from ucp_formats.deepspeed.read.optimizer.zero3 import read_chunked
from ucp_formats.deepspeed.read.optimizer.zero12 import buffer_shapes, read_flat
from ucp_formats.deepspeed.read.pipeline import TIED, layer_starts, pipeline_modules, untrained
from ucp_formats.deepspeed.read.run import SavedFile, SavedRun
from ucp_formats.deepspeed.tp.family import FamilyRules
from ucp_formats.deepspeed.tp.universal_info import TensorRules, recorded_layouts

__all__ = ["expert_degree", "read_parallel", "tensor_rules"]

_INFO = "universal_checkpoint_info"


def read_parallel(grid: SavedGrid, checksums: Checksums, options: SourceOptions, mesh: Mesh) -> Merged:
    """Module and optimizer of all ranks; `options`: what the user says of the layout. `mesh`: the axes."""
    reader = _Reader(grid, checksums)
    where = str(grid.folder.path)
    told = (file for run in grid.runs.values() for file in (run.model, *list(run.optimizers.values())[:1]))
    rules = tensor_rules(list(told), where, options)
    parts = reader.parts()
    merged = merge(parts, rules, checksums, where, mesh)
    merged.module.notes[:0] = rules.notes
    if grid.is_pipeline:
        layers, stages = _layers_and_stages(grid, parts)
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


def _layers_and_stages(grid: SavedGrid, parts: Sequence[RankPart]) -> tuple[dict[int, str], list[list[str]]]:
    """What only the names of files and their places say: names of each layer, and trained parameters of each stage."""
    stages: dict[int, list[str]] = {}
    for part in parts:
        if part.tp == 0 and part.optimizer.groups:
            stages[part.order] = [name for group in part.optimizer.groups for name in group.params]
    weights = {name: own.get(WEIGHT) for part in parts if part.tp == 0 for name, own in part.optimizer.states.items()}
    numels = {name: prod(weight.shape) for name, weight in weights.items() if isinstance(weight, StoredTensor)}
    starts = layer_starts(grid, 0, {name: numels.get(name) for own in stages.values() for name in own})
    return starts, [stages.get(stage, []) for stage in range(grid.pp)]


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


def tensor_rules(files: Sequence[SavedFile], where: str, options: SourceOptions) -> TensorRules | FamilyRules:
    """Rules out of files of all ranks, which say the same; else, or where the user says so, those of a model family."""
    found: dict[str, Mapping[object, object]] = {}
    for file in files:
        saved = file.root.get(_INFO, file.optimizer.get(_INFO))
        if saved is not None:
            found[file.name.name] = mapping(saved, f"{_INFO} of {file.path}")
    if not found or options != SourceOptions():
        return FamilyRules(options, _arguments(files), where)
    problems = Problems()
    problems.agree(_INFO, found)
    problems.raise_any(where, "tensor parallelism")
    return TensorRules(next(iter(found.values())), where)


def _arguments(files: Iterable[SavedFile]) -> dict[str, object]:
    """Arguments of the training script, which Megatron-DeepSpeed saves with the client state."""
    saved = next((file.root["args"] for file in files if "args" in file.root), None)
    state = saved.state if isinstance(saved, Stub) else saved
    return {str(key): value for key, value in state.items()} if isinstance(state, dict) else {}


def expert_degree(grid: SavedGrid) -> int:
    """Expert-parallel ranks; 1 without experts."""
    if not grid.experts or not grid.first.optimizers:
        return max(1, len(grid.expert_optimizers))
    return max(ExpertGroups.of(run, buffer_shapes(run)).ep for run in grid.runs.values())


class _Reader:
    """Reads what each model-parallel rank holds."""

    def __init__(self, grid: SavedGrid, checksums: Checksums) -> None:
        self.grid = grid
        self.checksums = checksums

    def parts(self) -> list[RankPart]:
        """Everything in the files, rank by rank."""
        problems = Problems()
        experts = {
            mp: Experts.of([file for file in self.grid.experts if file.name.mp == mp], problems)
            for mp in self.grid.runs
        }
        if self.grid.first.stage == 0:
            problems.raise_any(str(self.grid.folder.path), "experts")
            return self._unsharded_parts(experts)
        runs = {mp: with_shapes(run, self._module_shapes(mp)) for mp, run in self.grid.runs.items()}
        shapes = {mp: buffer_shapes(run) for mp, run in runs.items()}
        trained = {mp: ExpertGroups.of(run, shapes[mp]).trained(shapes[mp]) for mp, run in runs.items()}
        for mp, own in experts.items():
            own.check(trained[mp], f"model-parallel rank {mp}", problems)
        problems.raise_any(str(self.grid.folder.path), "experts")
        parts = self._pipeline_parts(trained) if self.grid.is_pipeline else []
        for mp, run in runs.items():
            part = RankPart(
                mp=mp,
                tp=self.grid.slice(mp),
                order=self.grid.stage(mp),
                optimizer=self._optimizer(run),
                untrained=tuple(untrained(run.model)),
            )
            part.optimizer.extras[:0] = model_extras(run.models, self.checksums)
            if not self.grid.is_pipeline:
                part = replace(part, module=self._module(run, trained[mp], experts[mp]))
            parts.append(part)
        return parts

    def _unsharded_parts(self, experts: Mapping[int, Experts]) -> list[RankPart]:
        """Everything of a run without ZeRO."""
        grid, checksums = self.grid, self.checksums
        parts = []
        if grid.is_pipeline:
            parts = read_stages(grid, checksums)
        elif grid.experts:
            file = _with_module(grid.first.model, experts[0])
            parts = list(read_expert_ranks(grid, file, experts[0], checksums))
        else:
            for mp, run in grid.runs.items():
                module, optimizer = read_unsharded(run.model, checksums)
                parts.append(RankPart(mp=mp, tp=mp, order=0, module=module, optimizer=optimizer))
        for mp, run in grid.runs.items():
            extras = OptimizerPart(extras=model_extras(run.models, checksums))
            own = RankPart(mp=mp, tp=grid.slice(mp), order=grid.stage(mp), optimizer=extras)
            parts.insert(mp, replace(own, untrained=tuple(untrained(run.model))))
        return parts

    def _pipeline_parts(self, trained: Mapping[int, Mapping[str, Shape]]) -> list[RankPart]:
        """Modules of a pipeline, one per tensor-parallel rank, and further copies of tied layers."""
        parts = []
        for tp in range(self.grid.tp):
            own = {name: s for mp, names in trained.items() if self.grid.slice(mp) == tp for name, s in names.items()}
            for copy, file in enumerate(pipeline_modules(self.grid, tp, own)):
                module = read_whole_module(file, own)
                parts.append(RankPart(mp=tp, tp=tp, order=copy * self.grid.pp, module=module))
        return parts

    def _module_shapes(self, mp: int) -> dict[str, Shape]:
        """Shapes of tensors that the module of a rank can have, for runs that record none."""
        if self.grid.first.model.root.get("param_shapes") is not None:
            return {}
        tp = self.grid.slice(mp)
        files: Sequence[SavedFile] = [self.grid.runs[mp].model]
        if self.grid.is_pipeline:
            stages = [run for other, run in self.grid.runs.items() if self.grid.slice(other) == tp]
            numels = {name: numel for run in stages for own in recorded_numels(run) for name, numel in own.items()}
            files = pipeline_modules(self.grid, tp, numels)
        found: dict[str, Shape] = {}
        for file in files:
            module = mapping(file.root.get("module"), f"module of {file.path}")
            found |= {str(name): ref.shape for name, ref in module.items() if hasattr(ref, "shape")}
        return found

    def _optimizer(self, run: SavedRun) -> OptimizerPart:
        part = read_chunked(run, self.checksums) if run.stage == 3 else read_flat(run, self.checksums)
        part.extras += optimizer_extras(run, self.checksums)
        return part

    def _module(self, run: SavedRun, trained: Mapping[str, Shape], experts: Experts) -> ModulePart:
        if run.stage == 3:
            return read_sharded_module(run.models, trained, self.checksums)
        return read_whole_module(_with_module(run.model, experts), trained)


def _with_module(file: SavedFile, experts: Experts) -> SavedFile:
    """A model-states file as if the experts were in its module."""
    if not experts.tensors and not experts.others:
        return file
    module = mapping(file.root.get("module"), f"module of {file.path}")
    whole = OrderedDict(_with_experts(module, {**experts.tensors, **experts.others}))
    vars(whole).update(getattr(module, "__dict__", {}))
    return replace(file, root={**file.root, "module": whole})


def _with_experts(module: Mapping[object, object], experts: Mapping[str, object]) -> Iterator[tuple[object, object]]:
    """Entries of a module, and those of experts after the last of their layer."""
    by_layer: dict[str, dict[str, object]] = {}
    for expert, own in experts.items():
        by_layer.setdefault(expert.partition("experts.")[0], {})[expert] = own
    last: dict[str, object] = {s: name for name in module for s in by_layer if str(name).startswith(s)}
    for name, value in module.items():
        yield name, value
        for start in [start for start, end in last.items() if end == name]:
            yield from by_layer.pop(start).items()
    for rest in by_layer.values():
        yield from rest.items()
