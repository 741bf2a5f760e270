"""The files of one model-parallel rank: model states and optimizer states, in the shape of the ZeRO stage.

The experts of a layer are dealt out in stretches: expert-parallel rank `e` has those with the numbers `e * n` to
`e * n + n - 1`. Their optimizer groups are cut over the data-parallel ranks that hold the same experts, and name an
expert by its number on the rank (`experts`, for reading, says the same).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ucp.core.names import WEIGHT
from ucp.errors import UnsupportedError
from ucp.io.torch_file.draft import Drafted
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.experts import Numbered, holders
from ucp_formats.deepspeed.extras import UNSTEPPED
from ucp_formats.deepspeed.read.model_states import EMPTY_SHAPES
from ucp_formats.deepspeed.write.model_states import (
    Module,
    frozen_fragments,
    frozen_shapes,
    has_frozen,
    lost_shapes,
    model_state,
    module_tensors,
    placeholders,
    shapes,
)
from ucp_formats.deepspeed.write.optimizer import zero0 as whole_optimizer
from ucp_formats.deepspeed.write.optimizer.groups import (
    Group,
    check_flat,
    group_notes,
    optimizer_groups,
    without_groups,
)
from ucp_formats.deepspeed.write.optimizer.sharded import GroupBuffer, Share, chunked_state, shared_state, split
from ucp_formats.deepspeed.write.rank_views import narrowed
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, RunFacts, tag


class ExpertRanks:
    """Optimizer groups as each expert-parallel rank has them."""

    def __init__(self, facts: RunFacts, groups: Sequence[Group], numbered: Numbered, ep: int) -> None:
        contiguous = facts.config.raw.get("use_data_before_expert_parallelism") is True
        self._facts = facts
        self._numbered = numbered
        self._ep = ep
        self._subsets = holders(ranks=facts.ranks, ep=ep, contiguous=contiguous)
        self._groups = [[self._narrowed(group, rank) for group in groups] for rank in range(ep)]

    def shares(self, rank: int) -> list[Share]:
        """What the file of data-parallel rank `rank` has."""
        (own,) = (number for number, subset in enumerate(self._subsets) if rank in subset)
        place = self._subsets[own].index(rank)
        every = self._facts.ranks
        shares = self._shares[own]
        return [replace(one, place=rank if one.buffer.layout.ranks == every else place) for one in shares]

    @cached_property
    def _shares(self) -> list[list[Share]]:
        """The first share of every buffer of each expert-parallel rank."""
        subsets = zip(self._groups, self._subsets, strict=True)
        return [[self._first_share(group, len(subset)) for group in groups] for groups, subset in subsets]

    def _first_share(self, group: Group, holders: int) -> Share:
        owners = {self._numbered.owner(atom.name, self._ep) for atom in group.params}
        renamed = {atom.name: self._numbered.local(atom.name, self._ep) for atom in group.params}
        ranks = self._facts.ranks if owners <= {None} else holders
        return Share(GroupBuffer.of(self._facts, group, ranks=ranks), 0, renamed)

    def views(self) -> Iterator[tuple[RunFacts, Sequence[Group]]]:
        """Facts and groups of each expert-parallel rank, with its own experts only."""
        for rank, groups in enumerate(self._groups):
            atoms = {
                name: atom
                for name, atom in self._facts.index.atoms.items()
                if self._numbered.owner(name, self._ep) in (None, rank)
            }
            yield replace(self._facts, index=narrowed(self._facts.index, atoms)), groups

    def _narrowed(self, group: Group, rank: int) -> Group:
        """A group with the experts of one rank only."""
        owners = [self._numbered.owner(atom.name, self._ep) for atom in group.params]
        if self._facts.stage and None in owners and any(owner is not None for owner in owners):
            expert = next(atom.name for atom, owner in zip(group.params, owners, strict=True) if owner is not None)
            other = group.params[owners.index(None)].name
            raise UnsupportedError(
                "expected parameter groups of experts alone, as every run with ZeRO has them; "
                f"{self._facts.index.path} has one with {expert} and {other}. Write files of a run without ZeRO "
                "(--topology with zero=0)"
            )
        params = tuple(atom for atom, owner in zip(group.params, owners, strict=True) if owner in (None, rank))
        hyper = dict(group.hyper)
        if hyper.get("moe") is True:
            hyper.setdefault("name", f"ep_size_{self._ep}")
        return replace(group, params=params, hyper=hyper)


def without_experts(facts: RunFacts, numbered: Numbered) -> RunFacts:
    """Facts with the parameters that are in the model-states file."""
    atoms = {name: atom for name, atom in facts.index.atoms.items() if numbered.owner(name, 1) is None}
    return replace(facts, index=narrowed(facts.index, atoms))


def expert_files(facts: RunFacts, numbered: Numbered) -> Iterator[Drafted]:
    """A file for each expert of each layer."""
    for (layer, expert), names in numbered.by_file(facts.index.atoms).items():
        draft = facts.draft(f"{tag(facts.index)}/layer_{layer}_expert_{expert}_mp_rank_{facts.mp:02d}_model_states.pt")
        dtypes = {name: facts.module_dtype(facts.index.atoms[name]) for name in names}
        yield draft.finish({name: draft.whole(name, WEIGHT, dtype) for name, dtype in dtypes.items()})


class RankFiles:
    """Decides the files of one rank; `facts`: with its own parameters and shapes.

    `numbered`, `ep`: experts, and the ranks they are dealt out to. `is_stage`: whether it is a stage of a pipeline,
    whose modules are in files of layers.
    """

    def __init__(self, facts: RunFacts, numbered: Numbered, ep: int, *, is_stage: bool) -> None:
        self.facts = facts
        self.groups = optimizer_groups(facts)
        self.numbered = numbered
        self.experts = ExpertRanks(facts, self.groups, numbered, ep) if numbered.counts else None
        self.is_stage = is_stage

    def drafted(self) -> tuple[list[Drafted], tuple[str, ...]]:
        """The files, and what is to be said of them."""
        files, notes = self._unsharded() if self.facts.stage == 0 else self._partitioned()
        return [*files, *expert_files(self.facts, self.numbered)], notes

    def _module(self, draft: AtomDraft) -> Module | None:
        return None if self.is_stage else module_tensors(draft, without_experts(self.facts, self.numbered))

    def _unsharded(self) -> tuple[list[Drafted], tuple[str, ...]]:
        facts = self.facts
        draft = facts.draft(self._model_path())
        own: dict[str, object] = {"module": self._module(draft)}
        unstepped = facts.extras.get(UNSTEPPED)
        if not self.groups and unstepped is not None:
            own["optimizer"] = {"state": {}, "param_groups": draft.carried(unstepped)}
            note = (
                "the optimizer had not stepped; its groups are written as they were, by the numbers of its parameters"
            )
            return [draft.finish(model_state(draft, facts, 0, own))], (note,)
        if not self.groups:
            note = f"the source {without_groups(facts.index)}: load the files with load_module_only=True"
            return [draft.finish(model_state(draft, facts, 0, own))], (note,)
        kind = whole_optimizer.wrapper(facts, self.groups)
        flat = kind is whole_optimizer.Wrapper.FUSED
        if flat:
            check_flat(self.groups)
        notes = (*_stage0_notes(facts, kind), *group_notes(self.groups, flat=flat))
        views: list[tuple[RunFacts, Sequence[Group]]] = [(facts, self.groups)]
        views = list(self.experts.views()) if self.experts else views
        own |= self._whole_optimizer(draft, *views[0], kind)
        files = [draft.finish(model_state(draft, facts, 0, own))]
        for number, (view, groups) in enumerate(views if self.experts else ()):
            name = f"expp_rank_{number}_mp_rank_{facts.mp:02d}_optim_states.pt"
            draft = view.draft(f"{tag(facts.index)}/{name}")
            files.append(draft.finish(self._whole_optimizer(draft, view, groups, kind)))
        return files, notes

    def _whole_optimizer(
        self, draft: AtomDraft, facts: RunFacts, groups: Sequence[Group], kind: whole_optimizer.Wrapper
    ) -> dict[str, object]:
        counted = whole_optimizer.members(facts, groups, kind)
        return {
            "optimizer": whole_optimizer.optimizer_state(draft, facts, counted, kind),
            "param_shapes": shapes(facts.index, [[atom.name for atom in atoms] for _, atoms in counted]),
        }

    def _partitioned(self) -> tuple[list[Drafted], tuple[str, ...]]:
        check_flat(self.groups)
        notes = tuple(group_notes(self.groups, flat=True))
        if self.facts.stage == 3:
            return list(self._stage3()), notes
        kept = [group for group in self.groups if group.params]
        if len(kept) < len(self.groups):
            left = len(self.groups) - len(kept)
            notes = (*notes, f"{left} parameter groups without a trained parameter are left out")
        return list(self._stages12(kept)), notes

    def _stages12(self, groups: Sequence[Group]) -> Iterator[Drafted]:
        facts = self.facts
        draft = facts.draft(self._model_path())
        whole = [Share(GroupBuffer.of(facts, group, ranks=facts.ranks), 0) for group in groups]
        shares = self.experts.shares(0) if self.experts else whole
        own: dict[str, object] = {
            "module": self._module(draft),
            "param_shapes": shapes(facts.index, [share.buffer.layout.names for share in shares]),
            "shared_params": dict(facts.index.aliases),
        }
        if facts.stage == 2 and has_frozen(facts.index):
            own["frozen_param_shapes"] = frozen_shapes(facts.index)
            own["frozen_param_fragments"] = frozen_fragments(draft, facts, 0)
        yield draft.finish(model_state(draft, facts, 0, own))
        for rank in range(facts.ranks):
            shares = self.experts.shares(rank) if self.experts else [replace(share, place=rank) for share in shares]
            draft = facts.draft(self._optim_path(rank))
            yield draft.finish(self._optim(draft, shared_state(draft, facts, shares, rank)))

    def _stage3(self) -> Iterator[Drafted]:
        facts = self.facts
        cut = list(zip(self.groups, split(facts, self.groups), strict=True))
        for rank in range(facts.ranks):
            draft = facts.draft(self._model_path(rank))
            own: dict[str, object] = {
                "module": placeholders(draft, facts, rank),
                "param_shapes": shapes(facts.index, [sub.names for _, subs in cut for sub in subs]),
                "shared_params": dict(facts.index.aliases) if rank == 0 else {},
            }
            if has_frozen(facts.index):
                own["frozen_param_shapes"] = frozen_shapes(facts.index)
                own["frozen_param_fragments"] = frozen_fragments(draft, facts, rank)
            elif empty := lost_shapes(facts.index):
                own[EMPTY_SHAPES] = empty
            yield draft.finish(model_state(draft, facts, rank, own))
            draft = facts.draft(self._optim_path(rank))
            yield draft.finish(self._optim(draft, chunked_state(draft, facts, cut, rank)))

    def _optim(self, draft: AtomDraft, state: dict[str, object]) -> dict[str, object]:
        config = draft.carried(self.facts.config.staged(self.facts.stage))
        return {"optimizer_state_dict": state, "ds_config": config, "ds_version": EMULATED}

    def _model_path(self, rank: int = 0) -> str:
        name = f"mp_rank_{self.facts.mp:02d}"
        name = f"zero_pp_rank_{rank}_{name}" if self.facts.stage == 3 else name
        return f"{tag(self.facts.index)}/{name}_model_states.pt"

    def _optim_path(self, rank: int) -> str:
        prefix = "bf16_" if self.facts.precision is Precision.BF16 else ""
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{self.facts.mp:02d}_optim_states.pt"
        return f"{tag(self.facts.index)}/{name}"


def _stage0_notes(facts: RunFacts, kind: whole_optimizer.Wrapper) -> Iterator[str]:
    if facts.index.topology.zero == 0:
        return
    if kind is not whole_optimizer.Wrapper.PLAIN:
        yield f"the optimizer is written as {kind} of DeepSpeed {EMULATED} keeps it, for an engine of {facts.precision}"
    elif frozen_shapes(facts.index):
        yield (
            "an optimizer of stage 0 counts its parameters: frozen ones are taken not to be among them, trained ones "
            "without elements to be"
        )
