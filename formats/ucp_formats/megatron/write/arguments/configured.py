"""Arguments of Megatron that a Hugging Face configuration states and shapes do not tell.

>>> configured({"n_head": 4, "layer_norm_epsilon": 1e-5})
{'num_attention_heads': 4, 'norm_epsilon': 1e-05}
>>> configured({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}})
{'rotary_base': 500000, 'rotary_percent': 1.0, 'rotary_seq_len_interpolation_factor': 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

__all__ = ["configured", "scaling_note"]

_KEYS = {
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
    "max_position_embeddings": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
}
"""Argument to the keys that may say it (transformers 4 and 5)."""
_LATENT, _OTHERWISE = "kv_lora_rank", ("num_query_groups", "kv_channels", "rotary_percent")
"""Key of models with latent attention, and the arguments that mean another thing there."""
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Numbers that no argument of Megatron changes (megatron-core 0.19, rotary_pos_embedding.py: _apply_scaling)."""

_MOST = 1e18
"""Above any argument; JSON has numbers that are no float, and infinity."""


def configured(config: Mapping[str, object]) -> dict[str, object]:
    """Arguments that `config` states."""
    rope = _rope(config)
    every = {**rope, **{key: own for key, own in config.items() if own is not None}}
    found = {name: next((every[key] for key in keys if key in every), None) for name, keys in _KEYS.items()}
    plain: dict[str, int | float] = {name: value for name, value in found.items() if _is_number(value)}
    if "rotary_base" in plain:
        plain["rotary_base"] = int(plain["rotary_base"])
        plain.setdefault("rotary_percent", 1.0)
    scaling = _scaling(rope)
    for name in _OTHERWISE if _LATENT in config else ("rotary_percent",) if scaling is None else ():
        plain.pop(name, None)  # without rotary_percent no config.json is made of the run, which would lack the scaling
    return {**plain, **(scaling or {})}


def scaling_note(config: Mapping[str, object]) -> str | None:
    """What a run has to be started with for the rotary positions that `config` states; None where they are plain."""
    rope = _rope(config)
    scaling = _scaling(rope)
    if scaling == {}:
        return None
    told = ", ".join(f"{key}={own}" for key, own in sorted(rope.items()) if key not in ("rope_theta", "type"))
    start = f"config.json scales rotary positions ({told}), which Megatron does not take from a checkpoint"
    if scaling is None:
        return (
            f"{start}: the weights are right, and a run without the same scaling computes something else. What is "
            "written does not say it; start the run with what your Megatron has for it, if anything"
        )
    options = " ".join(
        f"--{name.replace('_', '-')}" + ("" if own is True else f" {own}") for name, own in scaling.items()
    )
    return f"{start}: start the run with {options}, or it computes something else"


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """What is said of rotary positions, by transformers 4 (rope_scaling) or 5 (rope_parameters)."""
    found: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        own = config.get(key)
        found |= {name: value for name, value in own.items() if value is not None} if isinstance(own, dict) else {}
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _scaling(rope: Mapping[str, object]) -> dict[str, object] | None:
    """Arguments for a scaling of rotary positions; empty where there is none, None for one that they do not tell."""
    match rope:
        case {"rope_type": "llama3", "factor": factor} if _is_number(factor):
            same = all(rope.get(key) == own for key, own in _LLAMA3.items())
            return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)} if same else None
        case {"rope_type": "linear", "factor": factor} if _is_number(factor) and factor == int(factor):
            return {"rotary_seq_len_interpolation_factor": int(factor)}
        case {"rope_type": kind} if kind != "default":
            return None
        case _:
            return {}
