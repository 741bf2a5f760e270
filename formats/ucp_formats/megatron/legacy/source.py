"""Legacy checkpoints of Megatron (`mp_rank_*`), read as an index.

1. Read the files of all ranks and check that they belong together (`files`, `grid`).
2. Read the model: names, layers, experts, rules (`model`).
3. Read the optimizer: names of states that are recorded without any (`optimizer`).
4. Put the parts of all ranks together into atoms (`atoms`), the rest into extras (`extras`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.rank_extras import Checksums
from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, ParamGroup
from ucp.core.names import STEP
from ucp.errors import MalformedError, counted, listed
from ucp.io.pickle.fields import shown
from ucp_formats.megatron.legacy.atoms import atoms_of
from ucp_formats.megatron.legacy.files import LegacyRun, read_run, run_extras, source_files
from ucp_formats.megatron.legacy.model import LegacyModel, read_model
from ucp_formats.megatron.legacy.optimizer.forms import read_optimizer
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates
from ucp_formats.megatron.locate import SavedAs
from ucp_formats.megatron.param_groups.rules import is_by_named_optimizer, rank_free
from ucp_formats.megatron.run.modules import modules_extra
from ucp_formats.megatron.run.recorded_sizes import check_gaps, check_recorded

__all__ = ["read_legacy"]


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
    return Index(
        path=str(run.folder),
        format=name,
        evidence=located.reasons,
        producer=f"Megatron (torch, checkpoint version {run.version:g})",
        topology=run.arguments.topology(),
        step=_iteration(run),
        atoms=atoms,
        groups=_groups(run, model, states, atoms),
        aliases=_aliases(model, atoms),
        extras=(*extras, *modules_extra(model.modules), *model.extras, *states.extras),
        files=tuple(source_files(run)),
        records=run.records,
        notes=(
            *located.notes,
            f"model family {model.family.name}: {'; '.join(model.reasons)}",
            *states.notes,
        ),
        dropped=(*dropped, *states.dropped, *_strays(run)),
        lost=states.lost,
    )


def _iteration(run: LegacyRun) -> int | None:
    found = (run.root.get(key) for key in ("iteration", "total_iters"))
    return next((own for own in found if type(own) is int), run.arguments.iteration)


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
    torn: dict[tuple[int, int], dict[str, tuple[str, str]]] = {}
    rank_of: dict[str, str] = {}
    for held in model.held:
        number = states.group_of.get(held.slot)
        rank = run.ranks[held.slot.rank].name
        if number is not None and number_of.setdefault(held.name, number) != number:
            torn.setdefault((number_of[held.name], number), {})[held.name] = (rank_of[held.name], rank)
        elif number is not None:
            rank_of.setdefault(held.name, rank)
    if torn:
        raise MalformedError(_torn(torn, states))
    members: list[list[str]] = [[] for _ in states.groups]
    for name in atoms:
        if name in number_of:
            members[number_of[name]].append(name)
    stepped = {name for name, atom in atoms.items() if STEP in atom.states}
    return tuple(
        rank_free(ParamGroup(params=tuple(own), hyper=dict(group.hyper)), stepped)
        for own, group in zip(members, states.groups, strict=True)
    )


def _torn(torn: Mapping[tuple[int, int], Mapping[str, tuple[str, str]]], states: LegacyStates) -> str:
    """That ranks have parameters in groups of other settings. `torn`: pairs of groups, parameters, and which ranks."""
    lines = []
    same = Checksums(()).same
    for pair, names in torn.items():
        first, ranks = next(iter(names.items()))
        own, others = (states.groups[number].hyper for number in pair)
        keys = sorted(key for key in own.keys() | others.keys() if not same(own.get(key), others.get(key)))
        told = (f"{key}: {_value(own, key)} on {ranks[0]}, {_value(others, key)} on {ranks[1]}" for key in keys)
        lines.append(f"{'; '.join(told)} ({counted(len(names), 'parameter')} such as {first})")
    return (
        "expected the same settings of an optimizer group on all ranks; got\n"
        f"{listed(lines)}\nThe files are of different steps or runs: copy all of one checkpoint"
    )


def _value(hyper: Mapping[str, object], key: str) -> str:
    return shown(hyper[key]) if key in hyper else "not there"


def _aliases(model: LegacyModel, atoms: Mapping[str, AtomIndex]) -> dict[str, str]:
    """Second names of tied parameters."""
    pairs = ((tie.name, model.family.tied_to(tie.name)) for tie in model.family.tied)
    return {alias: stored for alias, stored in pairs if stored and stored in atoms and alias not in atoms}


def _strays(run: LegacyRun) -> Iterator[str]:
    for name in run.strays:
        what = "states of a layer-wise optimizer (Muon)" if "optimizer" in name else "where a data loader stands"
        yield f"{name}: {what}, which is not read"
