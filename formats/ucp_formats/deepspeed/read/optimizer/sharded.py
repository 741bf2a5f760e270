"""Reads the optimizer files of ZeRO: the states and groups of one model-parallel rank.

Stages 1 and 2, and BF16_Optimizer: one buffer per parameter group, and an equal share of it on each rank. The offset of
a parameter follows from `param_shapes`, `param_alignment_paddings` and the number of ranks. It is checked against
`param_slice_mappings`, and against the module's tensors where they are views of the buffer. `group_paddings` is
ignored: BF16_Optimizer and versions before 2025 save wrong values there.

Stage 3: each parameter is split into a chunk per rank, and the chunks of a sub-group follow one another in a flat
tensor. `param_shapes`, `fp32_flat_groups` and the keys of `state` use the number of the sub-group; a parameter group
lists the numbers of its sub-groups (stage3.py, `_rigid_state_dict`, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ucp.contract.layouts import Chunks, FlatBuffer, Span, WholeParameters
from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import ParamGroup
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import ExpertGroups, merge_names
from ucp_formats.deepspeed.extras import optimizer_extras
from ucp_formats.deepspeed.partition import optimizer_order, round_robin, shared_buffers
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, OptimizerPart, Shard, add_flat_group
from ucp_formats.deepspeed.read.optimizer.saved import OptimizerFile, SavedGroup, same_groups
from ucp_formats.deepspeed.read.run import SavedRun


def read_sharded(run: SavedRun, checksums: Checksums) -> OptimizerPart:
    """States, groups and extras of the optimizer of one model-parallel rank."""
    part = OptimizerPart()
    problems = Problems()
    files = {file.name.name: file for file in run.optimizers.values()}
    what = "sub-groups" if run.stage == 3 else "groups"
    groups = same_groups({name: file.torch for name, file in files.items()}, checksums, problems)
    count = len(run.model.groups)
    wrong = [f"{name}: {len(file.weights)}" for name, file in files.items() if len(file.weights) != count]
    if run.stage != 3:
        counts = {name: len(file.torch.groups) for name, file in files.items()}
        wrong += [f"param_groups of {name}: {number}" for name, number in counts.items() if number != count]
    if wrong:
        raise MalformedError(
            f"expected {count} {what} in each optimizer file, as in param_shapes of {run.model.file.path}; "
            f"got\n{format_list(wrong)}\nThe files are from different runs"
        )
    if run.stage == 3:
        experts = ExpertGroups.of(run, run.model.groups)
        for number, first_shapes in enumerate(run.model.groups):
            for ep_rank, ranks in enumerate(experts.holders(number)):
                shapes = experts.local_shapes(first_shapes, ep_rank)
                numels = {name: prod(shape) for name, shape in shapes.items()}
                holders = [run.optimizers[rank] for rank in ranks]
                group = FlatGroupStates(
                    label=f"sub-group {number}",
                    shapes=shapes,
                    layouts=(Chunks(numels, len(ranks)),),
                    shards=tuple(_shard(file, rank, number, number) for rank, file in enumerate(holders)),
                )
                add_flat_group(part, experts.on_rank(group, number, ep_rank), checksums, problems)
        members = sub_group_params(groups, run.model.groups, f"param_groups of {next(iter(files))}")
    else:
        members = add_groups(part, run, checksums, problems)
    problems.raise_any(run.folder, f"ZeRO-{run.stage} over {run.ranks} ranks")
    part.groups = [ParamGroup(params=names, hyper=group.hyper) for group, names in zip(groups, members, strict=True)]
    part.take_group_steps()
    part.extras += optimizer_extras(run, checksums)
    return part


def with_shapes(run: SavedRun, shapes: Mapping[str, Shape]) -> SavedRun:
    """The run with `param_shapes`, which is made from `param_slice_mappings` if it is not recorded.

    `shapes`: shapes of the module's tensors. Raises MalformedError if they contradict the mappings.
    """
    if run.model.param_shapes is not None or not run.optimizers:
        return run
    groups = run.recorded_numels
    degrees = ExpertGroups.of(run, groups).degrees
    wrong = [
        f"{name}: {numel / degree:g} elements, {list(shapes[name]) if name in shapes else 'no tensor'} in the module"
        for numels, degree in zip(groups, degrees, strict=True)
        for name, numel in numels.items()
        if name not in shapes or prod(shapes[name]) * degree != numel
    ]
    if wrong or not groups:
        raise MalformedError(
            f"expected param_slice_mappings in the optimizer files to name the parameters of the module, because "
            f"{run.model.file.path} has no param_shapes; got\n{format_list(wrong or ['none'])}\nFiles are missing, or "
            "are from another run"
        )
    orders = (
        round_robin([*names], ranks=run.ranks // degree) if run.is_round_robin else names
        for names, degree in zip(groups, degrees, strict=True)
    )
    param_shapes = tuple({name: shapes[name] for name in names} for names in orders)
    return replace(run, models={**run.models, 0: replace(run.model, param_shapes=param_shapes)})


def add_groups(part: OptimizerPart, run: SavedRun, checksums: Checksums, problems: Problems) -> list[tuple[str, ...]]:
    """Add the states of every group to `part`; return the parameters of each group, in the optimizer's order."""
    experts = ExpertGroups.of(run, run.model.groups)
    members = []
    for number, first_shapes in enumerate(run.model.groups):
        holders = experts.holders(number)
        names: list[list[str]] = []
        for ep_rank, ranks in enumerate(holders):
            files = [run.optimizers[rank] for rank in ranks]
            shapes = experts.local_shapes(first_shapes, ep_rank)
            buffer = _find_buffer(run, number, shapes, files)
            shards = []
            for rank, file in enumerate(files):
                slots = file.torch.groups[number].slots
                if len(slots) != 1:
                    where = f"group {number} of {file.name.name}"
                    raise UnsupportedError(f"expected one flat tensor in {where}; got {len(slots)}")
                shards.append(_shard(file, rank, number, slots[0]))
            group = FlatGroupStates(
                label=f"group {number}",
                shapes=shapes,
                layouts=(buffer,),
                state_layouts=(WholeParameters(buffer),),
                shards=tuple(shards),
            )
            group = experts.on_rank(group, number, ep_rank)
            add_flat_group(part, group, checksums, problems)
            saved = {r: file.mappings[number] for r, file in enumerate(files) if number < len(file.mappings)}
            mappings = {rank: spans for rank, spans in saved.items() if spans is not None}
            order = _check_order(part, run, group, buffer, mappings=mappings, checksums=checksums)
            names.append([group.names.get(name, name) for name in order])
        members.append(merge_names(names))
    return members


def _shard(file: OptimizerFile, rank: int, number: int, slot: int) -> Shard:
    states = file.torch.state.get(slot, {})
    return Shard(rank=rank, file=file.name.name, weight=file.weights[number], states=states)


def _find_buffer(run: SavedRun, number: int, shapes: Mapping[str, Shape], files: Sequence[OptimizerFile]) -> FlatBuffer:
    """The layout of a group's buffer that gives the shares the lengths in the files; if none does, the usual one."""
    first = files[0]
    paddings = None
    if first.paddings is not None:
        paddings = first.paddings[number] if number < len(first.paddings) else ()
        if len(paddings) != len(shapes) or min(paddings, default=0) < 0:
            raise MalformedError(
                f"expected {len(shapes)} paddings >= 0 in param_alignment_paddings[{number}] of {first.name.name}; "
                f"got {list(paddings)}"
            )
    weights = [file.weights[number].numel for file in files]
    buffers = shared_buffers(
        {name: prod(shape) for name, shape in shapes.items()},
        ranks=len(files),
        paddings=paddings,
        first=weights[0],
        known_from=run.shapes_from,
    )
    fitting = (b for b in buffers if all(numel in b.lengths(rank) for rank, numel in enumerate(weights)))
    return next(fitting, buffers[0])


def _check_order(
    part: OptimizerPart,
    run: SavedRun,
    group: FlatGroupStates,
    buffer: FlatBuffer,
    *,
    mappings: Mapping[int, Mapping[str, Span]],
    checksums: Checksums,
) -> tuple[str, ...]:
    """Parameters of a group in the optimizer's order; `mappings`: rank to its `param_slice_mappings` of the group.

    Raises UnsupportedError if other records contradict the layout, and `round_robin_gradients` does not explain that.
    """
    misplaced: set[str] = set()
    for rank, spans in mappings.items():
        recorded = {name: span for name, span in spans.items() if span.numel}
        misplaced |= {name for name, _ in recorded.items() ^ buffer.spans(rank).items()}
    names, is_round_robin = optimizer_order(
        list(group.shapes), ranks=buffer.ranks, is_round_robin=run.is_round_robin, mappings=mappings.values()
    )
    if misplaced and is_round_robin:
        part.notes.append(
            f"{group.label}: param_slice_mappings has wrong offsets for {format_count(len(misplaced), 'parameter')}, "
            "which are ignored: DeepSpeed up to 0.19.8 writes wrong ones under round_robin_gradients"
        )
    conflicts = [] if is_round_robin else [f"{name}: param_slice_mappings disagrees" for name in sorted(misplaced)]
    conflicts += [f"{name}: module has another offset" for name in _find_displaced(run, buffer, checksums)]
    if conflicts:
        raise UnsupportedError(
            f"expected the parameters of {group.label} in {run.folder} to follow one another in the order of "
            f"param_shapes; other records contradict that:\n{format_list(conflicts)}\nucp does not know this layout: "
            "report it, with the version of DeepSpeed"
        )
    return names


def _find_displaced(run: SavedRun, buffer: FlatBuffer, checksums: Checksums) -> list[str]:
    """Parameters whose module tensor is a view of the full buffer, but starts at another offset than expected."""
    tensors = run.model.module.tensors if run.model.module is not None else {}
    displaced = []
    for name, start in zip(buffer.names, buffer.starts, strict=True):
        ref = tensors.get(name)
        storage = checksums.find_storage(ref) if ref is not None else None
        if ref is None or storage is None:
            continue
        is_view = storage.nbytes == buffer.share * buffer.ranks * ref.dtype.itemsize
        if is_view and ref.offset - storage.offset != start * ref.dtype.itemsize:
            displaced.append(name)
    return sorted(displaced)


def sub_group_params(
    groups: Iterable[SavedGroup], param_shapes: Sequence[Mapping[str, object]], where: str
) -> list[tuple[str, ...]]:
    """Parameters of each parameter group: those of all sub-groups whose numbers the group lists."""
    numbers = [group.slots for group in groups]
    if sorted(number for slots in numbers for number in slots) != list(range(len(param_shapes))):
        raise MalformedError(
            f"expected {where} to list each of the {len(param_shapes)} sub-groups of param_shapes once; got "
            f"{[list(slots) for slots in numbers]}. The files are from different runs"
        )
    return [tuple(name for number in slots for name in param_shapes[number]) for slots in numbers]
