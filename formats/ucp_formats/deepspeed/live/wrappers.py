"""The optimizers of an engine, class by class: where masters lie, what is stepped, how weights follow from masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from ucp.errors import UnsupportedError
from ucp.live.adapters import LiveOptimizer
from ucp.live.parts import LivePart
from ucp_formats.deepspeed.live.buffers import (
    Buffer,
    bf16_buffers,
    fp16_buffers,
    single_buffers,
    stage3_buffers,
    zero_buffers,
)
from ucp_formats.deepspeed.live.handles import (
    Bf16Optimizer,
    Fp16Optimizer,
    Stage3Optimizer,
    UnfusedOptimizer,
    ZeroOptimizer,
)
from ucp_formats.deepspeed.live.module import NamedModule
from ucp_formats.deepspeed.live.optimizer import described

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Master", "Wrapped", "unwrapped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """What the weight of a parameter is loaded into."""

    memory: torch.Tensor
    """Its elements: a stretch of a flat tensor, or a tensor of the local shape."""
    part: LivePart
    """What of the parameter they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """An optimizer of an engine."""

    masters: Mapping[torch.Tensor, Master] = field(default_factory=dict)
    """Parameter of the module to its master, where it has one."""
    optimizer: LiveOptimizer | None = None
    """What steps them."""
    finish: Callable[[], None] = field(default=lambda: None)
    """Make the weights from the masters. Collective."""


_Unwrap: TypeAlias = Callable[[object, NamedModule], Wrapped]


def unwrapped(optimizer: object, named: NamedModule) -> Wrapped:
    """What an engine's optimizer steps. Raises UnsupportedError for a class that is not known."""
    from torch.optim import Optimizer

    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ in _KINDS:
            return _KINDS[kind.__name__](optimizer, named)
    if isinstance(optimizer, Optimizer) and not type(optimizer).__module__.startswith("deepspeed.runtime.fp16.onebit"):
        return _plain(optimizer, named)
    if optimizer is None:
        return Wrapped()
    raise UnsupportedError(
        f"expected an engine of ZeRO 0 to 3; its optimizer is a {type(optimizer).__name__}, which ucp does not know. "
        "Write files for its own load_checkpoint: ucp convert SRC DST --to deepspeed"
    )


def _zero(optimizer: object, named: NamedModule) -> Wrapped:
    own = cast("ZeroOptimizer", optimizer)  # by its class
    return _buffered(own.optimizer, zero_buffers(own, _whole), named, finish=own.update_lp_params)


def _bf16(optimizer: object, named: NamedModule) -> Wrapped:
    own = cast("Bf16Optimizer", optimizer)  # by its class
    return _buffered(own.optimizer, bf16_buffers(own, _whole), named, finish=own.update_lp_params)


def _fp16(optimizer: object, named: NamedModule) -> Wrapped:
    own = cast("Fp16Optimizer", optimizer)  # by its class
    return _copied(_buffered(own.optimizer, fp16_buffers(own, _whole), named))


def _stage3(optimizer: object, named: NamedModule) -> Wrapped:
    own = cast("Stage3Optimizer", optimizer)  # by its class
    return _buffered(own.optimizer, stage3_buffers(own, _whole), named, finish=partial(_update_chunks, own))


def _unfused(optimizer: object, named: NamedModule) -> Wrapped:
    own = cast("UnfusedOptimizer", optimizer)  # by its class
    pairs = map(zip, own.fp16_groups, own.fp32_groups)
    return _copied(_buffered(own.optimizer, single_buffers(pairs, _whole), named))


def _plain(optimizer: Optimizer, named: NamedModule) -> Wrapped:
    own = [[(param, param) for param in group["params"]] for group in optimizer.param_groups]
    return _buffered(optimizer, single_buffers(own, _whole), named)


def _offload(optimizer: object, named: NamedModule) -> Wrapped:
    """Stage 3 without an optimizer, for inference."""
    own = cast("Stage3Optimizer", optimizer)  # of these, it has the two events
    return Wrapped(finish=partial(_gather_anew, own))


_KINDS: Mapping[str, _Unwrap] = {
    "DeepSpeedZeroOptimizer": _zero,
    "BF16_Optimizer": _bf16,
    "FP16_Optimizer": _fp16,
    "FP16_UnfusedOptimizer": _unfused,
    "DeepSpeedZeroOptimizer_Stage3": _stage3,
    "DeepSpeedZeRoOffload": _offload,
}
"""Class of deepspeed.runtime to what unwraps it."""


def _whole(param: nn.Parameter) -> LivePart:
    """What model parallelism leaves a rank of a parameter: all of it."""
    shape: tuple[int, ...] = tuple(getattr(param, "ds_shape", param.shape))
    return LivePart.whole(shape)


def _buffered(
    optimizer: Optimizer, buffers: Iterable[Buffer], named: NamedModule, *, finish: Callable[[], None] = lambda: None
) -> Wrapped:
    held = tuple(buffers)
    masters: dict[torch.Tensor, Master] = {
        param: Master(memory=own.of(buffer.tensor.detach()), part=own.part)
        for buffer in held
        for param, own in buffer.params.items()
    }
    names = {param: named.name(param) for buffer in held for param in buffer.params}
    return Wrapped(masters=masters, optimizer=described(optimizer, held, names), finish=finish)


def _copied(own: Wrapped) -> Wrapped:
    """The same, with weights that are copies of whole masters."""

    def copy() -> None:
        for param, master in own.masters.items():
            param.data.copy_(master.memory.view(param.shape))

    return Wrapped(masters=own.masters, optimizer=own.optimizer, finish=copy)


def _update_chunks(optimizer: Stage3Optimizer) -> None:
    """Make the chunks of weights from those of masters; the weights that are kept whole are gathered again."""
    optimizer.checkpoint_event_prologue()
    chunks = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for weights, masters in chunks:
        weights.data.copy_(masters.data)
    optimizer.checkpoint_event_epilogue()


def _gather_anew(optimizer: Stage3Optimizer) -> None:
    optimizer.checkpoint_event_prologue()
    optimizer.checkpoint_event_epilogue()
