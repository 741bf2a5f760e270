"""Save the model and the optimizer of a running program: the mirror of `load_into`.

    import ucp

    report = ucp.save(model, optimizer, "dp=4", "ckpt/step1000", scheduler=scheduler)
    print(report)

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import xxhash

from ucp.chain.document import Link
from ucp.chain.window import list_needed
from ucp.conversion.option import TopologyLike, parse_step, path_parser, type_path
from ucp.core.index import Extra, Kind
from ucp.core.topology import Topology
from ucp.errors import UsageError, format_list
from ucp.io.folder import is_url, parse_path, path_of
from ucp.live.adapters import LiveRequest
from ucp.live.load import find_model_device
from ucp.live.model.describe import list_modules
from ucp.live.model.parallel.experts import PlacementLike
from ucp.live.optimizer.torch_optimizer import unwrap_optimizer
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.live.run.request import parse_mesh
from ucp.saving.chain import check_next, list_held, read_links
from ucp.saving.commit import SavedRun, begin, merge_facts
from ucp.saving.describe import describe_parts, name_extras
from ucp.saving.holdings import Holdings, collect_holdings
from ucp.saving.job import SaveHandle, SaveJob, find_running, start, wait_for_pending
from ucp.saving.plan import Full, PartialExperts, plan_save
from ucp.saving.report import SaveReport
from ucp.saving.snapshots import Snapshots
from ucp.saving.window import SparseWindow, find_operators

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

Plan: TypeAlias = Full | PartialExperts | SparseWindow
"""What a save holds."""
_RNG = "rng_state"
"""Extra of each rank with the states of its random generators."""


@overload
def save(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Literal[False] | None,
    topology: TopologyLike | DeviceMesh | None,
    path: type_path,
    *,
    plan: Plan = ...,
    step: int | None = ...,
    scheduler: object = ...,
    scaler: object = ...,
    masters: Mapping[str, torch.Tensor] | None = ...,
    extras: Mapping[str, object] | None = ...,
    like: type_path | None = ...,
    chain: bool = ...,
    placement: PlacementLike | None = ...,
    keep: int | None = ...,
    asynchronous: Literal[False] = ...,
    process_group: ProcessGroup | Ranks | None = ...,
) -> SaveReport: ...


@overload
def save(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Literal[False] | None,
    topology: TopologyLike | DeviceMesh | None,
    path: type_path,
    *,
    plan: Plan = ...,
    step: int | None = ...,
    scheduler: object = ...,
    scaler: object = ...,
    masters: Mapping[str, torch.Tensor] | None = ...,
    extras: Mapping[str, object] | None = ...,
    like: type_path | None = ...,
    chain: bool = ...,
    placement: PlacementLike | None = ...,
    keep: int | None = ...,
    asynchronous: Literal[True],
    snapshots: Snapshots | None = ...,
    process_group: ProcessGroup | Ranks | None = ...,
) -> SaveHandle: ...


def save(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Literal[False] | None,
    topology: TopologyLike | DeviceMesh | None,
    path: type_path,
    *,
    plan: Plan = Full(),  # noqa: B008  # a value without state
    step: int | None = None,
    scheduler: object = None,
    scaler: object = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    extras: Mapping[str, object] | None = None,
    like: type_path | None = None,
    chain: bool = False,
    placement: PlacementLike | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    snapshots: Snapshots | None = None,
    process_group: ProcessGroup | Ranks | None = None,
) -> SaveReport | SaveHandle:
    """Save weights, buffers, optimizer states, hyper-parameters and RNG states as an atom store.

    With torch.distributed initialised every rank of `process_group` must call this, with one folder that all ranks see.
    Each rank writes a share of the bytes: of tensors that several ranks hold, one of them writes each. The store is
    there once it is whole; if a rank fails or is killed, there is none.

    Parameters
    ----------
    model
        Module: the complete model, or this rank's part of it. Wrappers (DistributedDataParallel, FSDP, torch.compile)
        may be around it. A list of modules is the chunks of a virtual pipeline.
    optimizer
        Optimizer over parameters of `model`. None saves no optimizer states, except those of the optimizer that a
        DeepSpeed engine has. False saves none there either.
    topology
        Layout of this run, as for `load_into`. None if ranks hold replicas of one model, or shards that torch made.
    path
        Folder of the store, where nothing may be.
    plan
        What is saved: `Full()`, or, into a chain, a part. `PartialExperts(k)`: all tensors but those of experts, and k
        experts of every layer; the first link must be full. `SparseWindow(...)`: some operators in full, others as the
        model computes with them, for `densify`; `extras` must have `clip_norm`.
    step
        Training step; by default the number of steps that the engine or the optimizer counts.
    scheduler, scaler
        Learning rate scheduler and loss scaler, with `state_dict`: saved as the extras `lr_scheduler` and `scaler`.
    masters
        {name of a parameter: its master weight}, as for `load_into`.
    extras
        What else to save: {name: value}, the value of rank 0.
    like
        A checkpoint of the same model, of any format, such as the one that the run began from: needed if ranks hold
        parts of plain tensors, which it has the global shapes of. Into a chain, by default its first link.
    placement
        Which expert-parallel ranks hold which experts, as for `load_into`: needed if they are not assigned in order.
    chain
        Whether the store becomes the newest link of the chain in the folder above `path`: its `chain.json`, which is
        made if there is none, lists the store once it is whole. A store at `path` that it does not list (of a save that
        was killed just before) is replaced.
    keep
        Number of restore points of the chain that stay: links that the newest `keep` of them do not need are removed
        once the store is listed. Of sparse windows, the number of whole windows. None removes nothing.
    asynchronous
        Whether to return once this rank's share is copied to host memory: a thread writes it. The result is then a
        `SaveHandle`, whose `wait` returns the report. One save is written at a time: the next call waits for it, and
        raises what made it fail.
    snapshots
        `Snapshots` of this rank, for asynchronous saves into a chain: what is copied to host memory stays there until
        the next save, for `load_into(snapshots=)` after a failure. If the last save is still being written, this one
        is in memory alone, and the result is the handle of the last one.
    process_group
        Ranks of the run; by default all. A process group of torch.distributed, or an object with the methods of
        `ucp.live.run.ranks.Ranks`.

    Raises
    ------
    UsageError
        The topology has not as many ranks as the process group, `scheduler` or `scaler` has no state, or the step is
        not after that of the newest link.
    UnsupportedError
        It is not known how tensors are cut, or which states the optimizer has (Megatron's).
    ReplicaError
        Ranks contradict one another: shapes, steps or hyper-parameters of one parameter differ.
    DestinationError
        There is something at `path`, or it cannot be written.

    All ranks raise the same error.
    """
    began = time.perf_counter()
    ranks = find_ranks(process_group, find_model_device(model))
    running = find_running(ranks, has_snapshots=snapshots is not None)
    earlier = wait_for_pending() if running is None else None
    folder, mesh = run_together(ranks, lambda: (_parse_folder(path), parse_mesh(topology, ranks.rank, ranks.count)))
    live = LiveRequest(model=model, optimizer=unwrap_optimizer(optimizer), mesh=mesh, ranks=ranks, masters=masters)
    run_together(ranks, lambda: _check_options(plan, keep, snapshots, chain=chain, asynchronous=asynchronous))
    if snapshots is not None:
        snapshots.agree(ranks)
    links = run_together(ranks, lambda: read_links(folder) if chain and ranks.rank == 0 else None)
    links = ranks.share(links)[0] if chain else None  # another save may be listed at any time
    model_path = run_together(ranks, lambda: None if like is None else path_parser("like", parse_path)(like))
    run = describe_parts(live, model_path, path_of(links[0].path) if links else None, placement)
    is_sparse = isinstance(plan, SparseWindow)
    holdings = run_together(ranks, lambda: collect_holdings(run, list_modules(model), with_computed=is_sparse))
    facts = ranks.share(replace(holdings.facts(), plan=xxhash.xxh3_64_hexdigest(repr(plan).encode())))
    framework = run_together(ranks, run.state)
    layout = mesh.topology or framework.topology or _find_topology(holdings, ranks.count)
    step = framework.step if step is None else run_together(ranks, partial(parse_step, step))
    merged = run_together(ranks, lambda: merge_facts(facts, topology=layout, step=step, origin=framework.origin))
    narrow = partial(_narrow, plan, merged, folder, links, ep=layout.ep, snapshots=snapshots)
    copied_run, saved = run_together(ranks, lambda: narrow(is_running=running is not None))
    copied_shares = plan_save(
        [[item for item in of_rank.items if copied_run.holds(item, of_rank)] for of_rank in facts]
    )
    shares = [[item for item in share if item.param in saved.atoms] for share in copied_shares]
    rank_extras = run_together(
        ranks, lambda: list(_collect_extras(scheduler, scaler, extras, framework.extras, ranks.rank))
    )
    run_together(ranks, lambda: _check_scalars(plan, rank_extras) if ranks.rank == 0 else None)
    is_listed = links is None or str(folder) in [link.path for link in links]
    if running is None:
        run_together(ranks, lambda: begin(folder, replaced=not is_listed) if ranks.rank == 0 else None)
    job = SaveJob(
        folder=folder,
        run=saved,
        rank=ranks.rank,
        ranks=ranks.count,
        share=shares[ranks.rank],
        tensors=holdings.tensors,
        extras=rank_extras,
        is_link=links is not None,
        keep=keep,
    )
    planned = tuple(sum(item.nbytes for item in share) for share in shares)
    report = SaveReport(
        path=str(folder),
        step=saved.step,
        tensors=len(saved.atoms),
        nbytes_written=planned[ranks.rank],
        nbytes_planned=planned,
        seconds=0.0,
    )
    if asynchronous:
        to_keep = replace(job, run=copied_run, share=copied_shares[ranks.rank])
        copied = run_together(ranks, lambda: to_keep.snapshot(earlier))
        if snapshots is not None:
            snapshots.keep(copied, saved.atoms if running is None else ())
        job = replace(job, tensors=copied.tensors, extras=copied.extras)
        return running or start(job, ranks, report, is_kept=snapshots is not None)
    run_together(ranks, job.write)
    run_together(ranks, lambda: job.finish() if ranks.rank == 0 else None)
    return replace(report, seconds=time.perf_counter() - began)


def _check_options(
    plan: Plan, keep: int | None, snapshots: Snapshots | None, *, chain: bool, asynchronous: bool
) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1 or not chain):
        raise UsageError(f"expected keep= of 1 or more, with chain=True; got keep={keep!r}, chain={chain}")
    if snapshots is not None and not (chain and asynchronous and isinstance(plan, Full | PartialExperts)):
        raise UsageError(
            "expected snapshots= with chain=True, asynchronous=True and a plan of experts; got "
            f"chain={chain}, asynchronous={asynchronous}, plan={type(plan).__name__}"
        )


def _narrow(
    plan: Plan,
    run: SavedRun,
    folder: Path,
    links: tuple[Link, ...] | None,
    *,
    ep: int,
    snapshots: Snapshots | None,
    is_running: bool,
) -> tuple[SavedRun, SavedRun]:
    """What of the run is kept in memory, and what of that the plan saves. Raises UsageError, UnsupportedError.

    `is_running`: the last save is still being written.
    """
    step = None if links is None else check_next(folder, links, run.step)
    if isinstance(plan, Full):
        return run.narrow(()), run.narrow(())
    if links is None or step is None:
        raise UsageError(f"expected chain=True with {type(plan).__name__}: other links of the chain hold the rest")
    shapes = {name: atom.shape for name, atom in run.atoms.items()}
    if isinstance(plan, SparseWindow):
        buffers = frozenset(name for name, atom in run.atoms.items() if atom.kind is Kind.BUFFER)
        saved = run.narrow(*plan.divide(find_operators(shapes, buffers), step))
        return saved, saved
    link_params = (
        frozenset[str]() if is_running else list_held(links, run.atoms)
    )  # whose links may be removed meanwhile
    turn = plan.next_turn(shapes, link_params, ep=ep) if snapshots is None else snapshots.turn
    copied = run.narrow(plan.find_unsaved(shapes, turn=turn, ep=ep))
    if snapshots is None:
        return copied, copied
    return copied, run.narrow(plan.find_unsaved(shapes, turn=turn, ep=ep, last=snapshots.last))


def _check_scalars(plan: Plan, extras: Sequence[Extra]) -> None:
    """Raise UsageError if a sparse save lacks a number of the iteration that a replay cannot compute again."""
    names = [extra.name for extra in extras]
    missing = [name for name in list_needed(names) if name not in names]
    if isinstance(plan, SparseWindow) and missing:
        raise UsageError(
            f"expected extras= with {', '.join(missing)} of this iteration, because a replay does not have all "
            "gradients: clip_norm is the norm that clipped them (None without clipping), skipped whether the loss "
            "scaler skipped the step"
        )


def _parse_folder(path: type_path) -> Path:
    folder = path_parser("path", parse_path)(path)
    if is_url(str(folder)):
        raise UsageError(f"expected a folder on a disk that all ranks see; got {folder}. Save there, and convert to it")
    return Path(os.path.abspath(folder))


def _find_topology(holdings: Holdings, count: int) -> Topology:
    """The layout of the run, as far as the axes of DTensors tell: the ranks that do not cut tensors are `dp`."""
    layouts = [state.layout for atom in holdings.atoms.values() for state in atom.states.values()]
    degrees = {axis.axis: axis.parts for layout in layouts for axis in layout.all_axes}
    tp = degrees.get("tp", 1)
    return Topology(dp=count // tp, tp=tp) if count % tp == 0 else Topology(dp=count)


def _collect_extras(
    scheduler: object,
    scaler: object,
    extras: Mapping[str, object] | None,
    framework: Mapping[str, object],
    rank: int,
) -> Iterator[Extra]:
    """What this rank saves beside tensors; `framework`: extras of the framework. Raises UsageError."""
    named = name_extras(scheduler, scaler, framework)
    twice = [name for name in extras or () if name in (*named, _RNG)]
    if twice:
        raise UsageError(f"expected other names for extras, as these are taken:\n{format_list(twice)}")
    if rank == 0:
        yield from (Extra(name=name, value=value) for name, value in {**named, **(extras or {})}.items())
    yield Extra(name=_RNG, value=dict(_read_generators()), rank=rank)


def _read_generators() -> Iterator[tuple[str, object]]:
    """States of the random generators of this process, as `find_generators` reads them."""
    import torch

    yield "python", random.getstate()
    if "numpy" in sys.modules:
        import numpy as np

        yield "numpy", np.random.get_state()
    yield "torch", torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        yield "cuda", torch.cuda.get_rng_state_all()
