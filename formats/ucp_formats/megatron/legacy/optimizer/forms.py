"""The optimizer of every rank, in whichever form: whole, distributed, or a chain of either.

Where experts are parallel there are two optimizers on every rank, one of dense parameters and one of experts; else
there is one of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucp.contract.rank_extras import Checksums
from ucp.core.names import STEP
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import described, mapping
from ucp.transfer.probe import Prober
from ucp_formats.megatron.legacy.extras import ranks_extras
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank
from ucp_formats.megatron.legacy.model import Held, LegacyModel, Slot
from ucp_formats.megatron.legacy.optimizer.distributed import Buffer, add_buffers, read_buffers
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates, Population, groups_of
from ucp_formats.megatron.legacy.optimizer.whole import add_whole_optimizer, is_whole
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER
from ucp_formats.megatron.param_groups.rules import (
    SavedGroup,
    agreed_step,
    dealt_out,
    inferred,
    is_expert,
    left_open,
    lost_members,
)
from ucp_formats.megatron.param_groups.settings import group_rule
from ucp_formats.megatron.run.mesh import data_parallel
from ucp_formats.megatron.run.modules import with_modules

__all__ = ["read_optimizer"]

_KNOWN = ("optimizer", "fp32_from_fp16_params", "state", "param_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One optimizer of a rank."""

    chain: int | None
    """Its number in a chain; None for the only one."""
    saved: Mapping[object, object]
    """What the model file says of it."""
    population: Population
    """Parameters it may have states of."""


def read_optimizer(run: LegacyRun, model: LegacyModel, checksums: Checksums) -> LegacyStates:
    """States of all parameters. Raises MalformedError, MissingFileError, UnsupportedError."""
    states = LegacyStates()
    _check_buffers(run)
    trainable = _trainable(model)
    rest: dict[str, dict[int, object]] = {}
    arguments = with_modules(run.arguments.raw, model.modules)
    with Prober() as prober:
        for number, rank in enumerate(run.ranks):
            members = _members(run, rank, trainable.get(number, []), arguments)
            buffers = _buffers_of(rank, members)
            for position, member in enumerate(members):
                if is_whole(member.saved):
                    add_whole_optimizer(member.saved, member.population, states, prober)
                elif buffers and buffers[position] is not None:
                    add_buffers(buffers[position] or (), member.population, _ranks(run, member), states, prober)
                    _add_groups(member, states)
                for name, value in _rest(member).items():
                    rest.setdefault(name, {})[number] = value
    for name, values in rest.items():
        states.extras += ranks_extras(run, name, values, checksums)
    states.notes = list(dict.fromkeys(states.notes))
    states.dropped = list(dict.fromkeys(states.dropped))
    return states


def _trainable(model: LegacyModel) -> dict[int, list[Held]]:
    """Trainable tensors of every rank, each once, in registration order."""
    found: dict[Slot, Held] = {}
    for own in model.held:
        match = model.matches.get(own.name)
        if match is not None and not match.buffer:
            found.setdefault(own.slot, own)
    by_rank: dict[int, list[Held]] = {}
    for own in found.values():
        by_rank.setdefault(own.slot.rank, []).append(own)
    return by_rank


def _members(run: LegacyRun, rank: SavedRank, held: Sequence[Held], arguments: Mapping[str, object]) -> list[_Member]:
    """Optimizers of a rank, which trains `held`; `arguments`: those of the run, with what its keys show."""
    saved = rank.root.get("optimizer")
    where = f"the optimizer of {rank.name}"
    if saved is None:
        return []
    if not isinstance(saved, list):
        only = Population(where=where, held=tuple(held), arguments=arguments)
        return [_Member(chain=None, saved=mapping(saved, where), population=only)]
    dicts = [mapping(own if own is not None else {}, where) for own in saved]
    members = []
    for chain, own in enumerate(dicts):
        experts = _is_of_experts(own, chain, dicts, run)
        chosen = tuple(one for one in held if len(dicts) == 1 or is_expert(one.name) == experts)
        label = f"{where} ({'experts' if experts else 'dense parameters'})"
        population = Population(where=label, held=chosen, arguments=arguments)
        members.append(_Member(chain=chain, saved=own, population=population))
    return members


def _is_of_experts(saved: Mapping[object, object], chain: int, dicts: Sequence[object], run: LegacyRun) -> bool:
    """Whether an optimizer of a chain is that of the experts: its groups say so, else it is the last one."""
    inner = saved.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else saved.get("param_groups")
    listed_groups = groups if isinstance(groups, list) else []
    flags = [own.get("is_expert_parallel") for own in listed_groups if isinstance(own, dict)]
    if any(flag is not None for flag in flags):
        return any(flags)
    return run.grid.ep > 1 and chain == len(dicts) - 1


def _check_buffers(run: LegacyRun) -> None:
    """Every rank that saved a distributed optimizer has a file of it."""
    lacking = [
        f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
        for rank in run.ranks
        if rank.buffers is None and _is_distributed(rank.root.get("optimizer"))
    ]
    if lacking:
        raise MissingFileError(
            f"{run.folder} was saved with a distributed optimizer; {counted(len(lacking), 'file')} of it missing:\n"
            f"{listed(lacking)}\nCopy them from where they were saved"
        )


def _is_distributed(saved: object) -> bool:
    members = saved if isinstance(saved, list) else [saved]
    return any(own is not None and not is_whole(own) for own in members)


def _buffers_of(rank: SavedRank, members: Sequence[_Member]) -> list[list[Buffer] | None]:
    """Buffers of every optimizer of a rank."""
    if rank.buffers is None:
        return []
    where = f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
    found = read_buffers(rank.buffers.root, where)
    if len(found) != len(members):
        raise MalformedError(f"expected buffers of {counted(len(members), 'optimizer')} in {where}; got {len(found)}")
    return found


def _ranks(run: LegacyRun, member: _Member) -> int:
    """Ranks that a buffer was cut over."""
    is_apart = member.chain is not None and member.population.held and is_expert(member.population.held[0].name)
    return data_parallel(run.arguments.topology(), expert=bool(is_apart))


def _add_groups(member: _Member, states: LegacyStates) -> None:
    """Deal out the groups of a distributed optimizer, which has no numbers of parameters."""
    inner = member.saved.get("optimizer")
    saved = inner.get("param_groups") if isinstance(inner, dict) else None
    if saved is None:
        raise UnsupportedError(f"expected param_groups in {member.population.where}; got {described(inner)}")
    groups: list[SavedGroup] = [own for own, _ in groups_of(saved, member.population.where, chain=None)]
    placed = {own.name: own for own in member.population.held if own.slot in states.tensors}
    rule = group_rule(member.population.arguments, [own.hyper for own in groups])
    shapes = {name: own.ref.shape for name, own in placed.items()}
    dealt, left = dealt_out(groups, shapes, {}, rule)
    for group, params in zip(groups, dealt, strict=True):
        number = states.group(group)
        for name in params.params:
            slot = placed[name].slot
            states.group_of[slot] = number
            if group.hyper.get(STEP) is not None:
                states.numbers[slot] = {STEP: group.hyper[STEP]}
    agreed = agreed_step(groups)
    for name in left if agreed is not None else ():
        states.numbers[placed[name].slot] = {STEP: agreed}
    states.notes.append(inferred(rule))
    states.dropped += left_open(rule, left, shapes)
    states.lost |= lost_members(rule, left, shapes)


def _rest(member: _Member) -> dict[str, object]:
    """What an optimizer has besides states and groups: the scale of the loss, above all."""
    chain = "" if member.chain is None else f"{member.chain}/"
    rest = {str(key): value for key, value in member.saved.items() if key not in _KNOWN and value is not None}
    inner = member.saved.get("optimizer")
    for key, value in inner.items() if isinstance(inner, dict) else ():
        if key not in _KNOWN:
            rest[str(key)] = value
    return {f"optimizer/{chain}{key}": value for key, value in rest.items()}
