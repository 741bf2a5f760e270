"""Describes live runs of megatron-core 0.13 to 0.19, so that checkpoints can be loaded into them.

>>> MegatronAdapter().name
'megatron'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ucp.core.index import Index
from ucp.core.topology import AXES
from ucp.errors import UsageError
from ucp.live.adapters import LiveRequest, LiveRun
from ucp.live.checkpoint import Checkpoint
from ucp.live.match.items import Findings
from ucp.live.optimizer.torch_optimizer import describe_optimizer
from ucp.live.resume.scheduler import make_scaler_state
from ucp.live.resume.values import load_extra
from ucp.live.run.ranks import run_together
from ucp_formats.megatron.live.model import describe_chunks
from ucp_formats.megatron.live.optimizer import MegatronLive, describe_optimizers
from ucp_formats.megatron.source import find_grad_scaler

_MODULE = ("megatron.core.transformer.module", "MegatronModule")
_OPTIMIZER = ("megatron.core.optimizer.optimizer", "MegatronOptimizer")


class MegatronAdapter:
    """Adapter for models and optimizers of megatron-core."""

    name = "megatron"

    def claims(self, request: LiveRequest) -> bool:
        """Whether a chunk of the model, or the optimizer, is megatron-core's."""
        return any(map(_is_megatron, _chunks(request.model))) or _is_instance(request.optimizer, _OPTIMIZER)

    def describe(self, request: LiveRequest) -> LiveRun:
        """The rank's model and optimizer, and how to copy masters to 16-bit weights. Collective."""
        run_together(request.ranks, lambda: _check(request))
        model = describe_chunks(_chunks(request.model), request.ranks)
        if not request.optimizer:
            return LiveRun(model=model)
        if not _is_instance(request.optimizer, _OPTIMIZER):
            plain: Any = request.optimizer
            return LiveRun(model=model, optimizer=run_together(request.ranks, lambda: describe_optimizer(plain, model)))
        optimizer = describe_optimizers(request.optimizer, model, request.ranks)
        derived = frozenset(name for member in optimizer.members for name in member.copied)
        return LiveRun(
            model=replace(model, derived=derived),
            optimizer=optimizer,
            finish=lambda: _copy_masters(optimizer),
            resume=lambda index, findings: _restore_loss_scale(optimizer, index, findings),
        )


def _chunks(model: object) -> Sequence[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]


def _is_megatron(chunk: object) -> bool:
    """Whether a module, or one that it wraps, is megatron-core's."""
    while chunk is not None and not _is_instance(chunk, _MODULE):
        chunk = getattr(chunk, "module", None)
    return chunk is not None


def _is_instance(value: object, path: tuple[str, str]) -> bool:
    """Whether `value` is an instance of the class at `path` (module, name); does not import the module."""
    base = getattr(sys.modules.get(path[0]), path[1], None)
    return base is not None and isinstance(value, base)


def _check(request: LiveRequest) -> None:
    """Raise UsageError if the model is not megatron-core's, or if the topology given is not that of the run."""
    chunks = _chunks(request.model)
    others = [type(chunk).__name__ for chunk in chunks if not _is_megatron(chunk)]
    if others or not chunks:
        raise UsageError(
            "expected all chunks of the model to be megatron-core's, because the optimizer or other chunks are; got "
            f"{', '.join(others) or 'none'}"
        )
    if request.mesh.topology is None:
        return
    from megatron.core import parallel_state as state

    degrees = {}
    if state.model_parallel_is_initialized():
        degrees = {
            "dp": state.get_data_parallel_world_size(),
            "tp": state.get_tensor_model_parallel_world_size(),
            "pp": state.get_pipeline_model_parallel_world_size(),
            "ep": state.get_expert_model_parallel_world_size(),
            "cp": state.get_context_parallel_world_size(),
            "etp": state.get_expert_tensor_parallel_world_size(),
        }
    topology = request.mesh.topology
    requested = {**{axis: getattr(topology, axis) for axis in AXES}, "etp": topology.expert_tp}
    differing = [
        f"{axis} is {degree}, and {requested[axis]} was given"
        for axis, degree in degrees.items()
        if requested[axis] != degree
    ]
    if differing:
        raise UsageError(
            f"expected the topology that megatron-core was initialised with; {', '.join(differing)}. Drop topology="
        )


def _copy_masters(optimizer: MegatronLive) -> None:
    """Copy masters to 16-bit weights, on all data-parallel ranks, with Megatron's own functions."""
    import torch

    chunks: dict[int, Any] = {}
    with torch.no_grad():
        for member in optimizer.members:
            if member.copied:
                member.outer._copy_main_params_to_model_params()  # noqa: SLF001  # as after every step
            if member.is_distributed:
                chunks |= {id(chunk): chunk for chunk in member.outer.model_chunks}
        for chunk in chunks.values():
            chunk.start_param_sync(force_sync=True)


def _restore_loss_scale(optimizer: MegatronLive, index: Index, findings: Findings) -> dict[str, str]:
    """Set the dynamic loss scale of an fp16 run; returns the extras that it was read from."""
    scalers = (getattr(member.outer, "grad_scaler", None) for member in optimizer.members)
    saved = find_grad_scaler(index)
    counts = {key: value for key, value in saved.items() if isinstance(value, int)} if isinstance(saved, dict) else {}
    scaler_findings, used_extras = Findings(), {}
    for scaler in {id(entry): entry for entry in scalers if entry is not None and entry.state_dict()}.values():
        restored = make_scaler_state(
            index, scaler, lambda extra: load_extra(extra, Checkpoint(index).tensor), scaler_findings
        )
        if restored is not None:
            scaler.load_state_dict({**restored[1], **counts})
            used_extras[restored[0]] = "loss scale"
    findings.notes += [*(() if counts else scaler_findings.notes), *scaler_findings.problems]
    if index.groups and not any("max_lr" in group.hyper for group in index.groups):
        findings.notes.append(
            "the checkpoint has no max_lr and min_lr, so those of the groups stay as configured: Megatron's scheduler "
            "computes the learning rate from them, not from the restored lr"
        )
    return used_extras
