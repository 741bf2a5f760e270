"""Canonical names of the parameters of a torch_dist checkpoint, and the order in which the model registers them.

The family tells both. A model of no known family keeps the names of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.errors import UnknownFamilyError
from ucp.families.family import Family
from ucp_formats.megatron.torch_dist.keys import ModelKey, parse_model_key

__all__ = ["DistNames", "names_of"]


_BUFFERS = ("expert_bias", "local_tokens_per_expert", "qb_beta", "inv_freq")
"""Tensors of a model that are not trained, for names that no family knows."""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


_FUSED_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv."),
    ("norm.", "mixer.in_proj."),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj."),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj."),
)
"""Norms that Transformer Engine has in the module that follows them, where they come right before its weight."""


class DistNames:
    """Names of one checkpoint."""

    def __init__(self, family: Family | None, notes: tuple[str, ...]) -> None:
        self.family = family
        """The model family; None when it is of none that is known."""
        self.notes = notes
        """What was chosen, and why."""
        self._templates: dict[str, str] = {}
        self._understood: dict[str, ModelKey] = {}

    def understood(self, key: str) -> ModelKey:
        """The key of a model's tensor, with the template of its canonical name; several states have the same."""
        known = self._understood.get(key)
        if known is None:
            parsed = parse_model_key(key)
            known = ModelKey(self.template(parsed.whole), parsed.stacked, parsed.whole, parsed.part)
            self._understood[key] = known
        return known

    def template(self, key: str) -> str:
        """Canonical name for the key of a whole tensor, with {layer} and {expert} where it is stacked."""
        if self.family is None:
            return parse_model_key(key).template
        outline = _NUMBER.sub("#", key)
        text = self._templates.get(outline)
        if text is None:
            return self._looked_up(key, outline)
        for number in _NUMBER.findall(key):
            text = text.replace("#", number, 1)
        return text

    def _looked_up(self, key: str, outline: str) -> str:
        """Canonical name for a key; kept for others of its outline where it has the same numbers in the same order."""
        found = None if self.family is None else self.family.canonical(key)
        name = parse_model_key(key).template if found is None else found
        numbers = _NUMBER.findall(key)
        if numbers == _NUMBER.findall(name) and len(set(numbers)) == len(numbers):
            self._templates[outline] = _NUMBER.sub("#", name)
        return name

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of the model is none that is trained."""
        known = None if self.family is None or self.family.read(name) is None else self.family.match([name]).get(name)
        return name.rpartition(".")[2] in _BUFFERS if known is None else known.buffer

    def orders(self, names: Iterable[str]) -> list[list[str]]:
        """Orders in which the model may have registered its parameters; none when its family is not known."""
        if self.family is None:
            return []
        local = self.in_order(names)
        fused = local
        for norm, module in _FUSED_NORMS:
            fused = _moved(fused, norm, module)
        return [local, _moved(local, *_FUSED_NORMS[0]), fused]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names in the order of registration."""
        return list(names) if self.family is None else self.family.sorted(names)


def names_of(
    shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], options: SourceOptions
) -> DistNames:
    """Names for the tensors of a model, given its keys and their shapes.

    Raises FamilyError naming all keys without a rule, when the user named the family.
    """
    usual = {(_NUMBER.sub("#", key), shape): key for key, shape in shapes.items()}
    few = {key: shape for (_, shape), key in usual.items()}
    try:
        family, reasons = choose_family(names=list(few), shapes=few, arguments=arguments, options=options)
    except UnknownFamilyError as error:
        first, *nearest = (line.strip() for line in str(error).splitlines())
        reason = "; ".join((first.rstrip(":"), *nearest[:1], *nearest[1:][-1:]))
        return DistNames(None, (f"names are those of the file, because the model family is not known: {reason}",))
    wholes = dict.fromkeys(parse_model_key(key).whole for key in few)
    strange = [key for key in wholes if not family.ignores(key) and family.read(key) is None]
    family.match(strange)  # raises: by evidence a family has a rule for every name, so the user named this one
    return DistNames(family, (f"model family {family.name}: {'; '.join(reasons)}",))


def _moved(names: list[str], norm: str, module: str) -> list[str]:
    """`names` with the norms of every layer put right before the parameters of `module` of that layer."""
    norms: dict[str, list[str]] = {}
    for name in names:
        layer, found, _ = name.rpartition(norm)
        if found and layer.endswith("."):
            norms.setdefault(layer, []).append(name)
    moved = {name for own in norms.values() for name in own}
    result = []
    for name in names:
        layer, found, _ = name.partition(module)
        if found and layer in norms:
            result += norms.pop(layer)
        if name not in moved:
            result.append(name)
    return result + [name for own in norms.values() for name in own]
