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
from typing import TYPE_CHECKING, Literal, TypeGuard

import xxhash

from ucp.contract.protocols import SourceOptions
from ucp.conversion.options import TopologyLike, policy_of, topology_of
from ucp.conversion.prepare import index_of
from ucp.conversion.source.zero_moments import ZeroMoments
from ucp.core.index import DoubtKind
from ucp.core.topology import Topology
from ucp.errors import UcpError, UsageError
from ucp.live.adapters import LiveRequest
from ucp.live.decide import Decision, LoadOptions, check_agreement, decide, match, used_anywhere
from ucp.live.describe import described
from ucp.live.exchange.checksums import check_records
from ucp.live.exchange.read_shares import Bucket, share_out
from ucp.live.exchange.transfer import Reader, bring
from ucp.live.parts import LoadItem
from ucp.live.report import LoadReport, Traffic, report_of
from ucp.live.run.mesh import RunMesh
from ucp.live.run.ranks import Alone, Ranks, ranks_of, together

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["ENVIRONMENT", "LoadReport", "load_into"]

ENVIRONMENT = "UCP_CHECKPOINT"
"""Environment variable that names the checkpoint when the call does not."""


def load_into(
    model: nn.Module | Sequence[nn.Module],
    topology: TopologyLike | None = None,
    checkpoint: str | PathLike[str] | None = None,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    process_group: ProcessGroup | Ranks | None = None,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    family: str | None = None,
    patterns: str | PathLike[str] | None = None,
    shapes_from: str | PathLike[str] | None = None,
    bucket_nbytes: int = 64 << 20,
) -> LoadReport:
    """Load a checkpoint into `model`, and its optimizer states and hyper-parameters into `optimizer`.

    With torch.distributed initialised every rank of `process_group` must call this. Nothing is written into the model
    before everything is known to fit.

    Parameters
    ----------
    model
        Module on any device; wrappers (DistributedDataParallel, torch.compile) are seen through.
    topology
        Layout of this run, e.g. "dp=4". A path to a checkpoint is taken for one.
    checkpoint
        Anything `ucp inspect` reads; by default what the environment variable UCP_CHECKPOINT names.
    optimizer
        Optimizer over parameters of `model`. Without it, optimizer states are left out. A DeepSpeed engine brings its
        own; False leaves out the states of that.
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
        Model family whose rules say how the checkpoint is sharded, instead of the one chosen by evidence.
    patterns
        TOML file with a family of your own. See `ucp.convert`.
    shapes_from
        What says the shapes of parameters that the checkpoint keeps flat. See `ucp.convert`.
    bucket_nbytes
        Bytes gathered at once; a rank needs about this and twice its share of it.

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
    wanted, path = together(ranks, lambda: _told(topology, checkpoint, ranks))
    request = LiveRequest(model=model, optimizer=optimizer, mesh=RunMesh.of(wanted, rank=ranks.rank), ranks=ranks)
    options = LoadOptions(
        strict=strict,
        rename=rename,
        zero_moments=policy_of(zero_moments, ZeroMoments, "a policy for moments that are zero"),
        accept=DoubtKind.accepted(accept),
    )
    index = together(ranks, lambda: index_of(path, source=SourceOptions.of(family, patterns, shapes_from)))
    check_agreement(ranks, index, (replace(options, rename=None), bucket_nbytes, wanted))
    run = together(ranks, lambda: described(request))
    matching = together(ranks, lambda: match(run, index, options))
    used = used_anywhere(matching, ranks)
    decision = together(ranks, lambda: decide(matching, used, options))
    landing = together(ranks, lambda: [_landing(want, decision) for want in decision.wants])
    tracked = frozenset(record.path for record in decision.index.records)
    reader = Reader(decision.wants, tracked=tracked)
    try:
        holders = _holders(decision, ranks)
        together(ranks, lambda: bring(_buckets(decision, holders, bucket_nbytes), reader, holders, landing))
        checked = check_records(decision.index, reader, ranks)
    except UcpError as error:
        error.add_note("It was found under way: the model may be partly overwritten, do not use it")
        raise
    finally:
        reader.close()
    together(ranks, lambda: _restore(decision, landing))
    together(ranks, run.finish)
    decision.findings.notes.extend(together(ranks, lambda: run.resume(index)))
    traffic = Traffic(
        nbytes=tuple(ranks.share(reader.nbytes)),
        rank=ranks.rank,
        checked=checked,
        seconds=time.perf_counter() - started,
    )
    return report_of(decision, traffic)


def _device(model: nn.Module | Sequence[nn.Module]) -> torch.device:
    import torch
    from torch import nn

    modules = [model] if isinstance(model, nn.Module) else [own for own in model if isinstance(own, nn.Module)]
    return next((param.device for own in modules for param in own.parameters()), torch.device("cpu"))


def _told(
    topology: TopologyLike | None, checkpoint: str | PathLike[str] | None, ranks: Ranks
) -> tuple[Topology | None, Path]:
    """The topology and the path, which may stand in its place. Raises UsageError."""
    if checkpoint is None and _is_path(topology):
        topology, checkpoint = None, topology
    wanted = None if topology is None else topology_of(topology)
    if wanted is not None and wanted.ranks != ranks.count:
        raise UsageError(
            f"expected a topology of {ranks.count} ranks, as the process group has; got {wanted}. "
            "Leave it out, or initialise torch.distributed first"
        )
    path = checkpoint if checkpoint is not None else os.environ.get(ENVIRONMENT)
    if path is None or not str(path):
        raise UsageError(f"expected a checkpoint: pass checkpoint=PATH, or set {ENVIRONMENT}")
    return wanted, Path(path)


def _is_path(topology: object) -> TypeGuard[str | PathLike[str]]:
    """Whether what stands for a topology is a path."""
    is_text = isinstance(topology, str) and "=" not in topology.partition("/")[0]
    return isinstance(topology, PathLike) or is_text or (isinstance(topology, str) and os.path.exists(topology))


def _holders(decision: Decision, ranks: Ranks) -> Ranks:
    """The ranks that share the reading: all, where all hold the same."""
    digest = xxhash.xxh3_64_hexdigest(repr([(want.name, want.slice) for want in decision.wants]).encode())
    same = ranks.share(digest)
    return ranks if len(set(same)) == 1 else Alone()


def _buckets(decision: Decision, ranks: Ranks, bucket_nbytes: int) -> tuple[Bucket, ...]:
    return share_out(
        [want.slice for want in decision.wants],
        costs=[want.cost for want in decision.wants],
        readers=ranks.count,
        bucket_nbytes=bucket_nbytes,
    )


def _landing(want: LoadItem, decision: Decision) -> torch.Tensor:
    """The memory to bring a state into."""
    if not want.stepped:
        return decision.run.model.handles[want.name]
    assert decision.run.optimizer is not None
    counts = decision.index.atoms[want.slice.param].is_count(want.state)
    own = want.slice
    return decision.run.optimizer.landing(want.name, want.state, own.dtype, own.local_shape, counts=counts)


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
