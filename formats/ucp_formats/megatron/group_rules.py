"""Which parameters are in which optimizer group: Megatron's rule, because names are not recorded.

Biases and tensors of one dim are not decayed (`wd_mult` 0). Experts have groups of their own where they are parallel
(`is_expert_parallel`), and so have embedding and output layer where their learning rate is (`is_decoupled_lr`).
(megatron-core 0.16 core/optimizer/__init__.py: _get_param_groups.)
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.atom import ParamGroup
from ucp.state import STEP

__all__ = ["SavedGroup", "dealt_out", "expert_numbers", "is_expert", "rank_free"]

_EXPERT = re.compile(r"(?P<layer>.+\.local_experts)\.(?P<number>\d+)\.(?P<rest>.+)")
_DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A parameter group as it was saved: without the names of its parameters."""

    chain: int | None
    """Which of several optimizers it belongs to."""
    hyper: Mapping[str, object]
    """Its hyper-parameters."""

    @property
    def decays(self) -> bool | None:
        """Whether its parameters are decayed; None when it does not say."""
        scale = self.hyper.get("wd_mult")
        if not isinstance(scale, int | float):
            scale = self.hyper.get("weight_decay")
        return bool(scale) if isinstance(scale, int | float) else None

    def flag(self, name: str) -> bool:
        """One of its flags; false when it does not say."""
        return bool(self.hyper.get(name, False))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert of many.

    >>> is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"), is_expert("mlp.shared_experts.x")
    (True, False)
    """
    return ".experts." in name


def expert_numbers(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parameter of an expert to the number of the expert, and how many experts its layer has.

    >>> expert_numbers(["mlp.experts.local_experts.0.w", "mlp.experts.local_experts.1.w", "router"])
    {'mlp.experts.local_experts.0.w': (0, 2), 'mlp.experts.local_experts.1.w': (1, 2)}
    """
    matches = {name: match for name in names if (match := _EXPERT.fullmatch(name)) is not None}
    counts: dict[tuple[str, str], int] = {}
    for match in matches.values():
        layer = match["layer"], match["rest"]
        counts[layer] = max(counts.get(layer, 0), int(match["number"]) + 1)
    return {name: (int(match["number"]), counts[match["layer"], match["rest"]]) for name, match in matches.items()}


def dealt_out(
    groups: Sequence[SavedGroup], shapes: Mapping[str, tuple[int, ...]], chains: Mapping[str, int | None]
) -> tuple[tuple[ParamGroup, ...], list[str]]:
    """The groups with the names of their parameters, and the parameters that the rule puts in none, or in several.

    `shapes`: trained parameter to its shape, in the order of registration. `chains`: which of several optimizers a
    parameter belongs to, where that is known.
    """
    members: list[list[str]] = [[] for _ in groups]
    left = []
    for name, shape in shapes.items():
        fits = [number for number, group in enumerate(groups) if _fits(group, name, shape, groups)]
        if name in chains:
            fits = [number for number in fits if groups[number].chain == chains[name]]
        if len(groups) == 1:
            fits = [0]
        if len(fits) == 1:
            members[fits[0]].append(name)
        else:
            left.append(name)
    made = (ParamGroup(params=tuple(own), hyper=dict(group.hyper)) for group, own in zip(groups, members, strict=True))
    return tuple(made), left


def _fits(group: SavedGroup, name: str, shape: tuple[int, ...], groups: Sequence[SavedGroup]) -> bool:
    decays = not (len(shape) == 1 or name.endswith(".bias"))
    if group.decays is not None and any(other.decays != group.decays for other in groups) and group.decays != decays:
        return False
    apart = any(other.flag("is_expert_parallel") for other in groups)
    if apart and group.flag("is_expert_parallel") != is_expert(name):
        return False
    decoupled = any(other.flag("is_decoupled_lr") for other in groups)
    return not decoupled or group.flag("is_decoupled_lr") == (name in _DECOUPLED)


def rank_free(group: ParamGroup, counted: Container[str]) -> ParamGroup:
    """A group without what belongs to the layout of the run or to the states of its parameters.

    `is_expert_parallel` is true only where experts are spread over ranks. The step is a state of every parameter;
    `counted`: names of those that have it.
    """
    belongs = {"is_expert_parallel"}
    if all(name in counted for name in group.params):
        belongs.add(STEP)
    return replace(group, hyper={key: value for key, value in group.hyper.items() if key not in belongs})
