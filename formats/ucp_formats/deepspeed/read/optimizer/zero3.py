"""Optimizer files of ZeRO-3.

Each parameter is cut alone into a chunk per rank, and the chunks of a sub-group lie one after another in a flat tensor.
`param_shapes`, `fp32_flat_groups` and the keys of `state` share the number of the sub-group; a parameter group lists
the numbers of its sub-groups (stage3.py, `_rigid_state_dict`, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.core.index import ParamGroup
from ucp.errors import MalformedError
from ucp.io.pickle.fields import Shape, integer, mapping, sequence, tensor, text
from ucp_formats.deepspeed.read.optimizer.flat_group import Bucket, Shard, bucket_states
from ucp_formats.deepspeed.read.optimizer.flat_layout import Chunks
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart, hyper_parameters, same_groups, take_group_steps
from ucp_formats.deepspeed.read.optimizer.zero12 import buffer_shapes
from ucp_formats.deepspeed.read.run import SavedFile, SavedRun

__all__ = ["read_chunked", "sub_group_params"]


def read_chunked(run: SavedRun, checksums: Checksums) -> OptimizerPart:
    """States and groups of a ZeRO-3 checkpoint."""
    problems = Problems()
    part = OptimizerPart()
    inner = {
        rank: mapping(file.optimizer.get("optimizer_state_dict"), f"optimizer_state_dict of {file.name.name}")
        for rank, file in run.optimizers.items()
    }
    names = {rank: file.name.name for rank, file in run.optimizers.items()}
    groups = same_groups({names[rank]: own.get("param_groups") for rank, own in inner.items()}, checksums, problems)
    all_shapes = buffer_shapes(run)
    for number, own in enumerate(all_shapes):
        shards = [_shard(file, inner[rank], number, len(all_shapes)) for rank, file in run.optimizers.items()]
        sizes = tuple((name, prod(shape)) for name, shape in own.items())
        layouts = (Chunks(sizes, run.ranks),)
        bucket = Bucket(label=f"sub-group {number}", shapes=own, layouts=layouts, shards=tuple(shards))
        part.add(bucket_states(bucket, checksums, problems))
    problems.raise_any(str(run.folder.path), f"ZeRO-3 over {run.ranks} ranks")
    where = f"param_groups of {names[0]}"
    members = sub_group_params(groups, all_shapes, where)
    for group, params in zip(groups, members, strict=True):
        part.groups.append(ParamGroup(params=params, hyper=hyper_parameters(group, where)))
    take_group_steps(part)
    return part


def sub_group_params(
    groups: Sequence[object], all_shapes: Sequence[Mapping[str, Shape]], where: str
) -> list[tuple[str, ...]]:
    """Parameters of each parameter group: those of the sub-groups whose numbers it lists."""
    numbers = [
        [integer(number, where) for number in sequence(mapping(group, where).get("params"), where)] for group in groups
    ]
    if sorted(number for own in numbers for number in own) != list(range(len(all_shapes))):
        raise MalformedError(
            f"expected each of the {len(all_shapes)} sub-groups of param_shapes once in {where}; got {numbers}. "
            "The files are of different runs"
        )
    return [tuple(name for number in own for name in all_shapes[number]) for own in numbers]


def _shard(file: SavedFile, inner: Mapping[object, object], number: int, count: int) -> Shard:
    name = file.name.name
    weights = sequence(file.optimizer.get("fp32_flat_groups"), f"fp32_flat_groups of {name}")
    if len(weights) != count:
        raise MalformedError(
            f"expected {count} sub-groups in fp32_flat_groups of {name}, as in param_shapes; got {len(weights)}. "
            "The file is of another run"
        )
    where = f"state[{number}] of {name}"
    states = mapping(mapping(inner.get("state"), f"state of {name}").get(number, {}), where)
    return Shard(
        rank=file.name.dp,
        file=name,
        weight=tensor(weights[number], f"fp32_flat_groups[{number}] of {name}"),
        states={text(key, where): value for key, value in states.items()},
    )
