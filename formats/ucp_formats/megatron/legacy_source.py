"""Legacy checkpoints of Megatron (`mp_rank_*`), read as an index.

1. Read the files of all ranks and check that they belong together (`legacy_files`, `legacy_grid`).
2. Read the model: names, layers, experts, rules (`legacy_model`).
3. Read the optimizer: names of states that are recorded without any (`legacy_optimizer`).
4. Put the parts of all ranks together into atoms (`legacy_atoms`), the rest into extras (`legacy_extras`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.atom import AtomIndex, Index, ParamGroup
from ucp.errors import MalformedError, listed
from ucp.io.sameness import Checksums
from ucp.state import STEP
from ucp_formats.megatron.family_choice import ChooseFamily
from ucp_formats.megatron.folder import Located
from ucp_formats.megatron.group_rules import rank_free
from ucp_formats.megatron.legacy_atoms import atoms_of
from ucp_formats.megatron.legacy_extras import run_extras
from ucp_formats.megatron.legacy_files import LegacyRun, read_run, source_files
from ucp_formats.megatron.legacy_model import LegacyModel, read_model
from ucp_formats.megatron.legacy_optimizer import read_optimizer
from ucp_formats.megatron.legacy_states import LegacyStates

__all__ = ["read_legacy"]


def read_legacy(located: Located, name: str, choose: ChooseFamily) -> Index:
    """Index of the legacy checkpoint at `located`; `name`: of the format.

    `choose`: gives the family of the model.
    """
    run = read_run(located.root)
    model = read_model(run, choose)
    checksums = Checksums(run.records)
    states = read_optimizer(run, model, checksums)
    atoms = atoms_of(run, model, states)
    extras, dropped = run_extras(run, checksums)
    return Index(
        path=str(run.folder),
        format=name,
        evidence=located.reasons,
        producer=f"Megatron (torch, checkpoint version {run.version:g})",
        topology=run.arguments.topology(),
        step=_iteration(run),
        atoms=atoms,
        groups=_groups(model, states, atoms),
        aliases=_aliases(model, atoms),
        extras=(*extras, *model.extras, *states.extras),
        files=tuple(source_files(run)),
        records=run.records,
        notes=(f"model family {model.family.name}: {'; '.join(model.reasons)}", *model.notes, *states.notes),
        dropped=(*dropped, *states.dropped, *_strays(run)),
    )


def _iteration(run: LegacyRun) -> int | None:
    for key in ("iteration", "total_iters"):
        found = run.root.get(key)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return run.arguments.iteration


def _groups(model: LegacyModel, states: LegacyStates, atoms: Mapping[str, AtomIndex]) -> tuple[ParamGroup, ...]:
    """Groups with the names of their parameters, in the order of the model."""
    number_of: dict[str, int] = {}
    torn: dict[str, None] = {}
    for held in model.held:
        number = states.group_of.get(held.slot)
        if number is not None and number_of.setdefault(held.name, number) != number:
            torn[held.name] = None
    if torn:
        raise MalformedError(
            f"expected every parameter in one optimizer group; ranks have {len(torn)} in groups of other settings:\n"
            f"{listed(torn)}\nThe files are of different runs"
        )
    members: list[list[str]] = [[] for _ in states.groups]
    for name in atoms:
        if name in number_of:
            members[number_of[name]].append(name)
    counted = {name for name, atom in atoms.items() if STEP in atom.states}
    return tuple(
        rank_free(ParamGroup(params=tuple(own), hyper=dict(group.hyper)), counted)
        for own, group in zip(members, states.groups, strict=True)
    )


def _aliases(model: LegacyModel, atoms: Mapping[str, AtomIndex]) -> dict[str, str]:
    """Second names of tied parameters."""
    pairs = ((tie.name, model.family.tied_to(tie.name)) for tie in model.family.tied)
    return {alias: stored for alias, stored in pairs if stored is not None and stored in atoms and alias not in atoms}


def _strays(run: LegacyRun) -> Iterator[str]:
    for name in run.strays:
        what = "states of a layer-wise optimizer (Muon)" if "optimizer" in name else "where a data loader stands"
        yield f"{name}: {what}, which is not read"
