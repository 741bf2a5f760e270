"""Settings of torch's own optimizers, for groups of parameters that another framework may have kept.

torch asks for every setting that its optimizer has: those that another framework lacks are written as torch has them by
default (torch 2.13, `torch/optim/adamw.py`).

>>> dict(settings_of(ParamGroup(params=("w",), hyper={"lr": 0.1}), is_decoupled=True))
{'initial_lr': 0.1, 'lr': 0.1}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import pack, unpack

from ucp.core.dtypes import DType
from ucp.core.index import Index, ParamGroup, StateIndex
from ucp.core.target import TargetOptions
from ucp.core.tensor import InlineTensor
from ucp.errors import UsageError
from ucp.transfer.probe import Prober

__all__ = ["DECOUPLED", "checked_decoupled", "decay_notes", "is_adam", "number_as", "rate_notes", "settings_of"]

_ADAMW: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Settings of torch's Adam and AdamW that other frameworks do not have."""

DECOUPLED = "decoupled_weight_decay"
"""The one of them that tells AdamW from Adam."""


def checked_decoupled(index: Index, options: TargetOptions) -> str | None:
    """What the user says of it. Raises UsageError where the source says it itself."""
    said = options.settings.get(DECOUPLED)
    if said is not None and any(DECOUPLED in own.hyper for own in index.groups):
        raise UsageError(f"the source says {DECOUPLED} itself; drop --set {DECOUPLED}=...")
    return said


def is_adam(group: ParamGroup) -> bool:
    """Whether a group is one of Adam or AdamW."""
    return "betas" in group.hyper


def settings_of(group: ParamGroup, *, is_decoupled: bool) -> dict[str, object]:
    """Settings of a group, and those of torch's optimizers that it lacks.

    A group has `initial_lr` once a scheduler is made; schedulers have it in their own state (`base_lrs`) besides.
    """
    own = {
        key: tuple(value) if key == "betas" and isinstance(value, list) else value for key, value in group.hyper.items()
    }
    defaults = {**_ADAMW, DECOUPLED: is_decoupled} if is_adam(group) else {}
    if "lr" in own:
        defaults["initial_lr"] = own["lr"]
    return {**{key: value for key, value in defaults.items() if key not in own}, **own}


def rate_notes(index: Index) -> Iterator[str]:
    """What schedulers of torch ask for and the source does not have."""
    if any("initial_lr" not in group.hyper for group in index.groups):
        yield "no initial_lr in the source: the current lr is written, which schedulers do not read again"


def decay_notes(index: Index, said: str | None) -> Iterator[str]:
    """Which kind of weight decay was assumed, where neither source nor user (`said`) says it."""
    if said is None and any(is_adam(own) and DECOUPLED not in own.hyper for own in index.groups):
        yield (
            f"the source does not say whether weight decay is decoupled: written as AdamW has it. For Adam pass "
            f"--set {DECOUPLED}=false"
        )


def number_as(prober: Prober, state: StateIndex, dtype: DType) -> bytes:
    """The one element of a state, in another type where it is another."""
    ref = state.fragments[0].ref
    data = ref.data if isinstance(ref, InlineTensor) else prober.window(ref, 0, 1)
    if state.dtype is dtype:
        return bytes(data)
    form = {DType.INT64: "<q", DType.INT32: "<i", DType.FLOAT64: "<d", DType.FLOAT32: "<f"}[state.dtype]
    return pack("<f", unpack(form, data)[0])
