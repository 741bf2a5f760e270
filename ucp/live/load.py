"""Bring a checkpoint, in whatever format, into a live run: weights, buffers, optimizer states, hyper-parameters.

    import ucp

    report = ucp.load_into(model, "tp=2,dp=4", "ckpt/global_step1000", optimizer=optimizer)
    print(report)

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Unpack

from ucp.contract.protocols import Observer
from ucp.conversion.arguments import LoadArguments, takes_options
from ucp.conversion.values import DtypeLike, TopologyLike, type_path
from ucp.io.provenance import check_unchanged
from ucp.live.adapters import LiveRequest
from ucp.live.exchange.carry import carry
from ucp.live.match.decide import Decision, check_agreement, decide, match, used_anywhere
from ucp.live.match.names import rename_to_model, reorder_to_optimizer
from ucp.live.model.describe import describe_run
from ucp.live.model.meta import find_device
from ucp.live.model.parallel.experts import Experts
from ucp.live.model.parallel.numbering import strip_chunks
from ucp.live.model.parallel.place import PlacingOptions, place_run, trim_padding
from ucp.live.optimizer.torch_optimizer import unwrap_optimizer
from ucp.live.report import Clock, LoadReport, make_report
from ucp.live.resume.beside import ResumeOptions, ResumePlan, plan_resume
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.live.run.request import LoadRequest
from ucp.live.run.shared_index import read_once
from ucp.source.read import index_as_told, index_of, no_cycle_collection

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


@takes_options(LoadArguments)
def load_into(
    model: nn.Module | Sequence[nn.Module],
    topology: TopologyLike | DeviceMesh | type_path | None = None,
    checkpoint: type_path | None = None,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    scheduler: object = None,
    scaler: object = None,
    strict: bool = True,
    dtype: DtypeLike | None = None,
    rename: Callable[[str], str] | type_path | None = None,
    rank_extras: Literal["drop", "carry", "replicate"] = "drop",
    process_group: ProcessGroup | Ranks | None = None,
    exchange: Literal["auto", "always", "never"] = "auto",
    verify: bool = False,
    progress: bool | Observer = False,
    experts: Experts | None = None,
    **options: Unpack[LoadArguments],
) -> LoadReport:
    """Load a checkpoint into `model`, and what a run goes on with into `optimizer`, `scheduler` and `scaler`.

    With torch.distributed initialised every rank of `process_group` must call this. Nothing is written into the model
    before everything is known to fit.

    Parameters
    ----------
    model
        Module on any device, whole or with what this rank has of it; wrappers (DistributedDataParallel,
        torch.compile) are seen through. A list of modules is the chunks of a virtual pipeline.
    topology
        Layout of this run, e.g. "dp=2,tp=2,pp=2" or ucp.Topology(dp=4): ranks are numbered as Megatron does (tp, cp,
        ep, dp, pp, the first fastest). Another order is said by a torch DeviceMesh over all ranks with dims named dp,
        dp_replicate, dp_shard, fsdp, tp, pp, ep, etp, cp. A path to a checkpoint is taken for one.
    checkpoint
        Anything `ucp inspect` reads; by default what the environment variable UCP_CHECKPOINT names.
    optimizer
        Optimizer over parameters of `model`; wrappers of accelerate and Lightning are seen through. Without it,
        optimizer states are left out; but a DeepSpeed engine brings its own, unless this is False.
    masters
        Name of a parameter to its master in another precision, where `optimizer` steps masters of your own. They are
        brought, and the weights cast from them. Without it, masters are known by the order, shapes and values of the
        parameters.
    scheduler
        Learning rate scheduler of the class that was saved, of any framework: it has `load_state_dict`. Its state is
        found in the checkpoint under any key.
    scaler
        `torch.amp.GradScaler`, or Megatron's: gets the scale of the loss, from whichever framework counted it.
    strict
        Whether everything must fit. If not, what does not is left as it is, and reported.
    dtype
        Type of the floating weights of the model: that in which a model on the meta device is made, and that which
        another has to have.
    names
        Naming style of the model, such as "huggingface", where the checkpoint has names of another style;
        "nanogpt:huggingface" says the checkpoint's too. Without it, the one style that gives all names of the model
        on all ranks is taken.
    rename
        From a name in the model to the name in the checkpoint; or a TOML file with rules for names (see `ucp.convert`).
    settings
        Sizes of the model that `names` needs and nothing records, e.g. {"num_attention_heads": 32}; and, where the
        checkpoint has the states of several schedulers, the key of the one for `scheduler`: {"scheduler": "app.sched"}.
    rank_extras
        What each rank of the saved run kept for itself (random states, places of data loaders): "drop" leaves it,
        "carry" gives it to the rank of the same number in a run of as many, "replicate" gives that of rank 0 to all.
        Random states are set; all of it is in `LoadReport.carried`.
    process_group
        Ranks of the run; by default all. A process group of torch.distributed, or anything that
        exchanges values as `ucp.live.run.ranks.Ranks` says.
    memory
        Main memory of each rank for what is under way, beside the tensors themselves: bytes, or text like "1GiB".
    exchange
        Whether ranks that hold the same read it once between them and gather it from one another: "always", "never",
        or "auto", for whichever is faster as measured on the first of it.
    verify
        Read everything again at the end and compare it with what the model and the optimizer now hold, bit for bit.
        What checksums the checkpoint records of bytes that are read are compared in any case.
    progress
        True for lines on rank 0's standard error, or an observer (`ucp.contract.protocols.Observer`).
    experts
        Who holds which experts, where they are not dealt out in order: {expert: expert-parallel ranks}, or that by
        layer. A rank that is named twice holds two replicas; a rank has its experts in the order of the map.
    param_order
        Names of the parameters that the saved optimizer numbers, in its order; by default that of `optimizer`. See
        `ucp.convert`.
    OPTIONS

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
    clock = Clock()
    ranks = find_ranks(process_group, _device(model))
    asked = run_together(
        ranks,
        lambda: LoadRequest.parse(
            topology,
            checkpoint,
            rank=ranks.rank,
            ranks=ranks.count,
            strict=strict,
            dtype=dtype,
            rename=rename,
            rank_extras=rank_extras,
            exchange=exchange,
            verify=verify,
            progress=progress,
            experts=experts,
            **options,
        ),
    )
    beside = ResumeOptions(scheduler=scheduler, scheduler_key=asked.scheduler, scaler=scaler, policy=asked.rank_extras)
    given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "masters": masters}
    request = LiveRequest(
        model=model,
        optimizer=unwrap_optimizer(optimizer),
        mesh=asked.mesh,
        ranks=ranks,
        dtype=asked.dtype,
        masters=masters,
    )
    with no_cycle_collection():  # of the user's objects there may be millions
        plan = _plan(request, asked, beside, given, clock)
    decision = plan.decision
    run, files = decision.run, decision.index.files
    try:
        traffic = carry(decision.wants, plan.landing, ranks, replace(asked.carry, records=decision.index.records))
        run_together(ranks, lambda: None if ranks.rank else check_unchanged(files))  # one looks for all
    except Exception as error:
        error.add_note("It was found under way: the model may be partly overwritten, do not use it")
        raise
    clock.lap("read")
    run_together(ranks, lambda: _restore(decision, plan.landing))
    run_together(ranks, run.finish)
    resume = plan.resume.beside(run_together(ranks, lambda: run.resume(decision.index, decision.findings)))
    run_together(ranks, lambda: [step() for step in resume.steps])
    clock.lap("restore")
    return make_report(decision, resume, traffic, clock.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that is known before a byte moves."""

    decision: Decision
    landing: Sequence[torch.Tensor]
    """Where each of `decision.wants` is brought."""
    resume: ResumePlan


def _plan(
    request: LiveRequest, asked: LoadRequest, beside: ResumeOptions, given: Mapping[str, object], clock: Clock
) -> _Plan:
    """Match the checkpoint with the model, on all ranks alike. `given`: what the user passed beside the model."""
    ranks, source = request.ranks, asked.names.source
    read = index_of if asked.mesh.topology is None else index_as_told  # rules may be for this run alone
    index = read_once(ranks, asked.path, lambda: read(asked.path, source=source))
    told = {name: None if own is None else type(own).__name__ for name, own in given.items()}
    check_agreement(ranks, index, {**asked.agreed, **told})
    clock.lap("index")
    run = run_together(ranks, lambda: describe_run(request))
    saved = index
    index, hints = rename_to_model(saved, strip_chunks(run.model), asked.names, ranks)
    placing = PlacingOptions(family=source, rename=asked.options.rename, experts=asked.experts)
    run = place_run(run, index, asked.mesh, ranks, placing)
    if index is saved:  # names of parameters are those of the checkpoint
        index = reorder_to_optimizer(index, run, asked, ranks)
    matching = run_together(ranks, lambda: match(run, index, asked.options, dtype=asked.dtype))
    matching.findings.hints.extend(hints)
    used = used_anywhere(matching, ranks)
    resume = run_together(ranks, lambda: plan_resume(index, matching.findings, ranks, beside))
    decision = run_together(ranks, lambda: decide(matching, used, asked.options))
    brought = {want.name for want in decision.wants if not want.is_optimizer_state} | run.model.derived
    model = run_together(ranks, lambda: run.prepare(run.model, brought))  # with memory for everything
    decision = replace(decision, run=replace(run, model=model))
    landing = run_together(ranks, lambda: _landings(decision))
    clock.lap("plan")
    return _Plan(decision=decision, landing=landing, resume=resume)


def _device(model: nn.Module | Sequence[nn.Module]) -> torch.device:
    from torch import nn

    given = model if isinstance(model, list | tuple) else [model]
    return find_device(
        [own for own in given if isinstance(own, nn.Module)]
    )  # what else is given is refused by all ranks


def _landings(decision: Decision) -> list[torch.Tensor]:
    """The memory to bring each state into: of a vocabulary that is padded, without the padding."""
    run, landings = decision.run, []
    parts = {} if run.has_global_parts else {own.name: own.part for own in run.model.tensors if own.part.is_padded}
    for want in decision.wants:
        if not want.is_optimizer_state:
            memory = run.model.handles[want.name]
        else:
            assert run.optimizer is not None
            own, shape = want.slice, want.slice.local_shape
            counts = decision.index.atoms[own.param].is_count(want.state)
            part = parts.get(want.name)
            if part is not None and not counts and shape[1:] == part.local_shape[1:]:
                shape = part.local_shape
            memory = run.optimizer.landing(want.name, want.state, own.dtype, shape, counts=counts)
        landings.append(trim_padding(memory, want.slice))
    return landings


def _restore(decision: Decision, landing: Sequence[torch.Tensor]) -> None:
    """Give the optimizer what was brought."""
    if decision.run.optimizer is None:
        return
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in decision.fresh}
    counts: dict[str, set[str]] = {}
    for want, tensor in zip(decision.wants, landing, strict=True):
        if want.is_optimizer_state:
            states.setdefault(want.name, {})[want.state] = tensor
            if decision.index.atoms[want.slice.param].is_count(want.state):
                counts.setdefault(want.name, set()).add(want.state)
    decision.run.optimizer.put(states, {name: frozenset(own) for name, own in counts.items()})
    decision.run.optimizer.put_hyper(decision.hyper)
