"""Optimizer files of ZeRO-3.

Each parameter is cut alone into a chunk per rank, and the chunks of a sub-group lie one after another in a flat tensor.
`param_shapes`, `fp32_flat_groups` and the keys of `state` share the number of the sub-group; a parameter group lists
the numbers of its sub-groups (stage3.py, `_rigid_state_dict`, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ucp.contract.flat_buffer import Chunks
from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.errors import MalformedError
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, Shard, add_flat_group
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.saved import SavedGroup
from ucp_formats.deepspeed.read.run import SavedRun

__all__ = ["add_sub_groups", "sub_group_params"]


def add_sub_groups(part: OptimizerPart, run: SavedRun, checksums: Checksums, problems: Problems) -> None:
    """Add the states of every sub-group."""
    for number, own in enumerate(run.model.groups):
        group = FlatGroupStates(
            label=f"sub-group {number}",
            shapes=own,
            layouts=(Chunks({name: prod(shape) for name, shape in own.items()}, run.ranks),),
            shards=tuple(
                Shard(
                    rank=rank,
                    file=file.name.name,
                    weight=file.weights[number],
                    states=file.torch.state.get(number, {}),
                )
                for rank, file in run.optimizers.items()
            ),
        )
        add_flat_group(part, group, checksums, problems)


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
