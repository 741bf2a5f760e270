"""A native DeepSpeed checkpoint, ZeRO 0 to 3 and BF16_Optimizer, as an index.

1. List the tag folder that was found (`folder`); refuse layouts that are not read (`refusals`).
2. Read all files and check that they belong together (`saved_run`).
3. Read the module: names, kinds, ties, the model's own tensors (`module_part`).
4. Read the optimizer, in the shape of the stage (`flat_source`, `chunked_source`, `whole_source`).
5. Put both together into atoms, the rest into extras (`extras_source`).

What only some runs need (ranks of more than data parallelism, no ZeRO) is imported when such a run is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ucp.contract.protocols import SourceOptions
from ucp.contract.rank_extras import Checksums
from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, Kind, StateIndex
from ucp.core.names import WEIGHT
from ucp.core.topology import Topology
from ucp.errors import MalformedError, listed
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.locate import Located, TagFolder, list_folder
from ucp_formats.deepspeed.names import UNIVERSAL
from ucp_formats.deepspeed.read.extras import joined, model_extras, optimizer_extras
from ucp_formats.deepspeed.read.grid import SavedGrid, read_grid
from ucp_formats.deepspeed.read.merged import Merged
from ucp_formats.deepspeed.read.module import ModuleEntry, ModulePart, read_sharded_module, read_whole_module
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.zero3 import read_chunked
from ucp_formats.deepspeed.read.optimizer.zero12 import buffer_shapes, read_flat
from ucp_formats.deepspeed.read.run import SavedRun, source_files
from ucp_formats.deepspeed.refusals import refuse_idle_options, refuse_names

__all__ = ["atoms_of", "folder_notes", "producer_of", "read_native", "step_of"]

_DTYPES = {Precision.BF16: DType.BFLOAT16, Precision.FP16: DType.FLOAT16}


def read_native(
    located: Located, name: str, *, group_names: Sequence[Sequence[str]] | None, options: SourceOptions
) -> Index:
    """Index, of the format called `name`, of the tag folder that was found.

    `group_names`, `options`: see `ucp_formats.deepspeed.read.source.DeepSpeedFormat`. Raises SourceError.
    """
    folder = list_folder(located.root)
    refuse_names(folder)
    grid = read_grid(folder)
    run = grid.first
    checksums = Checksums(record for file in grid.files for record in file.records)
    refuse_idle_options(options, grid.tp, str(folder.path))
    if grid.is_plain:
        merged = _read_plain(run, checksums, group_names)
        return _index(name, located, grid, merged, _Mesh(ep=max(1, len(grid.expert_optimizers))))
    from ucp_formats.deepspeed.read.parallel import expert_degree, parallel_patterns, read_parallel

    merged = read_parallel(grid, checksums, options)
    mesh = _Mesh(ep=expert_degree(grid), patterns=partial(parallel_patterns, grid, merged))
    return _index(name, located, grid, merged, mesh)


def _no_patterns(name: str) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """What only runs of more than data parallelism have."""

    ep: int
    """Expert-parallel ranks."""
    patterns: Callable[[str], dict[str, str]] = _no_patterns
    """From the name of a parameter: axis to the name of the pattern along it, but for the data-parallel axis."""


def _read_plain(run: SavedRun, checksums: Checksums, group_names: Sequence[Sequence[str]] | None) -> Merged:
    """Module and optimizer of a run of data parallelism only."""
    if run.stage == 0:
        from ucp_formats.deepspeed.read.optimizer.zero0_ranks import read_unsharded

        merged = Merged(*read_unsharded(run.model, checksums, group_names))
    else:
        merged = Merged(*_read_zero(run, checksums))
    merged.optimizer.extras[:0] = model_extras(run.models, checksums)
    return merged


def _read_zero(run: SavedRun, checksums: Checksums) -> tuple[ModulePart, OptimizerPart]:
    trained: dict[str, Shape] = {name: shape for own in buffer_shapes(run) for name, shape in own.items()}
    if run.stage == 3:
        module = read_sharded_module(run.models, trained, checksums)
        optimizer = read_chunked(run, checksums)
    else:
        module = read_whole_module(run.model, trained)
        optimizer = read_flat(run, checksums)
    optimizer.extras += optimizer_extras(run, checksums)
    return module, optimizer


def _index(name: str, located: Located, grid: SavedGrid, merged: Merged, mesh: _Mesh) -> Index:
    run, module, optimizer = grid.first, merged.module, merged.optimizer
    roles = ((file.path, file.name.label) for file in grid.files)
    atoms = atoms_of(module, optimizer.states, run.config)
    return Index(
        path=str(grid.folder.path),
        format=name,
        evidence=located.reasons,
        producer=producer_of(run.model.root),
        topology=Topology(dp=run.ranks, tp=grid.tp, pp=grid.pp, ep=mesh.ep, zero=run.stage),
        step=step_of(run.model.root),
        skipped=step_of(run.model.root, "skipped_steps") or 0,
        atoms={own: replace(atom, origin=_patterns(atom, run, mesh)) for own, atom in atoms.items()},
        groups=tuple(optimizer.groups),
        aliases=module.aliases,
        extras=joined(optimizer.extras, module.extras),
        files=tuple(source_files(roles)),
        records=tuple(record for file in grid.files for record in file.records),
        notes=(
            *(note for own in grid.runs.values() for note in own.notes),
            *_stage_notes(run),
            *module.notes,
            *optimizer.notes,
            *folder_notes(grid.folder),
        ),
        dropped=(*module.dropped, *optimizer.dropped),
        doubts=tuple(merged.doubts),
        lost=optimizer.lost,
        recorded_in=_recorded_in(grid, mesh),
    )


def _recorded_in(grid: SavedGrid, mesh: _Mesh) -> dict[str, str]:
    """Where the files say how tensors lie over each axis; nothing where the rules of a family say it for one."""
    root, name = grid.first.model.root, Path(grid.first.model.path).name
    if grid.tp > 1 and "universal_checkpoint_info" not in root:
        return {}
    known = {
        "dp": f"param_shapes of {name}" if grid.first.stage else f"module of {name}: whole on every rank",
        "tp": f"universal_checkpoint_info of {name}" if grid.tp > 1 else "",
        "pp": "names of the layer_*-model_states.pt files" if grid.pp > 1 else "",
        "ep": "names of the layer_*_expert_*_model_states.pt files" if mesh.ep > 1 else "",
    }
    return {axis: where for axis, where in known.items() if where}


def _patterns(atom: AtomIndex, run: SavedRun, mesh: _Mesh) -> dict[str, str]:
    """Mesh axis to the name of the pattern along it, where there is more than one rank."""
    found = mesh.patterns(atom.name)
    if run.ranks > 1:
        found["dp"] = f"flat (ZeRO-{run.stage})" if _is_cut(atom, run.stage) else "replicate"
    return found


def _is_cut(atom: AtomIndex, stage: int) -> bool:
    """Whether ranks hold stretches of it: what is trained, from stage 1 on; frozen parameters too, at stage 3."""
    return (stage >= 1 and atom.kind is Kind.PARAMETER) or (stage == 3 and atom.kind is Kind.FROZEN)


def _stage_notes(run: SavedRun) -> list[str]:
    section = run.config.raw.get("zero_optimization")
    configured = section.get("stage") if isinstance(section, dict) else None
    if configured is None or configured == run.stage:
        return []
    return [f"configured with ZeRO stage {configured}, saved in the layout of stage {run.stage}, which is what counts"]


def atoms_of(
    module: ModulePart, states: Mapping[str, Mapping[str, StateIndex]], config: RunConfig
) -> dict[str, AtomIndex]:
    """Atoms in the order of the model; parameters that the module does not have come last.

    `config`: says the type in which the model computes with the latter.
    """
    atoms = {name: _atom(name, entry, states.get(name, {})) for name, entry in module.entries.items()}
    for name, own in states.items():
        if name not in atoms and WEIGHT in own:
            weight = own[WEIGHT]
            dtype = _DTYPES.get(config.precision(()), weight.dtype)
            atoms[name] = AtomIndex(
                name=name,
                global_shape=weight.global_shape,
                kind=Kind.PARAMETER,
                states=dict(own),
                model_dtype=dtype if dtype is not weight.dtype else None,
            )
    return atoms


def _atom(name: str, entry: ModuleEntry, states: Mapping[str, StateIndex]) -> AtomIndex:
    """One atom: the master is the weight where there is one, and the module's tensor a copy of it."""
    master = states.get(WEIGHT)
    if master is None:
        if not entry.fragments:
            raise MalformedError(f"expected the elements of {name} {list(entry.shape)}; neither file has them")
        weight = StateIndex(dtype=entry.fragments[0].ref.dtype, global_shape=entry.shape, fragments=entry.fragments)
    else:
        first = 1 + max((piece.replica for piece in master.fragments), default=0)
        copies = (
            replace(piece, replica=piece.replica + first, derived=True) for piece in entry.fragments if piece.box.numel
        )
        weight = replace(master, fragments=(*master.fragments, *copies))
    return AtomIndex(
        name=name,
        global_shape=entry.shape,
        kind=entry.kind,
        states={WEIGHT: weight, **{key: state for key, state in states.items() if key != WEIGHT}},
        model_dtype=entry.dtype if entry.dtype is not weight.dtype else None,
    )


def producer_of(root: Mapping[object, object]) -> str:
    """Program and version out of a model-states file; the version may have blanks around it."""
    version = root.get("ds_version")
    return f"DeepSpeed {version.strip()}" if isinstance(version, str) else "DeepSpeed, version not recorded"


def step_of(root: Mapping[object, object], key: str = "global_steps") -> int | None:
    """Steps of the engine out of a model-states file."""
    step = root.get(key)
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def folder_notes(folder: TagFolder) -> list[str]:
    """Notes on files that are not part of the checkpoint."""
    strays = [name for name in folder.strays if name != UNIVERSAL]
    return [f"not part of the checkpoint, left alone:\n{listed(strays)}"] if strays else []
