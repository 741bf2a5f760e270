"""The use cases: what the command line calls, and what `import ucp` gives.

>>> import ucp
>>> str(ucp.Topology(dp=4, zero=3))
'dp=4,zero=3'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

from ucp.checks.verify import DiffReport, VerifyReport, differences, prove, prove_written
from ucp.contract.companions import Companions
from ucp.contract.protocols import Observer, SourceOptions
from ucp.contract.registry import recognise, with_callables
from ucp.conversion.execute import ConvertReport, carry_out
from ucp.conversion.plan_report import PlanReport, preview
from ucp.conversion.prepare import ConvertOptions, Silent, Survey, index_of, judged, survey
from ucp.conversion.replica_policy import Drift
from ucp.conversion.zero_moments import ZeroMoments, moments_note
from ucp.core.dtypes import DType
from ucp.core.index import DoubtKind, Index
from ucp.core.names import NameFilter
from ucp.core.target import TargetOptions
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.staging import Staging
from ucp.live.checkpoint import Atom, Checkpoint
from ucp.transfer.compare import fit_threads

__all__ = [
    "Atom",
    "Checkpoint",
    "DiffReport",
    "PlanReport",
    "Survey",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "is_unfinished",
    "make_options",
    "open",
    "plan",
    "source_options",
    "survey",
    "verify",
]

type_path = str | PathLike[str]


def open(  # noqa: A001  # ucp.open is the name users look for
    path: type_path, *, family: str | None = None, patterns: type_path | None = None
) -> Checkpoint:
    """The checkpoint at `path`, of whatever format. Raises SourceError, CoverError.

    `family`, `patterns`: see `convert`.
    """
    return Checkpoint(index_of(Path(path), source=source_options(family, patterns)))


def inspect(path: type_path, *, family: str | None = None, patterns: type_path | None = None) -> Index:
    """Index of the checkpoint at `path`; its cover is not proved, so that a broken one can be looked at.

    `family`, `patterns`: see `convert`. Raises SourceError; what can be told then is in `survey(path)`.
    """
    fmt, _ = recognise(Path(path), options=source_options(family, patterns))
    index = with_callables(judged(fmt.read(Path(path))))
    note = moments_note(index)
    return index if note is None else replace(index, notes=(*index.notes, note))


def plan(
    src: type_path,
    *,
    to: str = "ucp",
    topology: Topology | str | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    settings: Mapping[str, str | int | float] | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    drift: str = Drift.ERROR,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    tag: str | None = None,
    companions: str = Companions.SMALL,
    workers: int | None = None,
    memory: int = 1 << 30,
) -> PlanReport:
    """What `convert` would do with the same arguments: files, bytes, memory, casts, and what is left behind.

    Writes nothing. Reads indexes and windows of a few moments (the whole of those that are zero there); with `drift`
    "first" or "mean", copies of tensors too. Raises UcpError where `convert` would before it writes.
    """
    options = make_options(
        to=to,
        topology=topology,
        layout=layout,
        virtual=virtual,
        compress=compress,
        include=include,
        exclude=exclude,
        dtypes=dtypes,
        settings=settings,
        family=family,
        patterns=patterns,
        drift=drift,
        zero_moments=zero_moments,
        accept=accept,
        tag=tag,
        companions=companions,
        workers=workers,
        memory=memory,
    )
    return preview(Path(src), options)


def convert(
    src: type_path,
    dst: type_path,
    *,
    to: str = "ucp",
    topology: Topology | str | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    settings: Mapping[str, str | int | float] | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    drift: str = Drift.ERROR,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    tag: str | None = None,
    companions: str = Companions.SMALL,
    workers: int | None = None,
    memory: int = 1 << 30,
    resume: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    verify: bool = False,
    observer: Observer | None = None,
) -> ConvertReport:
    """Convert the checkpoint at `src` to `dst`.

    Parameters
    ----------
    to
        Target: "ucp" (atoms), "deepspeed", "deepspeed-universal", ...
    topology
        Layout of the run that will load it, where the target has ranks.
    layout
        Variant of the target's layout: "packed" or "per-parameter" for atoms, "torch_dist" or "torch" for megatron.
    virtual
        Write references into `src` only (atoms).
    compress
        Compress atoms with zstd.
    include, exclude
        Globs over parameter names, or name/state.
    dtypes
        State to dtype, e.g. {"weight": "bfloat16"}.
    settings
        What the source does not record and the target needs, e.g. {"num_attention_heads": 32} for megatron.
    family
        Model family whose rules say how `src` is sharded, instead of the one chosen by evidence.
    patterns
        TOML file with a family of your own.
    drift
        Copies that should be equal and are not: "error", "first" (take the first rank's) or "mean".
    zero_moments
        Moments that are all zero although steps were taken, as where the optimizer was lost: "error" or "keep".
    accept
        What speaks against the files of `src` and is to be passed over: "equal-ranks" (files of two ranks are copies of
        one another), "missing-layers" (a layer of a pipeline has no file).
    tag
        Name to save under, for deepspeed and deepspeed-universal (and kept in atoms); by default that of `src`.
    companions
        Files that a training script left beside `src` (of a Trainer: its state, scheduler, tokenizer): "small" carries
        along those of up to 64 MiB each, "all" all of them, "none" none.
    workers
        Processes; by default one per core.
    memory
        Bytes for the whole run, beyond the interpreter's own.
    resume, overwrite
        Continue an unfinished conversion; replace a destination that ucp wrote. Both: continue one that replaces.
    fsync
        Wait until everything is on the disk. Without it the system brings it there in its own time, as after `cp`: safe
        when a process is killed, not when the power fails soon after.
    verify
        Afterwards read everything back and compare it with `src`, bit for bit.

    Raises
    ------
    UcpError
        `dst` is then as it was.
    """
    options = make_options(
        to=to,
        topology=topology,
        layout=layout,
        virtual=virtual,
        compress=compress,
        include=include,
        exclude=exclude,
        dtypes=dtypes,
        settings=settings,
        family=family,
        patterns=patterns,
        drift=drift,
        zero_moments=zero_moments,
        accept=accept,
        tag=tag,
        companions=companions,
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
        fsync=fsync,
    )
    watch = observer or Silent()
    prove = partial(prove_written, told=options.source, observer=watch, threads=fit_threads(memory)) if verify else None
    return carry_out(Path(src), Path(dst), options, watch, prove=prove)


def is_unfinished(dst: type_path) -> bool:
    """Whether a conversion to `dst` was begun and interrupted, so that `resume` has something to continue."""
    return Staging(Path(dst).resolve()).folder.exists()


def make_options(
    *,
    to: str = "ucp",
    topology: Topology | str | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    settings: Mapping[str, str | int | float] | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    drift: str = Drift.ERROR,
    zero_moments: str = ZeroMoments.ERROR,
    accept: Iterable[str] = (),
    tag: str | None = None,
    companions: str = Companions.SMALL,
    workers: int | None = None,
    memory: int = 1 << 30,
    resume: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
) -> ConvertOptions:
    """Options as users give them, checked. Raises UsageError. See `convert`."""
    if virtual and (to != "ucp" or layout not in ("", "virtual")):
        other = f"--layout {layout}" if to == "ucp" else f"--to {to}"
        raise UsageError(f"--virtual makes a store of atoms that are references: it does not go with {other}")
    for argument, text in {"to": to, "layout": layout}.items():
        if not isinstance(text, str):
            raise UsageError(f"expected {argument} as text; got {text!r}")
    if not isinstance(topology, Topology | str | None):
        raise UsageError(f"expected a topology as ucp.Topology or as text like dp=4,zero=3; got {topology!r}")
    if drift not in set(Drift):
        raise UsageError(f"expected a policy for copies that differ of {', '.join(Drift)}; got {drift!r}")
    if zero_moments not in set(ZeroMoments):
        raise UsageError(
            f"expected a policy for moments that are zero of {', '.join(ZeroMoments)}; got {zero_moments!r}"
        )
    if companions not in set(Companions):
        raise UsageError(
            f"expected which files beside the checkpoint to carry along, of {', '.join(Companions)}; got {companions!r}"
        )
    if tag is not None and not (isinstance(tag, str) and tag):
        raise UsageError(f"expected a tag such as global_step100; got {tag!r}")
    _check_means(workers, memory)
    return ConvertOptions(
        to=to,
        topology=Topology.parse(topology) if isinstance(topology, str) else topology,
        target=TargetOptions(
            dtypes=_dtypes(dtypes or {}),
            layout="virtual" if virtual else layout,
            compress=compress,
            settings=_settings(settings or {}),
            tag=tag or "",
        ),
        names=NameFilter(include=_globs(include), exclude=_globs(exclude)),
        source=source_options(family, patterns),
        drift=Drift(drift),
        zero_moments=ZeroMoments(zero_moments),
        accept=DoubtKind.accepted(accept),
        companions=Companions(companions),
        workers=workers or 0,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
        fsync=fsync,
    )


def source_options(family: str | None, patterns: type_path | None) -> SourceOptions:
    """What a user says of a source. Raises UsageError for a family by name and by file at once."""
    return SourceOptions.of(family, patterns)


def _check_means(workers: int | None, memory: int) -> None:
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise UsageError(f"expected a number of workers, 1 or more, or None for the default; got {workers!r}")
    if not isinstance(memory, int) or memory <= 0:
        raise UsageError(f"expected memory in bytes, a whole number above 0; got {memory!r}")


def _threads(workers: int | None, memory: int) -> int:
    """Threads that compare. Raises UsageError, MemoryBudgetError."""
    _check_means(workers, memory)
    return fit_threads(memory, asked=workers or 0)


def _dtypes(asked: Mapping[str, str]) -> dict[str, str]:
    """State to dtype. Raises UsageError."""
    if not isinstance(asked, Mapping):
        raise UsageError(f"expected dtypes by state, as in {{'weight': 'bfloat16'}}; got {asked!r}")
    for state, name in asked.items():
        if name not in {member.value for member in DType} or not DType(name).is_floating:
            known = ", ".join(member.value for member in DType if member.is_floating)
            raise UsageError(f"expected STATE=DTYPE with a dtype of {known}; got {state}={name}")
    return dict(asked)


def _settings(asked: Mapping[str, str | int | float]) -> dict[str, str]:
    """Name to value as text, as the command line has it. Raises UsageError."""
    if not isinstance(asked, Mapping) or not all(isinstance(value, str | int | float) for value in asked.values()):
        raise UsageError(
            f"expected settings by name, as in {{'num_attention_heads': 32}}, each a text or a number; got {asked!r}"
        )
    return {name: str(value) for name, value in asked.items()}


def _globs(asked: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one. Raises UsageError."""
    if isinstance(asked, str):
        return (asked,)
    globs = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    if not all(isinstance(own, str) for own in globs):
        raise UsageError(f"expected globs over names as text, as in ['*/weight']; got {asked!r}")
    return globs


def verify(
    path: type_path,
    *,
    against: type_path | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    workers: int | None = None,
    memory: int = 1 << 30,
    observer: Observer | None = None,
) -> VerifyReport:
    """Prove that the checkpoint at `path` is whole, undamaged and, if asked, equal to `against` bit for bit.

    Reads every byte that has a recorded checksum, compares copies that should be equal, and proves that pieces tile
    every tensor. Against another checkpoint a state of another dtype is compared after the cast, and extras where
    `path` holds atoms of the same run in the layout that `against` has: they are kept as they were. `family` and
    `patterns`: see `convert`; they are about both, as far as their formats have a use for them. `workers`: threads, by
    default four; `memory`: bytes for all of them, beyond the interpreter's own.
    """
    return prove(
        Path(path),
        against=None if against is None else Path(against),
        source=source_options(family, patterns),
        threads=_threads(workers, memory),
        observer=observer or Silent(),
    )


def diff(
    a: type_path,
    b: type_path,
    *,
    extras: bool = False,
    family: str | None = None,
    patterns: type_path | None = None,
    workers: int | None = None,
    memory: int = 1 << 30,
    observer: Observer | None = None,
) -> DiffReport:
    """Every difference between two checkpoints of any formats, streamed.

    `extras`: what is no parameter too, entry by entry. `family`, `patterns`, `workers`, `memory`: see `verify`.
    """
    return differences(
        Path(a),
        Path(b),
        extras=extras,
        source=source_options(family, patterns),
        threads=_threads(workers, memory),
        observer=observer or Silent(),
    )
