"""Legacy checkpoints of Megatron (`mp_rank_*`), read as an index.

1. Read the files of all ranks and check that they are consistent (`files`).
2. Read the model: names, layers, experts, rules (`model`).
3. Find the names of optimizer states, which are not recorded (`plain_optimizer`, `distributed_optimizer`).
4. Union the parts of all ranks into atoms (`atoms`); the remaining entries are extras.

With expert parallelism every rank has a chain of two optimizers, one for dense parameters and one for experts;
otherwise it has a single optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums
from ucp.core.index import STEP, AtomIndex, Extra, Index, ParamGroup
from ucp.core.tensor import DType
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import describe_value, format_value, require_mapping
from ucp.transfer.probe import Prober
from ucp_formats.megatron.arguments import check_gaps, check_recorded
from ucp_formats.megatron.groups import assign_groups, drop_rank_settings, is_by_named_optimizer, is_expert
from ucp_formats.megatron.legacy.atoms import LegacyStates, RankOptimizer, build_atoms
from ucp_formats.megatron.legacy.distributed_optimizer import SavedBuffer, add_buffers, read_buffers
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank, read_run
from ucp_formats.megatron.legacy.model import LegacyModel, RankParam, Slot, read_model
from ucp_formats.megatron.legacy.plain_optimizer import add_plain_optimizer
from ucp_formats.megatron.mesh import count_replicas
from ucp_formats.megatron.modules import with_modules
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, MODULES, SavedAs

_READ_KEYS = ("optimizer", "fp32_from_fp16_params", "state", "param_groups")
"""Entries of an optimizer that are states or groups; others, like the loss scale, are extras."""
_RANK_NUMBERS = {"rank", "local_rank"}
"""Arguments that differ between ranks by definition."""
_PER_RANK = "rng_state"
"""Extra that is kept per rank even if all ranks agree."""


def read_legacy(located: Located[SavedAs], name: str, options: SourceOptions) -> Index:
    """Index of the legacy checkpoint at `located`. `name`: of the format; `options`: may name the model family."""
    run = read_run(located.root)
    model = read_model(run, options)
    checksums = Checksums(run.records)
    states = _read_optimizers(run, model, checksums)
    _check_states(run, model, states)
    atoms = build_atoms(run, model, states)
    shapes = {atom.name: atom.global_shape for atom in atoms.values()}
    check_recorded(model.family, run.arguments.raw, shapes, str(run.folder), pads_on_load=False)
    extras, dropped = _run_extras(run, checksums)
    steps = (run.root.get(key) for key in ("iteration", "total_iters"))
    modules = [Extra(name=MODULES, value=dict(model.modules))] if model.modules else []
    unread = (
        f"{path}: {'states of a layer-wise optimizer (Muon)' if 'optimizer' in path else 'position of a data loader'}, "
        "which ucp does not read"
        for path in run.unread
    )
    return Index(
        path=str(run.folder),
        format=name,
        evidence=located.reasons,
        producer=f"Megatron (torch, checkpoint version {run.version:g})",
        topology=run.arguments.topology(),
        step=next((step for step in steps if type(step) is int), run.arguments.iteration),
        atoms=atoms,
        groups=_param_groups(run, model, states, atoms),
        aliases={
            tie.name: stored
            for tie in model.family.tied
            if tie.name not in atoms and (stored := model.family.find_tied(tie.name)) in atoms
        },
        extras=(*extras, *modules, *model.extras, *states.extras),
        files=tuple(run.files),
        records=run.records,
        notes=(*located.notes, f"model family {model.family.name}: {'; '.join(model.reasons)}", *states.notes),
        dropped=(*dropped, *states.dropped, *unread),
        lost=states.lost,
    )


def _read_optimizers(run: LegacyRun, model: LegacyModel, checksums: Checksums) -> LegacyStates:
    """States of all parameters. Raises MalformedError, MissingFileError, UnsupportedError."""
    states = LegacyStates()
    trainable = _trainable_params(model)
    arguments = with_modules(run.arguments.raw, model.modules)
    chains = [_rank_optimizers(run, rank, trainable.get(n, []), arguments) for n, rank in enumerate(run.ranks)]
    missing = [
        f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
        for rank, optimizers in zip(run.ranks, chains, strict=True)
        if rank.buffers is None and any(optimizer.saved and not optimizer.is_plain for optimizer in optimizers)
    ]
    if missing:
        raise MissingFileError(
            f"expected the files of a distributed optimizer in {run.folder}; "
            f"{format_count(len(missing), 'file is', 'files are')} missing:\n{format_list(missing)}\n"
            "Copy them from where they were saved"
        )
    extras: dict[str, dict[int, object]] = {}
    with Prober() as prober:
        for number, (rank, optimizers) in enumerate(zip(run.ranks, chains, strict=True)):
            for optimizer, buffers in zip(optimizers, _buffers_of(rank, optimizers), strict=True):
                if optimizer.is_plain:
                    add_plain_optimizer(optimizer, states, prober)
                elif buffers is not None:
                    params = optimizer.params
                    experts = optimizer.chain is not None and bool(params) and is_expert(params[0].name)
                    dp = count_replicas(run.arguments.topology(), expert=experts)
                    add_buffers(buffers, optimizer, dp, states, prober)
                    _add_groups(optimizer, states)
                prefix = "optimizer/" if optimizer.chain is None else f"optimizer/{optimizer.chain}/"
                others = {key: value for key, value in optimizer.saved.items() if value is not None}
                if optimizer.inner is not optimizer.saved:
                    others |= optimizer.inner
                for key in [key for key in others if key not in _READ_KEYS]:
                    extras.setdefault(f"{prefix}{key}", {})[number] = others[key]
    for name, values in extras.items():
        states.extras += _rank_extras(run, name, values, checksums)
    states.notes = list(dict.fromkeys(states.notes))
    states.dropped = list(dict.fromkeys(states.dropped))
    return states


def _trainable_params(model: LegacyModel) -> dict[int, list[RankParam]]:
    """Trainable tensors of every rank, each once, in registration order."""
    by_slot: dict[Slot, RankParam] = {}
    for param in model.params:
        match = model.matches.get(param.name)
        if match is not None and not match.buffer:
            by_slot.setdefault(param.slot, param)
    by_rank: dict[int, list[RankParam]] = {}
    for param in by_slot.values():
        by_rank.setdefault(param.slot.rank, []).append(param)
    return by_rank


def _rank_optimizers(
    run: LegacyRun, rank: SavedRank, params: Sequence[RankParam], arguments: Mapping[str, object]
) -> list[RankOptimizer]:
    """Optimizers of a rank that trains `params`. `arguments`: of the run, and those that its keys imply."""
    root = rank.root.get("optimizer")
    where = f"the optimizer of {rank.name}"
    if root is None:
        return []
    if not isinstance(root, list):
        saved = require_mapping(root, where)
        return [RankOptimizer(where=where, chain=None, saved=saved, params=tuple(params), arguments=arguments)]
    optimizers = []
    for chain, entry in enumerate(root):
        saved = require_mapping({} if entry is None else entry, where)
        optimizer = RankOptimizer(where=where, chain=chain, saved=saved, params=tuple(params), arguments=arguments)
        groups = optimizer.inner.get("param_groups")
        entries = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
        flags = [flag for group in entries if (flag := group.get("is_expert_parallel")) is not None]
        experts = any(flags) if flags else run.grid.ep > 1 and chain == len(root) - 1  # without flags, the last one
        chosen = tuple(param for param in params if len(root) == 1 or is_expert(param.name) == experts)
        label = f"{where} ({'experts' if experts else 'dense parameters'})"
        optimizers.append(replace(optimizer, where=label, params=chosen))
    return optimizers


def _buffers_of(rank: SavedRank, optimizers: Sequence[RankOptimizer]) -> list[list[SavedBuffer] | None]:
    """Buffers of every optimizer of a rank."""
    if rank.buffers is None:
        return [None] * len(optimizers)
    where = f"{rank.name}/{DISTRIBUTED_OPTIMIZER}"
    buffers = read_buffers(rank.buffers.root, where)
    if len(buffers) != len(optimizers):
        expected = format_count(len(optimizers), "optimizer")
        raise MalformedError(f"expected buffers of {expected} in {where}; got {len(buffers)}")
    return buffers


def _add_groups(optimizer: RankOptimizer, states: LegacyStates) -> None:
    """Assign parameters to the groups of a distributed optimizer, whose groups do not list them."""
    if optimizer.inner.get("param_groups") is None:
        got = describe_value(optimizer.saved.get("optimizer"))
        raise UnsupportedError(f"expected param_groups in {optimizer.where}; got {got}")
    groups = [group for group, _ in optimizer.groups()]
    params = {param.name: param for param in optimizer.params if param.slot in states.tensors}
    assigned = assign_groups(groups, {name: param.ref.shape for name, param in params.items()}, optimizer.arguments)
    steps = dict.fromkeys(assigned.lost, assigned.step)
    for group, members in zip(groups, assigned.groups, strict=True):
        number = states.add_group(group)
        states.group_of |= {params[name].slot: number for name in members.params}
        steps |= dict.fromkeys(members.params, group.hyper.get(STEP))
    states.numbers |= {params[name].slot: {STEP: step} for name, step in steps.items() if step is not None}
    states.notes.append(assigned.note)
    states.dropped += assigned.dropped
    states.lost |= assigned.lost


def _check_states(run: LegacyRun, model: LegacyModel, states: LegacyStates) -> None:
    """Check that no parameter of a rank lacks a state that others have. Raises MalformedError."""
    trained = {
        f"{param.name}, of {run.ranks[param.slot.rank].name}": param
        for param in model.params
        if param.slot in states.tensors
    }
    arguments, wide = run.arguments.raw, DType.FLOAT32.itemsize
    check_gaps(
        {label: frozenset(states.tensors[param.slot]) for label, param in trained.items()},
        {label: is_by_named_optimizer(arguments, param.name, param.ref.shape) for label, param in trained.items()},
        str(run.folder),
        without_master={label for label, param in trained.items() if param.ref.dtype.itemsize >= wide},
    )


def _param_groups(
    run: LegacyRun, model: LegacyModel, states: LegacyStates, atoms: Mapping[str, AtomIndex]
) -> tuple[ParamGroup, ...]:
    """Groups with the names of their parameters, in the order of the model."""
    number_of: dict[str, int] = {}
    for param in model.params:
        number = states.group_of.get(param.slot)
        if number is not None and number_of.setdefault(param.name, number) != number:
            first, other = (states.groups[n].hyper for n in (number_of[param.name], number))
            same = Checksums(()).is_same
            keys = sorted(key for key in {**first, **other} if not same(first.get(key), other.get(key)))
            differences = (
                f"{key} is {format_value(other.get(key))}, expected {format_value(first.get(key))}" for key in keys
            )
            raise MalformedError(
                f"expected the same optimizer group for {param.name} on all ranks; on "
                f"{run.ranks[param.slot.rank].name} {'; '.join(differences)}. The files are from different steps or "
                "runs: copy all files of one checkpoint"
            )
    members: list[list[str]] = [[] for _ in states.groups]
    for name in atoms:
        if name in number_of:
            members[number_of[name]].append(name)
    stepped_names = {name for name, atom in atoms.items() if STEP in atom.states}
    return tuple(
        drop_rank_settings(ParamGroup(params=tuple(names), hyper=dict(group.hyper)), stepped_names)
        for names, group in zip(members, states.groups, strict=True)
    )


def _run_extras(run: LegacyRun, checksums: Checksums) -> tuple[list[Extra], list[str]]:
    """Extras of a run, and lines for `Index.dropped`."""
    extras: list[Extra] = []
    for key in dict.fromkeys(key for rank in run.ranks for key in rank.root):
        name = str(key)
        if name == "optimizer" or name.rstrip("0123456789") == "model":
            continue
        values = {n: rank.root[key] for n, rank in enumerate(run.ranks) if rank.root.get(key) is not None}
        if name == "args" and values:
            extras.append(Extra(name=name, value=next(iter(values.values()))))
        else:
            extras += _rank_extras(run, name, values, checksums)
    first = run.ranks[0]
    items = (item for rank in run.ranks for item in rank.arguments.raw.items())
    differing = {key for key, value in items if not checksums.is_same(value, first.arguments.raw.get(key))}
    keys = sorted(differing - _RANK_NUMBERS)
    if not keys:
        return extras, []
    text = ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")
    return extras, [f"args of ranks other than {first.name}, which differ in {text}: the first rank's are kept"]


def _rank_extras(run: LegacyRun, name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for the values that ranks (by number) saved under one name: one extra if all are equal."""
    first = next(iter(values.values()), None)
    if name != _PER_RANK and all(checksums.is_same(first, value) for value in values.values()):
        return [Extra(name=name, value=first)] if values else []
    extras = []
    for number, value in values.items():
        place = run.ranks[number].place
        expert = f".ep{place.ep}" if run.grid.ep > 1 else ""
        extras.append(Extra(name=f"{name}/pp{place.pp}.tp{place.tp}{expert}", value=value))
    return extras
