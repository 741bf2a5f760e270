"""The adapter of DeepSpeed engines (0.19.8): ZeRO 0 to 3, in place.

The masters of this rank are what is loaded into, whatever the stage, and the 16-bit weights are made from them by
DeepSpeed's own means once all is there. An engine owns its optimizer, so that it need not be passed beside it;
`optimizer=False` loads the weights alone (masters and 16-bit), and leaves moments, steps and rates.

Experts of `deepspeed.moe` are numbered on each rank from 0; here they have the numbers that a checkpoint has.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucp.errors import UnsupportedError, UsageError, listed
from ucp.live.adapters import LiveModel, LiveRequest, LiveRun
from ucp.live.model.module import dtype_of
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh
from ucp_formats.deepspeed.live.buffers import chunk_of, whole_part
from ucp_formats.deepspeed.live.progress import resume
from ucp_formats.deepspeed.live.wrappers import Master, NamedModule, Wrapped, name_module, unwrapped

if TYPE_CHECKING:
    pass

__all__ = ["DeepSpeedAdapter"]


def _refuse(engine: Any) -> None:
    """Raise UnsupportedError for everything about an engine that is not known here."""
    optimizer = engine.optimizer
    known = (
        (
            getattr(optimizer, "swap_optimizer", False),
            "offload_optimizer to NVMe: its states lie in swap files; set device cpu, or none",
        ),
        (
            getattr(optimizer, "params_in_nvme_and_cpu", False),
            "offload_param to NVMe: weights lie in swap files; set device cpu, or none",
        ),
        (
            getattr(optimizer, "zero_hpz_partition_size", 1) > 1,
            "zero_hpz_partition_size (secondary copies of weights): set it to 1 while resuming",
        ),
        (getattr(optimizer, "zenflow", False), "ZenFlow: it keeps states of its own on the CPU"),
        (
            getattr(optimizer, "partial_offload", 1.0) < 1.0,
            "offload_optimizer.ratio below 1 (Twin-Flow): some states belong to a second optimizer; set it to 1",
        ),
        (
            getattr(optimizer, "offloaded_states", ()),
            "states that engine.offload_states moved away: call engine.reload_states() first",
        ),
    )
    reasons = [why for is_met, why in known if is_met]
    if reasons:
        raise UnsupportedError(
            f"expected an engine whose tensors lie in memory, each in one place; got\n{listed(reasons)}\n"
            "or write files for its own load_checkpoint: ucp convert SRC DST --to deepspeed"
        )


def _is_tensor_parallel(engine: Any, mesh: RunMesh) -> bool:
    """Whether ranks share a copy of a layer. Raises UsageError where `mesh` says otherwise than the engine."""
    said = importlib.import_module("deepspeed.utils.bwc")
    ranks = int(said.bwc_tensor_model_parallel_world_size(engine.mpu))
    if ranks == 1:
        return False
    rank = int(said.bwc_tensor_model_parallel_rank(engine.mpu))
    if mesh.degree("tp") != ranks:
        got = f"one with tp={mesh.degree('tp')}" if mesh.topology is not None else "none"
        raise UsageError(f'expected a topology with tp={ranks}, as the engine has it, such as "tp={ranks}"; got {got}')
    if mesh.coords["tp"] != rank:
        raise UsageError(
            f"expected this rank at tp={rank}, as the engine has it; the topology puts it at tp={mesh.coords['tp']}, "
            "as Megatron numbers ranks. Pass a torch DeviceMesh that says the order of this run"
        )
    return True


class DeepSpeedAdapter:
    """Describes engines of DeepSpeed."""

    name = "deepspeed"

    def claims(self, request: LiveRequest) -> bool:
        """Whether an engine is passed, or something that belongs to one."""
        if "deepspeed.runtime.engine" not in sys.modules:
            return False
        from torch import nn

        passed = (request.model, request.optimizer)
        params = request.model.parameters() if isinstance(request.model, nn.Module) else ()
        return any(type(own).__module__.startswith("deepspeed.runtime.") for own in passed) or any(
            hasattr(param, mark) for param in params for mark in ("ds_id", "_hp_mapping")
        )

    def describe(self, request: LiveRequest) -> LiveRun:
        """The parts of an engine. Raises UsageError without one, UnsupportedError for what is not known."""
        engine = _engine(request)
        _refuse(engine)
        is_cut = _is_tensor_parallel(engine, request.mesh)
        named = name_module(engine.module, engine.expert_parallel_group)
        wrapped = unwrapped(engine.optimizer, named)
        model = _model(named, wrapped)
        run = LiveRun(model=model, finish=wrapped.finish, is_placed=not is_cut)
        if request.optimizer is False:
            return run
        return replace(run, optimizer=wrapped.optimizer, resume=partial(resume, engine))


def _engine(request: LiveRequest) -> Any:
    """The engine that is the model or the optimizer, and which the other belongs to. Raises UsageError."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    engines = [own for own in (request.model, request.optimizer) if isinstance(own, kind)]
    if not engines:
        raise UsageError(
            "expected the engine that deepspeed.initialize returned; got its module or its optimizer alone, and the "
            "masters, steps and copies of a weight lie in several of its parts. Pass the engine as the model"
        )
    engine: Any = engines[0]
    if request.model not in (engine, engine.module):
        raise UsageError("expected the engine, or the module inside of it, as the model; got another module")
    if request.optimizer not in (None, False, engine, engine.optimizer):
        raise UsageError(
            "expected the optimizer of the engine, or none; got another. Leave it out: an engine has its own"
        )
    return engine


def _model(named: NamedModule, wrapped: Wrapped) -> LiveModel:
    """Masters where there are any; else what the rank holds of a tensor."""
    tensors, handles, marked = [], {}, {}
    tensor: Any  # with what DeepSpeed hangs on it
    for tensor, names in named.tensors.items():
        master = wrapped.masters.get(tensor)
        if master is None and hasattr(tensor, "ds_id"):
            chunk = chunk_of(tensor, tensor.ds_process_group)
            master = Master(memory=tensor.ds_tensor.narrow(0, 0, chunk.numel), part=chunk.part)
        elif master is None:
            master = Master(memory=tensor, part=whole_part(tensor))
        tensors.append(LiveTensor(names=names, dtype=dtype_of(master.memory), part=master.part))
        handles[names[0]], marked[names[0]] = master.memory, tensor
    return LiveModel(tensors=tuple(tensors), handles=handles, owners={}, notes=named.notes, marked=marked)
