"""Native DeepSpeed files: as if a run of the asked topology had saved them, for a plain `load_checkpoint`.

    DST/latest                                                    the tag; written last
    DST/global_step100/mp_rank_00_model_states.pt                 stages 0 to 2
    DST/global_step100/[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt   stages 1 to 3, one per rank
    DST/global_step100/zero_pp_rank_{r}_mp_rank_00_model_states.pt          stage 3, one per rank

No `load_universal` is needed, and what a universal load leaves out is there: frozen parameters, buffers, and the
hyper-parameters of every group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucp.atom import Index
from ucp.errors import MissingStateError, UnsupportedError, UsageError
from ucp.target import OutputFile, Receipt, TargetOptions, TargetPlan
from ucp.topology import Topology
from ucp_formats.deepspeed import chunked_optimizer, flat_optimizer, whole_optimizer
from ucp_formats.deepspeed.file_draft import Drafted, FileDraft
from ucp_formats.deepspeed.model_states import (
    frozen_fragments,
    frozen_shapes,
    has_frozen,
    model_state,
    module_tensors,
    placeholders,
    shapes,
)
from ucp_formats.deepspeed.optimizer_groups import Group, check_flat, optimizer_groups
from ucp_formats.deepspeed.run_config import Precision
from ucp_formats.deepspeed.run_facts import EMULATED, RunFacts, run_facts, tag
from ucp_formats.deepspeed.target_plan import group_notes, pointer_file, target_plan

__all__ = ["DeepSpeedTarget"]


class DeepSpeedTarget:
    """Target `deepspeed`."""

    name = "deepspeed"

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files of a run of `topology`; by default the source's own. Raises UsageError, MissingStateError."""
        wanted = _wanted(index, topology, options)
        stage = wanted.zero or 0
        facts = run_facts(index, options, ranks=wanted.dp, stage=stage)
        groups = optimizer_groups(index, options.dtypes) if index.groups else ()
        if stage and not groups:
            raise MissingStateError(
                f"expected optimizer groups and states, which ZeRO stage {stage} keeps the weights with; {index.path} "
                "holds weights only. Write stage-0 model files (--topology zero=0), to load with load_module_only=True"
            )
        drafted, notes = _stage0(facts, groups) if stage == 0 else _partitioned(facts, groups)
        return target_plan(index, list(drafted), notes=(*facts.extras.notes(), *notes))

    def seal(
        self,
        index: Index,
        plan: TargetPlan,
        receipts: Sequence[Receipt],  # the protocol's
    ) -> tuple[OutputFile, ...]:
        """`latest`, which makes the tag the one to load."""
        return (pointer_file("latest", tag(index)),)


def _wanted(index: Index, topology: Topology | None, options: TargetOptions) -> Topology:
    wanted = topology or index.topology
    if wanted.zero is None:
        raise UsageError(
            "expected the ZeRO stage of the run that will load the files; write it like --topology dp=4,zero=3"
        )
    odd = [axis for axis in ("tp", "pp", "ep", "cp") if getattr(wanted, axis) > 1]
    if odd:
        raise UnsupportedError(
            f"expected a topology of dp and zero; got {wanted}. {', '.join(odd)} cannot be written yet"
        )
    if options.layout or options.compress:
        raise UsageError("DeepSpeed files have one layout and no compression; drop --layout and --compress")
    return wanted


def _stage0(facts: RunFacts, groups: Sequence[Group]) -> tuple[list[Drafted], tuple[str, ...]]:
    draft = FileDraft(_model_path(facts), facts.index)
    own: dict[str, object] = {"module": module_tensors(draft, facts)}
    if not groups:
        note = "the source holds weights only: load the files with load_module_only=True"
        return [draft.finish(model_state(draft, facts, 0, own))], (note,)
    kind = whole_optimizer.wrapper(facts, groups)
    notes = tuple(_stage0_notes(facts, kind))
    if kind is whole_optimizer.Wrapper.FUSED:
        check_flat(groups)
        notes = (*notes, *group_notes(groups))
    own["optimizer"] = whole_optimizer.optimizer_state(draft, facts, groups, kind)
    return [draft.finish(model_state(draft, facts, 0, own))], notes


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


def _partitioned(facts: RunFacts, groups: Sequence[Group]) -> tuple[list[Drafted], tuple[str, ...]]:
    check_flat(groups)
    notes = group_notes(groups)
    if facts.stage == 3:
        return list(_stage3(facts, groups)), notes
    kept = [group for group in groups if group.params]
    if len(kept) < len(groups):
        notes = (*notes, f"{len(groups) - len(kept)} parameter groups without a trained parameter are left out")
    return list(_stages12(facts, kept)), notes


def _stages12(facts: RunFacts, groups: Sequence[Group]) -> Iterator[Drafted]:
    flats = flat_optimizer.buffers(facts, groups)
    draft = FileDraft(_model_path(facts), facts.index)
    own: dict[str, object] = {
        "module": module_tensors(draft, facts),
        "param_shapes": shapes(facts.index, [flat.names for flat in flats]),
        "shared_params": dict(facts.index.aliases),
    }
    if facts.stage == 2 and has_frozen(facts.index):
        own["frozen_param_shapes"] = frozen_shapes(facts.index)
        own["frozen_param_fragments"] = frozen_fragments(draft, facts, 0)
    yield draft.finish(model_state(draft, facts, 0, own))
    for rank in range(facts.ranks):
        draft = FileDraft(_optim_path(facts, rank), facts.index)
        yield draft.finish(_optim(draft, facts, flat_optimizer.optimizer_state(draft, facts, groups, flats, rank)))


def _stage3(facts: RunFacts, groups: Sequence[Group]) -> Iterator[Drafted]:
    cut = list(zip(groups, chunked_optimizer.split(facts, groups), strict=True))
    for rank in range(facts.ranks):
        draft = FileDraft(_model_path(facts, rank), facts.index)
        own: dict[str, object] = {
            "module": placeholders(draft, facts, rank),
            "param_shapes": shapes(facts.index, [sub.names for _, subs in cut for sub in subs]),
            "shared_params": dict(facts.index.aliases) if rank == 0 else {},
        }
        if has_frozen(facts.index):
            own["frozen_param_shapes"] = frozen_shapes(facts.index)
            own["frozen_param_fragments"] = frozen_fragments(draft, facts, rank)
        yield draft.finish(model_state(draft, facts, rank, own))
        draft = FileDraft(_optim_path(facts, rank), facts.index)
        yield draft.finish(_optim(draft, facts, chunked_optimizer.optimizer_state(draft, facts, cut, rank)))


def _optim(draft: FileDraft, facts: RunFacts, state: dict[str, object]) -> dict[str, object]:
    config = draft.carried(facts.config.staged(facts.stage))
    return {"optimizer_state_dict": state, "ds_config": config, "ds_version": EMULATED}


def _model_path(facts: RunFacts, rank: int = 0) -> str:
    name = f"zero_pp_rank_{rank}_mp_rank_00" if facts.stage == 3 else "mp_rank_00"
    return f"{tag(facts.index)}/{name}_model_states.pt"


def _optim_path(facts: RunFacts, rank: int) -> str:
    prefix = "bf16_" if facts.precision is Precision.BF16 else ""
    return f"{tag(facts.index)}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
