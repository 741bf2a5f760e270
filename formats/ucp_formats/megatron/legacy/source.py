"""The optimizer of every rank, in whichever form: whole, distributed, or a chain of either.

Where experts are parallel there are two optimizers on every rank, one of dense parameters and one of experts; else
there is one of all.

Legacy checkpoints of Megatron (`mp_rank_*`), read as an index.

1. Read the files of all ranks and check that they belong together (`files`, `grid`).
2. Read the model: names, layers, experts, rules (`model`).
3. Read the optimizer: names of states that are recorded without any (`optimizer`).
4. Put the parts of all ranks together into atoms (`atoms`), the rest into extras (`extras`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums
from ucp.core.index import STEP, AtomIndex, Extra, Index, ParamGroup
from ucp.core.tensor import DType
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import described, mapping, shown
from ucp.transfer.probe import Prober
from ucp_formats.megatron.arguments import check_gaps, check_recorded
from ucp_formats.megatron.groups import assign_groups, drop_rank_settings, is_by_named_optimizer, is_expert
from ucp_formats.megatron.legacy.atoms import LegacyStates, Optimizer, atoms_of
from ucp_formats.megatron.legacy.distributed import Buffer, add_buffers, read_buffers
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank, ranks_extras, read_run, run_extras, source_files
from ucp_formats.megatron.legacy.model import Held, LegacyModel, Slot, read_model
from ucp_formats.megatron.legacy.whole import add_whole_optimizer
from ucp_formats.megatron.mesh import count_replicas
from ucp_formats.megatron.modules import with_modules
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, MODULES, SavedAs

_KNOWN = ("optimizer", "fp32_from_fp16_params", "state", "param_groups")


def read_optimizer(run: LegacyRun, model: LegacyModel, checksums: Checksums) -> LegacyStates:
    """States of all parameters. Raises MalformedError, MissingFileError, UnsupportedError."""
    states = LegacyStates()
    trainable = _trainable(model)
    rest: dict[str, dict[int, object]] = {}
    arguments = with_modules(run.arguments.raw, model.modules)
    optimizers = [_members(run, rank, trainable.get(number, []), arguments) for number, rank in enumerate(run.ranks)]
    lacking = [
        f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
        for rank, members in zip(run.ranks, optimizers, strict=True)
        if rank.buffers is None and any(own.saved and not own.is_whole for own in members)
    ]
    if lacking:
        raise MissingFileError(
            f"{run.folder} was saved with a distributed optimizer; {counted(len(lacking), 'file')} of it missing:\n"
            f"{listed(lacking)}\nCopy them from where they were saved"
        )
    with Prober() as prober:
        for number, (rank, members) in enumerate(zip(run.ranks, optimizers, strict=True)):
            for own, buffers in zip(members, _buffers_of(rank, members), strict=True):
                if own.is_whole:
                    add_whole_optimizer(own, states, prober)
                elif buffers is not None:
                    experts = own.chain is not None and bool(own.held) and is_expert(own.held[0].name)
                    dp = count_replicas(run.arguments.topology(), expert=experts)
                    add_buffers(buffers, own, dp, states, prober)
                    _add_groups(own, states)
                prefix = "optimizer/" if own.chain is None else f"optimizer/{own.chain}/"
                others = {key: value for key, value in own.saved.items() if value is not None}
                if own.inner is not own.saved:
                    others |= own.inner
                for key in [key for key in others if key not in _KNOWN]:  # the loss scale, above all
                    rest.setdefault(f"{prefix}{key}", {})[number] = others[key]
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


def _members(run: LegacyRun, rank: SavedRank, held: Sequence[Held], arguments: Mapping[str, object]) -> list[Optimizer]:
    """Optimizers of a rank, which trains `held`; `arguments`: those of the run, with what its keys show."""
    found = rank.root.get("optimizer")
    where = f"the optimizer of {rank.name}"
    if found is None:
        return []
    if not isinstance(found, list):
        return [Optimizer(where=where, chain=None, saved=mapping(found, where), held=tuple(held), arguments=arguments)]
    members = []
    for chain, saved in enumerate(found):
        own = mapping({} if saved is None else saved, where)
        whole = Optimizer(where=where, chain=chain, saved=own, held=tuple(held), arguments=arguments)
        groups = own_groups if isinstance(own_groups := whole.inner.get("param_groups"), list) else []
        flags = [one.get("is_expert_parallel") for one in groups if isinstance(one, dict)]
        flags = [flag for flag in flags if flag is not None]  # where groups do not say it, experts come last
        experts = any(flags) if flags else run.grid.ep > 1 and chain == len(found) - 1
        chosen = tuple(one for one in held if len(found) == 1 or is_expert(one.name) == experts)
        label = f"{where} ({'experts' if experts else 'dense parameters'})"
        members.append(replace(whole, where=label, held=chosen))
    return members


def _buffers_of(rank: SavedRank, members: Sequence[Optimizer]) -> list[list[Buffer] | None]:
    """Buffers of every optimizer of a rank."""
    if rank.buffers is None:
        return [None] * len(members)
    where = f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
    buffers = read_buffers(rank.buffers.root, where)
    if len(buffers) != len(members):
        raise MalformedError(f"expected buffers of {counted(len(members), 'optimizer')} in {where}; got {len(buffers)}")
    return buffers


def _add_groups(own: Optimizer, states: LegacyStates) -> None:
    """Deal out the groups of a distributed optimizer, which has no numbers of parameters."""
    if own.inner.get("param_groups") is None:
        raise UnsupportedError(f"expected param_groups in {own.where}; got {described(own.saved.get('optimizer'))}")
    groups = [group for group, _ in own.groups()]
    placed = {held.name: held for held in own.held if held.slot in states.tensors}
    dealt = assign_groups(groups, {name: held.ref.shape for name, held in placed.items()}, own.arguments)
    steps = dict.fromkeys(dealt.lost, dealt.step)
    for group, params in zip(groups, dealt.groups, strict=True):
        number = states.group(group)
        states.group_of |= {placed[name].slot: number for name in params.params}
        steps |= dict.fromkeys(params.params, group.hyper.get(STEP))
    states.numbers |= {placed[name].slot: {STEP: step} for name, step in steps.items() if step is not None}
    states.notes.append(dealt.note)
    states.dropped += dealt.dropped
    states.lost |= dealt.lost


def read_legacy(located: Located[SavedAs], name: str, options: SourceOptions) -> Index:
    """Index of the legacy checkpoint at `located`; `name`: of the format.

    `options`: may name the family of the model.
    """
    run = read_run(located.root)
    model = read_model(run, options)
    checksums = Checksums(run.records)
    states = read_optimizer(run, model, checksums)
    _check_states(run, model, states)
    atoms = atoms_of(run, model, states)
    shapes = {own: atom.global_shape for own, atom in atoms.items()}
    check_recorded(model.family, run.arguments.raw, shapes, str(run.folder), pads_on_load=False)
    extras, dropped = run_extras(run, checksums)
    steps = (run.root.get(key) for key in ("iteration", "total_iters"))
    modules = [Extra(name=MODULES, value=dict(model.modules))] if model.modules else []
    strays = (
        f"{own}: {'states of a layer-wise optimizer (Muon)' if 'optimizer' in own else 'where a data loader stands'}, "
        "which is not read"
        for own in run.strays
    )
    return Index(
        path=str(run.folder),
        format=name,
        evidence=located.reasons,
        producer=f"Megatron (torch, checkpoint version {run.version:g})",
        topology=run.arguments.topology(),
        step=next((step for step in steps if type(step) is int), run.arguments.iteration),
        atoms=atoms,
        groups=_groups(run, model, states, atoms),
        aliases={
            tie.name: stored
            for tie in model.family.tied
            if tie.name not in atoms and (stored := model.family.find_tied(tie.name)) in atoms
        },
        extras=(
            *extras,
            *modules,
            *model.extras,
            *states.extras,
        ),
        files=tuple(source_files(run)),
        records=run.records,
        notes=(
            *located.notes,
            f"model family {model.family.name}: {'; '.join(model.reasons)}",
            *states.notes,
        ),
        dropped=(*dropped, *states.dropped, *strays),
        lost=states.lost,
    )


def _check_states(run: LegacyRun, model: LegacyModel, states: LegacyStates) -> None:
    """Prove that no parameter of a rank lacks a state that others have. Raises MalformedError."""
    trained = {
        f"{own.name}, of {run.ranks[own.slot.rank].name}": own for own in model.held if own.slot in states.tensors
    }
    check_gaps(
        {label: frozenset(states.tensors[own.slot]) for label, own in trained.items()},
        {label: is_by_named_optimizer(run.arguments.raw, own.name, own.ref.shape) for label, own in trained.items()},
        str(run.folder),
        without_master={label for label, own in trained.items() if own.ref.dtype.itemsize >= DType.FLOAT32.itemsize},
    )


def _groups(
    run: LegacyRun, model: LegacyModel, states: LegacyStates, atoms: Mapping[str, AtomIndex]
) -> tuple[ParamGroup, ...]:
    """Groups with the names of their parameters, in the order of the model."""
    number_of: dict[str, int] = {}
    for held in model.held:
        number = states.group_of.get(held.slot)
        if number is not None and number_of.setdefault(held.name, number) != number:
            settings, others = (states.groups[at].hyper for at in (number_of[held.name], number))
            same = Checksums(()).is_same
            keys = sorted(key for key in {**settings, **others} if not same(settings.get(key), others.get(key)))
            told = ", ".join(f"{key} is {shown(settings.get(key))} and {shown(others.get(key))}" for key in keys)
            raise MalformedError(
                f"expected the same settings of an optimizer group on all ranks; of {held.name} {told}, on "
                f"{run.ranks[held.slot.rank].name}. The files are of different steps or runs: copy one checkpoint"
            )
    members: list[list[str]] = [[] for _ in states.groups]
    for name in atoms:
        if name in number_of:
            members[number_of[name]].append(name)
    stepped = {name for name, atom in atoms.items() if STEP in atom.states}
    return tuple(
        drop_rank_settings(ParamGroup(params=tuple(own), hyper=dict(group.hyper)), stepped)
        for own, group in zip(members, states.groups, strict=True)
    )
