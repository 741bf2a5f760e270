"""The files of all model-parallel ranks of a native checkpoint, read and found to belong together.

Model-parallel rank `mp` is tensor-parallel rank `mp % tp` of pipeline stage `mp // tp` (PipeModelDataParallelTopology,
runtime/pipe/topology.py, 0.19.8). Each has the files of a data-parallel run (`saved_run`). A pipeline keeps its modules
in files of layers beside them, and native mixture of experts each expert in a file of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.contract.problems import Problems
from ucp.errors import UnsupportedError, listed
from ucp_formats.deepspeed.locate import TagFolder
from ucp_formats.deepspeed.names import FileName, Role
from ucp_formats.deepspeed.read.optimizer.slice_records import recorded_numels
from ucp_formats.deepspeed.read.run import SavedFile, SavedRun, checked_run, try_read
from ucp_formats.deepspeed.refusals import refuse_contents

__all__ = ["SavedGrid", "degrees", "model_parallel_size", "read_grid"]

_OF_A_RANK = (Role.MODEL, Role.SHARDED_MODEL, Role.OPTIMIZER)
_MOST_NAMED = 100
"""Model-parallel ranks without any file to name; a damaged size can be anything."""
_NUMBERED = re.compile(r"(\d+)\.(.+)")
"""Name of a parameter of a pipeline layer. Example: 3.norm.weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGrid:
    """Files that belong together."""

    folder: TagFolder
    """Where they lie."""
    runs: Mapping[int, SavedRun]
    """Model-parallel rank to its files, increasing."""
    layers: tuple[SavedFile, ...] = ()
    """Files of pipeline layers, by layer and tensor-parallel rank."""
    experts: tuple[SavedFile, ...] = ()
    """Files of experts."""
    expert_optimizers: tuple[SavedFile, ...] = ()
    """Optimizer states of each expert-parallel rank, without ZeRO."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""

    @property
    def first(self) -> SavedRun:
        """Files of model-parallel rank 0."""
        return self.runs[0]

    @property
    def is_plain(self) -> bool:
        """Whether there is data parallelism only."""
        return len(self.runs) == 1 and not self.layers and not self.experts

    @property
    def is_pipeline(self) -> bool:
        """Whether the modules are in files of layers."""
        return any(run.model.root.get("module") is None for run in self.runs.values())

    @property
    def files(self) -> tuple[SavedFile, ...]:
        """All files."""
        own = (file for run in self.runs.values() for file in run.files)
        return (*own, *self.layers, *self.experts, *self.expert_optimizers)

    def stage(self, mp: int) -> int:
        """Pipeline stage of a model-parallel rank."""
        return mp // self.tp

    def slice(self, mp: int) -> int:
        """Tensor-parallel rank of a model-parallel rank."""
        return mp % self.tp


def read_grid(folder: TagFolder) -> SavedGrid:
    """Read and check the files of `folder`. Raises one error with all that is missing, damaged or of another run."""
    problems = Problems()
    files = [read for name in folder.files if (read := try_read(folder.path, name, problems)) is not None]
    refuse_contents(str(folder.path), {file.name.name: file.root for file in files})
    by_role = {role: [file for file in files if file.name.role is role] for role in Role}
    ranked = [file for role in _OF_A_RANK for file in by_role[role]]
    size = model_parallel_size(ranked)
    runs = {mp: _run(folder, ranked, mp, problems) for mp in range(min(size, len(ranked) + _MOST_NAMED))}
    _check_extra(folder, size, problems)
    _check_same(runs, problems)
    layers = sorted(by_role[Role.LAYER], key=lambda file: (file.name.layer, file.name.tp))
    tp, pp = degrees(ranked, size, [file.name for file in layers], problems)
    if any(0 in run.models and run.model.root.get("module") is None for run in runs.values()):
        _check_layers(layers, runs, tp, problems)
    else:
        problems.wrong += [f"extra: {file.name.name} is of a pipeline; the module is elsewhere" for file in layers]
    stray = by_role[Role.EXPERT_OPTIMIZER] if runs[0].optimizers else ()
    problems.wrong += [f"extra: {file.name.name} is of a run without ZeRO" for file in stray]
    stage, ranks = runs[0].stage, runs[0].ranks
    what = "".join(f"{axis} {degree}, " for axis, degree in (("tp", tp), ("pp", pp)) if degree > 1)
    problems.raise_any(str(folder.path), f"{what}ZeRO-{stage} over {ranks} rank{'s' if ranks > 1 else ''}")
    return SavedGrid(
        folder=folder,
        runs=runs,
        layers=tuple(layers),
        experts=tuple(sorted(by_role[Role.EXPERT], key=lambda f: (f.name.mp, f.name.layer, f.name.expert))),
        expert_optimizers=tuple(sorted(by_role[Role.EXPERT_OPTIMIZER], key=lambda f: (f.name.mp, f.name.expert))),
        tp=tp,
        pp=pp,
    )


def model_parallel_size(files: Sequence[SavedFile]) -> int:
    """Model-parallel ranks that most model-states files speak of, else as many as there are."""
    sizes = (file.root.get("mp_world_size") for file in files if file.name.role is not Role.OPTIMIZER)
    said = Counter(size for size in sizes if type(size) is int and size > 0)
    if said:
        return said.most_common(1)[0][0]
    return max((file.name.mp + 1 for file in files), default=1)


def degrees(files: Sequence[SavedFile], size: int, layers: Sequence[FileName], problems: Problems) -> tuple[int, int]:
    """Tensor-parallel degree and pipeline stages of `size` model-parallel ranks.

    They are recorded since 2026; before, the names of layers tell, and without layers there is tensor parallelism only.
    """
    recorded = [file.root.get("checkpoint_parallel_dimensions") for file in files]
    found = next((own for own in recorded if isinstance(own, dict)), None)
    if found is not None:
        tp, pp = found.get("tp_degree"), found.get("pp_degree")
        if type(tp) is int and type(pp) is int and tp * pp == size:
            return tp, pp
        problems.wrong.append(f"checkpoint_parallel_dimensions {found} do not make up {size} model-parallel ranks")
    tp = max((name.tp + 1 for name in layers), default=size)
    if size % tp:
        problems.wrong.append(f"layers are cut over {tp} ranks, which do not divide the {size} model-parallel ranks")
        return size, 1
    return tp, size // tp


def _run(folder: TagFolder, files: Iterable[SavedFile], mp: int, problems: Problems) -> SavedRun:
    names = tuple(name for name in folder.files if name.mp == mp and name.role in _OF_A_RANK)
    own = [file for file in files if file.name.mp == mp]
    if not names and mp:  # what rank 0 has is missing here
        there = [name.name for name in folder.files if name.mp == 0 and name.role in _OF_A_RANK]
        problems.missing += [re.sub(r"mp_rank_\d+", f"mp_rank_{mp:02d}", name) for name in there]
        return SavedRun(folder=folder, models={}, optimizers={}, ranks=1, stage=0, notes=())
    return checked_run(replace(folder, files=names), own, problems, mp=mp)


def _check_extra(folder: TagFolder, size: int, problems: Problems) -> None:
    problems.wrong += [
        f"extra: {name.name} is for model-parallel rank {name.mp} of {size}"
        for name in folder.files
        if name.mp >= size and name.role is not Role.LAYER
    ]


def _check_same(runs: Mapping[int, SavedRun], problems: Problems) -> None:
    """Files of several model-parallel ranks say the same of what they share; those of one are checked already."""
    models = [run.model for run in runs.values() if 0 in run.models]
    for key in ("global_steps", "dp_world_size", "mp_world_size"):
        problems.agree(key, {file.name.name: file.root.get(key) for file in models})
    if len({run.stage for run in runs.values() if 0 in run.models}) > 1:
        problems.agree("the ZeRO stage", {run.model.name.name: run.stage for run in runs.values() if 0 in run.models})


def _check_layers(layers: Sequence[SavedFile], runs: Mapping[int, SavedRun], tp: int, problems: Problems) -> None:
    """Every layer is there on every tensor-parallel rank, and in its file what the stages name by it."""
    odd = [file.name.name for file in layers if any(axis != "model" for axis, _ in file.name.axes)]
    if odd:
        raise UnsupportedError(f"expected layers cut over the axis model only; got\n{listed(odd)}")
    there = {(file.name.layer, file.name.tp): file for file in layers}
    named = [(mp % tp, int(found[1]), found) for mp, run in runs.items() for found in _numbered(run)]
    needed = {layer for layer, _ in there} | {layer for _, layer, _ in named}
    has_axis = tp > 1 or any(file.name.axes for file in layers)
    for layer in sorted(needed):
        for rank in range(tp):
            if (layer, rank) not in there:
                cut = f"-model_{rank:02d}" if has_axis else ""
                problems.missing.append(f"layer_{layer:02d}{cut}-model_states.pt (a layer of the pipeline)")
    lacking: dict[str, list[str]] = {}
    for rank, layer, found in named:
        file = there.get((layer, rank))
        if file is not None and found[2] not in file.root:
            lacking.setdefault(file.name.name, []).append(found[0])
    problems.wrong += [
        f"{name}: expected {', '.join(own)}, as its stage names them; they are not in it: it is the file of another "
        "layer, or of another run"
        for name, own in lacking.items()
    ]
    problems.wrong += [
        f"extra: {file.name.name} is for tensor-parallel rank {file.name.tp} of {tp}"
        for file in layers
        if file.name.tp >= tp
    ]


def _numbered(run: SavedRun) -> Iterator[re.Match[str]]:
    """Names of a stage's parameters and buffers that begin with the number of a layer."""
    if 0 not in run.models:
        return
    root = run.model.root
    shapes = root.get("param_shapes")
    groups = recorded_numels(run) if shapes is None else shapes if isinstance(shapes, list) else [shapes]
    for own in (*groups, root.get("frozen_param_shapes"), root.get("buffer_names")):
        names = own if isinstance(own, dict | list) else ()
        yield from (found for name in names if (found := _NUMBERED.fullmatch(str(name))))
