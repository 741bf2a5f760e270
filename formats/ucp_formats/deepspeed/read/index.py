"""Indexes a native DeepSpeed checkpoint: ZeRO 0 to 3 and BF16_Optimizer.

1. List the tag folder, and refuse layouts that ucp does not read (`files`).
2. Parse all files, and check that they belong together (`run`).
3. Read the module: names, kinds, ties, tensors (`module`).
4. Read the optimizer, in the form of the stage (`optimizer`).
5. Join both into atoms; everything else becomes extras.

Modules that only some runs need (model parallelism, no ZeRO) are imported when such a run is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums
from ucp.contract.registry import data_parallel_cuts
from ucp.core.index import WEIGHT, AtomIndex, Index, Kind
from ucp.core.layout import Layout
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.core.union import ShardedTensor, StateSource, Union
from ucp.errors import MalformedError, UnsupportedError, format_list
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.experts import ExpertGroups
from ucp_formats.deepspeed.extras import join_extras, model_extras
from ucp_formats.deepspeed.names import UNIVERSAL, TagFolder, list_folder
from ucp_formats.deepspeed.read.files import SavedFile, refuse_idle_options, refuse_names, source_files
from ucp_formats.deepspeed.read.module import ModulePart, read_module
from ucp_formats.deepspeed.read.optimizer.sharded import read_sharded, with_shapes
from ucp_formats.deepspeed.read.ranks.merge import MergedRanks, Mesh
from ucp_formats.deepspeed.read.run import SavedGrid, read_grid
from ucp_formats.deepspeed.read.stacks import LAYERS

_DTYPES = {Precision.BF16: DType.BFLOAT16, Precision.FP16: DType.FLOAT16}


def read_native(
    located: Located[bool], name: str, *, group_names: Sequence[Sequence[str]] | None, options: SourceOptions
) -> Index:
    """Index of the tag folder; `name`: of the format that reads it.

    `group_names`, `options`: see `ucp_formats.deepspeed.read.source.DeepSpeedFormat`. Raises SourceError.
    """
    folder = list_folder(located.root)
    refuse_names(folder)
    grid = read_grid(folder)
    checksums = Checksums(record for file in grid.files for record in file.records)
    grid = _find_cuts(grid, options)
    if not grid.first.cuts:
        refuse_idle_options(options, grid.tp, str(folder.path))
    if len(grid.runs) == 1 and not grid.layers and not grid.experts and not grid.first.model.stacks.counts:
        merged = _read_plain(grid, checksums, group_names)
    else:
        from ucp_formats.deepspeed.read.ranks.parallel import expert_degree, read_parallel

        merged = read_parallel(grid, checksums, options, _mesh(grid, expert_degree(grid)))
    run, module, optimizer, mesh = grid.first, merged.module, merged.optimizer, merged.mesh
    if (configured := run.config.zero_stage) not in (None, run.stage):
        stages = f"configured with ZeRO stage {configured}, but saved in the layout of stage {run.stage}"
        module.notes.insert(0, f"{stages}, which is used")
    by_family = run.cuts or (grid.tp > 1 and "universal_checkpoint_info" not in run.model.file.root)
    return Index(
        path=str(folder.path),
        format=name,
        evidence=located.reasons,
        producer=producer_of(run.files),
        topology=Topology(dp=run.ranks, tp=grid.tp, pp=grid.pp, ep=mesh.ep, zero=run.stage),
        step=run.model.count("global_steps"),
        skipped=run.model.count("skipped_steps") or 0,
        atoms=atoms_of(module, optimizer.states, run.config, mesh),
        groups=tuple(optimizer.groups),
        aliases=module.aliases,
        extras=join_extras(optimizer.extras, module.extras),
        files=tuple(source_files((file.path, file.name.label) for file in grid.files)),
        records=tuple(record for file in grid.files for record in file.records),
        notes=(*grid.notes, *module.notes, *optimizer.notes, *folder_notes(folder)),
        dropped=(*module.dropped, *optimizer.dropped),
        doubts=tuple(merged.warnings),
        lost=optimizer.lost,
        # empty if one axis comes from a model family: the layouts then say where each axis is known from
        recorded_in={} if by_family else _known_from(grid, mesh.ep),
    )


def _find_cuts(grid: SavedGrid, options: SourceOptions) -> SavedGrid:
    """The grid with the parameters of which every data-parallel rank trains a part, by the user's rules."""
    run = grid.first
    names = run.model.trained or (run.model.module.tensors if run.model.module is not None else {})
    cuts = data_parallel_cuts(names, options.patterns) if run.ranks > 1 else {}
    if cuts and (run.stage not in (1, 2) or len(grid.runs) > 1):
        raise UnsupportedError(
            f"expected ZeRO stage 1 or 2 and no tensor or pipeline parallelism for {', '.join(cuts)}, of which every "
            f"data-parallel rank has a part, by its rule for dp; {run.folder} is of stage {run.stage}. DeepSpeed saves "
            "the module of rank 0 alone, so that only optimizer files have the parts of other ranks; with ZeRO 3 it "
            "cannot train such parameters"
        )
    return replace(grid, runs={mp: replace(run, cuts=cuts) for mp, run in grid.runs.items()}) if cuts else grid


def _mesh(grid: SavedGrid, ep: int) -> Mesh:
    """The axes of a run."""
    stage = grid.first.stage
    known = _known_from(grid, ep) | ({"dp": f"ZeRO-{stage}"} if stage else {})
    return Mesh(dp=grid.first.ranks, tp=grid.tp, pp=grid.pp, ep=ep, known_from=known)


def _read_plain(grid: SavedGrid, checksums: Checksums, group_names: Sequence[Sequence[str]] | None) -> MergedRanks:
    """Module and optimizer of a run with data parallelism only."""
    run = grid.first
    if run.stage == 0:
        from ucp_formats.deepspeed.read.ranks.unsharded import read_unsharded

        module, optimizer = read_unsharded(run.model, checksums, group_names)
    else:
        run = with_shapes(run, {})
        trained = ExpertGroups.of(run, run.model.groups).global_shapes(run.model.groups)
        module = read_module(run.models, trained, checksums, sharded=run.stage == 3, cut=run.cuts)
        optimizer = read_sharded(run, checksums)
    optimizer.extras[:0] = model_extras(run.models, checksums)
    return MergedRanks.from_rank(module, optimizer, _mesh(grid, max(1, len(grid.expert_optimizers))))


def _known_from(grid: SavedGrid, ep: int) -> dict[str, str]:
    name = grid.first.model.name.name
    stages = (
        "layer_*-model_states.pt files" if grid.is_pipeline else "parameters in the mp_rank_*_model_states.pt files"
    )
    experts = "names of the layer_*_expert_*_model_states.pt files"
    if grid.first.model.stacks.counts:
        experts = f"{LAYERS} of {name}"
    known = {
        "dp": grid.first.shapes_from if grid.first.stage else f"module of {name}: full on every rank",
        "tp": f"universal_checkpoint_info of {name}" if grid.tp > 1 else "",
        "pp": f"names of the {stages}" if grid.pp > 1 else "",
        "ep": experts if ep > 1 else "",
    }
    return {axis: where for axis, where in known.items() if where}


def atoms_of(
    module: ModulePart, states: Mapping[str, Mapping[str, StateSource]], config: RunConfig, mesh: Mesh | None = None
) -> dict[str, AtomIndex]:
    """Atoms in the order of the model; parameters that only the optimizer has come last.

    `config`: its precision is the model dtype of these last ones. `mesh`: the axes that tensors are sharded over.
    """
    masters = ((name, state.get(WEIGHT)) for name, state in states.items())
    layouts: dict[str, Layout] = {}  # of the weight, from the optimizer or else the module
    if mesh is not None:
        layouts = {name: master.layout for name, master in masters if isinstance(master, ShardedTensor)}
        moments = ((name, value) for name, state in states.items() if name not in layouts for value in state.values())
        for name, value in moments:  # ZeRO 0 has no masters; of stacked experts the optimizers say how they are cut
            if isinstance(value, ShardedTensor) and any(axis.axis == "ep" for axis in value.layout.all_axes):
                layouts[name] = value.layout
        for name, entry in module.entries.items():
            if name not in layouts and entry.tensor is not None:
                layouts[name] = mesh.layout(name, Layout(flat=entry.tensor.layout.flat))
    union = Union()
    atoms = {}
    for name, entry in module.entries.items():
        param_states = states.get(name, {})
        if WEIGHT not in param_states and entry.tensor is None:
            raise MalformedError(
                f"expected the elements of {name} {list(entry.shape)}; neither the module nor the optimizer has them"
            )
        layout = layouts.get(name, Layout())
        atoms[name] = union.build_atom(
            name, kind=entry.kind, layout=layout, states=param_states, model=entry.tensor, model_dtype=entry.dtype
        )
    dtype = _DTYPES.get(config.precision(()))
    for name, param_states in states.items():
        if name not in atoms and WEIGHT in param_states:
            layout = layouts.get(name, Layout())
            atoms[name] = union.build_atom(
                name, kind=Kind.PARAMETER, layout=layout, states=param_states, model_dtype=dtype
            )
    return atoms


def producer_of(files: Iterable[SavedFile]) -> str:
    """Program and version, from the first file that records one."""
    version = next((file.version for file in files if file.version is not None), None)
    return "DeepSpeed, version not recorded" if version is None else f"DeepSpeed {version}"


def folder_notes(folder: TagFolder) -> list[str]:
    """Notes on files that are not part of the checkpoint."""
    strays = [name for name in folder.strays if name != UNIVERSAL]
    return [f"not part of the checkpoint, left alone:\n{format_list(strays)}"] if strays else []
