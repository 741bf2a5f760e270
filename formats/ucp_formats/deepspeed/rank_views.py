"""A checkpoint as each model-parallel rank of a target sees it: its own parameters, with its own shapes.

What writes the files of a data-parallel run then writes those of one model-parallel rank: from an index with local
shapes, and from `cuts`, which say where a local tensor lies in the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.atom import AtomIndex, Index, Kind
from ucp.errors import UnsupportedError, UsageError
from ucp.topology import Topology
from ucp_formats.deepspeed.experts import Numbered
from ucp_formats.deepspeed.run_config import Precision
from ucp_formats.deepspeed.run_facts import RunFacts
from ucp_formats.deepspeed.tensor_layout import TensorLayout

__all__ = ["Pipeline", "check_experts", "narrowed", "pipeline_of", "rank_views"]

_UNIVERSAL = "--to deepspeed-universal loads at any degrees"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a source says of its pipeline."""

    layers: Mapping[int, str]
    """Layer with a file to what the names of its parameters start with."""
    stages: Sequence[Sequence[str]]
    """Trained parameters of each stage."""

    def stage_of(self, name: str) -> int:
        """Stage of a parameter or buffer that no optimizer has: that of the last layer before it with trained ones."""
        number = _layer(name)
        last = 0
        for stage, names in enumerate(self.stages):
            if any(_layer(own) <= number for own in names if own[:1].isdigit()):
                last = stage
        return last


def _layer(name: str) -> int:
    first = name.partition(".")[0]
    return int(first) if first.isdigit() else 0


def pipeline_of(facts: RunFacts) -> Pipeline | None:
    """The pipeline of the source, or None where it is not one."""
    found = facts.extras.mapping("pipeline")
    layers, stages = found.get("layers"), found.get("stages")
    if not isinstance(layers, dict) or not isinstance(stages, list):
        return None
    return Pipeline({int(str(number)): str(start) for number, start in layers.items()}, stages)


def rank_views(facts: RunFacts, wanted: Topology, pipeline: Pipeline | None) -> list[RunFacts]:
    """Facts of every model-parallel rank of a run of `wanted`. Raises UsageError and UnsupportedError."""
    _check(facts, wanted, pipeline)
    facts = replace(facts, tp=wanted.tp, pp=wanted.pp)
    layouts: dict[str, TensorLayout] = {}
    if wanted.tp > 1 and facts.rules is not None:
        every = facts.index.atoms.values()
        wholes = {atom.name: (atom.global_shape, atom.kind is not Kind.BUFFER) for atom in every}
        layouts = facts.rules.layouts_of(wholes, wanted.tp)
    views = []
    for stage in range(wanted.pp):
        names = facts.index.atoms.keys() if wanted.pp == 1 else _of_stage(facts.index, pipeline, stage)
        for rank in range(wanted.tp):
            cuts = {name: layouts[name].held(rank) for name in names if name in layouts}
            atoms = {
                name: _local(atom, layouts[name].local_shape(rank)) if name in layouts else atom
                for name, atom in facts.index.atoms.items()
                if name in names
            }
            index = narrowed(facts.index, atoms)
            views.append(replace(facts, index=index, cuts=cuts, mp=stage * wanted.tp + rank))
    return views


def narrowed(index: Index, atoms: Mapping[str, AtomIndex]) -> Index:
    """An index with these atoms only."""
    groups = tuple(replace(group, params=tuple(p for p in group.params if p in atoms)) for group in index.groups)
    aliases = {alias: name for alias, name in index.aliases.items() if name in atoms}
    return replace(index, atoms=dict(atoms), groups=groups, aliases=aliases)


def _of_stage(index: Index, pipeline: Pipeline | None, stage: int) -> set[str]:
    """Parameters and buffers of a stage."""
    if pipeline is None:
        return set(index.atoms)
    owned = {name for names in pipeline.stages for name in names}
    others = {name for name in index.atoms if name not in owned and pipeline.stage_of(name) == stage}
    return {*pipeline.stages[stage], *others}


def _local(atom: AtomIndex, shape: tuple[int, ...]) -> AtomIndex:
    """An atom with the shape that a rank has; its states refer to the whole still."""
    states = {
        name: replace(state, global_shape=shape) if state.global_shape == atom.global_shape else state
        for name, state in atom.states.items()
    }
    return replace(atom, global_shape=shape, states=states)


def _check(facts: RunFacts, wanted: Topology, pipeline: Pipeline | None) -> None:
    if wanted.cp > 1:
        raise UsageError(f"DeepSpeed counts sequence-parallel ranks as data-parallel ones: drop cp; got {wanted}")
    if wanted.tp > 1 and facts.rules is None:
        raise UsageError(
            f"expected universal_checkpoint_info in {facts.index.path}, which says how parameters are cut over "
            f"{wanted.tp} tensor-parallel ranks; there is none. Write files for tp=1"
        )
    if pipeline is None and wanted.pp > 1:
        raise UsageError(f"expected a source that was a pipeline for {wanted}; {facts.index.path} was none")
    if pipeline is None:
        return
    if wanted.pp not in (1, len(pipeline.stages)):
        raise UnsupportedError(
            f"expected pp=1 or pp={len(pipeline.stages)}, as the source has; got {wanted}. How another number of "
            f"stages would divide the layers is not recorded: {_UNIVERSAL}"
        )
    stage = facts.stage
    if stage > 1 or (stage == 0 and facts.precision is Precision.BF16):
        raise UnsupportedError(
            f"expected zero=1 for a pipeline, or zero=0 for one that does not compute in bf16; got zero={stage}: "
            "DeepSpeed has no pipelines with ZeRO 2 or 3, and 0.19.8 cannot resume those of bf16 without ZeRO"
        )


def check_experts(facts: RunFacts, wanted: Topology, names: Iterable[str]) -> Numbered:
    """The experts of a source, found to fit `wanted`. Raises UsageError and UnsupportedError."""
    numbered = Numbered.of(names)
    if not numbered.counts:
        if wanted.ep > 1:
            raise UsageError(f"expected experts in {facts.index.path} for {wanted}; there are none: drop ep")
        return numbered
    odd = [f"{start}*: {count}" for start, count in numbered.counts.items() if count % wanted.ep]
    if odd or wanted.dp % wanted.ep:
        raise UsageError(
            f"expected ep to divide dp and the numbers of experts; got {wanted}, and "
            f"{', '.join(odd) or 'numbers of experts that it divides'}"
        )
    if wanted.tp > 1 or wanted.pp > 1 or facts.stage == 3:
        raise UnsupportedError(
            f"experts are written for tp=1, pp=1 and zero 0 to 2; got {wanted}. DeepSpeed has no native experts with "
            "ZeRO 3"
        )
    return numbered
