"""Indexes a DeepSpeed universal checkpoint, whether DeepSpeed's converter or ucp wrote it.

1. Read the tag folder's model-states files, `zero/optimizer_state.pt` and every `zero/<parameter>/<state>.pt`.
2. Trained parameters come from `zero/`, with the module's tensor as a copy where there is one.
3. Frozen parameters and buffers come from the model-states files, where they have the model's dtype: the copies that
   the converter of 0.19.8 writes to `zero/` are cast to fp32.
4. Groups are those of `optimizer_state.pt`; `param_shapes` gives the names of their parameters.

The converter copies the model-states files of every model-parallel rank unchanged: each tensor-parallel rank's file has
its shards of frozen parameters and buffers. A pipeline's file has no module, and layer files are not copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import WEIGHT, Extra, Index, Kind, ParamGroup, StateIndex
from ucp.core.tensor import TensorRef
from ucp.core.topology import Topology
from ucp.core.union import state_from_scalar
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import Shape, require_sequence
from ucp_formats.deepspeed.extras import join_extras, model_extras, universal_extras
from ucp_formats.deepspeed.names import UNIVERSAL, FileName, Role, list_folder
from ucp_formats.deepspeed.partition import undo_round_robin
from ucp_formats.deepspeed.read.files import (
    SavedFile,
    parse_files,
    read_files,
    refuse_idle_options,
    refuse_names,
    source_files,
    try_read,
)
from ucp_formats.deepspeed.read.index import atoms_of, folder_notes, producer_of
from ucp_formats.deepspeed.read.module import ModelStates, ModuleEntry, ModulePart, read_module
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.saved import SavedGroup, TorchOptimizer, counts_of, stage_of
from ucp_formats.deepspeed.read.optimizer.sharded import sub_group_params
from ucp_formats.deepspeed.read.ranks.merge import MergedRanks, Mesh, RankPart, Rules, merge_ranks
from ucp_formats.deepspeed.read.ranks.parallel import tensor_rules
from ucp_formats.deepspeed.read.run import degrees, model_parallel_size
from ucp_formats.deepspeed.read.universal.parameter_folders import GLOBALS, ParameterFolders, read_parameter_folders
from ucp_formats.deepspeed.tp.layout import TensorShapes


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalRanks:
    """The model-states files of all ranks."""

    where: str
    """Folder, for messages."""
    models: Mapping[int, Mapping[int, ModelStates]]
    """Model-parallel rank to data-parallel rank to model-states file; the data-parallel rank is 0 except for ZeRO-3."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    rules: Rules
    """How tensors are split over tensor-parallel ranks."""

    @property
    def first(self) -> ModelStates:
        """Model states of rank 0."""
        return self.models[0][0]

    @property
    def groups(self) -> tuple[dict[str, Shape], ...]:
        """`param_shapes` of all stages together, with the shapes that tensor-parallel rank 0 holds."""
        stages = [files[0].groups for mp, files in self.models.items() if mp % self.tp == 0]
        if len({len(groups) for groups in stages}) > 1:
            raise UnsupportedError(
                f"expected the same number of parameter groups on each pipeline stage of {self.where}; got "
                f"{', '.join(str(len(groups)) for groups in stages)}, and optimizer_state.pt has only the groups of "
                "the first stage. Read the original checkpoint instead"
            )
        return tuple(
            {name: shape for groups in group for name, shape in groups.items()} for group in zip(*stages, strict=True)
        )

    def known_shapes(self) -> dict[str, Shape]:
        """Global shapes of parameters, as far as the files record them."""
        if not self.models or any(0 not in files for files in self.models.values()):
            return {}  # missing files are among the problems already
        local = {mp: {**files[0].frozen, **files[0].trained} for mp, files in self.models.items()}
        if self.tp == 1 or sorted(local) != list(range(self.tp * self.pp)):
            return {name: shape for shapes in local.values() for name, shape in shapes.items()}
        by_name: dict[str, list[Shape]] = {}
        for mp in sorted(local):
            for name, shape in local[mp].items():
                by_name.setdefault(name, []).append(shape)
        complete = {
            name: TensorShapes(local=tuple(shapes[: self.tp]))
            for name, shapes in by_name.items()
            if len(shapes) >= self.tp
        }
        return {name: layout.global_shape for name, layout in self.rules.layouts(complete).items()}

    def module(self, checksums: Checksums) -> MergedRanks:
        """The module of all ranks, and the extras of their files."""
        parts = []
        for mp, models in self.models.items():
            optimizer = OptimizerPart(extras=model_extras(models, checksums))
            if models[0].module is None:
                lacking = "it has no buffers and no frozen parameters"
                module = ModulePart(notes=[f"a universal checkpoint of a pipeline has no layer files: {lacking}"])
            else:
                sharded = models[0].name.role is Role.SHARDED_MODEL
                module = read_module(models, models[0].trained, checksums, sharded=sharded)
            parts.append(RankPart(mp=mp, tp=mp % self.tp, order=mp // self.tp, module=module, optimizer=optimizer))
        return merge_ranks(parts, self.rules, checksums, self.where, Mesh(tp=self.tp, pp=self.pp))


def universal_ranks(
    parsed_models: Iterable[ModelStates], where: str, problems: Problems, options: SourceOptions
) -> UniversalRanks:
    """The model-states files by rank; missing files are added to `problems`. `options`: what the user states.

    ucp writes one file for stages 1 and 2 and another for stage 3; the first is read, because it records more.
    """
    by_role: dict[Role, dict[int, dict[int, ModelStates]]] = {Role.MODEL: {}, Role.SHARDED_MODEL: {}}
    for model in parsed_models:
        by_role[model.name.role].setdefault(model.name.mp, {})[model.name.dp] = model
    models = by_role[Role.MODEL] or by_role[Role.SHARDED_MODEL]
    model_files = [model for by_rank in models.values() for model in by_rank.values()]
    size = model_parallel_size(model_files, [model.name for model in model_files])
    prefix = "" if by_role[Role.MODEL] or not models else "zero_pp_rank_0_"
    lost = [mp for mp in range(size) if 0 not in models.get(mp, {})]
    problems.missing += [f"{prefix}mp_rank_{mp:02d}_model_states.pt" for mp in lost]
    tp, pp = degrees(model_files, size, [], problems)
    if all(model.module is None and model.degrees is None for model in model_files):
        tp, pp = 1, size  # a pipeline that records no degrees; the names of layer files would, but there are none here
    infos = {model.name.name: (model.file, model.file.root.get("universal_checkpoint_info")) for model in model_files}
    rules = tensor_rules(infos, where, options)
    return UniversalRanks(where=where, models=dict(sorted(models.items())), tp=tp, pp=pp, rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStates:
    """`zero/optimizer_state.pt`: what all parameters share."""

    file: SavedFile
    """The file itself; other values of it become extras."""
    groups: tuple[SavedGroup, ...]
    """Parameter groups."""
    state: Mapping[int, Mapping[str, object]]
    """Optimizer states of rank 0, which DeepSpeed's converter leaves in the file under ZeRO-3."""
    stage: int | None
    """ZeRO stage of the run, which DeepSpeed's converter leaves in the file; None if ucp wrote it."""
    ranks: int
    """Ranks that the first group was partitioned over."""
    is_aligned: bool
    """Whether parameters had padding between them."""

    @classmethod
    def of(cls, file: SavedFile) -> SharedStates:
        """The parsed file: new converters write `param_groups`, older ones leave `zero_stage` and others in it."""
        root = file.root
        if not {"param_groups", "zero_stage"} & root.keys():
            keys = ", ".join(map(repr, list(root)[:8])) or "nothing"
            raise MalformedError(
                f"expected the key param_groups or zero_stage in {file.path}; got {keys}. Another file has been put "
                "under this name: copy it again from where it was saved"
            )
        saved = root.get("param_groups")
        groups = require_sequence(() if saved is None else saved, "param_groups")
        inner = root.get("optimizer_state_dict")
        state = (
            TorchOptimizer.of({"param_groups": [], **inner}, "optimizer_state_dict").state
            if isinstance(inner, dict) and "state" in inner
            else {}
        )
        paddings = root.get("param_alignment_paddings")
        return cls(
            file=file,
            groups=tuple(SavedGroup.of(group, f"param_groups[{number}]") for number, group in enumerate(groups)),
            state=state,
            stage=stage_of(root),
            ranks=next(iter(counts_of(root) or ()), 1),
            is_aligned=isinstance(paddings, list)
            and any(any(padding) for padding in paddings if isinstance(padding, list)),
        )


def read_universal(located: Located[bool], name: str, options: SourceOptions) -> Index:
    """Index of the tag folder; `name`: of the format that reads it. Raises SourceError."""
    folder = list_folder(located.root)
    refuse_names(folder)
    problems = Problems()
    files = read_files(folder, problems)
    model_files = [file for file in files if file.name.role in (Role.MODEL, Role.SHARDED_MODEL)]
    models = parse_files(model_files, ModelStates.of, problems)
    ranks = universal_ranks(models, str(folder.path), problems, options)
    refuse_idle_options(options, ranks.tp, str(folder.path))
    folders = read_parameter_folders(folder.path / UNIVERSAL, ranks.known_shapes(), problems)
    shared, wrong = try_read(folder.path / UNIVERSAL, FileName(role=Role.OPTIMIZER, name=GLOBALS))
    problems.extend(wrong)
    parsed = parse_files([shared] if shared is not None else [], SharedStates.of, problems)
    problems.raise_any(str(folder.path), "universal")
    (states_of_all,) = parsed
    trained = {param: shape for group in ranks.groups for param, shape in group.items()}
    _check_folders(trained, folders, str(folder.path / UNIVERSAL))
    model = ranks.first
    records = (*(record for file in (*files, states_of_all.file) for record in file.records), *folders.records)
    merged = ranks.module(Checksums(records))
    _check_stacks(model, folders, str(folder.path))
    module = _complete_module(merged.module, model, trained, folders)
    states, dropped = _select_states(module, ranks, states_of_all, folders)
    stage = model.config.zero_stage if states_of_all.stage is None else states_of_all.stage
    stage = stage if stage in range(4) else None  # of the run that the checkpoint was made from, where it is recorded
    # a pipeline's: the model-states files have no module, or ucp recorded it
    has_no_module = all(rank.module is None for models_of in ranks.models.values() for rank in models_of.values())
    extras = universal_extras(states_of_all.file.root, folders.info)
    extras += (
        [Extra(name="pipeline", value=True)] if has_no_module or states_of_all.file.root.get("pipeline") is True else []
    )
    strays = [f"not part of the checkpoint, left alone: zero/{stray}" for stray in folders.strays]
    roles = [(file.path, file.name.label) for file in files]
    roles.append((states_of_all.file.path, "optimizer values that all parameters share"))
    return Index(
        path=os.path.dirname(model.file.path),
        format=name,
        evidence=located.reasons,
        producer=producer_of([model.file]),
        topology=Topology(dp=model.ranks or 1, tp=ranks.tp, pp=ranks.pp, zero=stage),
        step=model.count("global_steps"),
        skipped=model.count("skipped_steps") or 0,
        atoms=atoms_of(module, states, model.config),
        groups=_read_groups(ranks, states_of_all, stage),
        aliases=module.aliases,
        extras=join_extras((*merged.optimizer.extras, *extras), module.extras),
        files=tuple(source_files([*roles, *folders.files])),
        records=records,
        notes=(*module.notes, *folder_notes(folder), *strays),
        dropped=(*module.dropped, *dropped),
        recorded_in={"every axis": "folders of zero/: one per parameter, with global tensors"},
    )


def _check_folders(trained: Mapping[str, Shape], folders: ParameterFolders, zero: str) -> None:
    missing = [param for param, shape in trained.items() if prod(shape) and param not in folders.states]
    if missing:
        raise MissingFileError(
            f"expected a folder in {zero} for every trained parameter of the model-states files; there is none for "
            f"{format_count(len(missing), 'parameter')}:\n{format_list(missing)}\nCopy the missing folders from where "
            "the checkpoint was saved"
        )


def _check_stacks(model: ModelStates, folders: ParameterFolders, where: str) -> None:
    """Raise UnsupportedError if stacked experts lack some of their moments: DeepSpeed issue 8147, before 0.19.5.

    The list of layers says which parameters are stacks, and so do the files of the parameters.
    """
    recorded = {name: keys.get("ep_num_experts") for name, keys in folders.info.items()}
    counts = {**{name: count for name, count in recorded.items() if count is not None}, **model.stacks.counts}
    partial = [
        f"{name}: {list(state.global_shape)} of {key}, {list(states[WEIGHT].global_shape)} of the weight"
        for name, states in folders.states.items()
        if name in counts and WEIGHT in states
        for key, state in states.items()
        if state.numel > 1 and state.global_shape != (counts[name], *states[WEIGHT].global_shape[1:])
    ]
    if partial:
        raise UnsupportedError(
            f"expected the states of all experts in the folders of {where}; some have those of one expert-parallel "
            f"rank only:\n{format_list(partial)}\nAn older ds_to_universal left out the others (DeepSpeed issue 8147): "
            "read the original checkpoint instead, or convert it again with a later DeepSpeed"
        )


def _complete_module(
    part: ModulePart, model: ModelStates, trained: Mapping[str, Shape], folders: ParameterFolders
) -> ModulePart:
    """The module of the model-states files, completed by tensors that `zero/` alone has, or has without padding."""
    for name, states in folders.states.items():
        entry, weight = part.entries.get(name), states.get(WEIGHT)
        if weight is None:
            continue
        if entry is None and name not in part.aliases and name not in trained:
            kind = Kind.FROZEN if len(states) == 1 else Kind.PARAMETER
            kind = Kind.BUFFER if name in (model.buffers or ()) else kind
            part.entries[name] = ModuleEntry(kind=kind, shape=weight.global_shape, dtype=weight.dtype, tensor=None)
        elif entry is not None and name in trained and weight.global_shape != entry.shape:
            part.entries[name] = replace(entry, shape=weight.global_shape, tensor=None)
            sizes = f"{list(weight.global_shape)} in zero/ and {list(entry.shape)} with padding in the module"
            part.notes.append(f"{name} is {sizes}: the first is used")
    return part


def _select_states(
    module: ModulePart, ranks: UniversalRanks, shared: SharedStates, folders: ParameterFolders
) -> tuple[dict[str, dict[str, StateIndex]], list[str]]:
    """States to take from `zero/`, and a line for each that is left out as a copy or cast of another tensor."""
    groups = ranks.groups
    trained = {name for group in groups for name in group}
    states: dict[str, dict[str, StateIndex]] = {}
    dropped: list[str] = []
    for name, param_states in folders.states.items():
        entry = module.entries.get(name)
        if name in module.aliases:
            dropped.append(f"zero/{name}/: a copy of {module.aliases[name]}, to which it is tied")
        elif name in trained or entry is None or entry.tensor is None:
            states[name] = param_states
        else:
            dropped.append(
                f"zero/{name}/: a cast of the {entry.kind.value} tensor in {ranks.first.name.name}, which is used"
            )
    for at, slot in shared.state.items():  # counts such as `step`, which the converter leaves there under ZeRO-3
        members = groups if at == 0 and len(shared.state) == 1 else groups[at : at + 1]
        for key, value in slot.items():
            state = state_from_scalar(value)
            for name in (name for group in members for name in group):
                if state is not None and name in states:
                    states[name].setdefault(key, state)
    tensors = (value for entries in shared.state.values() for value in entries.values())
    if any(isinstance(value, TensorRef) and value.shape for value in tensors):
        dropped.append("optimizer_state.pt: tensors of rank 0; the folders of zero/ hold them too")
    return states, dropped


def _read_groups(ranks: UniversalRanks, shared: SharedStates, stage: int | None) -> tuple[ParamGroup, ...]:
    """The groups, with their parameters in the optimizer's order, from before `round_robin_gradients` reordered them.

    DeepSpeed's converter splits the buffers of such a run by `param_slice_mappings`. Unless parameters were aligned,
    these are wrong (0.19.8), and the converter silently swaps parameters: such checkpoints are refused.
    """
    if not shared.groups:
        return ()
    is_dealt = shared.stage is not None and stage in (1, 2) and ranks.first.config.round_robin
    over = shared.ranks if is_dealt else 1
    groups = [tuple(group) for group in ranks.groups]
    if not shared.is_aligned and any(undo_round_robin(group, ranks=over) != group for group in groups):
        raise UnsupportedError(
            f"{ranks.first.file.path}: the run used round_robin_gradients, which DeepSpeed's converter does not "
            "support: it has written elements of one parameter into another. Read the original checkpoint instead"
        )
    members = sub_group_params(shared.groups, ranks.groups, f"param_groups of {shared.file.path}")
    return tuple(
        ParamGroup(params=undo_round_robin(names, ranks=over), hyper=group.hyper)
        for group, names in zip(shared.groups, members, strict=True)
    )
