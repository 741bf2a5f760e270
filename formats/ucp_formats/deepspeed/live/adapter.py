"""The adapter of DeepSpeed engines (0.19.8): ZeRO 0 to 3, in place.

The masters of this rank are what is loaded into, whatever the stage, and the 16-bit weights are made from them by
DeepSpeed's own means once all is there. An engine owns its optimizer, so that it need not be passed beside it;
`optimizer=False` loads the weights alone (masters and 16-bit), and leaves moments, steps and rates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ucp.errors import UsageError
from ucp.live.adapters import LiveModel, LiveRequest, LiveRun
from ucp.live.model.module import dtype_of
from ucp.live.parts import LivePart, LiveTensor
from ucp_formats.deepspeed.live.buffers import chunk_of
from ucp_formats.deepspeed.live.handles import Engine, PartitionedParam
from ucp_formats.deepspeed.live.module import NamedModule, name_module
from ucp_formats.deepspeed.live.progress import resume
from ucp_formats.deepspeed.live.refusals import refuse
from ucp_formats.deepspeed.live.tensor_parallel import is_tensor_parallel
from ucp_formats.deepspeed.live.wrappers import Master, Wrapped, unwrapped

if TYPE_CHECKING:
    import torch

__all__ = ["DeepSpeedAdapter"]


class DeepSpeedAdapter:
    """Describes engines of DeepSpeed."""

    name = "deepspeed"

    def claims(self, request: LiveRequest) -> bool:
        """Whether an engine is passed, or something that belongs to one."""
        if "deepspeed.runtime.engine" not in sys.modules:
            return False
        passed = (request.model, request.optimizer)
        return any(type(own).__module__.startswith("deepspeed.runtime.") for own in passed) or any(
            hasattr(param, mark) for param in _params(request.model) for mark in ("ds_id", "_hp_mapping")
        )

    def describe(self, request: LiveRequest) -> LiveRun:
        """The parts of an engine. Raises UsageError without one, UnsupportedError for what is not known."""
        engine = _engine(request)
        refuse(engine)
        is_cut = is_tensor_parallel(engine, request.mesh)
        named = name_module(engine.module, engine.expert_parallel_group)
        wrapped = unwrapped(engine.optimizer, named)
        model = _model(named, wrapped)
        run = LiveRun(model=model, finish=wrapped.finish, is_placed=not is_cut)
        if request.optimizer is False:
            return run
        return replace(run, optimizer=wrapped.optimizer, resume=partial(resume, engine))


def _params(model: object) -> Iterator[torch.Tensor]:
    from torch import nn

    if isinstance(model, nn.Module):
        yield from model.parameters()


def _engine(request: LiveRequest) -> Engine:
    """The engine that is the model or the optimizer, and which the other belongs to. Raises UsageError."""
    engines = [own for own in (request.model, request.optimizer) if _is_engine(own)]
    if not engines:
        raise UsageError(
            "expected the engine that deepspeed.initialize returned; got its module or its optimizer alone, and the "
            "masters, steps and copies of a weight lie in several of its parts. Pass the engine as the model"
        )
    engine = cast("Engine", engines[0])  # an instance of the class that the protocol describes
    if request.model not in (engine, engine.module):
        raise UsageError("expected the engine, or the module inside of it, as the model; got another module")
    if request.optimizer not in (None, False, engine, engine.optimizer):
        raise UsageError(
            "expected the optimizer of the engine, or none; got another. Leave it out: an engine has its own"
        )
    return engine


def _is_engine(value: object) -> bool:
    kind: type = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    return isinstance(value, kind)


def _model(named: NamedModule, wrapped: Wrapped) -> LiveModel:
    """Masters where there are any; else what the rank holds of a tensor."""
    tensors, handles, marked = [], {}, {}
    for tensor, names in named.tensors.items():
        own = wrapped.masters.get(tensor) or _held(tensor)
        tensors.append(LiveTensor(names=names, dtype=dtype_of(own.memory), part=own.part))
        handles[names[0]], marked[names[0]] = own.memory, tensor
    return LiveModel(tensors=tuple(tensors), handles=handles, owners={}, notes=named.notes, marked=marked)


def _held(tensor: torch.Tensor) -> Master:
    if not hasattr(tensor, "ds_id"):
        return Master(memory=tensor, part=LivePart.whole(tuple(tensor.shape)))
    cut: PartitionedParam = tensor  # type: ignore[assignment]  # what DeepSpeed hangs on it
    own = chunk_of(cut, cut.ds_process_group, LivePart.whole(tuple(cut.ds_shape)))
    return Master(memory=cut.ds_tensor.narrow(0, 0, own.numel), part=own.part)
