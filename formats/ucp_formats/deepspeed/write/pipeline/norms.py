"""Stages of a pipeline on which DeepSpeed 0.19.8 cannot take the norm of the gradients, and so cannot take a step.

The norm is summed over the ranks of one replica of the model, which are of all stages (`get_model_parallel_group` of
runtime/pipe/topology.py). There are two kinds of stages that this does not work for:

- Some optimizers sum it group by group, one `all_reduce` each. A stage with parameters of more groups than another
  waits in the first step for a call that the other never makes.
- BF16_Optimizer leaves out copies of tied layers, which are counted on the first stage that has them
  (`ds_pipe_replicated`). On a stage that trains nothing else it has nothing to stack, and fails.

Both load. What the run is configured to do is taken from the source; where it is to be otherwise, the user says
`--set norm=unchecked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ucp.errors import TopologyError, listed
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.values import clipping
from ucp_formats.deepspeed.write.optimizer.zero0 import Wrapper, wrapper
from ucp_formats.deepspeed.write.pipeline.layers import layer_of, tied_key
from ucp_formats.deepspeed.write.pipeline.wording import numbers_shown
from ucp_formats.deepspeed.write.rank_files import groups_of
from ucp_formats.deepspeed.write.run import EMULATED, RunFacts

__all__ = ["Norms", "Places", "norm_by_group", "waiting_notes"]

Places = Sequence[Mapping[str, object]]
"""Of each stage, the names of its parameters and buffers."""


def norm_by_group(facts: RunFacts, groups: Sequence[Group]) -> str | None:
    """What sums the norm of the gradients group by group in the run of the target; None where nothing does."""
    config = facts.config
    if facts.stage:
        if config.uses_bf16_optimizer(facts.precision) or not config.computes_norm:
            return None
        return f"ZeRO {facts.stage} (scaled_global_norm in runtime/zero/stage_1_and_2.py)"
    kind = wrapper(facts, groups)
    if kind is Wrapper.UNFUSED:
        return f"{kind} (step in runtime/fp16/unfused_optimizer.py)"
    if kind is Wrapper.FUSED and config.fuses_as_before:
        return f"{kind} under legacy_fusion (step_fused_adam in runtime/fp16/fused_optimizer.py)"
    return None


def waiting_notes(facts: RunFacts, groups: Sequence[Group]) -> Iterator[str]:
    """That stages may wait for each other, for files that do not say which layers a stage has."""
    facts = replace(facts, stage=1)
    where = norm_by_group(facts, groups)
    held: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for atom in group.params:
            held.setdefault(tied_key(atom.name) or str(layer_of(atom.name)), set()).add(number)
    if where is not None and any(len(own) < len(groups) for own in held.values()):
        yield (
            f"layers have parameters of unlike optimizer groups ({len(groups)} in all), and a run in which a stage has "
            f"parameters of more groups than another loads this and hangs in the first step: {where} waits for as many "
            "all_reduces as there are groups. --to deepspeed --topology pp=N,zero=1 tells before"
        )


class Norms:
    """Answers for a run of the target; `facts`: of all its stages."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.groups = groups_of(facts)
        self._where = norm_by_group(facts, self.groups)
        self._group_of = {atom.name: number for number, group in enumerate(self.groups) for atom in group.params}

    def fit(self, places: Places) -> bool:
        """Whether DeepSpeed can take the norm over stages that have `places`."""
        return not self._uneven(places) and not self._copies(places)

    def notes(self, places: Places, others: Callable[[], Sequence[str]], *, anyway: bool) -> Iterator[str]:
        """What is to be said of stages over which it cannot, where the user wants the files `anyway`.

        `others`: stages to ask for instead. Raises TopologyError where the user has not said so.
        """
        for found in filter(None, (self._uneven(places), self._copies(places))):
            if not anyway:
                raise TopologyError(f"{found}. {self._remedy(others())}")
            yield f"{found}. Written as --set norm=unchecked says, for a run that {self._run_otherwise()}"

    def _uneven(self, places: Places) -> str:
        """That stages have parameters of unlike numbers of groups, where the norm is summed by group; else empty."""
        held = [tuple(sorted({self._group_of[name] for name in own if name in self._group_of})) for own in places]
        if self._where is None or len({len(own) for own in held}) < 2:
            return ""
        return (
            f"expected parameters of as many optimizer groups on each of {len(places)} stages; those of "
            f"{self.facts.index.path} come out as\n{listed(self._lines(places, held))}\nDeepSpeed {EMULATED} would "
            f"load the files and hang in the first step: {self._where} sums the norm of the gradients group by group, "
            "one all_reduce over all stages each, and stages of more groups wait for ever for those of fewer"
        )

    def _lines(self, places: Places, held: Sequence[tuple[int, ...]]) -> Iterator[str]:
        """Stages with the same groups, and the groups that they lack."""
        known = sorted({number for own in held for number in own})
        for own in dict.fromkeys(held):
            stages = [stage for stage, other in enumerate(held) if other == own]
            names = dict.fromkeys(name for stage in stages for name in places[stage])
            lacking = [f"{n} ({self.groups[n].params[0].name}, ...)" for n in known if n not in own]
            none = f", nothing of {', '.join(lacking)}" if lacking else ""
            yield f"{_numbered('stage', stages)} ({_layers(names)}): {_numbered('group', own)}{none}"

    def _copies(self, places: Places) -> str:
        """That BF16_Optimizer would find no gradient on a stage, all of whose parameters are copies; else empty."""
        if not self.facts.stage or not self.facts.config.uses_bf16_optimizer(self.facts.precision):
            return ""
        seen: set[str] = set()
        bare = []
        for stage, own in enumerate(places):
            trained = own.keys() & self._group_of.keys()
            if trained and trained <= seen:
                bare.append(stage)
            seen |= trained
        if not bare:
            return ""
        return (
            f"expected each of {len(places)} stages to train more than copies of tied layers of an earlier stage; of "
            f"those of {self.facts.index.path}, {_numbered('stage', bare)} would train nothing else. DeepSpeed "
            f"{EMULATED} would load the files and fail in the first step: BF16_Optimizer leaves copies out of the norm "
            "of the gradients, and cannot take one of none (get_global_norm_of_tensors in runtime/utils.py: stack "
            "expects a non-empty TensorList)"
        )

    def _remedy(self, others: Sequence[str]) -> str:
        """What to do; `others`: stages to ask for instead."""
        asked = list(others)
        if self.facts.stage and self.facts.precision is Precision.FP32:
            asked.append("--topology with zero=0: without ZeRO, the norm is one sum")
        anyway = f"or a run that {self._run_otherwise()}, add --set norm=unchecked"
        if not asked:
            return f"F{anyway}"
        head = "Ask for other stages (not for a universal checkpoint: the run would be the same):"
        return f"{head}\n{listed(asked)}\nor, f{anyway}"

    def _run_otherwise(self) -> str:
        """What a run can do for which the files are good."""
        ways = []
        if self._where and self.facts.stage:
            if not clipping(self.facts, 0).get("clip_grad"):  # else it refuses to load the files
                ways.append("has zero_optimization.compute_grad_norm=false")
            if self.facts.precision is Precision.BF16:
                ways.append("has data_types.grad_accum_dtype=fp32 (BF16_Optimizer, whose norm is one sum)")
        return ", or ".join([*ways, "takes no step"])


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {numbers_shown(numbers)}"


def _layers(names: Iterable[str]) -> str:
    """Layers that names are of."""
    numbers = {layer for name in names if (layer := layer_of(name)) is not None}
    tied = dict.fromkeys(f"tied {key}" for name in names if (key := tied_key(name)) is not None)
    return ", ".join([*([_numbered("layer", sorted(numbers))] if numbers else []), *tied])
