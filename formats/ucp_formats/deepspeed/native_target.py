"""Native DeepSpeed files: as if a run of the asked topology had saved them, for a plain `load_checkpoint`.

    DST/latest                                                    the tag; written last
    DST/global_step100/mp_rank_00_model_states.pt                 stages 0 to 2
    DST/global_step100/[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt   stages 1 to 3, one per rank
    DST/global_step100/zero_pp_rank_{r}_mp_rank_00_model_states.pt          stage 3, one per rank
    DST/global_step100/layer_{n}-model_states.pt                  pipelines, one per layer (and tensor-parallel rank)
    DST/global_step100/layer_{n}_expert_{e}_mp_rank_00_model_states.pt      experts

Tensor-parallel ranks and pipeline stages have the files of `mp_rank_00` each, under a number of their own.

No `load_universal` is needed, and what a universal load leaves out is there: frozen parameters, buffers, and the
hyper-parameters of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ucp.atom import Index
from ucp.errors import MissingStateError, UsageError
from ucp.target import OutputFile, Receipt, TargetOptions, TargetPlan
from ucp.topology import Topology
from ucp_formats.deepspeed.file_draft import Drafted
from ucp_formats.deepspeed.missing_states import native_notes
from ucp_formats.deepspeed.pipeline_target import layer_files
from ucp_formats.deepspeed.rank_files import RankFiles, groups_of
from ucp_formats.deepspeed.rank_views import check_experts, pipeline_of, rank_views
from ucp_formats.deepspeed.run_facts import RunFacts, run_facts, tag
from ucp_formats.deepspeed.target_plan import pointer_file, target_plan

__all__ = ["DeepSpeedTarget"]


class DeepSpeedTarget:
    """Target `deepspeed`."""

    name = "deepspeed"

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files of a run of `topology`; by default the source's own. Raises UsageError, MissingStateError."""
        wanted = _wanted(index, topology, options)
        stage = wanted.zero or 0
        facts = run_facts(index, options, ranks=wanted.dp, stage=stage)
        groups = groups_of(facts)
        if stage and not groups:
            raise MissingStateError(
                f"expected optimizer groups and states, which ZeRO stage {stage} keeps the weights with; {index.path} "
                "holds weights only. Write stage-0 model files (--topology zero=0), to load with load_module_only=True"
            )
        drafted, notes = _files(facts, wanted)
        lost = native_notes(groups, stage=stage, precision=facts.precision)
        return target_plan(index, list(drafted), notes=(*facts.extras.notes(), *notes, *lost), topology=wanted)

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
    if options.layout or options.compress:
        raise UsageError("DeepSpeed files have one layout and no compression; drop --layout and --compress")
    return wanted


def _files(facts: RunFacts, wanted: Topology) -> tuple[list[Drafted], tuple[str, ...]]:
    """Files of all model-parallel ranks, of layers and of experts."""
    pipeline = pipeline_of(facts)
    numbered = check_experts(facts, wanted, facts.index.atoms)
    drafted: list[Drafted] = []
    notes: list[str] = []
    for own in rank_views(facts, wanted, pipeline):
        files, said = RankFiles(own, numbered, wanted.ep, is_stage=pipeline is not None).drafted()
        drafted += files
        notes += said
    if pipeline is not None:
        for own in rank_views(facts, replace(wanted, pp=1), pipeline):
            drafted += layer_files(own, pipeline)
    return drafted, tuple(notes)
