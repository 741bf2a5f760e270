"""Narrows the source to what each model-parallel rank of a target holds: its parameters, with local shapes.

With such a view, the code that writes the files of a data-parallel run writes those of one model-parallel rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, format_list
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.experts import ExpertNumbers
from ucp_formats.deepspeed.tp.layout import shared_divisors
from ucp_formats.deepspeed.write.pipeline.layers import is_pipeline as was_pipeline
from ucp_formats.deepspeed.write.run import RunFacts, localize


def rank_views(
    facts: RunFacts,
    wanted: Topology,
    stages: Sequence[Mapping[str, int]] | None = None,
    *,
    uncut: Collection[str] = (),
) -> list[RunFacts]:
    """Facts for every model-parallel rank of a run of topology `wanted`.

    `stages`: for each stage, its parameters and buffers, numbered in the order that they have in the optimizer's
    groups. `uncut`: names of tensors that every tensor-parallel rank holds in full.
    """
    facts = replace(facts, tp=wanted.tp, pp=wanted.pp)
    layouts = facts.cuts
    if wanted.tp > 1 and facts.rules is not None:
        split = (atom for name, atom in facts.index.atoms.items() if name not in uncut)
        shapes = {atom.name: (atom.global_shape, atom.kind is not Kind.BUFFER) for atom in split}
        layouts = facts.rules.layouts_of(shapes, wanted.tp)
    views = []
    for stage in range(wanted.pp):
        names = facts.index.atoms if stages is None else stages[stage]
        for rank in range(wanted.tp):
            atoms = {name: atom for name, atom in facts.index.atoms.items() if name in names}
            index = narrow_index(facts.index, localize(atoms, layouts, rank))
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
    "state the layers of each stage (--set stages=FIRST,FIRST,...,COUNT, or --set partition=uniform --set layers=N)"
)


def check_degrees(facts: RunFacts, wanted: Topology, *, is_pipeline: bool) -> None:
    """Raise TopologyError if DeepSpeed does not support the degrees of `wanted`, or this source does not allow them."""
    if wanted.cp > 1:
        raise TopologyError(
            f"DeepSpeed counts sequence-parallel ranks as data-parallel ones: count them in dp, drop cp; got {wanted}"
        )
    if wanted.vpp > 1 or wanted.etp is not None:
        raise TopologyError(
            f"only Megatron has a virtual pipeline and expert tensor parallelism: drop vpp and etp; got {wanted}"
        )
    if not is_pipeline:
        if wanted.pp > 1 and was_pipeline(facts):
            raise TopologyError(
                f"expected the layer files of a pipeline for {wanted}; {facts.index.path} is a universal checkpoint, "
                "which has none, so it is not recorded which stage has a layer without parameters. Convert from the "
                f"checkpoint that it was made from, {_SET_STAGES}, or write files for pp=1"
            )
        if wanted.pp > 1:
            raise TopologyError(
                f"expected a source that a DeepSpeed pipeline saved for {wanted}; {facts.index.path} is from another "
                "run, so it is not recorded which layer of a PipelineModule holds a parameter. Rename its parameters "
                f"to those of a PipelineModule (--names pipeline, or --rename) and {_SET_STAGES}, or write files for "
                "pp=1"
            )
        return
    stage = facts.stage
    if stage > 1 or (stage == 0 and facts.precision is Precision.BF16):
        raise TopologyError(
            f"expected zero=1 for a pipeline, or zero=0 for one that does not compute in bf16; got zero={stage}. "
            "DeepSpeed has no pipelines with ZeRO 2 or 3, and 0.19.8 cannot resume a bf16 pipeline without ZeRO"
        )


def check_experts(facts: RunFacts, wanted: Topology, names: Iterable[str]) -> ExpertNumbers:
    """The experts of a source. Raises MissingStateError if some are missing, TopologyError if they misfit `wanted`."""
    experts = ExpertNumbers.of(names)
    if experts.missing:
        raise MissingStateError(
            f"expected {facts.index.path} to have all experts of a layer, from number 0 to its highest; missing:\n"
            f"{format_list(experts.missing)}\nDeepSpeed's files number experts without gaps: include these experts, or "
            "exclude all experts of the layer"
        )
    counts = {**experts.counts, **facts.stacks.counts}
    if not counts:
        if wanted.ep > 1:
            raise TopologyError(
                f"expected experts of DeepSpeed's MoE layer (deepspeed_experts.N) or of AutoEP (LAYER.experts.w1, w2 "
                f"and w3 beside LAYER.router.gate.weight) in {facts.index.path} for {wanted}; there are none: rename "
                "experts to these names, or drop ep. Under other names they are written like any other parameters"
            )
        return experts
    uneven = [
        f"{prefix}*: {count} experts"
        for prefix, count in counts.items()
        if count % wanted.ep and prefix not in facts.stacks.by_rank
    ]
    uneven += [f"dp={wanted.dp}"] if wanted.dp % wanted.ep else []
    if uneven:
        raise TopologyError(
            f"expected ep to divide dp and the number of experts of each layer; got {wanted}, whose ep does not "
            f"divide\n{format_list(uneven)}\nChoose ep among {shared_divisors(counts.values())}, and a dp that "
            "it divides"
        )
    if facts.stacks.counts and experts.counts:
        raise UnsupportedError(
            f"expected experts of DeepSpeed's MoE layer or of AutoEP in {facts.index.path}, not both for {wanted}, "
            "because the files of experts number the layers of both kinds in one row, which is not recorded"
        )
    if experts.counts and (wanted.tp > 1 or wanted.pp > 1 or facts.stage == 3):
        raise TopologyError(
            f"expected tp=1, pp=1 and zero=0 to 2 for a model with DeepSpeed's experts, because ucp writes no others; "
            f"got {wanted}. DeepSpeed has no native experts with ZeRO 3"
        )
    return experts
