"""Find the parameter of an operator's tensor: operators number layers within a stage, and experts within a rank.

`stage{S}_non_expert`, `stage{S}_layer_{L}_gate`, `stage{S}_layer_{L}_expert_{E}` (moevement/coordinator.py): S is a
pipeline stage, L counts the MoE layers of the stage, E the experts of the rank. The ranks of a stage are consecutive
(`PipeDataParallelTopology`). If a rank has n experts of a layer, the d-th rank of the stage (from 0) has those from
number (d mod ep) * n on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucp.core.index import Index
from ucp.errors import MalformedError, format_list
from ucp.moe.layers import Role, find_layers
from ucp_formats.moevement.window import RankWindow

_OPERATOR = re.compile(r"stage(\d{1,6})_(?:non_expert|layer_(\d{1,6})_(?:gate|expert_(\d{1,6})))")
"""Examples: stage0_non_expert, stage1_layer_0_gate, stage1_layer_0_expert_3."""
_GATE = "deepspeed_moe.gate"
_EXPERTS = "deepspeed_moe.experts.deepspeed_experts"


@dataclass(frozen=True, slots=True)
class Operator:
    """The parsed name of an operator."""

    stage: int
    """Pipeline stage."""
    layer: int | None = None
    """Number among the MoE layers of the stage; None unless it is an expert or a gate."""
    expert: int | None = None
    """Number among the rank's experts; None unless it is an expert."""


def parse_operator(name: str) -> Operator | None:
    """The parsed name; None if it is not the name of an operator, e.g. that of the RNG states.

    >>> parse_operator("stage1_layer_0_expert_3")
    Operator(stage=1, layer=0, expert=3)
    >>> parse_operator("__moe_rng_state__")
    """
    match = _OPERATOR.fullmatch(name)
    if match is None:
        return None
    stage, layer, expert = (None if group is None else int(group) for group in match.groups())
    return Operator(stage or 0, layer, expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorNames:
    """Finds the parameter that is stored as a tensor of an operator."""

    modules: Mapping[int, tuple[str, ...]]
    """Stage to the paths of its MoE layers, in order."""
    ranks: Mapping[int, tuple[int, ...]]
    """Stage to its ranks, in order."""
    experts_of_rank: int
    """Experts of each layer on a rank; 0 without experts."""
    ep: int
    """Degree of expert parallelism."""

    @classmethod
    def of(cls, dense: Index, windows: Sequence[RankWindow]) -> OperatorNames:
        """Take the names from the dense checkpoint beside the window. Raises MalformedError if the two do not fit."""
        operators = {window.rank: _list_operators(window) for window in windows}
        stages = sorted({operator.stage for several in operators.values() for operator in several})
        ranks = {
            stage: tuple(rank for rank, several in operators.items() if any(o.stage == stage for o in several))
            for stage in stages
        }
        if [rank for stage in stages for rank in ranks[stage]] != [window.rank for window in windows]:
            lines = (f"stage {stage}: ranks {', '.join(map(str, ranks[stage]))}" for stage in stages)
            raise MalformedError(
                f"expected successive ranks on each pipeline stage, in the order of the stages; {windows[0].path} and "
                f"the files beside it have\n{format_list(lines)}\nFiles were exchanged"
            )
        modules: dict[int, tuple[str, ...]] = dict.fromkeys(stages, ())
        layers = find_layers(dense.shapes)
        for layer in sorted(layers, key=lambda layer: layer.number or 0):
            atom = dense.atoms[layer.routing[Role.ROUTER]]
            pipeline = next((axis for axis in atom.layout.axes if axis.axis == "pp"), None)
            stage = pipeline.holders(atom.global_shape)[0] if pipeline is not None else 0
            modules[stage] = (*modules.get(stage, ()), layer.module)
        local = 1 + max(
            (o.expert for several in operators.values() for o in several if o.expert is not None), default=-1
        )
        total = layers[0].num_experts if layers else 0
        if local and total % local:
            raise MalformedError(
                f"expected a window and a dense checkpoint of the same run; got {local} experts per layer and rank in "
                f"{windows[0].path}, and {total} per layer in {dense.path}"
            )
        return cls(modules=modules, ranks=ranks, experts_of_rank=local, ep=total // local if local else 1)

    def param(self, operator: Operator, name: str, rank: int) -> str | None:
        """The parameter called `name` inside an operator of a rank; None if the dense checkpoint lacks its layer."""
        if operator.layer is None:
            return name
        modules = self.modules.get(operator.stage, ())
        if operator.layer >= len(modules):
            return None
        module = modules[operator.layer]
        if operator.expert is None:
            return f"{module}.{_GATE}.{name}"
        number = self._expert_rank(operator.stage, rank) * self.experts_of_rank + operator.expert
        return f"{module}.{_EXPERTS}.{number}.{name}"

    def sharing_ranks(self, operator: Operator, rank: int) -> tuple[int, ...]:
        """Ranks over which an operator's parameters are partitioned, in the order of their ranges."""
        ranks = self.ranks[operator.stage]
        if operator.expert is None:
            return ranks
        return tuple(
            r for r in ranks if self._expert_rank(operator.stage, r) == self._expert_rank(operator.stage, rank)
        )

    def _expert_rank(self, stage: int, rank: int) -> int:
        return self.ranks[stage].index(rank) % self.ep


def _list_operators(window: RankWindow) -> list[Operator]:
    names = dict.fromkeys(name for stored in window.document.iterations for name in stored.operators)
    return [operator for name in names if (operator := parse_operator(name)) is not None]
