"""A config.json out of the arguments that a run recorded, by `[[config.huggingface]]` of its family."""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import MisfitError, listed
from ucp.families.family import Family
from ucp.families.toml.config import derived_config
from ucp_formats.huggingface.config import NONE, ModelConfig

__all__ = ["derived", "refused_note"]

_STYLE = "huggingface"
_ROUTER, _DENSE = "decoder.layers.{layer}.mlp.router.weight", "decoder.layers.{layer}.mlp.linear_fc2.weight"

_EVEN = ("llama", "deepseek_v2")
"""Models whose hidden size must be a multiple of their heads (transformers 5.23, `validate_architecture`)."""


def derived(
    family: Family, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], where: str
) -> ModelConfig:
    """The configuration of a model of `family`, bound to it. Raises MisfitError naming all that is not told.

    `shapes`: of what is written, by name in any style. `where`: the checkpoint, for messages.
    """
    parts = family.configs.get(_STYLE, ())
    if not any(part.family == family.name and "model_type" in part.fixed for part in parts):
        raise MisfitError(
            f"no config.json can be made for a model of the family {family.name}: name a folder that has one "
            f"(--set config=DIR), or write the weights alone (--set config={NONE})"
        )
    values, lines = derived_config(parts, {**arguments, **family.values, **_seen(family, shapes)})
    if lines:
        raise MisfitError(
            f"expected arguments of a run that transformers has the model of ({values.get('model_type')}); of those in "
            f"{where}\n{listed(lines)}\nName a folder with the config.json of the model (--set config=DIR), or write "
            f"the weights alone (--set config={NONE})"
        )
    return ModelConfig(values=values, where=f"the arguments that {where} records")


def refused_note(config: ModelConfig) -> str | None:
    """What keeps transformers from loading a model by `config`, where something does."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("model_type") in _EVEN and isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        return (
            f"transformers 5 loads no {config.get('model_type')} whose hidden_size is no multiple of "
            f"num_attention_heads, and by {config.where} these are {hidden} and {heads}: from_pretrained refuses the "
            "config.json that is written, and the weights alone can be read"
        )
    return None


def _seen(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """What the tensors tell: rows of the vocabulary, and which layers have no experts."""
    seen: dict[str, object] = {}
    layers: dict[str, set[int]] = {_ROUTER: set(), _DENSE: set()}
    for name, shape in shapes.items():
        named = family.read(name)
        if named is not None and named.rule.padded == 0:
            seen["written_vocab"] = shape[0]
        if named is not None and named.rule.name.text in layers:
            layers[named.rule.name.text].add(named.fields["layer"])
    dense = sorted(layers[_DENSE] - layers[_ROUTER])
    seen["dense_layers"] = dense
    if dense == list(range(len(dense))):
        seen["leading_dense"] = len(dense)
    return seen
