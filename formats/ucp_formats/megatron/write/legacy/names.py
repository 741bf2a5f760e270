"""Keys of a legacy state_dict, and the order in which a chunk registers its parameters, as the run's modules have them.

Runs with megatron-core's own modules (`transformer_impl` "local") keep norms apart; those with Transformer Engine's
fuse a norm into the linear layer that follows, so its parameters come right before that layer's weight. Grouped
experts of Transformer Engine register all first projections before the second ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucp.core.layout import Overlap
from ucp.families.family import Family
from ucp_formats.megatron.write.model import ModelTensor

__all__ = ["Modules", "modules_of"]

_NORM = re.compile(r"\.layer_norm_(weight|bias)$")
_GROUPED = re.compile(r"^(?P<module>.+\.experts\.linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)$")
_OUTPUT = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """How a run names what it registers."""

    family: Family
    """Rules of the model."""
    fused: bool
    """Whether modules are those of Transformer Engine."""
    grouped: bool
    """Whether the experts of a layer are one module."""
    expert_layers: frozenset[int]
    """Layers with routed experts, global numbers."""

    def key(self, own: ModelTensor, *, layer: int, expert: int) -> str:
        """Key of a parameter in the state_dict of a chunk. `layer`, `expert`: local numbers, of those that it has."""
        numbers = {"layer": None if own.layer is None else layer, "expert": expert}
        fields = {key: number for key, number in numbers.items() if key in own.match.fields and number is not None}
        name = own.match.renamed(**fields)
        before_experts = ".pre_mlp_layernorm." in own.name and own.layer in self.expert_layers
        if not self.fused or before_experts or (own.expert is not None and not self.grouped):
            return name
        return self.family.styled(name, "te")

    def registered(self, keys: Mapping[str, ModelTensor]) -> list[str]:
        """Keys in the order of registration; `keys` come in that of megatron-core's own modules."""
        names = list(keys)
        for norm in [key for key in names if _NORM.search(key)]:
            weight = _NORM.sub(".weight", norm)
            names.remove(norm)
            names.insert(names.index(weight), norm)
        places: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            if found := _GROUPED.match(name):
                places.setdefault(found["module"].rpartition(".")[0], []).append(at)
        for own in places.values():  # grouped experts go by projection, then by expert
            for at, name in zip(own, sorted((names[at] for at in own), key=_grouped_key), strict=True):
                names[at] = name
        return names

    def extra_states(self, keys: Mapping[str, ModelTensor]) -> Iterator[str]:
        """Keys of modules that keep state of their own: linear layers, and attention with Transformer Engine."""
        seen: dict[str, None] = {}
        for key, own in keys.items():
            if key == _OUTPUT or _is_linear(own):
                found = _GROUPED.match(key)
                seen[f"{found['module'] if found else key.rpartition('.')[0]}._extra_state"] = None
            if self.fused and ".self_attention.linear_proj." in key:
                seen[f"{key.partition('.linear_proj.')[0]}.core_attention._extra_state"] = None
        yield from seen


def modules_of(family: Family, arguments: Mapping[str, object], expert_layers: frozenset[int]) -> Modules:
    """The modules of a run of these arguments; Transformer Engine's where they do not say."""
    fused = arguments.get("transformer_impl") != "local"
    grouped = fused and bool(arguments.get("moe_grouped_gemm"))
    return Modules(family=family, fused=fused, grouped=grouped, expert_layers=expert_layers)


def _grouped_key(name: str) -> tuple[str, int, bool]:
    found = _GROUPED.match(name)
    assert found is not None
    return found["module"], int(found["expert"]), found["kind"] == "bias"


def _is_linear(own: ModelTensor) -> bool:
    """Whether it is the weight of a layer that is cut over tensor-parallel ranks."""
    if not own.name.endswith(".weight") or len(own.shape) != 2 or own.name == _EMBEDDING:
        return False
    layout = own.match.layout(axes={"tp": 1, "etp": 1}, global_shape=own.shape)
    return any(axis.pattern.overlap is Overlap.EXCLUSIVE for axis in layout.axes)
