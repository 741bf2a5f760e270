"""The source as each model-parallel rank of a target sees it: its parameters, with local shapes.

The code that writes the files of a data-parallel run then writes those of one model-parallel rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, format_list
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.experts import ExpertNumbers
from ucp_formats.deepspeed.tp.layout import TensorLayout, shared_divisors
from ucp_formats.deepspeed.write.pipeline.layers import is_pipeline as was_pipeline
from ucp_formats.deepspeed.write.run import RunFacts


def rank_views(
    facts: RunFacts,
    wanted: Topology,
    stages: Sequence[Mapping[str, int]] | None = None,
    *,
    uncut: Collection[str] = (),
) -> list[RunFacts]:
    """Facts of every model-parallel rank of a run of `wanted`.

    `stages`: the names of each stage, numbered in the order of its optimizer's groups. `uncut`: names of the tensors
    that every tensor-parallel rank holds in full.
    """
    facts = replace(facts, tp=wanted.tp, pp=wanted.pp)
    layouts: Mapping[str, TensorLayout] = {}
    if wanted.tp > 1 and facts.rules is not None:
        split = (atom for name, atom in facts.index.atoms.items() if name not in uncut)
        shapes = {atom.name: (atom.global_shape, atom.kind is not Kind.BUFFER) for atom in split}
        layouts = facts.rules.layouts_of(shapes, wanted.tp)
    views = []
    for stage in range(wanted.pp):
        names = facts.index.atoms if stages is None else stages[stage]
        for rank in range(wanted.tp):
            atoms = {name: atom for name, atom in facts.index.atoms.items() if name in names}
            for name, atom in atoms.items():
                if name in layouts:  # with the local shape; fragments still refer to the global tensor
                    shape = layouts[name].local_shape(rank)
                    states = {
                        key: replace(state, global_shape=shape) if state.global_shape == atom.global_shape else state
                        for key, state in atom.states.items()
                    }
                    atoms[name] = replace(atom, global_shape=shape, states=states)
            index = narrow_index(facts.index, atoms)
            if stages is not None:  # the engine removes groups without parameters (`_configure_optimizer`)
                order = stages[stage].__getitem__
                groups = (replace(group, params=tuple(sorted(group.params, key=order))) for group in index.groups)
                index = replace(index, groups=tuple(group for group in groups if group.params))
            views.append(replace(facts, index=index, cuts=layouts, mp=stage * wanted.tp + rank))
    return views


def narrow_index(index: Index, atoms: Mapping[str, AtomIndex]) -> Index:
    """The index with these atoms only."""
    groups = tuple(replace(group, params=tuple(p for p in group.params if p in atoms)) for group in index.groups)
    aliases = {alias: name for alias, name in index.aliases.items() if name in atoms}
    return replace(index, atoms=dict(atoms), groups=groups, aliases=aliases)


_SET_STAGES = (
    "say which layers the stages have (--set stages=FIRST,FIRST,...,COUNT, or --set partition=uniform --set layers=N)"
)


def check_degrees(facts: RunFacts, wanted: Topology, *, is_pipeline: bool) -> None:
    """Raise TopologyError where DeepSpeed, or this source, cannot have the degrees of `wanted`."""
    if wanted.cp > 1:
        raise TopologyError(f"DeepSpeed counts sequence-parallel ranks as data-parallel ones: drop cp; got {wanted}")
    if wanted.vpp > 1 or wanted.etp is not None:
        raise TopologyError(
            f"a virtual pipeline and expert tensor parallelism are Megatron's: drop vpp and etp; got {wanted}"
        )
    if not is_pipeline:
        if wanted.pp > 1 and was_pipeline(facts):
            raise TopologyError(
                f"expected the files of the layers of a pipeline for {wanted}; {facts.index.path} has none, as it is a "
                "universal checkpoint, and which stage has a layer without parameters is not recorded. Convert from "
                f"the checkpoint that it was made from, {_SET_STAGES}, or write files for pp=1"
            )
        if wanted.pp > 1:
            raise TopologyError(
                f"expected a source that was a pipeline of DeepSpeed for {wanted}; {facts.index.path} was none, so "
                "which module of a PipelineModule holds a parameter is not recorded. Bring its names to those of one "
                f"(--names pipeline, or --rename) and {_SET_STAGES}, or write files for pp=1"
            )
        return
    stage = facts.stage
    if stage > 1 or (stage == 0 and facts.precision is Precision.BF16):
        raise TopologyError(
            f"expected zero=1 for a pipeline, or zero=0 for one that does not compute in bf16; got zero={stage}: "
            "DeepSpeed has no pipelines with ZeRO 2 or 3, and 0.19.8 cannot resume those of bf16 without ZeRO"
        )


def check_experts(facts: RunFacts, wanted: Topology, names: Iterable[str]) -> ExpertNumbers:
    """The experts of a source, if they fit `wanted`. Raises TopologyError, and MissingStateError for missing ones."""
    experts = ExpertNumbers.of(names)
    if experts.missing:
        raise MissingStateError(
            f"expected every expert of a layer of {facts.index.path} that has experts with higher numbers; missing:\n"
            f"{format_list(experts.missing)}\nDeepSpeed's files number experts without gaps: include these experts, or "
            "exclude all experts of the layer"
        )
    if not experts.counts:
        if wanted.ep > 1:
            raise TopologyError(
                f"expected experts of DeepSpeed's MoE layer (deepspeed_experts.N) in {facts.index.path} for {wanted}; "
                "there are none: drop ep. Experts of another framework are written as parameters like others"
            )
        return experts
    uneven = [f"{prefix}*: {count} experts" for prefix, count in experts.counts.items() if count % wanted.ep]
    uneven += [f"dp={wanted.dp}"] if wanted.dp % wanted.ep else []
    if uneven:
        raise TopologyError(
            f"expected ep to divide dp and the numbers of experts; got {wanted}, which does not divide\n"
            f"{format_list(uneven)}\nchoose ep among {shared_divisors(experts.counts.values())}, and a dp that it "
            "divides"
        )
    if wanted.tp > 1 or wanted.pp > 1 or facts.stage == 3:
        raise TopologyError(
            f"experts are written for tp=1, pp=1 and zero 0 to 2; got {wanted}. DeepSpeed has no native experts with "
            "ZeRO 3"
        )
    return experts
