"""Find out by their names which tensors of a checkpoint belong to which expert, for all frameworks alike.

Frameworks name experts in two ways. Some give every expert tensors of its own, others stack those of a layer:

    model.layers.3.mlp.experts.7.down_proj.weight    expert 7 of layer 3 (Hugging Face, Megatron, DeepSpeed)
    layers.3.moe.routed_experts.inner_experts.w2     [experts, rows, columns] (torchtitan, gpt-oss, DeepSpeed AutoEP)

>>> find_layers({"mlp.gate.weight": (4, 8), "mlp.experts.1.up_proj.weight": (16, 8)})[0].missing
(range(0, 1), range(2, 4))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

_OF_ONE = re.compile(
    r"(?P<module>.+?)\.(?:experts\.local_experts|deepspeed_moe\.experts\.deepspeed_experts|experts)"
    r"\.(?P<expert>\d{1,6})\.(?P<tensor>.+)"
)
"""A tensor of one expert. Examples: mlp.experts.7.w1.weight, moe.deepspeed_moe.experts.deepspeed_experts.0.bias."""

_GROUPED = re.compile(r"(?P<module>.+?)\.experts\.(?P<tensor>linear_fc[12]\.(?:weight|bias))(?P<expert>\d{1,6})")
"""The same, as Transformer Engine's grouped layers number it. Example: mlp.experts.linear_fc1.weight7."""

_STACKED = re.compile(r"(?P<module>.+?)\.(?:routed_experts\.inner_experts|experts\.experts|experts)\.(?P<tensor>.+)")
"""A tensor of all experts, stacked along the first dim. Examples: mlp.experts.gate_up_proj, layers.3.moe.experts.w1."""

_STACKED_DIMS = 3
"""Dims of stacked matrices, at least."""

_NUMBER = re.compile(r"(?:^|\.)(\d{1,18})(?:\.|$)")
"""A number in the path of a module; the first is the layer's. Example: model.layers.3.mlp."""


class Role(StrEnum):
    """Role of a tensor in a layer with experts."""

    EXPERT = "expert"
    """Part of an expert."""
    ROUTER = "router"
    """[experts, hidden]: each row scores one expert."""
    ROUTER_BIAS = "router bias"
    """[experts]: trained, added to the scores."""
    BALANCE = "balancing bias"
    """[experts]: not trained; a rule changes it so that all experts get equally many tokens."""
    TOKENS = "tokens per expert"
    """[experts]: counted."""


_OF_ROUTER = {
    "router.weight": Role.ROUTER,
    "router.gate.weight": Role.ROUTER,
    "gate.weight": Role.ROUTER,
    "gate.wg.weight": Role.ROUTER,
    "deepspeed_moe.gate.wg.weight": Role.ROUTER,
    "router.bias": Role.ROUTER_BIAS,
    "router.gate.bias": Role.ROUTER_BIAS,
    "gate.bias": Role.ROUTER_BIAS,
    "router.expert_bias": Role.BALANCE,
    "gate.e_score_correction_bias": Role.BALANCE,
    "router.e_score_correction_bias": Role.BALANCE,
    "expert_bias": Role.BALANCE,
    "expert_bias_E": Role.BALANCE,
    "router.local_tokens_per_expert": Role.TOKENS,
    "tokens_per_expert": Role.TOKENS,
    "tokens_per_expert_E": Role.TOKENS,
}
"""Names below the module of a layer (Megatron, transformers, DeepSpeed, torchtitan)."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The part of a parameter that belongs to one expert: all of it, or one row."""

    param: str
    """Parameter or buffer."""
    row: int | None = None
    """Index in the first dim; None for all of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The experts of one layer, and its router."""

    module: str
    """Path of the module that has experts and router, e.g. model.layers.3.mlp."""
    number: int | None
    """Number of the layer, the first in that path; None if the path has none."""
    experts: Mapping[int, Mapping[str, ExpertTensor]]
    """Number of an expert to its tensors by their name inside it, in increasing number."""
    routing: Mapping[Role, str] = field(default_factory=dict)
    """Parameters or buffers with a row or a value for each expert."""
    rows: Mapping[Role, int] = field(default_factory=dict)
    """How many rows or values each of these has."""
    twice: tuple[tuple[str, str], ...] = ()
    """Pairs of parameters whose names mean one tensor of one expert: experts.1.w1 and experts.01.w1."""

    @property
    def num_experts(self) -> int:
        """How many experts the model has: rows of the router, or the largest number plus 1, if that is more."""
        return max(self.rows.get(Role.ROUTER, 0), max(self.experts, default=-1) + 1)

    @property
    def missing(self) -> tuple[range, ...]:
        """Numbers of experts that the model has and the checkpoint lacks, as ranges."""
        numbers = [-1, *self.experts, self.num_experts]
        return tuple(range(low + 1, high) for low, high in pairwise(numbers) if high - low > 1)

    def tensors(self) -> Iterator[tuple[Role, int, str, ExpertTensor]]:
        """(role, number of the expert, name inside it, tensor) for everything that belongs to one expert."""
        for expert, tensors in self.experts.items():
            for name, tensor in tensors.items():
                yield Role.EXPERT, expert, name, tensor
        for role, param in self.routing.items():
            for row in range(self.rows[role]):
                yield role, row, "", ExpertTensor(param, row)


def number_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ExpertLayer]]:
    """The layers of `find_layers`, each with its number; without one, its position among them."""
    return [(at if layer.number is None else layer.number, layer) for at, layer in enumerate(find_layers(shapes))]


def find_layers(shapes: Mapping[str, tuple[int, ...]]) -> tuple[ExpertLayer, ...]:
    """Layers with experts, in the order of the model; empty for a model without. `shapes`: global, by parameter.

    A tensor counts as stacked if it has three dims or more; a bias, if it has as many rows as such a tensor. Matrices
    with several experts side by side (DBRX) are ignored, because nothing says how many experts they hold.
    """
    experts: dict[str, dict[int, dict[str, ExpertTensor]]] = {}
    twice: dict[str, list[tuple[str, str]]] = {}
    stacked: dict[str, list[tuple[str, str]]] = {}
    for param, shape in shapes.items():
        if "experts." not in param:  # soon decided for most parameters
            continue
        match = _OF_ONE.fullmatch(param) or _GROUPED.fullmatch(param)
        if match is not None:
            tensors = experts.setdefault(match["module"], {}).setdefault(int(match["expert"]), {})
            first = tensors.setdefault(match["tensor"], ExpertTensor(param)).param
            if first != param:
                twice.setdefault(match["module"], []).append((first, param))
        elif 0 not in shape and shape and (match := _STACKED.fullmatch(param)):
            stacked.setdefault(match["module"], []).append((match["tensor"], param))
    for module, params in stacked.items():
        counts = {shapes[param][0] for _, param in params if len(shapes[param]) >= _STACKED_DIMS}
        for name, param in params:
            for row in range(shapes[param][0] if shapes[param][0] in counts else 0):
                experts.setdefault(module, {}).setdefault(row, {})[name] = ExpertTensor(param, row)
    return tuple(_make_layer(module, tensors, shapes, twice.get(module, ())) for module, tensors in experts.items())


def _make_layer(
    module: str,
    experts: Mapping[int, Mapping[str, ExpertTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    twice: Iterable[tuple[str, str]],
) -> ExpertLayer:
    routing = {
        role: param
        for suffix, role in _OF_ROUTER.items()
        if (shape := shapes.get(param := f"{module}.{suffix}")) and 0 not in shape[1:]
    }
    number = _NUMBER.search(module)
    return ExpertLayer(
        module=module,
        number=int(number[1]) if number else None,
        experts=dict(sorted(experts.items())),
        routing=routing,
        rows={role: shapes[param][0] for role, param in routing.items()},
        twice=tuple(twice),
    )
