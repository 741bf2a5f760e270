"""Reads all files of a native checkpoint and checks that they belong to one run.

1. Read every file whose name is known, and parse it into a typed value.
2. Model-parallel rank `mp` is tensor-parallel rank `mp % tp` of pipeline stage `mp // tp`
   (PipeModelDataParallelTopology, runtime/pipe/topology.py, 0.19.8). Each has the files of a data-parallel run: one
   optimizer file per rank (no ZeRO: none), one model-states file per rank under ZeRO-3, else one.
3. The modules of a pipeline are in files of layers, unless it has experts: then each stage's module is in its
   model-states file. Native mixture of experts has a file per expert.
4. Step, version and world size must be equal everywhere. All problems are raised together.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from ucp.contract.ranks import Problems
from ucp.core.layout import Pattern
from ucp.errors import MalformedError, UnsupportedError, format_list
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.names import FileName, Role, TagFolder
from ucp_formats.deepspeed.read.files import SavedFile, parse_files, read_files
from ucp_formats.deepspeed.read.module import ModelStates, SavedModule, shapes_by_group
from ucp_formats.deepspeed.read.optimizer.saved import OptimizerFile, UnshardedOptimizer
from ucp_formats.deepspeed.read.stacks import LAYERS

TIED = "tied_modules."
"""Start of the names of tied parameters of a pipeline."""
_MOST_NAMED, _MOST_RANKS = 1000, 100
"""The most missing files that an error names, and the most ranks without any file: a damaged count can be huge."""
_NUMBERED = re.compile(r"(\d+)\.(.+)")
"""Name of a parameter of a pipeline layer, for example 3.norm.weight."""

_NO_OPTIMIZER = (
    "there is no optimizer file at all. If the run saved none, its fp32 master weights and optimizer states are lost: "
    "DeepSpeed 0.18.4 saves none for ZeRO-1 with bf16 and data_types.grad_accum_dtype fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Files of one model-parallel rank."""

    models: Mapping[int, ModelStates]
    """Rank to its model-states file: all ranks under ZeRO-3, otherwise only rank 0."""
    optimizers: Mapping[int, OptimizerFile]
    """Rank to its optimizer file, increasing; empty without ZeRO."""
    ranks: int
    """Data-parallel ranks, including sequence-parallel ones."""
    stage: int
    """ZeRO stage."""
    notes: tuple[str, ...] = ()
    """Notes on files that are missing but not needed."""
    cuts: Mapping[str, Pattern] = field(default_factory=dict)
    """Parameters of which every data-parallel rank trains a part, by the user's rules."""

    @property
    def model(self) -> ModelStates:
        """Model-states file of rank 0."""
        return self.models[0]

    @property
    def files(self) -> Iterator[SavedFile]:
        """All files."""
        yield from (model.file for model in self.models.values())
        yield from (optimizer.file for optimizer in self.optimizers.values())

    @property
    def folder(self) -> str:
        """Folder of the files."""
        return os.path.dirname(self.model.file.path)

    @property
    def config(self) -> RunConfig:
        """Configuration of the run; up to 0.19.4, a run with experts records it in the optimizer files only."""
        configs = chain([self.model.config], (file.config for file in self.optimizers.values()))  # made when asked for
        return next((config for config in configs if config.raw), self.model.config)

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether BF16_Optimizer wrote it: a ZeRO-1 file that names no stage (bf16_optimizer.py, 0.19.8)."""
        return any(file.stage is None for file in self.optimizers.values())

    @property
    def is_round_robin(self) -> bool:
        """Whether the configuration makes DeepSpeed reorder the parameters of the optimizer in its buffers."""
        return self.config.round_robin and not self.is_bf16_optimizer

    @property
    def shapes_from(self) -> str:
        """Where the names and shapes of the optimizer's parameters are recorded."""
        if self.model.file.root.get("param_shapes") is None:
            return "param_slice_mappings of the optimizer files"
        return f"param_shapes of {self.model.name.name}"

    @property
    def names(self) -> Sequence[Mapping[str, object]]:
        """Names of the parameters of each group; every rank numbers its experts from 0."""
        return self.recorded_numels if self.model.param_shapes is None else self.model.param_shapes

    @property
    def recorded_numels(self) -> list[dict[str, int]]:
        """Elements of every parameter of each group, in the optimizer's order, summed over the mappings of all ranks.

        `param_slice_mappings` is the only record of names where `param_shapes` is missing: for BF16_Optimizer without
        ZeRO, which pipelines use, and for experts up to 0.19.4, whose sums are over all expert-parallel ranks.
        """
        groups: list[dict[str, int]] = []
        for file in self.optimizers.values():
            groups += [{} for _ in file.mappings[len(groups) :]]
            for group, spans in zip(groups, file.mappings, strict=False):
                for name, span in (spans or {}).items():
                    group[name] = group.get(name, 0) + span.numel
        return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGrid:
    """Files of all model-parallel ranks."""

    folder: TagFolder
    """The tag folder."""
    files: tuple[SavedFile, ...]
    """All files that were read."""
    runs: Mapping[int, SavedRun]
    """Model-parallel rank to its files, increasing."""
    layers: Mapping[FileName, SavedModule]
    """File name to the state_dict of a pipeline layer, on one tensor-parallel rank."""
    experts: tuple[SavedFile, ...]
    """Files of experts."""
    expert_optimizers: tuple[UnshardedOptimizer, ...]
    """The optimizer of each expert-parallel rank of a run without ZeRO; else empty."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""

    @property
    def first(self) -> SavedRun:
        """Files of model-parallel rank 0."""
        return self.runs[0]

    @property
    def notes(self) -> Iterator[str]:
        """Notes of all model-parallel ranks."""
        yield from (note for run in self.runs.values() for note in run.notes)

    @property
    def is_pipeline(self) -> bool:
        """Whether the module is in files of pipeline layers."""
        return any(run.model.module is None for run in self.runs.values())

    def stages(self, tp: int) -> dict[int, SavedRun]:
        """The pipeline stages on tensor-parallel rank `tp`: model-parallel rank to its files."""
        return {mp: run for mp, run in self.runs.items() if mp % self.tp == tp}


def read_grid(folder: TagFolder) -> SavedGrid:
    """Read and check the files of `folder`. Raises one error with all problems."""
    problems = Problems()
    files = read_files(folder, problems)
    files.sort(key=lambda file: (file.name.mp, file.name.layer, file.name.expert, file.name.tp, file.name.dp))
    by_role = {role: [file for file in files if file.name.role is role] for role in Role}
    models = parse_files(by_role[Role.MODEL] + by_role[Role.SHARDED_MODEL], ModelStates.of, problems)
    optimizers = parse_files(by_role[Role.OPTIMIZER], OptimizerFile.of, problems)
    is_pipeline = any(model.module is None for model in models)
    layer_files = by_role[Role.LAYER] if is_pipeline else ()
    layers = dict(parse_files(layer_files, lambda file: (file.name, SavedModule.of(file.root, "the layer")), problems))
    size = model_parallel_size(models, [name for name in folder.files if name.role in _RANKED])
    least = len({name.mp for name in folder.files})
    runs = {mp: _read_run(folder, models, optimizers, mp, problems) for mp in range(min(size, least + _MOST_RANKS))}
    _check_runs_agree(runs, folder, size, problems)
    tp, pp = degrees(models, size, list(layers), problems)
    if is_pipeline:
        _check_layers(layers, runs, tp, problems)
    stray = by_role[Role.LAYER] if models and not is_pipeline else ()
    problems.wrong += [f"extra: {file.name.name} is a pipeline layer; the run is not a pipeline" for file in stray]
    expert_optimizers = []
    if not runs[0].optimizers:
        expert_optimizers = parse_files(by_role[Role.EXPERT_OPTIMIZER], _expert_optimizer, problems)
    else:  # under ZeRO these files are empty (up to 0.19.4)
        strays = [file.name.name for file in by_role[Role.EXPERT_OPTIMIZER] if file.root.get("optimizer") is not None]
        problems.wrong += [f"extra: {name} belongs to a run without ZeRO" for name in strays]
    stage, ranks = runs[0].stage, runs[0].ranks
    what = "".join(f"{axis} {degree}, " for axis, degree in (("tp", tp), ("pp", pp)) if degree > 1)
    problems.raise_any(str(folder.path), f"{what}ZeRO-{stage} over {ranks} rank{'s' if ranks > 1 else ''}")
    rank_files = (file for run in runs.values() for file in run.files)
    return SavedGrid(
        folder=folder,
        files=(*rank_files, *by_role[Role.LAYER], *by_role[Role.EXPERT], *by_role[Role.EXPERT_OPTIMIZER]),
        runs=runs,
        layers=layers,
        experts=tuple(by_role[Role.EXPERT]),
        expert_optimizers=tuple(expert_optimizers),
        tp=tp,
        pp=pp,
    )


_RANKED = (Role.MODEL, Role.SHARDED_MODEL, Role.OPTIMIZER)
"""Roles of the files that every model-parallel rank has."""


def _expert_optimizer(file: SavedFile) -> UnshardedOptimizer:
    if file.root.get("optimizer", "absent") is None:
        raise MalformedError(
            "expected an optimizer; got None, as a run with ZeRO saves here. The optimizer files of such a run "
            "(zero_pp_rank_*_optim_states.pt) are missing"
        )
    recorded = shapes_by_group(file.root.get("param_shapes"))
    return UnshardedOptimizer.of(file.root.get("optimizer"), file.name.name, recorded or ())


def model_parallel_size(models: Iterable[ModelStates], names: Iterable[FileName]) -> int:
    """Number of model-parallel ranks: the count that most model-states files record, else what file names imply."""
    recorded = Counter(size for model in models if (size := model.count("mp_world_size")))
    return recorded.most_common(1)[0][0] if recorded else max((name.mp + 1 for name in names), default=1)


def degrees(
    models: Iterable[ModelStates], size: int, layers: Iterable[FileName], problems: Problems
) -> tuple[int, int]:
    """Tensor-parallel degree and pipeline stages of `size` model-parallel ranks.

    DeepSpeed records them since 2026. In older checkpoints they follow from the file names of layers, or from which
    ranks have modules with the same names.
    """
    recorded = next((model.degrees for model in models if model.degrees is not None), None)
    if recorded is not None:
        if recorded[0] * recorded[1] == size:
            return recorded
        problems.wrong.append(
            f"checkpoint_parallel_dimensions records tp {recorded[0]} and pp {recorded[1]}, which do not make "
            f"{size} model-parallel ranks"
        )
    tp = max((name.tp + 1 for name in layers), default=0)
    if not tp:
        # two stages share only the names of tied layers; all other names begin with the number of a layer
        modules = {model.name.mp: frozenset(model.module.tensors) for model in models if model.module is not None}
        stages = frozenset(modules.values())
        numbers = [at for stage in stages for at in {name.partition(".")[0] for name in stage} - {TIED.rstrip(".")}]
        is_pipeline = len(stages) > 1 and all(map(str.isdigit, numbers)) and len(numbers) == len({*numbers})
        tp = sum(names == modules.get(0) for names in modules.values()) if is_pipeline and 0 in modules else size
    if size % tp:
        problems.wrong.append(
            f"layers are split over {tp} tensor-parallel ranks, which do not divide the {size} model-parallel ranks"
        )
        return size, 1
    return tp, size // tp


def _read_run(
    folder: TagFolder,
    all_models: Iterable[ModelStates],
    all_optimizers: Iterable[OptimizerFile],
    mp: int,
    problems: Problems,
) -> SavedRun:
    """The files of one model-parallel rank; what is wrong with them goes to `problems`."""
    names = [name for name in folder.files if name.mp == mp and name.role in _RANKED]
    if not names and mp:  # every file that rank 0 has is missing for this rank
        problems.missing += [
            re.sub(r"mp_rank_\d+", f"mp_rank_{mp:02d}", name.name)
            for name in folder.files
            if name.mp == 0 and name.role in _RANKED
        ]
        return SavedRun(models={}, optimizers={}, ranks=1, stage=0)
    models = {model.name.dp: model for model in all_models if model.name.mp == mp}
    optimizers = {file.name.dp: file for file in all_optimizers if file.name.mp == mp}
    stage = _find_stage(names, models.values(), optimizers.values())
    files: list[ModelStates | OptimizerFile] = [*models.values(), *optimizers.values()]
    counts = Counter(file.ranks for file in files if file.ranks is not None)
    ranks = counts.most_common(1)[0][0] if counts else max(name.dp + 1 for name in names) if names else 1
    prefix = next((file.name.prefix for file in optimizers.values()), None)
    if prefix is None:  # as the configuration implies
        is_bf16 = any(model.config.precision(()) is Precision.BF16 for model in models.values() if model.config.raw)
        prefix = "bf16_" if is_bf16 else ""
    _check_names(names, (stage, ranks, mp), problems, prefix=prefix)
    _check_same_run(models.values(), optimizers.values(), problems)
    present = {name.dp for name in names if name.role is Role.SHARDED_MODEL}
    missing = [rank for rank in range(ranks) if rank not in present] if stage == 3 and 0 in models else []
    notes: tuple[str, ...] = ()
    if missing:  # rank 0's file has everything except the other ranks' frozen chunks (DeepSpeed issue 7546)
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes = (f"no model-states file of rank {shown}: only the client state of those ranks is lost",)
    return SavedRun(models=models, optimizers=optimizers, ranks=ranks, stage=stage, notes=notes)


def _find_stage(names: Iterable[FileName], models: Iterable[ModelStates], optimizers: Iterable[OptimizerFile]) -> int:
    """ZeRO stage that the optimizer files record, else the one that file names and the model-states file imply."""
    recorded = next((file.stage for file in optimizers if file.stage is not None), None)
    roles = {name.role for name in names}
    if recorded is not None or Role.SHARDED_MODEL in roles:
        return 3 if recorded is None else recorded
    if Role.OPTIMIZER in roles:
        return 1
    for model in models:
        # param_shapes without an optimizer means ZeRO; a run without ZeRO that ucp wrote has both in this file
        if model.param_shapes is not None and model.optimizer is None:
            return 2 if model.config.zero_stage == 2 else 1
    return 0


def _check_names(names: Sequence[FileName], layout: tuple[int, int, int], problems: Problems, *, prefix: str) -> None:
    """Check that a model-parallel rank has all its files and no others; `layout`: ZeRO stage, ranks, and that rank."""
    stage, ranks, mp = layout
    seen: dict[tuple[bool, int], str] = {}
    for name in names:
        other = seen.setdefault((name.role is Role.OPTIMIZER, name.dp), name.name)
        if other != name.name:
            problems.wrong.append(f"extra: {name.name} and {other} hold the same part: one is from another run")
    model = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt" if stage == 3 else "mp_rank_{1:02d}_model_states.pt"
    optimizer = prefix + "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
    counts = {Role.OPTIMIZER: ranks if stage else 0, Role.SHARDED_MODEL if stage == 3 else Role.MODEL: 1}
    for role, needed in counts.items():
        present = {name.dp for name in names if name.role is role}
        count = ranks if role is Role.SHARDED_MODEL else needed
        template = optimizer if role is Role.OPTIMIZER else model
        missing = islice((rank for rank in range(needed) if rank not in present), _MOST_NAMED)
        problems.missing += [f"{template.format(rank, mp)} (rank {rank} of {count})" for rank in missing]
        if role is Role.OPTIMIZER and needed and not present:
            problems.missing.append(_NO_OPTIMIZER)
        problems.wrong += [
            f"extra: {name.name} is for rank {name.dp} of {count}"
            for name in names
            if name.role is role and name.dp >= count
        ]


def _check_same_run(models: Collection[ModelStates], optimizers: Collection[OptimizerFile], problems: Problems) -> None:
    """Check that all files of a model-parallel rank record the same values."""
    files: list[ModelStates | OptimizerFile] = [*models, *optimizers]
    _check_steps(models, problems)
    problems.check_agreement("ds_version", {file.name.name: file.file.version for file in files})
    problems.check_agreement("zero_stage", {file.name.name: file.stage for file in optimizers})
    if optimizers:
        problems.check_agreement("the number of ranks", {file.name.name: file.ranks for file in files})
    for key in ("param_shapes", "frozen_param_shapes", LAYERS):
        known = [value for model in models if (value := model.saved(key)) is not None]
        if any(other != known[0] for other in known[1:]):
            names = ", ".join(model.name.name for model in models)
            problems.wrong.append(f"{names}: {key} differs between these files: some are from another run")


def _check_steps(models: Iterable[ModelStates], problems: Problems) -> None:
    for key in ("global_steps", "dp_world_size", "mp_world_size"):
        problems.check_agreement(key, {model.name.name: model.file.root.get(key) for model in models})


def _check_runs_agree(runs: Mapping[int, SavedRun], folder: TagFolder, size: int, problems: Problems) -> None:
    """Check that the files of all model-parallel ranks record the same values."""
    problems.wrong += [
        f"extra: {name.name} is for model-parallel rank {name.mp} of {size}"
        for name in folder.files
        if name.mp >= size and name.role is not Role.LAYER
    ]
    with_model = [run for run in runs.values() if 0 in run.models]
    _check_steps([run.model for run in with_model], problems)
    problems.check_agreement("the ZeRO stage", {run.model.name.name: run.stage for run in with_model})


def _check_layers(
    layers: Mapping[FileName, SavedModule], runs: Mapping[int, SavedRun], tp: int, problems: Problems
) -> None:
    """Check that each tensor-parallel rank has a file of every layer, with the tensors that the stages record."""
    unknown = [name.name for name in layers if any(axis != "model" for axis, _ in name.axes)]
    if unknown:
        raise UnsupportedError(f"expected layers split over the axis model only; got\n{format_list(unknown)}")
    files = {(name.layer, name.tp): name for name in layers}
    recorded = [
        (mp % tp, int(match[1]), match)
        for mp, run in runs.items()
        if 0 in run.models
        for name in (*(name for group in run.names for name in group), *run.model.untrained)
        if (match := _NUMBERED.fullmatch(name))
    ]
    has_axis = tp > 1 or any(name.axes for name in layers)
    for layer in sorted({layer for layer, _ in files} | {layer for _, layer, _ in recorded}):
        for rank in range(tp):
            if (layer, rank) not in files:
                suffix = f"-model_{rank:02d}" if has_axis else ""
                problems.missing.append(f"layer_{layer:02d}{suffix}-model_states.pt (a layer of the pipeline)")
    absent: dict[str, list[str]] = {}
    for rank, layer, match in recorded:
        name = files.get((layer, rank))
        if name is not None and match[2] not in {*layers[name].tensors, *layers[name].others}:
            absent.setdefault(name.name, []).append(match[0])
    problems.wrong += [
        f"{file}: expected {', '.join(params)}, which the pipeline stage records; the file does not hold them: it is "
        "the file of another layer, or from another run"
        for file, params in absent.items()
    ]
    problems.wrong += [
        f"extra: {name.name} is for tensor-parallel rank {name.tp} of {tp}" for name in layers if name.tp >= tp
    ]
