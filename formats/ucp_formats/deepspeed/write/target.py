"""Native DeepSpeed files, as a run of the requested topology would save them; plain `load_checkpoint` reads them.

    DST/latest                                                    the tag of the source; written last
    DST/global_step100/mp_rank_00_model_states.pt                 stages 0 to 2
    DST/global_step100/[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt   stages 1 to 3, one per rank
    DST/global_step100/zero_pp_rank_{r}_mp_rank_00_model_states.pt          stage 3, one per rank
    DST/global_step100/layer_{n}-model_states.pt                  pipelines, one per layer (and tensor-parallel rank)
    DST/global_step100/layer_{n}_expert_{e}_mp_rank_00_model_states.pt      experts

Each further tensor-parallel rank and pipeline stage has the same files as `mp_rank_00`, with its number in the names.

The run that loads these files does not need `load_universal`. Unlike a universal load, a plain load restores frozen
parameters, buffers, and the hyper-parameters of every group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ucp.contract.layouts import holder_axes
from ucp.contract.registry import BY_RULE, lay_out_cuts
from ucp.core.index import WEIGHT, Index
from ucp.core.layout import AxisLayout
from ucp.core.target import TargetOptions, TargetPlan
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, UsageError, format_count
from ucp.io.torch_file.draft import FinishedFile, make_target_plan
from ucp_formats.deepspeed.tp.layout import TensorLayout
from ucp_formats.deepspeed.write.autoep import place_stacks
from ucp_formats.deepspeed.write.optimizer.groups import (
    check_stepped,
    describe_without_groups,
    filled_with_zeros,
    note_step_casts,
    optimizer_groups,
)
from ucp_formats.deepspeed.write.optimizer.states import Wrapper, choose_wrapper
from ucp_formats.deepspeed.write.pipeline.layers import infer_pipeline, layer_files, read_pipeline
from ucp_formats.deepspeed.write.pipeline.stages import (
    SETTINGS,
    Stages,
    StageSettings,
    assign_stages,
    parse_stage_settings,
)
from ucp_formats.deepspeed.write.rank_files import RankFiles
from ucp_formats.deepspeed.write.rank_views import check_degrees, check_experts, rank_views
from ucp_formats.deepspeed.write.run import EngineTarget, RunFacts, run_facts


class DeepSpeedTarget(EngineTarget):
    """Target `deepspeed`."""

    name = "deepspeed"
    settings = SETTINGS
    takes_placement = True

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files for a run of `topology`, by default the source's. Raises UsageError, MissingStateError and others."""
        wanted = _target_topology(index, topology)
        stage = wanted.zero or 0
        facts = run_facts(index, options, ranks=wanted.dp, stage=stage, tp=wanted.tp)
        facts = _add_cuts(place_stacks(facts, wanted), wanted, options)
        groups = optimizer_groups(facts)
        if stage and not groups:
            raise MissingStateError(
                f"expected optimizer groups and states, because ZeRO stage {stage} loads weights from the optimizer "
                f"files; {index.path} {describe_without_groups(index)}. Start a new optimizer (--optimizer zero), or "
                "write stage-0 model files (--topology zero=0), to load with load_module_only=True"
            )
        if groups and index.unordered:
            raise UnsupportedError(
                "expected parameters in the order of the model, because DeepSpeed's optimizer files hold no names; "
                f"the order is not known for {index.path}. Write --to deepspeed-universal, which is loaded by name "
                "(load_universal in the configuration of the run)"
            )
        # flat: all parameters of a group share one buffer and one step, so a state that one of them lacks becomes zeros
        flat = stage > 0 or (bool(groups) and choose_wrapper(facts, groups) is Wrapper.FUSED)
        check_stepped(facts, groups, flat=flat)
        drafted, notes, axes_of = _files(facts, wanted, parse_stage_settings(options.settings))
        note_step_casts(facts, groups)
        plan = make_target_plan(index, list(drafted), notes=notes, topology=wanted, axes_of=axes_of)
        plan = self._finish_plan(facts, plan, filled_with_zeros(groups) if flat else {})
        return plan if groups else _without_states(plan, index)


def _add_cuts(facts: RunFacts, wanted: Topology, options: TargetOptions) -> RunFacts:
    """The facts with the parameters of which every data-parallel rank trains a part, by the user's rules."""
    layouts = lay_out_cuts(facts.index, options.patterns, wanted.dp)
    if not layouts:
        return facts
    if wanted.zero not in (1, 2) or wanted.tp > 1 or wanted.pp > 1:
        raise TopologyError(
            f"expected zero=1 or zero=2, tp=1 and pp=1 for parameters with a rule for dp ({', '.join(layouts)}); got "
            f"{wanted}. DeepSpeed has no other files that hold the part of every data-parallel rank"
        )
    if tied := [alias for alias, name in facts.index.aliases.items() if name in layouts]:
        raise UnsupportedError(f"expected no rule for dp for tied parameters; got {', '.join(tied)}, tied to one")
    atoms = facts.index.atoms
    cuts = {
        name: TensorLayout(layout.axes[0].pattern, atoms[name].global_shape, wanted.dp, "dp", BY_RULE)
        for name, layout in layouts.items()
    }
    return replace(facts, cuts=cuts)


def _without_states(plan: TargetPlan, index: Index) -> TargetPlan:
    """The plan, with a record of the states that it leaves out because no optimizer group has their parameters."""
    lost = {atom.name: frozenset(atom.states) - {WEIGHT} for atom in index.atoms.values()}
    lost = {name: states for name, states in lost.items() if states}
    names = ", ".join(dict.fromkeys(state for states in lost.values() for state in sorted(states)))
    params = format_count(len(lost), "parameter")
    line = f"{names} of {params}: no trained parameter is in an optimizer group of the source"
    return replace(plan, lost=lost, dropped=(line, *plan.dropped)) if lost else plan


def _target_topology(index: Index, topology: Topology | None) -> Topology:
    """The run that the files are for. Raises TopologyError if its ZeRO stage is not known."""
    wanted = topology or index.topology
    if wanted.zero is not None:
        return wanted
    saved = index.topology.zero
    example = replace(wanted if topology else Topology(dp=wanted.dp), zero=1 if saved is None else saved)
    if topology is None:
        raise TopologyError(
            f"expected the topology of the run that will load the files, as in --topology {example}: {index.path} "
            f"was saved with {wanted}, and records no ZeRO stage that could be kept"
        )
    without = f". Without --topology, the files are for a run like the source: {index.topology}"
    raise TopologyError(
        f"expected the ZeRO stage of the run that will load the files, as in --topology {example}; got {wanted}. "
        f"--topology must state zero; axes that it leaves out are 1{'' if saved is None else without}"
    )


_AxesOf = Callable[[str], tuple[AxisLayout, ...]]
"""Name of a parameter to the axes of the run."""


def _files(
    facts: RunFacts, wanted: Topology, settings: StageSettings
) -> tuple[list[FinishedFile], tuple[str, ...], _AxesOf]:
    """Files of all model-parallel ranks, of layers and of experts; notes; the axes of each parameter."""
    pipeline = read_pipeline(facts) or (infer_pipeline(facts, settings.tied) if settings.partitions else None)
    experts = check_experts(facts, wanted, facts.index.atoms)
    check_degrees(facts, wanted, is_pipeline=pipeline is not None)
    if pipeline is None and settings.partitions:
        raise UsageError(
            f"--set states the layers of pipeline stages, but no pipeline saved {facts.index.path}: drop --set"
        )
    drafted, layers = list[FinishedFile](), list[FinishedFile]()
    if pipeline is None:
        stages, views = Stages(()), rank_views(facts, wanted)
    else:
        unstaged = rank_views(facts, replace(wanted, pp=1))
        stages = assign_stages(unstaged[0], pipeline, settings, wanted.pp)
        views = rank_views(facts, wanted, stages.places)
        layers = [file for view in unstaged for file in layer_files(view, pipeline)]
    notes = [*stages.notes]
    if facts.stacks.by_rank:
        notes.append(
            "expert_placement says which rank holds which experts. DeepSpeed 0.19.8 records it, but gives every rank "
            "an equal run of experts: load these files with a version that takes a placement, or write --to "
            "deepspeed-universal"
        )
    stages_from = "--set" if settings.partitions else "the stages of the source"
    for view in views:
        files, rank_notes = RankFiles(view, experts, wanted.ep, is_stage=pipeline is not None).draft_files()
        drafted += files
        notes += rank_notes

    def axes_of(param: str) -> tuple[AxisLayout, ...]:
        """Axes of the run that hold a parameter: copies of it, apart from what ZeRO and tensor parallelism split."""
        owner = experts.owner(param, wanted.ep)
        is_stack = param in facts.stacks.counts
        ranks = wanted.dp if owner is None and not is_stack else wanted.dp // wanted.ep
        return (
            *holder_axes(
                "pp", wanted.pp, stages_from, [at for at, names in enumerate(stages.places) if param in names]
            ),
            *((facts.stacks.axis(param),) if is_stack and wanted.ep > 1 else ()),
            *(() if owner is None else holder_axes("ep", wanted.ep, "the numbers of the experts", (owner,))),
            *holder_axes("tp", wanted.tp, facts.tp_known_from),
            *holder_axes("dp", ranks, f"ZeRO-{wanted.zero}"),
        )

    return [*drafted, *layers], tuple(notes), axes_of
