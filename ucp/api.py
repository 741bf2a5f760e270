"""The use cases: what the command line calls and `import ucp` gives; each imports what it needs when it is called.

>>> import ucp
>>> str(ucp.Topology(dp=4, zero=3))
'dp=4,zero=3'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from inspect import signature
from operator import attrgetter
from typing import TypeVar, Unpack

import ucp  # the return types, which are imported when they are looked at
from ucp.contract.protocols import Observer, ParamOrderLike, SourceOptions
from ucp.contract.registry import with_callables
from ucp.conversion.arguments import suggest_arguments
from ucp.conversion.collection import no_cycle_collection
from ucp.conversion.options import (
    ConvertArguments,
    MemoryLike,
    PlanArguments,
    filter_of,
    make_options,
    nbytes_of,
    type_path,
    workers_of,
)
from ucp.conversion.plan_report import PlanReport, preview
from ucp.conversion.prepare import Silent
from ucp.conversion.source.read import Survey, index_of, judged, read_index, survey
from ucp.conversion.source.zero_moments import before_first_step, moments_note
from ucp.core.index import Index
from ucp.io.destination.staging import is_begun
from ucp.io.folder import given, is_url

__all__ = [
    "PlanReport",
    "Survey",
    "convert",
    "diff",
    "inspect",
    "is_unfinished",
    "open",
    "plan",
    "survey",
    "verify",
]


F = TypeVar("F", bound=Callable[..., object])


def _asked_as(known: Callable[..., object], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Show the arguments of `known` where a function takes `**asked`, to `help` and to notebooks."""

    def shown(function: F) -> F:
        *own, _ = signature(function).parameters.values()
        more = (one for one in signature(known).parameters.values() if one.name not in without)
        parameters = sorted((*more, *own), key=attrgetter("kind"))
        vars(function).update(__signature__=signature(function).replace(parameters=parameters))
        return function

    return shown


@suggest_arguments
def open(  # noqa: A001  # ucp.open is the name users look for
    path: type_path,
    *,
    family: str | None = None,
    patterns: type_path | None = None,
    shapes_from: type_path | None = None,
    param_order: ParamOrderLike | None = None,
) -> ucp.Checkpoint:
    """The checkpoint at `path`, of whatever format. Raises SourceError, CoverError.

    `family`, `patterns`, `shapes_from`, `param_order`: see `convert`.
    """
    from ucp.live.checkpoint import Checkpoint

    return Checkpoint(index_of(given(path), source=SourceOptions.of(family, patterns, shapes_from, param_order)))


@suggest_arguments
@no_cycle_collection()
def inspect(
    path: type_path,
    *,
    family: str | None = None,
    patterns: type_path | None = None,
    shapes_from: type_path | None = None,
    param_order: ParamOrderLike | None = None,
) -> Index:
    """Index of the checkpoint at `path`, even if shards are missing: nothing is proved of it.

    `family`, `patterns`, `shapes_from`, `param_order`: see `convert`. Raises SourceError; `survey(path)` then
    gives what is known.
    """
    path = given(path)
    index = read_index(path, source=SourceOptions.of(family, patterns, shapes_from, param_order))
    index = before_first_step(with_callables(judged(index)))
    note = moments_note(index)
    return index if note is None else replace(index, notes=(*index.notes, note))


@suggest_arguments
@_asked_as(make_options, without=("resume", "overwrite", "fsync", "verify", "part", "finalize"))
def plan(src: type_path, dst: type_path | None = None, **asked: Unpack[PlanArguments]) -> PlanReport:
    """What `convert` would do with the same arguments: files, bytes, memory, casts, and what is left behind.

    `dst` may be left out; for one in a bucket, the disk is told too that files take before they are uploaded. Writes
    nothing. Reads indexes and windows of a few moments (the whole of those that are zero there); with `drift` "first"
    or "mean", copies of tensors too. Raises UcpError where `convert` would before it writes.
    """
    return preview(given(src), make_options(**asked), None if dst is None else given(dst))


@suggest_arguments
@_asked_as(make_options)
def convert(
    src: type_path, dst: type_path, *, observer: Observer | None = None, **asked: Unpack[ConvertArguments]
) -> ucp.ConvertReport:
    """Convert the checkpoint at `src` to `dst`, each a path or the URL of a bucket ("s3://bucket/run").

    Parameters
    ----------
    to
        Target: "ucp" (atoms), "deepspeed", "deepspeed-universal", ...
    topology
        Layout of the run that will load it, where the target has ranks: "dp=4,zero=3", {"dp": 4, "zero": 3} or
        ucp.Topology(dp=4, zero=3).
    layout
        Variant of the target's layout: "packed" or "per-parameter" for atoms, "torch_dist" or "torch" for megatron.
    virtual
        Write references into `src` only (atoms).
    compress
        Compress atoms with zstd.
    include, exclude
        Globs over parameter names, or name/state.
    dtypes
        State to dtype, e.g. {"weight": "bfloat16"}, {"weight": "bf16"} or {"weight": torch.bfloat16}.
    settings
        What the target needs and the source does not record, e.g. {"num_attention_heads": 32} for megatron.
    names
        Naming style of the model's family to write, such as "huggingface"; "nanogpt:huggingface" says the source's too.
    rename
        TOML file with rules of your own for other names.
    family
        Model family whose rules say how `src` is sharded, instead of the one chosen by evidence.
    patterns
        TOML file with a family of your own.
    shapes_from
        Checkpoint, or JSON of name to shape, with the shapes of parameters that `src` keeps flat (FSDP1).
    param_order
        Names of the parameters that the optimizer of `src` numbers, in its order: a list for each of its groups, one
        for all of them, or a JSON file with either.
    drift
        What to do if copies that should be equal differ: "error", "first" (take the first rank's) or "mean".
    zero_moments
        What to do if all moments are zero although steps were taken, as when the optimizer was lost: "error" or "keep".
    optimizer
        "zero": make moments of zero, a step of 0 and one parameter group for a `src` without optimizer states, so that
        a run can start from a published model. `settings` takes its lr, beta1, beta2, eps and weight_decay.
    accept
        Doubts about the files of `src` to ignore: "equal-ranks" (files of two ranks are copies of one another),
        "missing-layers" (a pipeline layer has no file), "moment-shapes" (moments of the optimizer do not have the
        shapes of their parameters), "config" (config.json is that of another model).
    tag
        Name to save under, for deepspeed and deepspeed-universal (and kept in atoms); by default that of `src`.
    companions
        Which files to keep that a training script saved beside `src` (Trainer state, scheduler, tokenizer): "small"
        for those of up to 64 MiB each, "all", or "none".
    engine
        What does the work: "processes" (of this machine), "serial", "ray" (nodes of a Ray cluster), or any installed
        one; its settings go into `settings`, as in {"address": "auto"}. By default processes, or none where one is
        enough.
    workers
        Processes; by default one per core, on a cluster as many as `memory` allows.
    memory
        Memory for the whole run, beyond the interpreter's own: bytes, or text like "1GiB".
    scratch
        Folder of a disk in which files grow before they are uploaded, for `dst` in a bucket; by default $UCP_SCRATCH,
        or the system's folder for temporary files.
    resume, overwrite
        Continue an unfinished conversion; replace a destination that ucp wrote. Both: continue one that replaces it.
    fsync
        Wait until everything is on disk. Otherwise the system flushes in its own time, as after `cp`: safe if the
        process is killed, not if the power fails soon after.
    verify
        Read everything back and compare it with `src`, bit for bit, before `dst` appears.
    part
        Do this part of the work alone, into the folder beside `dst` that all parts share: "3/8", (3, 8), or "auto" for
        what Slurm's variables say. Parts may run in any order, at the same time, and again.
    finalize
        Complete what the parts did: check that all of it is there, and put `dst` in place. Read back only what was
        written with `fsync=False` or by a part that was cut off.
    observer
        Receives progress: `begin`, `advance` and `end` (`ucp.contract.protocols.Observer`). `advance` is called from
        many threads.

    Returns
    -------
    ConvertReport
        What was written: files, bytes, casts, notes, what was left behind; printed, a few lines.

    Raises
    ------
    UcpError
        `dst` is then as it was; in a bucket it may be unfinished, which whoever reads it is told, until `resume`.
        UnfinishedError, which says what is missing, where `finalize` finds parts undone.
    """
    from ucp.conversion.convert import carry_out

    return carry_out(given(src), given(dst), make_options(**asked), observer or Silent())


def is_unfinished(dst: type_path) -> bool:
    """Whether a conversion to `dst` was interrupted, so that `resume` can continue it."""
    return is_begun(given(dst))


def _threads(workers: int | None, memory: MemoryLike, paths: Iterable[type_path | None]) -> int:
    """Threads that compare what lies at some paths. Raises UsageError, MemoryBudgetError."""
    from ucp.transfer.compare import fit_threads

    remote = any(path is not None and is_url(os.fspath(path)) for path in paths)
    return fit_threads(nbytes_of(memory), asked=workers_of(workers), remote=remote)


@suggest_arguments
def verify(
    path: type_path,
    *,
    against: type_path | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    weights: bool = False,
    family: str | None = None,
    patterns: type_path | None = None,
    shapes_from: type_path | None = None,
    param_order: ParamOrderLike | None = None,
    workers: int | None = None,
    memory: MemoryLike = 1 << 30,
    observer: Observer | None = None,
) -> ucp.VerifyReport:
    """Prove that the checkpoint at `path` is complete, undamaged and, if asked, equal to `against` bit for bit.

    Reads every byte that has a recorded checksum, compares copies that should be equal, and proves that shards tile
    every tensor. Against another checkpoint, a state of another dtype is compared after the cast; extras are compared
    if `path` holds atoms of the same run in the layout of `against`.

    `include`, `exclude`: globs over parameter names, or name/state, that choose what is compared with `against`;
    `weights`: weights alone, as for an export of a run. `family`, `patterns`, `shapes_from` and `param_order`: see
    `convert`; they apply to both, as far as their formats need them. `workers`: threads, by default four, or eight
    with a bucket; `memory`: bytes for all of them, beyond the interpreter's own.
    """
    from ucp.checks.verify import prove

    return prove(
        given(path),
        against=None if against is None else given(against),
        names=filter_of(include, exclude, weights=weights),
        source=SourceOptions.of(family, patterns, shapes_from, param_order),
        threads=_threads(workers, memory, (path, against)),
        observer=observer or Silent(),
    )


@suggest_arguments
def diff(
    a: type_path,
    b: type_path,
    *,
    extras: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    weights: bool = False,
    family: str | None = None,
    patterns: type_path | None = None,
    shapes_from: type_path | None = None,
    param_order: ParamOrderLike | None = None,
    workers: int | None = None,
    memory: MemoryLike = 1 << 30,
    observer: Observer | None = None,
) -> ucp.DiffReport:
    """Every difference between two checkpoints of any formats, streamed.

    `extras`: also what is not a parameter, entry by entry. `include`, `exclude`, `weights`, `family`, `patterns`,
    `shapes_from`, `param_order`, `workers`, `memory`: see `verify`.
    """
    from ucp.checks.verify import differences

    return differences(
        given(a),
        given(b),
        names=filter_of(include, exclude, weights=weights),
        extras=extras,
        source=SourceOptions.of(family, patterns, shapes_from, param_order),
        threads=_threads(workers, memory, (a, b)),
        observer=observer or Silent(),
    )
