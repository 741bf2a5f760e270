"""Bring a checkpoint, in whatever format, into a live run: weights, buffers, optimizer states, hyper-parameters.

    import ucp

    report = ucp.load_into(model, "tp=2,dp=4", "ckpt/global_step1000", optimizer=optimizer)
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
from typing import TYPE_CHECKING, TypeGuard

from ucp.contract.protocols import SourceOptions
from ucp.conversion.options import TopologyLike, policy_of, topology_of
from ucp.conversion.prepare import index_as_told, index_of
from ucp.conversion.source.zero_moments import ZeroMoments
from ucp.core.index import DoubtKind
from ucp.errors import UcpError, UsageError
from ucp.live.adapters import LiveRequest
from ucp.live.decide import Decision, LoadOptions, check_agreement, decide, match, used_anywhere
from ucp.live.describe import described
from ucp.live.exchange.carry import carry
from ucp.live.exchange.traffic import CarryOptions, Exchange
from ucp.live.model.experts import Experts
from ucp.live.model.padding import without_padding
from ucp.live.parts import LoadItem
from ucp.live.place import Placing, place
from ucp.live.report import LoadReport, report_of
from ucp.live.run.mesh import RunMesh, is_device_mesh
from ucp.live.run.ranks import Ranks, ranks_of, together

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

__all__ = ["ENVIRONMENT", "LoadReport", "load_into"]

ENVIRONMENT = "UCP_CHECKPOINT"
"""Environment variable that names the checkpoint when the call does not."""


def load_into(
    model: nn.Module | Sequence[nn.Module],
    topology: TopologyLike | DeviceMesh | None = None,
    checkpoint: str | PathLike[str] | None = None,
    *,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    process_group: ProcessGroup | Ranks | None = None,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    family: str | None = None,
    patterns: str | PathLike[str] | None = None,
    shapes_from: str | PathLike[str] | None = None,
    experts: Experts | None = None,
    bucket_nbytes: int = 64 << 20,
) -> LoadReport:
    """Load a checkpoint into `model`, and its optimizer states and hyper-parameters into `optimizer`.

    With torch.distributed initialised every rank of `process_group` must call this. Nothing is written into the model
    before everything is known to fit.

    Parameters
    ----------
    model
        Module on any device, whole or with what this rank has of it; wrappers (DistributedDataParallel,
        torch.compile) are seen through. A list of modules is the chunks of a virtual pipeline.
    topology
        Layout of this run, e.g. "dp=2,tp=2,pp=2": ranks are numbered as Megatron does (tp, cp, ep, dp, pp, the first
        fastest). Another order is said by a torch DeviceMesh over all ranks with dims named dp, dp_replicate,
        dp_shard, fsdp, tp, pp, ep, etp, cp. A path to a checkpoint is taken for one.
    checkpoint
        Anything `ucp inspect` reads; by default what the environment variable UCP_CHECKPOINT names.
    optimizer
        Optimizer over parameters of `model`. Without it, optimizer states are left out.
    strict
        Whether everything must fit. If not, what does not is left as it is, and reported.
    rename
        From a name in the model to the name in the checkpoint.
    process_group
        Ranks of the run; by default all. A process group of torch.distributed, or anything that
        exchanges values as `ucp.live.run.ranks.Ranks` says.
    zero_moments
        Moments that are all zero although steps were taken: "error", or "keep" to load them. See `ucp.convert`.
    accept
        What speaks against the files of the checkpoint and is to be passed over. See `ucp.convert`.
    family
        Model family whose rules say how the checkpoint is sharded and how ranks cut it, instead of the one chosen by
        evidence.
    patterns
        TOML file with a family of your own. See `ucp.convert`.
    shapes_from
        What says the shapes of parameters that the checkpoint keeps flat. See `ucp.convert`.
    experts
        Who holds which experts, where they are not dealt out in order: {expert: expert-parallel ranks}, or that by
        layer. A rank that is named twice holds two replicas; a rank has its experts in the order of the map.
    bucket_nbytes
        Bytes gathered at once; a rank needs up to four times as many for what is under way.

    Raises
    ------
    LoadError
        Model and checkpoint do not fit; the message lists everything that does not. The model is as it was.
    UnsupportedError
        The model or the optimizer is laid out in a way that is not known.
    UsageError
        No checkpoint is named, the topology is not that of the process group, or the family is not there.
    SourceError, CoverError, CorruptError
        The checkpoint cannot be read, or is damaged. An error found under way carries a note that says so: the model
        may then be partly overwritten.

    Whatever is raised is raised on all ranks.
    """
    started = time.perf_counter()
    ranks = ranks_of(process_group, _device(model))
    mesh, path = together(ranks, lambda: _told(topology, checkpoint, ranks))
    request = LiveRequest(model=model, optimizer=optimizer, mesh=mesh, ranks=ranks)
    options = LoadOptions(
        strict=strict,
        rename=rename,
        zero_moments=policy_of(zero_moments, ZeroMoments, "a policy for moments that are zero"),
        accept=DoubtKind.accepted(accept),
    )
    said = together(ranks, lambda: SourceOptions.of(family, patterns, shapes_from))
    read = index_of if mesh.topology is None else index_as_told  # rules may be for this run alone
    index = together(ranks, lambda: read(path, source=said))
    check_agreement(ranks, index, (replace(options, rename=None), bucket_nbytes, mesh.topology, experts))
    run = together(ranks, lambda: described(request))
    run = place(run, index, mesh, ranks, Placing(family=said, rename=rename, experts=experts))
    matching = together(ranks, lambda: match(run, index, options))
    used = used_anywhere(matching, ranks)
    decision = together(ranks, lambda: decide(matching, used, options))
    landing = together(ranks, lambda: [_landing(want, decision) for want in decision.wants])
    carried = CarryOptions(exchange=Exchange.ALWAYS, memory=4 * bucket_nbytes, records=decision.index.records)
    try:
        traffic = carry(decision.wants, landing, ranks, carried)
    except UcpError as error:
        error.add_note("It was found under way: the model may be partly overwritten, do not use it")
        raise
    together(ranks, lambda: _restore(decision, landing))
    together(ranks, run.finish)
    return report_of(decision, replace(traffic, seconds=time.perf_counter() - started))


def _device(model: nn.Module | Sequence[nn.Module]) -> torch.device:
    import torch
    from torch import nn

    modules = [model] if isinstance(model, nn.Module) else [own for own in model if isinstance(own, nn.Module)]
    return next((param.device for own in modules for param in own.parameters()), torch.device("cpu"))


def _told(
    topology: TopologyLike | DeviceMesh | None, checkpoint: str | PathLike[str] | None, ranks: Ranks
) -> tuple[RunMesh, Path]:
    """The mesh and the path, which may stand in its place. Raises UsageError."""
    if checkpoint is None and _is_path(topology):
        topology, checkpoint = None, topology
    if is_device_mesh(topology):
        return RunMesh.of_device_mesh(topology, rank=ranks.rank, count=ranks.count), _path(checkpoint)
    wanted = None if topology is None else topology_of(topology)
    if wanted is not None and wanted.ranks != ranks.count:
        raise UsageError(
            f"expected a topology of {ranks.count} ranks, as the process group has; got {wanted}. "
            "Leave it out, or initialise torch.distributed first"
        )
    return RunMesh.of(wanted, rank=ranks.rank), _path(checkpoint)


def _path(checkpoint: str | PathLike[str] | None) -> Path:
    path = checkpoint if checkpoint is not None else os.environ.get(ENVIRONMENT)
    if path is None or not str(path):
        raise UsageError(f"expected a checkpoint: pass checkpoint=PATH, or set {ENVIRONMENT}")
    return Path(path)


def _is_path(topology: object) -> TypeGuard[str | PathLike[str]]:
    """Whether what stands for a topology is a path."""
    is_text = isinstance(topology, str) and "=" not in topology.partition("/")[0]
    return isinstance(topology, PathLike) or is_text or (isinstance(topology, str) and os.path.exists(topology))


def _landing(want: LoadItem, decision: Decision) -> torch.Tensor:
    """The memory to bring a state into."""
    own = want.slice
    if not want.stepped:
        return without_padding(decision.run.model.handles[want.name], own)
    assert decision.run.optimizer is not None
    counts = decision.index.atoms[own.param].is_count(want.state)
    memory = decision.run.optimizer.landing(want.name, want.state, own.dtype, own.local_shape, counts=counts)
    return without_padding(memory, own)


def _restore(decision: Decision, landing: Sequence[torch.Tensor]) -> None:
    """Give the optimizer what was brought."""
    if decision.run.optimizer is None:
        return
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in decision.fresh}
    counts: dict[str, set[str]] = {}
    for want, tensor in zip(decision.wants, landing, strict=True):
        if want.stepped:
            states.setdefault(want.name, {})[want.state] = tensor
            if decision.index.atoms[want.slice.param].is_count(want.state):
                counts.setdefault(want.name, set()).add(want.state)
    decision.run.optimizer.put(states, {name: frozenset(own) for name, own in counts.items()})
    decision.run.optimizer.put_hyper(decision.hyper)
