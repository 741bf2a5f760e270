"""States of random generators, as frameworks save them in a dict, and giving them to the generators of this process."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["generators_of"]

_KEYS = {
    "python": ("python", "random", "random_state", "random_rng_state"),
    "numpy": ("numpy", "numpy_random_seed", "np_rng_state"),
    "torch": ("cpu", "torch", "torch_manual_seed", "torch_rng_state"),
    "cuda": ("cuda", "torch_cuda_manual_seed", "cuda_rng_state"),
}
"""Generator to what its state is called: by the Trainer, verl, accelerate, Megatron."""


def generators_of(value: object) -> dict[str, Callable[[], None]]:
    """Generator to what gives it the state in `value`; empty for what is not the random states of a rank."""
    if not isinstance(value, dict):
        return {}
    import numpy as np
    import torch

    states = {name: value[key] for name, keys in _KEYS.items() for key in keys if value.get(key) is not None}
    found: dict[str, Callable[[], None]] = {}
    match states.get("python"):
        case (int(), tuple(), _) as state:
            found["python"] = lambda: random.setstate(state)
    match states.get("numpy"):
        case (str() as kind, np.ndarray() as keys, int() as at, int() as has, float() as cached):
            found["numpy"] = lambda: np.random.set_state((kind, keys, at, has, cached))
    held = states.get("torch")
    if isinstance(held, torch.Tensor) and held.dtype is torch.uint8:
        found["torch"] = lambda: torch.set_rng_state(held)
    if found and torch.cuda.is_available():
        match states.get("cuda"):
            case torch.Tensor() as one:
                found["cuda"] = lambda: torch.cuda.set_rng_state(one)
            case list() as every if len(every) == torch.cuda.device_count():
                found["cuda"] = lambda: torch.cuda.set_rng_state_all(every)
    return found
