"""Arguments of Megatron that a Hugging Face configuration states and shapes do not tell.

>>> configured({"n_head": 4, "layer_norm_epsilon": 1e-5})
{'num_attention_heads': 4, 'norm_epsilon': 1e-05}
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["configured"]

_KEYS = {
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
}
"""Argument to the keys that may say it (transformers 4 and 5)."""


def configured(config: Mapping[str, object]) -> dict[str, object]:
    """Arguments that `config` states."""
    rope = config.get("rope_parameters")  # of transformers 5
    every = {**rope, **config} if isinstance(rope, dict) else config
    found = {name: next((every[key] for key in keys if key in every), None) for name, keys in _KEYS.items()}
    plain = {name: value for name, value in found.items() if isinstance(value, int | float) and value is not True}
    if "rotary_base" in plain:
        plain["rotary_base"] = int(plain["rotary_base"])
    return dict(plain)
