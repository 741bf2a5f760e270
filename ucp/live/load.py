"""Bring a checkpoint, in whatever format, into a live model: weights, buffers, optimizer states, hyper-parameters.

    import ucp

    report = ucp.load_into(model, checkpoint="ckpt/global_step1000", optimizer=optimizer)
    print(report)

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ucp.contract.protocols import SourceOptions
from ucp.conversion.options import TopologyLike, policy_of, topology_of
from ucp.conversion.source.zero_moments import ZeroMoments
from ucp.core.index import DoubtKind
from ucp.core.names import WEIGHT
from ucp.errors import UcpError, UsageError
from ucp.live.exchange.carry import carry
from ucp.live.exchange.traffic import CarryOptions, Exchange
from ucp.live.load_plan import Decision, check_agreement, check_topology, decide
from ucp.live.match import LoadItem
from ucp.live.optimizer import State, formed, put_hyper, put_states
from ucp.live.report import LoadReport, report_of
from ucp.live.run.ranks import Ranks, ranks_of, together

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["ENVIRONMENT", "LoadReport", "load_into"]

ENVIRONMENT = "UCP_CHECKPOINT"
"""Environment variable that names the checkpoint when the call does not."""


def load_into(
    model: nn.Module,
    topology: TopologyLike | None = None,
    *,
    checkpoint: str | PathLike[str] | None = None,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    group: ProcessGroup | Ranks | None = None,
    check: bool = True,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    family: str | None = None,
    patterns: str | PathLike[str] | None = None,
    shapes_from: str | PathLike[str] | None = None,
    bucket_nbytes: int = 64 << 20,
) -> LoadReport:
    """Load a checkpoint into `model`, and its optimizer states and hyper-parameters into `optimizer`.

    The model has whole parameters on every rank: a single process, or data parallelism
    (`DistributedDataParallel`, wrapped already or not). With torch.distributed initialised every rank of `group` must
    call this; each reads its share of the bytes, and the ranks gather them. Nothing is written into the model before
    everything is known to fit.

    Parameters
    ----------
    model
        Module on any device; wrappers (DistributedDataParallel, torch.compile) are seen through.
    topology
        Layout of this run, e.g. "dp=4", to be checked against the process group.
    checkpoint
        Anything `ucp inspect` reads; by default what the environment variable UCP_CHECKPOINT names.
    optimizer
        Optimizer over parameters of `model`. Without it, optimizer states are left out.
    strict
        Whether everything must fit. If not, what does not is left as it is, and reported.
    rename
        From a name in the model to the name in the checkpoint.
    group
        Ranks that hold the same model; by default all. A process group of torch.distributed, or anything that
        exchanges values as `ucp.live.run.ranks.Ranks` says.
    check
        Compare what is read with the checksums that the checkpoint records.
    zero_moments
        Moments that are all zero although steps were taken: "error", or "keep" to load them. See `ucp.convert`.
    accept
        What speaks against the files of the checkpoint and is to be passed over. See `ucp.convert`.
    family
        Model family whose rules say how the checkpoint is sharded, instead of the one chosen by evidence.
    patterns
        TOML file with a family of your own. See `ucp.convert`.
    shapes_from
        What says the shapes of parameters that the checkpoint keeps flat. See `ucp.convert`.
    bucket_nbytes
        Bytes gathered at once; a rank needs up to four times as many for what is under way.

    Raises
    ------
    LoadError
        Model and checkpoint do not fit; the message lists everything that does not. The model is as it was.
    UnsupportedError
        The model or the optimizer is sharded.
    UsageError
        No checkpoint is named, the topology is not that of the process group, or the family is not there.
    SourceError, CoverError, CorruptError
        The checkpoint cannot be read, or is damaged. An error found under way carries a note that says so: the model
        may then be partly overwritten.

    Whatever is raised is raised on all ranks.
    """
    started = time.perf_counter()
    ranks = ranks_of(group, _device(model))

    def decided() -> Decision:
        if topology is not None:
            check_topology(topology_of(topology), ranks)
        return decide(
            model,
            optimizer,
            _path_of(checkpoint),
            strict=strict,
            rename=rename,
            zero_moments=policy_of(zero_moments, ZeroMoments, "a policy for moments that are zero"),
            accept=DoubtKind.accepted(accept),
            source=SourceOptions.of(family, patterns, shapes_from),
        )

    decision = together(ranks, decided)
    check_agreement(ranks, decision, (strict, check, bucket_nbytes))
    landing = together(ranks, lambda: [_landing(want, decision) for want in decision.wants])
    options = CarryOptions(
        exchange=Exchange.ALWAYS, memory=4 * bucket_nbytes, records=decision.index.records if check else ()
    )
    try:
        traffic = carry(decision.wants, landing, ranks, options)
    except UcpError as error:
        error.add_note("It was found under way: the model may be partly overwritten, do not use it")
        raise
    together(ranks, lambda: _restore(decision, landing))
    return report_of(decision, replace(traffic, seconds=time.perf_counter() - started))


def _device(model: nn.Module) -> torch.device:
    import torch

    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _path_of(checkpoint: str | PathLike[str] | None) -> Path:
    path = checkpoint if checkpoint is not None else os.environ.get(ENVIRONMENT)
    if path is None or not str(path):
        raise UsageError(
            f"expected a checkpoint; pass checkpoint=PATH (after the model comes the topology), or set {ENVIRONMENT}"
        )
    return Path(path)


def _landing(want: LoadItem, decision: Decision) -> torch.Tensor:
    """The tensor to bring a state into: the live one where that can be, else a new one."""
    import torch

    handle = decision.model.handles[want.name]
    if want.state == WEIGHT:
        return handle
    dtype = getattr(torch, want.slice.dtype.value)
    if decision.index.atoms[want.slice.param].is_count(want.state):
        return torch.empty(want.slice.local_shape, dtype=dtype)
    assert decision.optimizer is not None
    held = decision.optimizer.state_of(want.name).get(want.state)
    reusable = isinstance(held, torch.Tensor) and held.dtype == dtype and held.device == handle.device
    if isinstance(held, torch.Tensor) and reusable and held.shape == want.slice.local_shape:
        return held
    if handle.shape == want.slice.local_shape:
        return torch.empty_like(handle, dtype=dtype, requires_grad=False)
    return torch.empty(want.slice.local_shape, dtype=dtype, device=handle.device)


def _restore(decision: Decision, landing: Sequence[torch.Tensor]) -> None:
    """Give the optimizer what was brought."""
    if decision.optimizer is None:
        return
    states: dict[str, dict[str, State]] = {name: {} for name in decision.fresh}
    for want, tensor in zip(decision.wants, landing, strict=True):
        if want.state != WEIGHT:
            own = states.setdefault(want.name, {})
            form = decision.forms.get(want.name, {}).get(want.state)
            counts = decision.index.atoms[want.slice.param].is_count(want.state)
            own[want.state] = formed(tensor, form) if counts else tensor
    put_states(decision.optimizer, states)
    put_hyper(decision.optimizer, decision.hyper)
