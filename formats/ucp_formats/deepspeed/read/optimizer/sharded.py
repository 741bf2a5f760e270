"""Optimizer files of ZeRO, of any stage: the states and groups of one model-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.core.index import ParamGroup
from ucp.errors import MalformedError, listed
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import ExpertGroups
from ucp_formats.deepspeed.partition import round_robin
from ucp_formats.deepspeed.read.extras import optimizer_extras
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.optimizer.saved import same_groups
from ucp_formats.deepspeed.read.optimizer.zero3 import add_sub_groups, sub_group_params
from ucp_formats.deepspeed.read.optimizer.zero12 import add_groups
from ucp_formats.deepspeed.read.run import SavedRun

__all__ = ["read_sharded", "with_shapes"]


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
        add_sub_groups(part, run, checksums, problems)
        members = sub_group_params(groups, run.model.groups, f"param_groups of {next(iter(files))}")
    else:
        members = add_groups(part, run, checksums, problems)
    problems.raise_any(run.folder, f"ZeRO-{run.stage} over {run.ranks} ranks")
    part.groups = [ParamGroup(params=own, hyper=group.hyper) for group, own in zip(groups, members, strict=True)]
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
