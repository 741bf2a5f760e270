"""Live runs of megatron-core 0.13 to 0.19.

>>> MegatronAdapter().name
'megatron'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ucp.core.index import Index
from ucp.core.topology import AXES
from ucp.errors import UsageError
from ucp.live.adapters import LiveRequest, LiveRun
from ucp.live.checkpoint import Checkpoint
from ucp.live.match.findings import Findings
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
    """Describes models and optimizers of megatron-core."""

    name = "megatron"

    def claims(self, request: LiveRequest) -> bool:
        """Whether a chunk of the model, or the optimizer, is megatron-core's."""
        chunks = _chunks(request.model)
        return any(_is_of(own, _MODULE) for chunk in chunks for own in _inward(chunk)) or _is_of(
            request.optimizer, _OPTIMIZER
        )

    def describe(self, request: LiveRequest) -> LiveRun:
        """The rank's parts, and the way back from masters to 16-bit weights. Collective."""
        run_together(request.ranks, lambda: _check(request))
        model = describe_chunks(_chunks(request.model), request.ranks)
        if not request.optimizer:
            return LiveRun(model=model)
        if not _is_of(request.optimizer, _OPTIMIZER):
            plain: Any = request.optimizer
            return LiveRun(model=model, optimizer=run_together(request.ranks, lambda: describe_optimizer(plain, model)))
        optimizer = describe_optimizers(request.optimizer, model, request.ranks)
        derived = frozenset(name for own in optimizer.members for name in own.copied)
        return LiveRun(
            model=replace(model, derived=derived),
            optimizer=optimizer,
            finish=lambda: _refresh(optimizer),
            resume=lambda index, findings: _rescaled(optimizer, index, findings),
        )


def _chunks(model: object) -> Sequence[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]


def _inward(module: object) -> Iterator[object]:
    """A module, and what it wraps."""
    while module is not None:
        yield module
        module = getattr(module, "module", None)


def _is_of(own: object, place: tuple[str, str]) -> bool:
    """Whether it is of a class of megatron-core; nothing is imported for others."""
    base = getattr(sys.modules.get(place[0]), place[1], None)
    return base is not None and isinstance(own, base)


def _check(request: LiveRequest) -> None:
    """Raise UsageError for a model without chunks of megatron-core, or another topology than the run's."""
    chunks = _chunks(request.model)
    strange = [type(own).__name__ for own in chunks if not any(_is_of(each, _MODULE) for each in _inward(own))]
    if strange or not chunks:
        raise UsageError(
            f"expected the chunks of a model of megatron-core with its optimizer; got {', '.join(strange) or 'none'}"
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
    wanted = request.mesh.topology
    given = {**{axis: getattr(wanted, axis) for axis in AXES}, "etp": wanted.expert_tp}
    differing = [f"{axis} is {own}, and {given[axis]} was given" for axis, own in degrees.items() if given[axis] != own]
    if differing:
        raise UsageError(
            f"expected the topology that megatron-core was initialised with; {', '.join(differing)}. Leave it out"
        )


def _refresh(optimizer: MegatronLive) -> None:
    """16-bit weights from masters, and to all data-parallel ranks, by Megatron's own means."""
    import torch

    chunks: dict[int, Any] = {}
    with torch.no_grad():
        for own in optimizer.members:
            if own.copied:
                own.outer._copy_main_params_to_model_params()  # noqa: SLF001  # as after every step
            if own.parts or hasattr(own.outer, "gbuf_ranges"):
                chunks |= {id(chunk): chunk for chunk in own.outer.model_chunks}
        for chunk in chunks.values():
            chunk.start_param_sync(force_sync=True)


def _rescaled(optimizer: MegatronLive, index: Index, findings: Findings) -> dict[str, str]:
    """Set the scale of the loss that an fp16 run adapts; the extra that it was taken from."""
    every = (getattr(own.outer, "grad_scaler", None) for own in optimizer.members)
    said = find_grad_scaler(index)
    counts = {key: own for key, own in said.items() if isinstance(own, int)} if isinstance(said, dict) else {}
    told, taken = Findings(), {}
    for scaler in {id(own): own for own in every if own is not None and own.state_dict()}.values():
        found = make_scaler_state(index, scaler, lambda extra: load_extra(extra, Checkpoint(index).tensor), told)
        if found is not None:
            scaler.load_state_dict({**found[1], **counts})
            taken[found[0]] = "scale of the loss"
    findings.notes += [*(() if counts else told.notes), *told.problems]
    if index.groups and not any("max_lr" in group.hyper for group in index.groups):
        findings.notes.append(
            "max_lr and min_lr of the groups stay as configured, as the checkpoint has none: Megatron's scheduler sets "
            "the rate of every step by them, and not the lr that was restored"
        )
    return taken
