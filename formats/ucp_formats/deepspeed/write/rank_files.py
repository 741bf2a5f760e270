"""Plans the files of one model-parallel rank: model states and optimizer states, in the form of the ZeRO stage.

Optimizer groups of experts are partitioned over the data-parallel ranks that hold the same experts; in their files,
each rank numbers its experts from 0 (see `experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ucp.core.index import WEIGHT
from ucp.errors import UnsupportedError
from ucp.io.torch_file.draft import FinishedFile
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.experts import ExpertNumbers, expert_holders, is_expert
from ucp_formats.deepspeed.extras import UNSTEPPED
from ucp_formats.deepspeed.read.module import EMPTY_SHAPES
from ucp_formats.deepspeed.write.autoep import expert_files, record_layers, stack_view
from ucp_formats.deepspeed.write.model_states import (
    Module,
    frozen_fragments,
    frozen_shapes,
    has_frozen,
    model_state,
    module_tensors,
    placeholders,
    shapes,
)
from ucp_formats.deepspeed.write.optimizer.groups import (
    Group,
    check_flat,
    describe_without_groups,
    group_notes,
    optimizer_groups,
)
from ucp_formats.deepspeed.write.optimizer.states import (
    GroupBuffer,
    Share,
    SubGroup,
    Wrapper,
    choose_wrapper,
    chunked_state,
    group_members,
    optimizer_state,
    shared_state,
    split_groups,
)
from ucp_formats.deepspeed.write.rank_views import narrow_index
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, RunFacts, tag


class RankFiles:
    """Plans the files of one model-parallel rank; `facts`: a view with its parameters and local shapes.

    `experts`, `ep`: the experts, and the number of ranks that they are split over. `is_stage`: whether the rank is a
    pipeline stage, whose module is in layer files.
    """

    def __init__(self, facts: RunFacts, experts: ExpertNumbers, ep: int, *, is_stage: bool) -> None:
        self.facts = facts
        self.groups = optimizer_groups(facts)
        self.experts = experts
        self.ep = ep
        self.is_stage = is_stage

    def draft_files(self) -> tuple[list[FinishedFile], tuple[str, ...]]:
        """The files, and notes on them."""
        facts, groups = self.facts, self.groups
        if facts.stage == 0:
            files, notes = self._draft_unsharded()
        else:
            check_flat(groups)
            notes = tuple(group_notes(groups, flat=True))
            if facts.stage < 3 and (count := sum(not group.params for group in groups)):
                groups = tuple(group for group in groups if group.params)
                notes = (*notes, f"parameter groups without a trained parameter are left out: {count}")
            files = list(self._draft_stage3() if facts.stage == 3 else self._draft_stages12(groups))
        for (layer, expert), names in self.experts.params_by_file(facts.index.atoms).items():
            name = f"layer_{layer}_expert_{expert}_mp_rank_{facts.mp:02d}_model_states.pt"
            draft = facts.draft(f"{tag(facts.index)}/{name}")
            dtypes = {name: facts.module_dtype(facts.index.atoms[name]) for name in names}
            files.append(draft.finish({name: draft.full(name, WEIGHT, dtype) for name, dtype in dtypes.items()}))
        return [*files, *(expert_files(facts) if facts.stage < 3 else ())], notes

    def _module(self, draft: AtomDraft) -> Module | None:
        """The module without experts, which have separate files; None for a pipeline stage, which has layer files."""
        index = self.facts.index
        atoms = {name: atom for name, atom in index.atoms.items() if not self._is_expert(name)}
        return None if self.is_stage else module_tensors(draft, replace(self.facts, index=narrow_index(index, atoms)))

    def _is_expert(self, name: str) -> bool:
        return is_expert(name) or name in self.facts.stacks.counts

    def _select_experts(self, view: RunFacts, group: Group, rank: int) -> Group:
        """`group` with only those experts that expert-parallel rank `rank` holds; `view`: with its part of stacks."""
        owners = {atom.name: self.experts.owner(atom.name, self.ep) for atom in group.params}
        kinds = {(owner is not None, self.facts.has_parts(name)): name for name, owner in owners.items()}
        if self.facts.stage and len(kinds) > 1:
            raise UnsupportedError(
                "expected parameter groups that hold only experts, only parameters with a rule for dp, or only others: "
                f"DeepSpeed requires that with ZeRO; {self.facts.index.path} has one with "
                f"{' and '.join(kinds.values())}. Give them groups of their own in the run that saves; or write "
                "experts for a run without ZeRO (--topology with zero=0)"
            )
        hyper = dict(group.hyper)
        if any(self.facts.has_parts(name) for name in owners):
            hyper |= {"moe": True, "name": f"ep_size_{self.facts.ranks}"}
        if self.experts.counts and hyper.get("moe") is True:
            hyper.setdefault("name", f"ep_size_{self.ep}")
        params = tuple(view.index.atoms[name] for name, owner in owners.items() if owner in (None, rank))
        return replace(group, params=params, hyper=hyper)

    def _draft_unsharded(self) -> tuple[list[FinishedFile], tuple[str, ...]]:
        facts, index = self.facts, self.facts.index
        first = stack_view(facts, 0)
        draft = first.draft(self._path("model", 0))
        layers = record_layers(first, place=0, holders=facts.ranks // self.ep)
        values: dict[str, object] = {"module": self._module(draft), **layers}
        if not self.groups:
            unstepped = facts.extras.get(UNSTEPPED)
            note = f"the source {describe_without_groups(index)}: load the files with load_module_only=True"
            if unstepped is not None:
                values["optimizer"] = {"state": {}, "param_groups": draft.copy_extra(unstepped)}
                note = "the optimizer was never stepped; its groups are written unchanged, with numbered parameters"
            return [draft.finish(model_state(draft, facts, 0, values))], (note,)
        kind = choose_wrapper(facts, self.groups)
        notes = list(group_notes(self.groups, flat=kind is Wrapper.FUSED))
        if kind is Wrapper.FUSED:
            check_flat(self.groups)
        if index.topology.zero != 0 and kind is not Wrapper.PLAIN:
            written = f"the optimizer is written in the form of DeepSpeed {EMULATED}'s {kind}"
            notes.insert(0, f"{written}, for an engine that computes in {facts.precision}")
        elif index.topology.zero != 0 and frozen_shapes(index):
            notes.insert(
                0,
                "an optimizer of stage 0 numbers its parameters: ucp assumes that trained parameters without elements "
                "have a number, and frozen ones have none",
            )
        files = []
        for rank in range(self.ep):
            view = stack_view(facts, rank)
            atoms = {n: atom for n, atom in view.index.atoms.items() if self.experts.owner(n, self.ep) in (None, rank)}
            view = replace(view, index=narrow_index(view.index, atoms))
            members = group_members(view, [self._select_experts(view, group, rank) for group in self.groups], kind)
            param_shapes = shapes(view.index, [[atom.name for atom in atoms] for _, atoms in members])
            if rank == 0:
                values |= {"optimizer": optimizer_state(draft, view, members, kind), "param_shapes": param_shapes}
                files.append(draft.finish(model_state(draft, facts, 0, values)))
            if self.experts.counts or layers:
                draft = view.draft(f"{tag(index)}/expp_rank_{rank}_mp_rank_{facts.mp:02d}_optim_states.pt")
                state = optimizer_state(draft, view, members, kind)
                files.append(draft.finish({"optimizer": state, "param_shapes": param_shapes}))
        return files, tuple(notes)

    def _draft_stages12(self, groups: Sequence[Group]) -> Iterator[FinishedFile]:
        facts = self.facts
        shares = self._shares(groups)
        view, first = shares[0]
        draft = facts.draft(self._path("model", 0))
        values: dict[str, object] = {
            "module": self._module(draft),
            "param_shapes": shapes(view.index, [share.buffer.layout.names for share in first]),
            "shared_params": dict(facts.index.aliases),
            **record_layers(view, place=0, holders=facts.ranks // self.ep),
        }
        if facts.stage == 2 and has_frozen(facts.index):
            values["frozen_param_shapes"] = frozen_shapes(facts.index)
            values["frozen_param_fragments"] = frozen_fragments(draft, facts, 0)
        yield draft.finish(model_state(draft, facts, 0, values))
        for rank in range(facts.ranks):
            view, on_rank = shares[rank]
            draft = view.draft(self._path("optim", rank), rank)
            yield draft.finish(self._optim(draft, shared_state(draft, view, on_rank, rank)))

    @property
    def _holders(self) -> list[tuple[int, ...]]:
        return expert_holders(ranks=self.facts.ranks, ep=self.ep, contiguous=self.facts.config.groups_experts)

    def _shares(self, groups: Sequence[Group]) -> dict[int, tuple[RunFacts, list[Share]]]:
        """The share of each data-parallel rank in every group, and facts with its part of stacks."""
        count = self.facts.ranks
        shares: dict[int, tuple[RunFacts, list[Share]]] = {}
        for ep_rank, ranks in enumerate(self._holders):
            view = stack_view(self.facts, ep_rank)
            buffers = []
            for group in groups:
                selected = self._select_experts(view, group, ep_rank)
                has_experts = any(self._is_expert(atom.name) for atom in selected.params)
                has_parts = any(view.has_parts(atom.name) for atom in selected.params)
                axis, holders = ("edp", 1) if has_parts else ("dp", len(ranks) if has_experts else count)
                buffer = GroupBuffer.of(view, selected, ranks=holders, axis=axis)
                local_names = {atom.name: self.experts.local_name(atom.name, self.ep) for atom in selected.params}
                buffers.append((buffer, local_names, has_experts))
            for at, rank in enumerate(ranks):
                shares[rank] = (
                    view,
                    [
                        Share(buffer, (at if has_experts else rank) % buffer.layout.ranks, local_names)
                        for buffer, local_names, has_experts in buffers
                    ],
                )
        return shares

    def _draft_stage3(self) -> Iterator[FinishedFile]:
        for ep_rank, ranks in enumerate(self._holders):
            view = stack_view(self.facts, ep_rank)
            groups = [self._select_experts(view, group, ep_rank) for group in self.groups]
            everyone = range(view.ranks)
            holders = [ranks if any(self._is_expert(a.name) for a in group.params) else everyone for group in groups]
            cut = list(zip(groups, split_groups(view, groups, holders), strict=True))
            for place, rank in enumerate(ranks):
                layers = record_layers(view, place=place, holders=len(ranks))
                yield from self._draft_chunks(view, cut, rank, layers)

    def _draft_chunks(
        self,
        facts: RunFacts,
        cut: Sequence[tuple[Group, Sequence[SubGroup]]],
        rank: int,
        layers: Mapping[str, object],
    ) -> Iterator[FinishedFile]:
        """Both files of a rank under stage 3; `facts`: with its part of stacks."""
        draft = facts.draft(self._path("model", rank))
        values: dict[str, object] = {
            "module": placeholders(draft, facts, rank),
            "param_shapes": shapes(facts.index, [tuple(sub.chunks.numels) for _, subs in cut for sub in subs]),
            "shared_params": dict(facts.index.aliases) if rank == 0 else {},
            **layers,
        }
        if has_frozen(facts.index):
            values["frozen_param_shapes"] = frozen_shapes(facts.index)
            values["frozen_param_fragments"] = frozen_fragments(draft, facts, rank)
        elif empty := frozen_shapes(facts.index):
            # DeepSpeed saves parameters without elements among the frozen ones. They cannot be written so here:
            # the source may lack frozen parameters, and a loader that finds one requires all of the model's
            values[EMPTY_SHAPES] = empty
        yield draft.finish(model_state(draft, facts, rank, values))
        draft = facts.draft(self._path("optim", rank))
        yield draft.finish(self._optim(draft, chunked_state(draft, facts, cut, rank)))

    def _optim(self, draft: AtomDraft, state: dict[str, object]) -> dict[str, object]:
        config = draft.copy_extra(self.facts.config.with_stage(self.facts.stage))
        return {"optimizer_state_dict": state, "ds_config": config, "ds_version": EMULATED}

    def _path(self, kind: str, rank: int) -> str:
        """Path of the "model" or "optim" states file of `rank`."""
        name = f"mp_rank_{self.facts.mp:02d}_{kind}_states.pt"
        if kind == "optim" or self.facts.stage == 3:
            name = f"zero_pp_rank_{rank}_{name}"
        if kind == "optim" and self.facts.precision is Precision.BF16:
            name = f"bf16_{name}"
        return f"{tag(self.facts.index)}/{name}"
