"""Settings of torch's own optimizers, for groups of parameters that another framework may have kept.

torch asks for every setting that its optimizer has: those that another framework lacks are written as torch has them by
default (torch 2.13, `torch/optim/adamw.py`).

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
"""Settings of torch's Adam and AdamW that other frameworks do not have."""

DECOUPLED = "decoupled_weight_decay"
"""The one of them that tells AdamW from Adam."""
DECOUPLED_MEANING = "true for AdamW, false for Adam, where the source does not say"

_ELSEWHERE = "Leave the optimizer out (--include '*/weight'), or take another target"
"""What to do with counts that torch cannot keep."""


def check_options(options: TargetOptions, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError for what torch has no place for. `choices`: further settings, to the values they take."""
    if options.compress:
        raise UsageError("torch cannot read compressed tensors; drop --compress")
    if options.tag:
        raise UsageError("torch's checkpoints have no tag: their path is their name. Drop --tag")
    if STEP in options.dtypes:
        raise UsageError(f"torch keeps {STEP} in float32; drop --dtype {STEP}=...")
    for key, values in {**choices, DECOUPLED: ("true", "false")}.items():
        if (said := options.settings.get(key, values[0])) not in values:
            raise UsageError(f"expected --set {key}={'|'.join(values)}; got {said}")


def checked_decoupled(index: Index, options: TargetOptions) -> str | None:
    """What the user says of it. Raises UsageError where the source says it itself."""
    said = options.settings.get(DECOUPLED)
    if said is not None and any(DECOUPLED in own.hyper for own in index.groups):
        raise UsageError(f"the source says {DECOUPLED} itself; drop --set {DECOUPLED}=...")
    return said


def count_tensor(index: Index, optimizer: OptimizerPlan, param: str, state: str) -> tuple[DType, bytes]:
    """Type and bytes of a count as torch's optimizers keep it: 0-d, and `step` in float32.

    Raises UnsupportedError for one with dims, or a `step` that float32 does not hold.
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
