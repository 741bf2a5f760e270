"""Optimizer files of ZeRO, of any stage: the states and groups of one model-parallel rank.

Stages 1 and 2, and BF16_Optimizer: one buffer per parameter group, an equal share of it on each rank. Where a parameter
lies follows from `param_shapes`, `param_alignment_paddings` and the number of ranks. It is then held against two other
records, the slice mappings and the module's own tensors, which are views of the same buffer. `group_paddings` is
ignored: BF16_Optimizer and versions before 2025 get it wrong.

Stage 3: each parameter is cut alone into a chunk per rank, and the chunks of a sub-group lie one after another in a
flat tensor. `param_shapes`, `fp32_flat_groups` and the keys of `state` share the number of the sub-group; a parameter
group lists the numbers of its sub-groups (stage3.py, `_rigid_state_dict`, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ucp.contract.layouts import Chunks, FlatBuffer, Span, WholeParameters
from ucp.contract.plugins import pattern
from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import ParamGroup
from ucp.core.layout import AxisLayout
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import ExpertGroups, ranks_joined
from ucp_formats.deepspeed.extras import optimizer_extras
from ucp_formats.deepspeed.partition import optimizer_order, round_robin, shared_buffers
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, OptimizerPart, Shard, add_flat_group
from ucp_formats.deepspeed.read.optimizer.saved import OptimizerFile, SavedGroup, same_groups
from ucp_formats.deepspeed.read.run import SavedRun


def read_sharded(run: SavedRun, checksums: Checksums) -> OptimizerPart:
    """States, groups and extras."""
    part = OptimizerPart()
    problems = Problems()
    files = {file.name.name: file for file in run.optimizers.values()}
    what = "sub-groups" if run.stage == 3 else "groups"
    groups = same_groups({name: file.torch for name, file in files.items()}, checksums, problems)
    count = len(run.model.groups)
    wrong = [f"{name}: {len(file.weights)}" for name, file in files.items() if len(file.weights) != count]
    if run.stage != 3:
        own = {name: len(file.torch.groups) for name, file in files.items()}
        wrong += [f"param_groups of {name}: {number}" for name, number in own.items() if number != count]
    if wrong:
        raise MalformedError(
            f"expected as many {what} in the optimizer files as in param_shapes of {run.model.file.path}, {count}; "
            f"got\n{listed(wrong)}\nThe files are of different runs"
        )
    if run.stage == 3:
        for number, shapes in enumerate(run.model.groups):
            chunks = Chunks({name: prod(shape) for name, shape in shapes.items()}, run.ranks)
            shards = tuple(_shard(file, rank, number, number) for rank, file in run.optimizers.items())
            group = FlatGroupStates(label=f"sub-group {number}", shapes=shapes, layouts=(chunks,), shards=shards)
            add_flat_group(part, group, checksums, problems)
        members = sub_group_params(groups, run.model.groups, f"param_groups of {next(iter(files))}")
    else:
        members = add_groups(part, run, checksums, problems)
    problems.raise_any(run.folder, f"ZeRO-{run.stage} over {run.ranks} ranks")
    part.groups = [ParamGroup(params=names, hyper=own.hyper) for own, names in zip(groups, members, strict=True)]
    part.take_group_steps()
    part.extras += optimizer_extras(run, checksums)
    return part


def with_shapes(run: SavedRun, shapes: Mapping[str, Shape]) -> SavedRun:
    """The run with `param_shapes`, made from the slice mappings where it is not recorded.

    `shapes`: of the module's tensors. Raises MalformedError where the two do not agree.
    """
    if run.model.param_shapes is not None or not run.optimizers:
        return run
    groups = run.recorded_numels
    degrees = ExpertGroups.of(run, groups).degrees
    wrong = [
        f"{name}: {numel / degree:g} elements, {list(shapes[name]) if name in shapes else 'no tensor'} in the module"
        for own, degree in zip(groups, degrees, strict=True)
        for name, numel in own.items()
        if name not in shapes or prod(shapes[name]) * degree != numel
    ]
    if wrong or not groups:
        raise MalformedError(
            f"expected param_slice_mappings of the optimizer files of {run.model.file.path} to name the parameters of "
            f"the module, as param_shapes is not recorded; got\n{listed(wrong or ['none'])}\nfiles are missing, or are "
            "of another run"
        )
    dealt = run.config.round_robin and not run.is_bf16_optimizer
    orders = (
        round_robin([*own], ranks=run.ranks // degree) if dealt else own
        for own, degree in zip(groups, degrees, strict=True)
    )
    made = tuple({name: shapes[name] for name in own} for own in orders)
    return replace(run, models={**run.models, 0: replace(run.model, param_shapes=made)})


def add_groups(part: OptimizerPart, run: SavedRun, checksums: Checksums, problems: Problems) -> list[tuple[str, ...]]:
    """Add the states of every group; the parameters of each, in the optimizer's order."""
    placed = ExpertGroups.of(run, run.model.groups)
    members = []
    for number, own in enumerate(run.model.groups):
        subsets = placed.subsets(number)
        names: list[list[str]] = []
        for ep_rank, subset in enumerate(subsets):
            files = [run.optimizers[rank] for rank in subset]
            buffer = _buffer(run, number, own, files)
            odd = [file for file in files if len(file.torch.groups[number].slots) != 1]
            if odd:
                raise UnsupportedError(
                    f"expected one flat parameter in group {number} of {odd[0].name.name}; got "
                    f"{len(odd[0].torch.groups[number].slots)}"
                )
            shards = tuple(
                _shard(file, rank, number, file.torch.groups[number].slots[0]) for rank, file in enumerate(files)
            )
            owner = AxisLayout("ep", len(subsets), pattern("unique", owner=ep_rank), "partition_count")
            group = FlatGroupStates(
                label=f"group {number}" + (f" of expert-parallel rank {ep_rank}" if len(subsets) > 1 else ""),
                shapes=own,
                names={name: placed.named(name, ep_rank) for name in own} if len(subsets) > 1 else {},
                layouts=(buffer,),
                state_layouts=(WholeParameters(buffer),),
                shards=shards,
                coords={"ep": ep_rank},
                axes=(owner,) if len(subsets) > 1 else (),
            )
            add_flat_group(part, group, checksums, problems)
            saved = {r: file.mappings[number] for r, file in enumerate(files) if number < len(file.mappings)}
            mappings = {rank: spans for rank, spans in saved.items() if spans is not None}
            order = _checked_order(part, run, group, buffer, mappings=mappings, checksums=checksums)
            names.append([group.names.get(name, name) for name in order])
        members.append(ranks_joined(names))
    return members


def _shard(file: OptimizerFile, rank: int, number: int, slot: int) -> Shard:
    states = file.torch.state.get(slot, {})
    return Shard(rank=rank, file=file.name.name, weight=file.weights[number], states=states)


def _buffer(run: SavedRun, number: int, own: Mapping[str, Shape], files: Sequence[OptimizerFile]) -> FlatBuffer:
    """The buffer of a group that has the lengths which the ranks hold, else the usual one."""
    first = run.optimizers[min(run.optimizers)]
    paddings = None
    if first.paddings is not None:
        paddings = first.paddings[number] if number < len(first.paddings) else ()
        if len(paddings) != len(own) or min(paddings, default=0) < 0:
            raise MalformedError(
                f"expected {len(own)} paddings >= 0 for param_alignment_paddings[{number}] of {first.name.name}; got "
                f"{list(paddings)}"
            )
    weights = [file.weights[number].numel for file in files]
    buffers = shared_buffers(
        {name: prod(shape) for name, shape in own.items()},
        ranks=len(files),
        paddings=paddings,
        first=weights[0],
        known_from=run.shapes_from,
    )
    fitting = (b for b in buffers if all(numel in b.lengths(rank) for rank, numel in enumerate(weights)))
    return next(fitting, buffers[0])


def _checked_order(
    part: OptimizerPart,
    run: SavedRun,
    group: FlatGroupStates,
    buffer: FlatBuffer,
    *,
    mappings: Mapping[int, Mapping[str, Span]],
    checksums: Checksums,
) -> tuple[str, ...]:
    """Names of a group in the optimizer's order; `mappings`: rank to what it recorded.

    Raises UnsupportedError where other records contradict the layout, and nothing explains it.
    """
    told: set[str] = set()
    for rank, spans in mappings.items():
        recorded = {name: span for name, span in spans.items() if span.numel}
        told |= {name for name, _ in recorded.items() ^ buffer.spans(rank).items()}
    dealt = run.config.round_robin and not run.is_bf16_optimizer
    names, dealt = optimizer_order(list(group.shapes), ranks=buffer.ranks, dealt=dealt, mappings=mappings.values())
    if told and dealt:
        part.notes.append(
            f"{group.label}: the places of {counted(len(told), 'parameter')} in param_slice_mappings are wrong and not "
            "used, as DeepSpeed up to 0.19.8 writes them under round_robin_gradients"
        )
    shown = [] if dealt else [f"{name}: param_slice_mappings has it elsewhere" for name in sorted(told)]
    shown += [f"{name}: module has it elsewhere in the buffer" for name in _displaced(run, buffer, checksums)]
    if shown:
        raise UnsupportedError(
            f"expected the buffer of {group.label} in {run.folder} in the order of param_shapes; other records "
            f"contradict it:\n{listed(shown)}\nThis layout is not known: report it, with the version of DeepSpeed"
        )
    return names


def _displaced(run: SavedRun, buffer: FlatBuffer, checksums: Checksums) -> list[str]:
    """Parameters whose module tensor, where it is a view of the whole buffer, starts elsewhere in it; sorted.

    A pipeline has no views: its tensors are in files of layers.
    """
    tensors = run.model.module.tensors if run.model.module is not None else {}
    found = []
    for name, start in zip(buffer.names, buffer.starts, strict=True):
        ref = tensors.get(name)
        storage = checksums.find_storage(ref) if ref is not None else None
        if ref is None or storage is None:
            continue
        is_view = storage.nbytes == buffer.share * buffer.ranks * ref.dtype.itemsize
        if is_view and ref.offset - storage.offset != start * ref.dtype.itemsize:
            found.append(name)
    return sorted(found)


def sub_group_params(
    groups: Iterable[SavedGroup], param_shapes: Sequence[Mapping[str, object]], where: str
) -> list[tuple[str, ...]]:
    """Parameters of each parameter group: those of the sub-groups whose numbers it lists."""
    numbers = [group.slots for group in groups]
    if sorted(number for own in numbers for number in own) != list(range(len(param_shapes))):
        raise MalformedError(
            f"expected each of the {len(param_shapes)} sub-groups of param_shapes once in {where}; got "
            f"{[list(own) for own in numbers]}. The files are of different runs"
        )
    return [tuple(name for number in own for name in param_shapes[number]) for own in numbers]
