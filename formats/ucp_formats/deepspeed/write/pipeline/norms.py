"""Whether DeepSpeed 0.19.8 can take the norm of the gradients over the stages of a pipeline, and so take a step.

It is summed over the ranks of one replica of the model, which are of all stages (`get_model_parallel_group` of
runtime/pipe/topology.py). Some optimizers sum it group by group, one `all_reduce` each: a stage with parameters of more
groups than another waits for a call that the other never makes. BF16_Optimizer leaves out copies of tied layers
(`ds_pipe_replicated`) and fails on a stage that trains nothing else. The files of both load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.zero0 import Wrapper, wrapper
from ucp_formats.deepspeed.write.run import EMULATED, RunFacts

__all__ = ["hang_notes", "norm_notes", "sums_by_group"]

Places = Sequence[Mapping[str, object]]
"""Of each stage, the names of its parameters and buffers."""


def sums_by_group(facts: RunFacts, groups: Sequence[Group]) -> bool:
    """Whether a run of the target sums the norm of the gradients group by group."""
    if facts.stage:  # scaled_global_norm in runtime/zero/stage_1_and_2.py
        return facts.config.computes_norm and not facts.config.uses_bf16_optimizer(facts.precision)
    kind = wrapper(facts, groups)  # step in runtime/fp16/unfused_optimizer.py, step_fused_adam in fused_optimizer.py
    return kind is Wrapper.UNFUSED or (kind is Wrapper.FUSED and facts.config.fuses_as_before)


def norm_notes(facts: RunFacts, groups: Sequence[Group], places: Places) -> Iterator[str]:
    """That the run of the target would fail in its first step; `facts`: of all stages."""
    yield from hang_notes(facts, groups, places, "stages have")
    trained = {atom.name for group in groups for atom in group.params}
    seen: set[str] = set()
    for stage, names in enumerate(places):
        own = names.keys() & trained
        if facts.stage and facts.config.uses_bf16_optimizer(facts.precision) and own and own <= seen:
            yield (
                f"stage {stage} trains copies of tied layers alone: the run loads this and fails in the first step, as "
                f"BF16_Optimizer of DeepSpeed {EMULATED} leaves them out of the norm of the gradients"
            )
        seen |= own


def hang_notes(facts: RunFacts, groups: Sequence[Group], places: Places, what: str) -> Iterator[str]:
    """That a run hangs whose stages have parameters of unlike numbers of groups; `what`: has those of `places`."""
    group_of = {atom.name: number for number, group in enumerate(groups) for atom in group.params}
    counts = sorted({len({group_of[name] for name in names.keys() & group_of.keys()}) for names in places})
    if len(counts) > 1 and sums_by_group(facts, groups):
        yield (
            f"{what} parameters of {' or '.join(map(str, counts))} optimizer groups: a run whose stages have unlike "
            "numbers of them loads this and hangs in the first step. Configured as the source, DeepSpeed "
            f"{EMULATED} sums the norm of the gradients by group, one all_reduce over all stages each"
        )
