"""Load a checkpoint of any format into a running program: weights, buffers, optimizer states, hyper-parameters.

    import ucp

    report = ucp.load_into(model, "tp=2,dp=4", "ckpt/global_step1000", optimizer=optimizer)
    print(report)

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Unpack

from ucp.contract.protocols import Observer
from ucp.conversion.arguments import LoadArguments, takes_options
from ucp.conversion.option import DtypeLike, TopologyLike, type_path
from ucp.core.index import Index
from ucp.errors import UsageError
from ucp.io.provenance import check_unchanged
from ucp.live.adapters import LiveRequest
from ucp.live.exchange.memory import Memory, carry_with_memory
from ucp.live.match.decide import Decision, check_agreement, decide, find_used_atoms, match
from ucp.live.match.names import drop_padding, rename_to_model, reorder_to_optimizer
from ucp.live.model.describe import describe_run
from ucp.live.model.meta import find_device
from ucp.live.model.parallel.experts import PlacementLike
from ucp.live.model.parallel.numbering import strip_chunks
from ucp.live.model.parallel.place import place_run, trim_padding
from ucp.live.optimizer.torch_optimizer import unwrap_optimizer
from ucp.live.report import Clock, LoadReport, make_report
from ucp.live.resume.beside import ResumeOptions, ResumePlan, plan_resume
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.live.run.request import LoadRequest
from ucp.live.run.shared_index import read_once
from ucp.log import log_report
from ucp.source.read import index_of, pause_gc, read_with_options

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
    placement: PlacementLike | None = None,
    snapshots: Memory | None = None,
    **options: Unpack[LoadArguments],
) -> LoadReport:
    """Load the weights of a checkpoint into `model`, and its training state into `optimizer`, `scheduler`, `scaler`.

    With torch.distributed initialised every rank of `process_group` must call this. Nothing is written into the model
    before everything is known to fit.

    Parameters
    ----------
    model
        Module on any device: the complete model, or this rank's part of it. Wrappers (DistributedDataParallel,
        torch.compile) may be around it. A list of modules is the chunks of a virtual pipeline.
    topology
        Layout of this run, e.g. "dp=2,tp=2,pp=2" or ucp.Topology(dp=4). Ranks are numbered as in Megatron (order
        tp-cp-ep-dp-pp: tp ranks are neighbours). For another order pass a torch DeviceMesh over all ranks with dims
        named dp, dp_replicate, dp_shard, fsdp, tp, pp, ep, etp, cp. A path in this place is the checkpoint.
    checkpoint
        Path of anything that `ucp inspect` reads; by default the path in the environment variable UCP_CHECKPOINT.
    optimizer
        Optimizer over parameters of `model`; wrappers of accelerate and Lightning may be around it. None loads no
        optimizer states, except into the optimizer that a DeepSpeed engine has. False loads none there either.
    masters
        {name of a parameter: its master weight}, if `optimizer` steps master weights that you made. The masters are
        loaded, and the weights are cast from them. Without this argument, masters are recognised if they have the
        order, shapes and values of the parameters.
    scheduler
        Learning rate scheduler of any framework, with `state_dict` and `load_state_dict`, of the class that was saved.
        Its state is found in the checkpoint under any key.
    scaler
        `torch.amp.GradScaler`, or Megatron's: gets the loss scale, whichever framework saved it.
    strict
        Whether everything must fit. If False, what does not fit keeps its values, and the report lists it.
    dtype
        Dtype of floating-point weights: a model on the meta device is allocated in it; another model must have it.
    names
        Naming style of the model, such as "huggingface", if the names in the checkpoint have another style;
        "nanogpt:huggingface" also says the style of the checkpoint. By default the style is found if names differ:
        exactly one must give all names of the model, on all ranks.
    rename
        Function from a name in the model to the name in the checkpoint; or a TOML file of rules (see `ucp.convert`).
    settings
        Sizes of the model that `names` needs and the checkpoint does not record, e.g. {"num_attention_heads": 32}.
        If the checkpoint has the states of several schedulers, also the key of the state for `scheduler`:
        {"scheduler": "app.sched"}.
    rank_extras
        What to do with the state that each rank saved for itself (RNG states, positions of data loaders): "drop"
        ignores it; "carry" gives it to the rank with the same number, and needs as many ranks as were saved;
        "replicate" gives that of rank 0 to all ranks. RNG states are set; `LoadReport.carried` has all of it.
    process_group
        Ranks of the run; by default all. A process group of torch.distributed, or an object with the methods of
        `ucp.live.run.ranks.Ranks`.
    memory
        Host memory of each rank for buffers, beside the tensors themselves: bytes, or text like "1GiB".
    exchange
        Whether ranks that hold the same elements each read a share of them and gather the other shares: "always",
        "never" (every rank reads everything itself), or "auto" (whichever is faster, as the first reads show).
    verify
        Read everything again at the end and compare it with what the model and the optimizer now hold, bit for bit.
        Checksums that the checkpoint records are compared in any case; `LoadReport.unchecked` lists files without.
    progress
        True for lines on rank 0's standard error, or an observer (`ucp.contract.protocols.Observer`).
    placement
        Which expert-parallel ranks hold which experts, if they are not assigned in order: a placement (`ucp.place`),
        whose GPUs are the ranks; {expert: ranks}; or {layer: {expert: ranks}}. A rank that is listed twice for an
        expert holds two replicas of it. A rank holds its experts in the order of its slots, or of the dict.
    snapshots
        `ucp.Snapshots` of this rank: what ranks have in memory is loaded from there, each part from a rank that holds
        it, and only experts that none holds from the checkpoint. The report lists all iterations. If parts other than
        experts are missing in memory, too, experts alone are taken from there, where they are newer. A rank whose
        process is new passes an empty one.
    param_order
        Names of the parameters in the order of the saved optimizer, if that identifies them by number; by default
        inferred from the order of `model` and of `optimizer`. See `ucp.convert`.
    OPTIONS

    Raises
    ------
    LoadError
        Model and checkpoint do not fit; the message lists everything that does not. The model is unchanged.
    UnsupportedError
        The layout of the model or the optimizer is not known, or the optimizer would round the saved step count.
    UsageError
        No checkpoint is named, the topology has not as many ranks as the process group, or the family does not exist.
    SourceError, CoverError, CorruptError
        The checkpoint cannot be read, or is damaged. If that is noticed after loading began, a note on the error says
        so: the model may then be partly overwritten.

    All ranks raise the same error.
    """
    clock = Clock()
    ranks = find_ranks(process_group, find_model_device(model))
    request = run_together(
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
            placement=placement,
            **options,
        ),
    )
    resume_options = ResumeOptions(
        scheduler=scheduler, scheduler_key=request.scheduler, scaler=scaler, policy=request.rank_extras
    )
    objects = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "masters": masters}
    objects["snapshots"] = snapshots
    live = LiveRequest(
        model=model,
        optimizer=unwrap_optimizer(optimizer),
        mesh=request.mesh,
        ranks=ranks,
        dtype=request.dtype,
        masters=masters,
    )
    report = load_index(live, request, resume_options, objects, clock=clock)[1]
    log_report(report, rank=ranks.rank)
    return report


def load_index(
    live: LiveRequest,
    request: LoadRequest,
    resume_options: ResumeOptions,
    objects: Mapping[str, object],
    *,
    clock: Clock,
    saved: Index | None = None,
) -> tuple[Decision, LoadReport]:
    """Load `saved`, or else the checkpoint of the request: what was decided, and the report. Collective.

    `objects`: what the user passed beside the model. Raises as `load_into`.
    """
    ranks = live.ranks
    with pause_gc():  # the user may have millions of objects
        decision, resume = decide_load(live, request, resume_options, objects, clock, saved=saved)
        loaded = {item.name for item in decision.items if not item.is_optimizer_state} | decision.run.model.derived
        run = decision.run
        run = replace(run, model=run_together(ranks, lambda: run.prepare(run.model, loaded)))  # with memory for all
        decision = replace(decision, run=run)
        decision = replace(decision, memories=run_together(ranks, lambda: _find_memory(decision)))
        clock.lap("plan")
    run, index = decision.run, decision.index
    try:
        memory, options = objects.get("snapshots"), replace(request.carry, records=index.records)
        assert memory is None or isinstance(memory, Memory)
        traffic = carry_with_memory(decision.items, decision.memories, ranks, options, memory)
        run_together(ranks, lambda: None if ranks.rank else check_unchanged(index.files))  # on rank 0
    except Exception as error:
        error.add_note("Loading had begun: the model may be partly overwritten. Do not use it")
        raise
    clock.lap("read")
    run_together(ranks, lambda: _restore_optimizer(decision))
    run_together(ranks, run.finish)
    resume = resume.with_framework(run_together(ranks, lambda: run.resume(index, decision.findings)))
    run_together(ranks, lambda: [step() for step in resume.steps])
    clock.lap("restore")
    return decision, make_report(decision, resume, traffic, clock.seconds)


def _check_memory(memory: object, *, at: int | str | None) -> Memory:
    """What the user passed as snapshots=. Raises UsageError for what cannot be loaded from memory."""
    if not isinstance(memory, Memory):
        raise UsageError(f"expected snapshots= as ucp.Snapshots; got a {type(memory).__name__}")
    if at is not None:
        raise UsageError(f"expected snapshots=, which have the newest iteration, or at={at}; got both")
    return memory


def decide_load(
    live: LiveRequest,
    request: LoadRequest,
    resume_options: ResumeOptions,
    objects: Mapping[str, object],
    clock: Clock,
    *,
    saved: Index | None,
) -> tuple[Decision, ResumePlan]:
    """What to load into the model, and what to restore beside it, before memory is allocated. Collective."""
    ranks, source = live.ranks, request.names.source
    read = index_of if request.mesh.topology is None else read_with_options  # rules may be for this run only
    is_given = saved is not None
    saved = saved or read_once(ranks, request.path, lambda: read(request.path, source=source))
    classes = {name: None if value is None else type(value).__name__ for name, value in objects.items()}
    check_agreement(ranks, saved, {**request.agreed, **classes})
    if objects.get("snapshots") is not None:  # on all ranks or on none
        memory = run_together(ranks, lambda: _check_memory(objects["snapshots"], at=source.at))
        saved = memory.overlay(saved, ranks, exact=source.exact)
    clock.lap("index")
    run = run_together(ranks, lambda: describe_run(live))
    index, hints = (saved, ()) if is_given else rename_to_model(saved, strip_chunks(run.model), request.names, ranks)
    is_renamed = index is not saved
    index = drop_padding(index, strip_chunks(run.model), request.names, ranks)
    run = place_run(
        run, index, request.mesh, ranks, options=source, rename=request.options.rename, placement=request.placement
    )
    if not is_renamed:  # names of parameters are those of the checkpoint
        index = reorder_to_optimizer(index, request.path, run, request.names, ranks)
    matching = run_together(ranks, lambda: match(run, index, request.options, dtype=request.dtype))
    matching.findings.hints.extend(hints)
    used = find_used_atoms(matching, ranks)
    resume = run_together(ranks, lambda: plan_resume(index, matching.findings, ranks, resume_options))
    decision = run_together(ranks, lambda: decide(matching, used, request.options))
    return decision, resume


def find_model_device(model: nn.Module | Sequence[nn.Module]) -> torch.device:
    """The device of the model's tensors."""
    from torch import nn

    modules = model if isinstance(model, list | tuple) else [model]
    # whatever else was passed is refused later, by all ranks
    return find_device([module for module in modules if isinstance(module, nn.Module)])


def _find_memory(decision: Decision) -> list[torch.Tensor]:
    """The tensor to load each item into; of a padded vocabulary, the rows that the checkpoint has."""
    run, memories = decision.run, []
    tensors = () if run.has_global_parts else run.model.tensors
    padded = {tensor.name: tensor.part for tensor in tensors if tensor.part.is_padded}
    for item in decision.items:
        if not item.is_optimizer_state:
            memory = run.model.handles[item.name]
        else:
            assert run.optimizer is not None
            piece, shape = item.slice, item.slice.local_shape
            counts = decision.index.atoms[piece.param].is_count(item.state)
            part = padded.get(item.name)
            if part is not None and not counts and shape[1:] == part.local_shape[1:]:
                shape = part.local_shape
            memory = run.optimizer.landing(item.name, item.state, piece.dtype, shape, counts=counts)
        memories.append(trim_padding(memory, item.slice))
    return memories


def _restore_optimizer(decision: Decision) -> None:
    """Give the optimizer what was loaded."""
    if decision.run.optimizer is None:
        return
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in decision.without_states}
    counts: dict[str, set[str]] = {}
    for item, tensor in zip(decision.items, decision.memories, strict=True):
        if item.is_optimizer_state:
            states.setdefault(item.name, {})[item.state] = tensor
            if decision.index.atoms[item.slice.param].is_count(item.state):
                counts.setdefault(item.name, set()).add(item.state)
    decision.run.optimizer.put(states, {name: frozenset(names) for name, names in counts.items()})
    if decision.hyper:
        decision.run.optimizer.put_hyper(decision.hyper)
