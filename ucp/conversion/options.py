"""The options of the verbs, each declared once: a field of `ConvertOptions` whose metadata is an `Option`.

Command-line options, arguments of the public functions and their help, the identity of a conversion and that of a
part's plan are read from the fields.

>>> str(make_options(topology={"dp": 4, "zero": 3}).topology)
'dp=4,zero=3'
>>> OPTIONS["dtypes"].flag, OPTIONS["dtypes"].identity
('--dtype', 'dtypes')
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ucp.contract.protocols import Engine, Naming, ParamOrder, SourceOptions
from ucp.contract.registry import engine as engine_named
from ucp.contract.sidecars import SidecarPolicy
from ucp.conversion.option import (
    Option,
    choice_parser,
    option,
    parse_dtypes,
    parse_globs,
    parse_iteration,
    parse_memory,
    parse_param_order,
    parse_part,
    parse_settings,
    parse_share,
    parse_tag,
    parse_topology,
    parse_workers,
    path_parser,
    text_parser,
)
from ucp.core.index import WEIGHT, DoubtKind
from ucp.core.target import TargetOptions
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.folder import parse_path
from ucp.source.moments import ZeroMoments
from ucp.source.new_optimizer import NewOptimizer
from ucp.source.replica_policy import Drift
from ucp.source.selection import NameFilter
from ucp.source.steps import StepPolicy
from ucp.transfer.plan.tasks import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the user asked for. The metadata of each field says what it means."""

    to: str = option(
        "What to write: ucp (atoms), dcp, deepspeed, deepspeed-universal, huggingface, megatron, torch, or any "
        "installed target.",
        default="ucp",
        metavar="FORMAT",
        shown="ucp",
        parse=text_parser("to"),
        identity="target",
    )
    topology: Topology | None = option(
        "Layout of the run that will load it, such as dp=4,zero=3. Axes left out are 1; deepspeed requires "
        "zero; dcp takes dp_replicate=2,dp_shard=4 for HSDP. Without the option: a run like the source. "
        "deepspeed-universal fits any run and takes tp and pp only.",
        python='Layout of the run that will load it, where the target has ranks: "dp=4,zero=3", {"dp": 4, '
        '"zero": 3} or ucp.Topology(dp=4, zero=3).',
        metavar="T",
        parse=parse_topology,
        identity="topology",
    )
    layout: str = option(
        "Of atoms: packed (default) or per-parameter. Of megatron: torch_dist (default) or torch.",
        default="",
        alternative="--megatron-format",
        metavar="NAME",
        parse=text_parser("layout"),
        identity="layout",
    )
    virtual: bool = option(
        "Write atoms that refer to the source's bytes; nothing is copied.", default=False, identity="references"
    )
    compress: bool = option("Compress atoms with zstd.", default=False, identity="compression")
    include: tuple[str, ...] = option(
        "Only these parameters (NAME) or states (NAME/STATE). May be repeated.",
        default=(),
        python="Globs over parameter names, or name/state, of what to take.",
        metavar="GLOB",
        repeats=True,
        parse=parse_globs,
        identity="included",
    )
    exclude: tuple[str, ...] = option(
        "Leave these out. May be repeated.",
        default=(),
        python="Globs over parameter names, or name/state, of what to leave out.",
        metavar="GLOB",
        repeats=True,
        parse=parse_globs,
        identity="left out",
    )
    weights: bool = option("Compare weights alone, as of a run and an export: --include '*/weight'.", default=False)
    dtypes: Mapping[str, str] = option(
        "Cast a state, e.g. weight=bfloat16. May be repeated.",
        default={},
        python='State to dtype, e.g. {"weight": "bfloat16"}, {"weight": "bf16"} or {"weight": torch.bfloat16}.',
        flag="--dtype",
        metavar="STATE=DTYPE",
        repeats=True,
        parse=parse_dtypes,
        identity="dtypes",
    )
    settings: Mapping[str, str] = option(
        "What the target needs and the source does not record, e.g. num_attention_heads=N (an unknown name "
        "lists those there are); drop=EXTRA,... leaves extras of the source out; frozen=GLOB,... or none says "
        "what is frozen; step=N and scheduler=KEY what a run resumes from. Also settings of --engine.",
        default={},
        python='What the target needs and the source does not record, e.g. {"num_attention_heads": 32} for megatron.',
        flag="--set",
        metavar="NAME=VALUE",
        repeats=True,
        parse=parse_settings,
        identity="settings",
    )
    names: str | None = option(
        "Write names and tensors of another framework, by the model's family: huggingface, mcore, ... "
        "FROM:STYLE where the source's names are those of several.",
        metavar="STYLE",
        parse=lambda names: Naming.parse(text_parser("names")(names), None) and names,
        identity="names",
    )
    rename: Path | None = option(
        "Other names by rules of your own, as a TOML file.",
        metavar="FILE",
        parse=path_parser("rename"),
        identity="renamed by",
    )
    family: str | None = option(
        "Model family of the source; see `ucp patterns list`.",
        python="Model family whose rules say how the source is sharded, instead of the one chosen by evidence.",
        metavar="NAME",
        parse=text_parser("family"),
        identity="family",
    )
    patterns: Path | None = option(
        "Model family of your own, as a TOML file.",
        metavar="FILE",
        parse=path_parser("patterns"),
        identity="rules of the family",
    )
    shapes_from: Path | None = option(
        "Checkpoint, or JSON of name to shape, that has the shapes which the source lacks (FSDP1, LOCAL).",
        metavar="PATH",
        parse=path_parser("shapes_from", parse_path),
        identity="shapes",
    )
    param_order: Path | ParamOrder | None = option(
        "JSON of the names that the source's optimizer numbers, in its order: a list per group, or one.",
        python="Names of the parameters that the source's optimizer numbers, in its order: a list for each "
        "of its groups, one for all of them, or a JSON file with either.",
        metavar="FILE",
        parse=parse_param_order,
        identity="order of the optimizer",
    )
    at: int | None = option(
        "Iteration at which a chain of checkpoints is read.  [default: the newest]",
        metavar="ITER",
        parse=parse_iteration,
        identity="iteration",
    )
    exact: bool = option(
        "Refuse a source in which some parameters are older than others, as in a chain.",
        default=False,
    )
    max_plt: float | None = option(
        "Refuse a source whose experts lack a larger share of the run's tokens than this, such as 0.0375.",
        metavar="SHARE",
        parse=parse_share,
    )
    drift: Drift = option(
        "If copies that should be equal differ: stop, take the first rank's, or take their mean.",
        default=Drift.ERROR,
        python='If copies that should be equal differ: "error" (stop), "first" (take the first rank\'s) or "mean".',
        parse=choice_parser(Drift, "a policy for copies that differ"),
        identity="of copies that differ",
    )
    step: StepPolicy = option(
        "If parameters differ in the optimizer steps that they count, as in a chain: leave that to the target, or take "
        "the newest for all.",
        default=StepPolicy.ERROR,
        python="If parameters differ in the optimizer steps that they count, as in a chain: leave that to the target, "
        'which may refuse it ("error"), or take the newest for all ("newest").',
        parse=choice_parser(StepPolicy, "a policy for step counts that differ"),
        identity="step counts",
    )
    zero_moments: ZeroMoments = option(
        "If all moments are zero although steps were taken (the optimizer was lost): stop, or keep them.",
        default=ZeroMoments.ERROR,
        python='If all moments are zero although steps were taken (the optimizer was lost): "error" (stop) or "keep".',
        parse=choice_parser(ZeroMoments, "a policy for moments that are zero"),
    )
    optimizer: NewOptimizer | None = option(
        "Make optimizer states for a source that has none, such as a published model: moments of zero, and one "
        "parameter group (--set lr=, beta1=, beta2=, eps=, weight_decay=).",
        python='"zero": make moments of zero, a step of 0 and one parameter group for a source without '
        "optimizer states, such as a published model. `settings` takes its lr, beta1, beta2, eps and "
        "weight_decay.",
        choices=NewOptimizer,
        parse=choice_parser(NewOptimizer, "an optimizer to make"),
        identity="new optimizer",
    )
    accept: frozenset[DoubtKind] = option(
        "Continue even if the files of two ranks are copies of one another, or a pipeline layer has no file.",
        default=frozenset(),
        python='Doubts about the files of the source to ignore: "equal-ranks" (files of two ranks are copies '
        'of one another), "missing-layers" (a pipeline layer has no file), "moment-shapes" (moments '
        'do not have the shapes of their parameters), "config" (config.json is that of another '
        'model), "experts" (experts of a layer are missing, or unlike the others), "layout" (ranks cut '
        "tensors otherwise than the model family says).",
        choices=DoubtKind,
        repeats=True,
        parse=DoubtKind.accepted,
    )
    tag: str | None = option(
        "Tag, the folder that DeepSpeed's files are saved in.  [default: that of the source]",
        metavar="NAME",
        parse=parse_tag,
        identity="tag",
    )
    companions: SidecarPolicy = option(
        "Of the files that a training script saved beside the checkpoint (Trainer state, scheduler, tokenizer, "
        "...), keep those of up to 64 MiB each, all, or none.",
        default=SidecarPolicy.SMALL,
        python="Of the files that a training script saved beside the checkpoint (Trainer state, scheduler, "
        'tokenizer), keep those of up to 64 MiB each ("small"), "all", or "none".',
        parse=choice_parser(SidecarPolicy, "which files beside the checkpoint to carry along,"),
        identity="companion files",
    )
    engine: Engine | None = option(
        "What does the work, with its settings by --set: {engines}.  [default: processes, or serial where one "
        "is enough]",
        python='What does the work: "processes" (of this machine), "serial", "ray" (nodes of a Ray cluster), '
        'or any installed one; its settings go into `settings`, as in {"address": "auto"}. By default '
        "processes, or none where one is enough.",
        metavar="NAME",
        parse=lambda name: engine_named(text_parser("engine")(name)),
    )
    workers: int | None = option(
        "Processes.  [default: one per core; on a cluster, by --memory]",
        comparing="Threads that read and compare.  [default: 4; with a bucket 8]",
        metavar="N",
        parse=parse_workers,
    )
    memory: int = option(
        "Memory for the whole run: 512M or 1GiB are powers of 1024, 2GB of 1000.",
        default=1 << 30,
        python='Memory for the whole run, beyond the interpreter\'s own: bytes, or text like "1GiB".',
        metavar="M",
        shown="1GiB",
        parse=parse_memory,
    )
    scratch: Path | None = option(
        "Where files grow before they are uploaded to a DST in a bucket.  [default: $UCP_SCRATCH, or the "
        "system's temporary folder]",
        metavar="DIR",
        parse=path_parser("scratch"),
    )
    resume: bool = option(
        "Continue an interrupted conversion; with --overwrite, one that replaces DST.",
        default=False,
    )
    overwrite: bool = option(
        "Replace a DST that ucp wrote, once the new one is complete (in a bucket: at once).",
        default=False,
    )
    fsync: bool = option(
        "Let the system decide when bytes reach the disk, like cp: safe against kill -9, not against a power failure.",
        default=True,
        python="Wait until everything is on disk. Otherwise the system flushes in its own time, as after "
        "`cp`: safe if the process is killed, not if the power fails soon after.",
        flag="--no-fsync",
    )
    verify: bool = option(
        "Read everything back and compare it with SRC, bit for bit, before DST appears.",
        default=False,
    )
    part: Share | None = option(
        "Do part K of N alone, here or on another machine that sees the same folders: in any order, side by "
        "side, again after a failure. auto: as Slurm's variables say (srun, job arrays).",
        python='Do this part of the work alone, into the folder beside DST that all parts share: "3/8", (3, '
        '8), or "auto" for what Slurm\'s variables say. Parts may run in any order, at the same time, '
        "and again.",
        metavar="K/N",
        parse=parse_part,
    )
    finalize: bool = option(
        "Complete what parts did: check that all of it is there, and put DST in place. Reads back only what "
        "was written with --no-fsync or by a part that was cut off. Takes the same options.",
        default=False,
    )

    def __post_init__(self) -> None:
        """Raise UsageError for options that exclude one another."""
        if self.virtual and (self.to != "ucp" or self.layout not in ("", "virtual")):
            other = f"--layout {self.layout}" if self.to == "ucp" else f"--to {self.to}"
            raise UsageError(f"--virtual makes a store of atoms that are references: it does not go with {other}")
        if self.part is not None and (self.finalize or self.verify):
            flag = "--finalize" if self.finalize else "--verify"
            raise UsageError(f"{flag} is for when all parts are done: drop --part")
        if self.family is not None and self.patterns is not None:
            raise UsageError("expected a family by name (--family) or by file (--patterns); got both")
        if self.weights and self.include:
            raise UsageError(f"expected --weights or --include; got both. Say --include '{self.include[0]}/{WEIGHT}'")

    @property
    def selection(self) -> NameFilter:
        """Which parameters and states to take."""
        return NameFilter(include=(f"*/{WEIGHT}",) if self.weights else self.include, exclude=self.exclude)

    @property
    def naming(self) -> Naming:
        """Under which names to write them."""
        return Naming.parse(self.names, self.rename)

    @property
    def source(self) -> SourceOptions:
        """What the user says of the source."""
        return SourceOptions(
            family=self.family,
            patterns=self.patterns,
            shapes_from=self.shapes_from,
            param_order=self.param_order,
            at=self.at,
            exact=self.exact,
            max_plt=self.max_plt,
        )

    @property
    def target(self) -> TargetOptions:
        """What the user says of the destination."""
        return TargetOptions(
            dtypes=self.dtypes,
            layout="virtual" if self.virtual else self.layout,
            compress=self.compress,
            settings=self.settings,
            tag=self.tag or "",
        )


def _declare_options() -> dict[str, Option]:
    options: dict[str, Option] = {}
    for declared in fields(ConvertOptions):
        option: Option = declared.metadata["option"]
        default = None if declared.default is MISSING else declared.default
        options[declared.name] = replace(
            option,
            name=declared.name,
            flag=option.flag or f"--{declared.name.replace('_', '-')}",
            default=default.value if isinstance(default, StrEnum) else () if default == frozenset() else default,
            shown=default.value if isinstance(default, StrEnum) else option.shown,
            choices=type(default) if isinstance(default, StrEnum) else option.choices,
        )
    return options


OPTIONS: Mapping[str, Option] = _declare_options()
"""Argument to its option, in the order of help pages."""


def make_options(**arguments: object) -> ConvertOptions:
    """Arguments as users pass them, checked; settings that are the engine's go to it. Raises UsageError."""
    values: dict[str, Any] = {
        name: OPTIONS[name].parse_argument(value)
        for name, value in arguments.items()
        if value is not None or OPTIONS[name].default is not None
    }
    options = ConvertOptions(**values)
    if options.engine is None:
        return options
    settings = options.settings
    chosen = {name: value for name, value in settings.items() if name in options.engine.settings}
    others = {name: value for name, value in settings.items() if name not in chosen}
    return replace(options, engine=options.engine.configured(chosen), settings=others)


def count_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
