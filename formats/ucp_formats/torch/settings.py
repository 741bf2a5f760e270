"""Settings of torch's own optimizers, for parameter groups of any framework.

A torch optimizer needs all of its settings: those that the source lacks get torch's defaults (torch 2.13,
`torch/optim/adamw.py`).

>>> dict(settings_of(ParamGroup(params=("w",), hyper={"lr": 0.1}), is_decoupled=True))
{'initial_lr': 0.1, 'lr': 0.1}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import pack

from ucp.contract.optimizer import OptimizerPlan
from ucp.core.index import STEP, Index, ParamGroup
from ucp.core.target import TargetOptions
from ucp.core.tensor import DType
from ucp.errors import UnsupportedError, UsageError

_ADAMW: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Defaults of torch's Adam and AdamW for settings that other frameworks lack."""

DECOUPLED = "decoupled_weight_decay"
"""The setting that tells AdamW from Adam."""
DECOUPLED_HELP = "true for AdamW, false for Adam, where the source does not say"

_ELSEWHERE = "Leave the optimizer out (--include '*/weight'), or take another target"
"""What to do with counts that torch cannot keep."""


def check_options(options: TargetOptions, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError for options that torch has no place for. `choices`: further settings, to their values."""
    if options.compress:
        raise UsageError("torch cannot read compressed tensors; drop --compress")
    if options.tag:
        raise UsageError("torch's checkpoints have no tag: their path is their name. Drop --tag")
    if STEP in options.dtypes:
        raise UsageError(f"torch keeps {STEP} in float32; drop --dtype {STEP}=...")
    for key, values in {**choices, DECOUPLED: ("true", "false")}.items():
        if (value := options.settings.get(key, values[0])) not in values:
            raise UsageError(f"expected --set {key}={'|'.join(values)}; got {value}")


def decoupled_option(index: Index, options: TargetOptions) -> str | None:
    """The user's value of `decoupled_weight_decay`. Raises UsageError if the source has its own."""
    option = options.settings.get(DECOUPLED)
    if option is not None and any(DECOUPLED in group.hyper for group in index.groups):
        raise UsageError(f"the source says {DECOUPLED} itself; drop --set {DECOUPLED}=...")
    return option


def count_tensor(index: Index, optimizer: OptimizerPlan, param: str, state: str) -> tuple[DType, bytes]:
    """Type and bytes of a count as torch's optimizers keep it: 0-d, and `step` in float32.

    Raises UnsupportedError for a count with dims, or a `step` that float32 cannot represent.
    """
    source = index.atoms[param].states[state]
    count = optimizer.count(param, state)
    if source.global_shape or count is None:
        raise UnsupportedError(
            f"{index.path} keeps {state} as a tensor of shape {list(source.global_shape)}, torch's optimizers as one "
            f"without dims. {_ELSEWHERE}"
        )
    if state != STEP:
        return source.dtype, optimizer.count_bytes(param, state)
    optimizer.check_float32(param, state, remedy=_ELSEWHERE)
    optimizer.note_cast(state, source.dtype, DType.FLOAT32)
    return DType.FLOAT32, pack("<f", count)


def is_adam(group: ParamGroup) -> bool:
    """Whether a group is one of Adam or AdamW."""
    return "betas" in group.hyper


def settings_of(group: ParamGroup, *, is_decoupled: bool) -> dict[str, object]:
    """Settings of a group, and torch's defaults for those that it lacks.

    Schedulers of torch add `initial_lr` to a group, and keep it in their own state (`base_lrs`) too.
    """
    settings = dict(group.hyper)
    if isinstance(betas := settings.get("betas"), list):
        settings["betas"] = tuple(betas)
    defaults = {**_ADAMW, DECOUPLED: is_decoupled} if is_adam(group) else {}
    if "lr" in settings:
        defaults["initial_lr"] = settings["lr"]
    return {**{key: value for key, value in defaults.items() if key not in settings}, **settings}


def setting_notes(index: Index, decoupled: str | None) -> Iterator[str]:
    """Values that were assumed for settings that the source lacks. `decoupled`: the user's choice."""
    if any("initial_lr" not in group.hyper for group in index.groups):
        yield (
            "the source does not record initial_lr, the learning rate that a scheduler starts from: the current lr is "
            "written in its place. A scheduler that loads its own state does not read it"
        )
    if decoupled is None and any(is_adam(group) and DECOUPLED not in group.hyper for group in index.groups):
        yield (
            "the source does not record whether weight decay is decoupled: written as decoupled, as in AdamW. For Adam "
            f"pass --set {DECOUPLED}=false"
        )
