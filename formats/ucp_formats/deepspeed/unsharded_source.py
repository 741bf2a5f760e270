"""Runs without ZeRO: the optimizer lies in the model-states file, and does not name its parameters.

The names come from the module (`whole_source`). With several ranks there are more places to look:

- a tensor-parallel rank has its own module and optimizer in one file;
- the optimizer of a pipeline stage goes with some layers, one after another, and which these are is not recorded: its
  own names tell where torch kept them, else exactly one way to deal the layers out must fit the shapes;
- every expert-parallel rank has an optimizer file, over what all ranks share and over its own experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ucp.atom import Kind, ParamGroup
from ucp.errors import UnsupportedError
from ucp.io.fields import Shape, mapping, sequence, shapes
from ucp.io.sameness import Checksums
from ucp.tensor import TensorRef
from ucp_formats.deepspeed.experts import Experts, Numbered, is_expert
from ucp_formats.deepspeed.extras_source import whole_optimizer_extras
from ucp_formats.deepspeed.layer_split import split_layers
from ucp_formats.deepspeed.merging import RankPart
from ucp_formats.deepspeed.module_part import ModulePart, read_whole_module
from ucp_formats.deepspeed.optimizer_part import OptimizerPart
from ucp_formats.deepspeed.pipeline_module import pipeline_modules
from ucp_formats.deepspeed.saved_grid import SavedGrid
from ucp_formats.deepspeed.saved_run import SavedFile
from ucp_formats.deepspeed.whole_source import WholeOptimizer, read_whole

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
    refs = {name: own.fragments[0].ref for name, own in module.entries.items() if own.kind is not Kind.BUFFER}
    return {name: ref for name, ref in refs.items() if isinstance(ref, TensorRef)}


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
        if not all(named.values()):
            ranges = split_layers(list(optimizers.values()), _params(module), str(grid.folder.path))
            optimizers = {mp: replace(optimizers[mp], params=own) for mp, own in zip(runs, ranges, strict=True)}
        read = {mp: read_whole(own, checksums, None) for mp, own in optimizers.items()}
        trained = {name: shape for part in read.values() for name, shape in _trained(module, part).items()}
        for mp, part in read.items():
            part.extras += whole_optimizer_extras(optimizers[mp].saved, optimizers[mp].kind)
            parts.append(RankPart(mp=mp, tp=tp, order=grid.stage(mp), optimizer=part))
        parts += [
            RankPart(mp=tp, tp=tp, order=copy * grid.pp, module=read_whole_module(file, trained))
            for copy, file in enumerate(files)
        ]
    return parts


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
    numbered = Numbered.of(experts.tensors)
    parts = []
    for rank, own in enumerate(optimizers):
        owned = (rank, None)
        params = {n: ref for n, ref in _params(first).items() if numbered.owner(n, len(optimizers)) in owned}
        parts.append(_read_by_kind(own, params, checksums))
    trained = {name: shape for part in parts for name, shape in _trained(first, part).items()}
    yield RankPart(mp=0, tp=0, order=0, module=read_whole_module(file, trained), optimizer=parts[0])
    for rank, part in enumerate(parts[1:], start=1):
        part.extras.clear()  # those of the first hold for all
        yield RankPart(mp=0, tp=0, order=rank, optimizer=part)


def _read_by_kind(file: SavedFile, params: Mapping[str, TensorRef], checksums: Checksums) -> OptimizerPart:
    """An optimizer whose groups are of experts, or of none: DeepSpeed keeps them apart, which helps to find names."""
    saved = mapping(file.root.get("optimizer"), f"optimizer of {file.path}")
    whole = _optimizer(file, saved, params)
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, group in enumerate(whole.groups):
        numbers[group.get("moe") is True].append(number)
    found = OptimizerPart(extras=whole_optimizer_extras(whole.saved, whole.kind))
    groups: dict[int, ParamGroup] = {}
    for experts, own in numbers.items():
        chosen = {name: ref for name, ref in params.items() if is_expert(name) is experts}
        recorded = tuple(whole.recorded[number] for number in own) if whole.recorded else ()
        part = read_whole(
            replace(whole, saved=_narrowed(saved, own), params=chosen, recorded=recorded), checksums, None
        )
        found.states |= part.states
        found.notes += [note for note in part.notes if note not in found.notes]
        found.dropped += part.dropped
        groups.update(zip(own, part.groups, strict=True))
    found.groups = [groups[number] for number in sorted(groups)]
    return found


def _narrowed(saved: Mapping[object, object], numbers: Sequence[int]) -> dict[object, object]:
    """An optimizer with some of its groups."""
    found = dict(saved)
    for key in ("fp32_groups", "fp32_groups_flat", "param_groups"):
        if isinstance(own := found.get(key), list):
            found[key] = [own[number] for number in numbers]
    inner = found.get("optimizer_state_dict")
    if isinstance(inner, dict):
        found["optimizer_state_dict"] = _narrowed(inner, numbers)
    return found
