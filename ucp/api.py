"""The use cases, which the command line calls and `import ucp` exports; each imports what it needs when it is called.

>>> import ucp
>>> str(ucp.Topology(dp=4, zero=3))
'dp=4,zero=3'
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Unpack

import ucp  # for return types, which are imported only when an annotation is evaluated
from ucp.advice.run import Range
from ucp.chain.staleness import check_staleness
from ucp.contract.protocols import Observer
from ucp.contract.registry import add_call_notes
from ucp.conversion.arguments import (
    CompareArguments,
    ConvertArguments,
    ExpertArguments,
    PlanArguments,
    SourceArguments,
    VerifyArguments,
    takes_options,
)
from ucp.conversion.destination.disk import is_begun
from ucp.conversion.option import switch_parser, type_path
from ucp.conversion.options import ConvertOptions, make_options
from ucp.conversion.plan_report import PlanReport, preview
from ucp.core.index import Index
from ucp.errors import UsageError
from ucp.io.folder import is_url, parse_path
from ucp.log import LoggedObserver, log_report
from ucp.source.moments import describe_zero_moments, detect_first_step
from ucp.source.read import Survey, add_doubts, index_of, pause_gc, read_index, survey

__all__ = [
    "PlanReport",
    "Survey",
    "add_to_chain",
    "advise",
    "convert",
    "delta",
    "diff",
    "experts",
    "inspect",
    "is_unfinished",
    "migrate",
    "open",
    "place",
    "plan",
    "survey",
    "verify",
]


@takes_options(SourceArguments)
def open(path: type_path, **options: Unpack[SourceArguments]) -> ucp.Checkpoint:  # noqa: A001  # what users look for
    """The checkpoint at `path`, of any format. Raises SourceError, CoverError.

    `family`, `patterns`, `shapes_from`, `param_order`: see `convert`.
    """
    from ucp.live.checkpoint import Checkpoint

    return Checkpoint(index_of(parse_path(path), source=make_options(**options).source))


@takes_options(SourceArguments)
@pause_gc()
def inspect(path: type_path, **options: Unpack[SourceArguments]) -> Index:
    """Index of the checkpoint at `path`, even if shards are missing: it is not checked that they tile every tensor.

    `family`, `patterns`, `shapes_from`, `param_order`: see `convert`. Raises SourceError if there is no index to read;
    `survey(path)` then still tells the format and lists the files.
    """
    path = parse_path(path)
    source = make_options(**options).source
    index = read_index(path, source=source)
    check_staleness(index, exact=source.exact, max_plt=source.max_plt)
    index = detect_first_step(add_call_notes(add_doubts(index)))
    note = describe_zero_moments(index)
    return index if note is None else replace(index, notes=(*index.notes, note))


@takes_options(ExpertArguments)
def experts(
    path: type_path, *, observer: Observer | None = None, **options: Unpack[ExpertArguments]
) -> ucp.ExpertsReport:
    """How trained the experts of a mixture-of-experts model are, which stand out in their layer, and what is wrong.

    Reads the experts and routers of the checkpoint at `path` once. Names are those of Megatron, DeepSpeed, torchtitan
    and transformers. Raises UsageError for a model without experts, SourceError, CorruptError.

    `workers`: threads, by default four, or eight with a bucket; `memory`: bytes for all of them, beyond the
    interpreter's own. `family`, `patterns`, `shapes_from`, `param_order`: see `convert`.
    """
    from ucp.chain.staleness import describe_staleness, measure_staleness
    from ucp.moe.report import report_experts

    checked = make_options(**options)
    index = index_of(parse_path(path), source=checked.source)
    report = report_experts(index, _check_observer(observer), threads=_threads(checked, (path,)))
    return replace(report, notes=(*describe_staleness(measure_staleness(index)), *report.notes))


def add_to_chain(
    chain: type_path, links: Iterable[type_path], *, iteration: int | None = None
) -> tuple[tuple[int, str], ...]:
    """List checkpoints of one run in the folder `chain`, so that they are read as one: (iteration, path) of all of it.

    `iteration`: training step of a checkpoint that records none. Nothing is copied. Raises SourceError, UsageError.
    """
    from ucp.chain.format import add_links

    several = (links,) if isinstance(links, str | os.PathLike) else links
    listed = add_links(parse_path(chain), [parse_path(link) for link in several], iteration=iteration)
    return tuple((link.iteration, link.path) for link in listed)


@takes_options(ExpertArguments)
def delta(
    a: type_path,
    b: type_path,
    out: type_path,
    *,
    encoding: str = "xor",
    observer: Observer | None = None,
    **options: Unpack[ExpertArguments],
) -> ucp.DeltaReport:
    """Write the checkpoint `b` as patches of `a`, two of one model in any formats, to the folder `out`.

    slime and SGLang read it, and so does `ucp`: as `b`, as long as `a` is where it is. `out`: a name such as
    "weight_v000007" says the version; otherwise it is the one after that of `a`. `encoding`: "xor", or "overwrite"
    (positions and bytes). Raises SourceError, MisfitError for tensors that only one of them has, DestinationError.

    `workers`: threads, by default four, or eight with a bucket; `memory`: bytes for all of them, beyond the
    interpreter's own. `family`, `patterns`, `shapes_from`, `param_order`: see `convert`; for both checkpoints.
    """
    from ucp.chain.delta.write import write_delta
    from ucp.source.read import read_with_options

    checked = make_options(**options)
    first, second = (read_with_options(parse_path(path), source=checked.source) for path in (a, b))
    threads = _threads(checked, (a, b))
    return write_delta(
        first, second, parse_path(out), encoding=encoding, threads=threads, observer=_check_observer(observer)
    )


def place(
    loads: Mapping[int, Sequence[float]] | Sequence[Sequence[float]] | ucp.ExpertsReport | type_path,
    *,
    nodes: int,
    slots: int,
    gpus: int = 1,
    threshold: int = 2,
    goal: Literal["survival", "balance"] = "survival",
) -> ucp.Placement:
    """Place the experts of every layer on GPUs: busy ones several times, so that lost nodes cost no expert.

    Parameters
    ----------
    loads
        Tokens of each expert: `{layer: [experts]}`, `[layers][experts]`, the report of `ucp.experts`, or a file or
        checkpoint (`ucp.placement.loads`).
    nodes, gpus, slots
        Nodes, GPUs of a node, and experts of a layer that fit on a GPU.
    threshold
        Distinct nodes that every expert is on, at least: fewer lost nodes than that lose no expert.
    goal
        "survival": lost nodes are least likely to cost an expert; "balance": the busiest GPU has fewest tokens. The
        other decides between equals.

    Raises
    ------
    UsageError
        There are too few slots or nodes, or `loads` are of no known form.
    SourceError
        A file or checkpoint cannot be read.

    Allocation and grouping are those of Lazarus (eq. 1, MRO), packing that of DeepSeek's EPLB.
    """
    from ucp.placement.loads import describe_loads, read_loads
    from ucp.placement.place import place as place_experts
    from ucp.placement.placement import Cluster

    cluster = Cluster(nodes=nodes, gpus=gpus, slots=slots)
    if isinstance(loads, str | os.PathLike):
        path = parse_path(loads)
        is_file = path.suffix in (".json", ".jsonl", ".pt", ".pth") and not is_url(str(path)) and path.is_file()
        loads = read_loads(path) if is_file else experts(path)
    tokens, notes = describe_loads(loads)
    return replace(place_experts(tokens, cluster, threshold=threshold, goal=goal), notes=notes)


def migrate(
    before: ucp.Placement,
    after: ucp.Placement,
    *,
    lost: Collection[int] = (),
    checkpoint: type_path | None = None,
    bandwidth: float | None = None,
    tolerance: float | None = None,
) -> ucp.Migration:
    """How nodes that are left get the experts of a new placement: which becomes which, and who sends what.

    `Migration.placement` is `after`, with its nodes in the order of those that are left, so that fewest experts move:
    what `load_into(placement=...)` takes. With `tolerance`, such as 0.05, experts of as many replicas may also exchange
    their slots so that fewer move: survival stays what it is, and the busiest GPU gets at most that share more tokens.

    `before`, `after`: the placement until now, and that of the nodes that are left (`ucp.place`), of the same layers.
    `lost`: nodes of `before`, by number. `checkpoint`: of the model, tells the bytes of experts. `bandwidth`: bytes
    that a node sends or receives in a second. Raises UsageError if layers differ or there is no such node, SourceError
    if the checkpoint cannot be read, MissingLibraryError without scipy.
    """
    from ucp.placement.migrate import measure_experts, plan_migration

    sizes = None if checkpoint is None else measure_experts(inspect(checkpoint))
    return plan_migration(before, after, lost=lost, nbytes_per_expert=sizes, bandwidth=bandwidth, tolerance=tolerance)


def advise(
    *,
    checkpoint: type_path | None = None,
    trace: type_path | Sequence[float] | None = None,
    measure: type_path | None = None,
    **run: Range | float | str,
) -> ucp.AdviceReport:
    """How often to save a run, and how: the share of time that it makes progress, for several ways of saving.

    Parameters
    ----------
    checkpoint
        A checkpoint of the run, for `params_dense`, `params_expert`, `experts` and `moe_layers`.
    trace
        Times of failures, in seconds from the start of the run: numbers, or a file with one per line.
    measure
        A folder in the storage of the run: writes 1 GiB there, which is deleted, for `bandwidth` if that is not given.
    run
        Fields of `ucp.advice.run.Run`, and `gpu_memory`, `host_memory`, `disk` (bytes of all GPUs, hosts and disks
        together) for a memory plan. Numbers, or ranges as text ("2-4"): the report is then a range, too. `iter_time`,
        `mtbf`, `params_dense` and `bandwidth` are needed.

    Raises
    ------
    UsageError
        Numbers are missing, unknown, or not positive.
    SourceError
        The checkpoint or the trace cannot be read.

    The models are those of CheckFreq, Gemini, MoC-System and MoEtion: see docs/how-to/decide-how-often-to-save.md.
    """
    from ucp.advice.report import advise as advise_run
    from ucp.advice.run import count_params
    from ucp.advice.simulate import parse_trace
    from ucp.checks.floor import measure_writes

    values: dict[str, Range | float | str] = {} if checkpoint is None else {**count_params(inspect(checkpoint))}
    if isinstance(trace, str | os.PathLike):
        trace = parse_trace(str(parse_path(trace)))
    if measure is not None and "bandwidth" not in run:
        values["bandwidth"] = measure_writes(parse_path(measure), 1 << 30).bytes_per_second
    return advise_run({**values, **run}, trace=trace)


@takes_options(PlanArguments)
def plan(src: type_path, dst: type_path | None = None, **options: Unpack[PlanArguments]) -> PlanReport:
    """What `convert` would do with the same arguments: files, bytes, memory, casts, and what is left behind.

    `dst` may be left out; if it is in a bucket, the report also says how much local disk files take before they are
    uploaded. Writes nothing. Reads the indexes and samples of optimizer moments (all elements, if the samples are
    zero); with `drift` "first" or "mean", also the tensors that have copies. Raises each UcpError that `convert` would
    raise before it writes.
    """
    return preview(parse_path(src), make_options(**options), None if dst is None else parse_path(dst))


@takes_options(ConvertArguments)
def convert(
    src: type_path, dst: type_path, *, observer: Observer | None = None, **options: Unpack[ConvertArguments]
) -> ucp.ConvertReport:
    """Convert the checkpoint at `src` to `dst`, each a path or the URL of a bucket ("s3://bucket/run").

    Parameters
    ----------
    OPTIONS
    observer
        Receives progress: `begin`, `advance` and `end` (`ucp.contract.protocols.Observer`). `advance` is called from
        many threads.

    Returns
    -------
    ConvertReport
        What was written: files, bytes, casts, notes, what was left behind. `print` shows it in a few lines.

    Raises
    ------
    UcpError
        A folder `dst` is then as it was before. A `dst` in a bucket may be unfinished: reading it raises
        IncompleteError until the conversion is resumed. UnfinishedError: `finalize` found that parts are not done;
        the message says which.
    """
    from ucp.conversion.convert import carry_out

    report = carry_out(parse_path(src), parse_path(dst), make_options(**options), _check_observer(observer))
    log_report(report)
    return report


def is_unfinished(dst: type_path) -> bool:
    """Whether a conversion to `dst` was interrupted, so that `resume` can continue it."""
    return is_begun(parse_path(dst))


def _check_observer(observer: Observer | None) -> Observer:
    """An observer that also logs. Raises UsageError for anything that is no observer."""
    if not isinstance(observer, Observer | None):
        raise UsageError(f"expected an observer (begin, advance, end) or None; got {observer!r}")
    return LoggedObserver(observer)


def _threads(options: ConvertOptions, paths: Iterable[type_path | None]) -> int:
    """Number of threads for comparing the checkpoints at `paths`. Raises MemoryBudgetError."""
    from ucp.transfer.compare import fit_threads

    remote = any(path is not None and is_url(os.fspath(path)) for path in paths)
    return fit_threads(options.memory, requested=options.workers or 0, remote=remote)


@takes_options(VerifyArguments)
def verify(
    path: type_path,
    *,
    against: type_path | None = None,
    observer: Observer | None = None,
    **options: Unpack[VerifyArguments],
) -> ucp.VerifyReport:
    """Prove that the checkpoint at `path` is complete, undamaged and, if asked, equal to `against` bit for bit.

    Reads every byte that has a recorded checksum, compares copies that should be equal, and proves that shards tile
    every tensor. In the comparison with `against`, a state of another dtype is cast first; extras are compared if
    `path` holds atoms of the same run in the layout of `against`.

    `include`, `exclude`: globs over parameter names, or name/state, that choose what is compared with `against`;
    `weights`: compare the weights alone, e.g. those of an export with those of the run. `family`, `patterns`,
    `shapes_from` and `param_order`: see `convert`; they apply to both checkpoints, as far as their formats need them.
    `accept`: doubts that are notes instead of problems, such as those accepted when `path` was converted. `workers`:
    threads, by default four, or eight with a bucket; `memory`: bytes for all threads together, in addition to the
    interpreter's own.
    """
    from ucp.checks.verify import verify_checkpoint

    checked = make_options(**options)
    report = verify_checkpoint(
        parse_path(path),
        against=None if against is None else parse_path(against),
        names=checked.selection,
        source=checked.source,
        accept=checked.accept,
        threads=_threads(checked, (path, against)),
        observer=_check_observer(observer),
    )
    log_report(report)
    return report


@takes_options(CompareArguments)
def diff(
    a: type_path,
    b: type_path,
    *,
    extras: bool = False,
    observer: Observer | None = None,
    **options: Unpack[CompareArguments],
) -> ucp.DiffReport:
    """Every difference between two checkpoints of any formats, streamed.

    `extras`: compare also what is not a parameter, entry by entry. `include`, `exclude`, `weights`, `family`,
    `patterns`, `shapes_from`, `param_order`, `workers`, `memory`: see `verify`.
    """
    from ucp.checks.verify import diff_checkpoints

    checked = make_options(**options)
    return diff_checkpoints(
        parse_path(a),
        parse_path(b),
        names=checked.selection,
        extras=switch_parser("extras")(extras),
        source=checked.source,
        threads=_threads(checked, (a, b)),
        observer=_check_observer(observer),
    )
