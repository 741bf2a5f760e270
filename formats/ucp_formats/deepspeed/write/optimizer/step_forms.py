"""In which form the files keep how many steps the optimizer took, and which optimizers go on from it.

`load_checkpoint` of native files goes through `load_state_dict` of the optimizer, where torch's make a tensor of a
number and DeepSpeed's keep it. A universal load puts what it finds into the optimizer as it is (`base_optimizer.py` and
`stage3.py`, 0.19.8). What the first step after it makes of that, tried with torch 2.13 and DeepSpeed 0.19.8:

==================== ============================ ============================================
form                 torch (plain, foreach, fused) DeepSpeed's on CPUs (FusedAdam, CPUAdam)
==================== ============================ ============================================
number, whole        fails                        counts on
number with a point  fails                        fails: the C++ takes none
tensor of int64      foreach and fused fail       counts on
tensor of float32    counts on                    counts on
==================== ============================ ============================================
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ucp.core.index import Index
from ucp.errors import UsageError

__all__ = ["SETTINGS", "StepForm", "from_elsewhere", "native_form", "universal_form"]


class StepForm(StrEnum):
    """How the files keep a step."""

    FOUND = "as found"
    """A number or a tensor, as the source has it."""
    NUMBER = "number"
    """A whole Python number."""
    FLOATING = "float32 tensor"
    """A 0-d tensor of float32."""


_OPTIMIZERS = {"torch": StepForm.FLOATING, "deepspeed": StepForm.NUMBER}
"""Whose optimizer loads a universal checkpoint, to the form that it counts on from everywhere."""
SETTINGS = {"optimizer": "torch or deepspeed: whose optimizer loads it, which decides the form of the step"}
"""Setting of a universal checkpoint to its meaning."""


def from_elsewhere(index: Index) -> bool:
    """Whether no engine of DeepSpeed saved the optimizer, so that its forms are those of another framework."""
    return not any(extra.name == "engine" for extra in index.extras)


def native_form(index: Index) -> StepForm:
    """Form for `load_checkpoint`: what an optimizer of DeepSpeed saved is for the same one."""
    return StepForm.NUMBER if from_elsewhere(index) else StepForm.FOUND


def universal_form(index: Index, settings: Mapping[str, str]) -> StepForm:
    """Form for a universal load, as `--set optimizer=...` says. Raises UsageError for another optimizer."""
    asked = settings.get("optimizer")
    if asked is not None and asked not in _OPTIMIZERS:
        raise UsageError(f"expected --set optimizer=torch or optimizer=deepspeed; got {asked!r}")
    if asked is not None:
        return _OPTIMIZERS[asked]
    return StepForm.FLOATING if from_elsewhere(index) else StepForm.FOUND
