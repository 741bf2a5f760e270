"""The options of the verbs, each declared once: a field of `ConvertOptions` whose metadata is an `Option`.

The fields give command-line options, arguments of the public functions, their help, and the identity of a conversion.

>>> str(make_options(topology={"dp": 4, "zero": 3}).topology)
'dp=4,zero=3'
>>> OPTIONS["dtypes"].flag, OPTIONS["dtypes"].identity
('--dtype', 'dtypes')
"""

from __future__ import annotations

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
    parse_placement,
    parse_settings,
    parse_share,
    parse_tag,
    parse_topology,
    parse_workers,
    path_parser,
    take_placement,
    text_parser,
)
from ucp.core.index import WEIGHT, DoubtKind
from ucp.core.target import TargetOptions
from ucp.core.topology import PlacesExperts, Topology
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
        "Format to write: ucp (atoms), dcp, deepspeed, deepspeed-universal, huggingface, megatron, torch, or any "
        "other installed target.",
        default="ucp",
        metavar="FORMAT",
        shown="ucp",
        parse=text_parser("to"),
        identity="target",
    )
    topology: Topology | None = option(
        "Parallel layout of the run that will load the result, such as dp=4,zero=3; axes that are not given are 1. "
        "Without this option, the layout of the source. deepspeed requires zero; dcp takes "
        "dp_replicate=2,dp_shard=4 for HSDP; deepspeed-universal takes only tp and pp, as any run can load it.",
        python="Parallel layout of the run that will load the result, if the target depends on it: "
        '"dp=4,zero=3", {"dp": 4, "zero": 3} or ucp.Topology(dp=4, zero=3).',
        metavar="T",
        parse=parse_topology,
        identity="topology",
    )
    placement: PlacesExperts | Path | None = option(
        "Which experts each of ep ranks holds, for deepspeed (AutoEP): a file of `ucp place`.  [default: in order]",
        python="Which experts each of ep ranks holds, for deepspeed (AutoEP): what `ucp.place` returns, or a file.",
        metavar="FILE",
        parse=parse_placement,
        identity="placement",
    )
    layout: str = option(
        "Variant of the format. For atoms: packed (default) or per-parameter. For megatron: torch_dist (default) or "
        "torch.",
        default="",
        alternative="--megatron-format",
        metavar="NAME",
        parse=text_parser("layout"),
        identity="layout",
    )
    virtual: bool = option(
        "Write atoms that refer to the bytes in SRC instead of a copy: SRC must be kept.",
        default=False,
        identity="references",
    )
    compress: bool = option("Compress atoms with zstd.", default=False, identity="compression")
    include: tuple[str, ...] = option(
        "Take only parameters (NAME) or states (NAME/STATE) that match GLOB, e.g. '*/weight'. May be repeated.",
        default=(),
        python="Globs over parameter names, or name/state, of what to take.",
        metavar="GLOB",
        repeats=True,
        parse=parse_globs,
        identity="included",
    )
    exclude: tuple[str, ...] = option(
        "Leave out parameters or states that match GLOB. May be repeated.",
        default=(),
        python="Globs over parameter names, or name/state, of what to leave out.",
        metavar="GLOB",
        repeats=True,
        parse=parse_globs,
        identity="left out",
    )
    weights: bool = option(
        "Compare only weights, e.g. a checkpoint with its export; the same as --include '*/weight'.", default=False
    )
    dtypes: Mapping[str, str] = option(
        "Cast a state of all parameters, e.g. weight=bfloat16. May be repeated.",
        default={},
        python='State to dtype, e.g. {"weight": "bfloat16"}, {"weight": "bf16"} or {"weight": torch.bfloat16}.',
        flag="--dtype",
        metavar="STATE=DTYPE",
        repeats=True,
        parse=parse_dtypes,
        identity="dtypes",
    )
    settings: Mapping[str, str] = option(
        "A value that the target needs and the source does not record, e.g. num_attention_heads=32, or a setting of "
        "--engine. drop=EXTRA,... leaves out extras of the source; frozen=GLOB,... or frozen=none says which "
        "parameters are frozen; step=N and scheduler=KEY say from which step and scheduler state a run resumes. The "
        "error for an unknown name lists all names. May be repeated.",
        default={},
        python='Values that the target needs and the source does not record, e.g. {"num_attention_heads": 32} for '
        'megatron, and settings of the engine. {"drop": "EXTRA,..."} leaves out extras of the source, {"frozen": '
        '"GLOB,..."} says which parameters are frozen, {"step": N} and {"scheduler": KEY} say from which step and '
        "scheduler state a run resumes.",
        flag="--set",
        metavar="NAME=VALUE",
        repeats=True,
        parse=parse_settings,
        identity="settings",
    )
    names: str | None = option(
        "Write the names of another framework, and tensors joined or split as it has them: huggingface, mcore, ... "
        "`ucp patterns show FAMILY` lists the styles of a model family. FROM:STYLE also says the style of the source, "
        "if its names fit several.",
        python="Write the names of another framework, and tensors joined or split as it has them: "
        '"huggingface", "mcore", ...; "nanogpt:huggingface" also says the style of the source (nanogpt), if its '
        "names fit several.",
        metavar="STYLE",
        parse=lambda names: Naming.parse(text_parser("names")(names), None) and names,
        identity="names",
    )
    rename: Path | None = option(
        "Rename parameters by your own rules, in a TOML file.",
        metavar="FILE",
        parse=path_parser("rename"),
        identity="renamed by",
    )
    family: str | None = option(
        "Model family whose rules say how parameters are sharded, instead of the one found by their names; see `ucp "
        "patterns list`.",
        python="Model family whose rules say how parameters are sharded, instead of the one found by their names.",
        metavar="NAME",
        parse=text_parser("family"),
        identity="family",
    )
    patterns: Path | None = option(
        "TOML file of your own model family, instead of --family.",
        metavar="FILE",
        parse=path_parser("patterns"),
        identity="rules of the family",
    )
    shapes_from: Path | None = option(
        "Where to find shapes that the checkpoint does not record (FSDP1's LOCAL_STATE_DICT): another checkpoint of "
        "the model, or a JSON file of {name: shape}.",
        metavar="PATH",
        parse=path_parser("shapes_from", parse_path),
        identity="shapes",
    )
    param_order: Path | ParamOrder | None = option(
        "JSON file of parameter names in the order of the saved optimizer, if that identifies them only by number: "
        "one list, or a list per param group.",
        python="Names of the parameters in the order of the saved optimizer, if that identifies them only by "
        "number: one list, a list per param group, or a JSON file with either.",
        metavar="FILE",
        parse=parse_param_order,
        identity="order of the optimizer",
    )
    at: int | None = option(
        "Iteration of a chain, or a version.  [default: newest]", metavar="ITER", parse=parse_iteration, identity="at"
    )
    exact: bool = option(
        "Refuse a source in which some parameters are older than others, as in a chain.", default=False
    )
    max_plt: float | None = option(
        "Refuse a source whose experts lack more than this share of the run's tokens, such as 0.0375.",
        metavar="SHARE",
        parse=parse_share,
    )
    drift: Drift = option(
        "If replicas of a tensor differ: stop (error), take that of the first rank (first), or take the mean (mean).",
        default=Drift.ERROR,
        python='If replicas of a tensor differ: "error" (stop), "first" (take that of the first rank) or "mean".',
        parse=choice_parser(Drift, "drift"),
        identity="of copies that differ",
    )
    step: StepPolicy = option(
        "If optimizer step counts of parameters differ, as in a chain: let the target decide, which may refuse them "
        "(error), or take the newest for all (newest).",
        default=StepPolicy.ERROR,
        parse=choice_parser(StepPolicy, "step"),
        identity="step counts",
    )
    zero_moments: ZeroMoments = option(
        "If all of the optimizer's moments are zero although it has stepped (its state was lost): stop (error), or "
        "keep the zeros (keep).",
        default=ZeroMoments.ERROR,
        python="If all of the optimizer's moments are zero although it has stepped (its state was lost): "
        '"error" (stop) or "keep" (keep the zeros).',
        parse=choice_parser(ZeroMoments, "zero_moments"),
    )
    optimizer: NewOptimizer | None = option(
        "Make optimizer states for a source that has none, such as a published model. zero: moments of zero, step 0, "
        "and one param group with --set lr=, beta1=, beta2=, eps=, weight_decay=.",
        python='"zero": make moments of zero, a step of 0 and one param group for a source without '
        "optimizer states, such as a published model. `settings` takes its lr, beta1, beta2, eps and "
        "weight_decay.",
        choices=NewOptimizer,
        parse=choice_parser(NewOptimizer, "optimizer"),
        identity="new optimizer",
    )
    accept: frozenset[DoubtKind] = option(
        "Continue although the source looks wrong. equal-ranks: two ranks have equal files; missing-layers: a "
        "pipeline layer has no file; moment-shapes: optimizer moments do not have the shapes of their parameters; "
        "config: config.json is that of another model; experts: experts of a layer are missing or unlike the others; "
        "layout: tensors are cut differently than the model family says. May be repeated.",
        default=frozenset(),
        python='Continue although the source looks wrong: "equal-ranks" (two ranks have equal files), '
        '"missing-layers" (a pipeline layer has no file), "moment-shapes" (optimizer moments do not have the '
        'shapes of their parameters), "config" (config.json is that of another model), "experts" (experts of a layer '
        'are missing, or do not have the tensors that others have), "layout" (tensors are cut differently than the '
        "model family says).",
        choices=DoubtKind,
        repeats=True,
        parse=DoubtKind.accepted,
    )
    tag: str | None = option(
        "DeepSpeed's tag: name of the folder in DST for the files, e.g. global_step100.  [default: that of the source]",
        metavar="NAME",
        parse=parse_tag,
        identity="tag",
    )
    companions: SidecarPolicy = option(
        "Which files that a training script saved beside the checkpoint (Trainer state, scheduler, tokenizer, ...) to "
        "copy: those of up to 64 MiB each (small), all, or none.",
        default=SidecarPolicy.SMALL,
        python="Which files that a training script saved beside the checkpoint (Trainer state, scheduler, tokenizer, "
        '...) to copy: those of up to 64 MiB each ("small"), "all", or "none".',
        parse=choice_parser(SidecarPolicy, "companions"),
        identity="companion files",
    )
    engine: Engine | None = option(
        "Where the work runs: {engines}. Its settings are passed with --set.  [default: processes, or serial if one "
        "process is enough]",
        python='Where the work runs: "processes" (of this machine), "ray" (nodes of a Ray cluster), "serial" (this '
        "process), or any other installed engine. Its settings are passed in `settings`, e.g. "
        '{"address": "auto"}. By default "processes", or "serial" if one process is enough.',
        metavar="NAME",
        parse=lambda name: engine_named(text_parser("engine")(name)),
    )
    workers: int | None = option(
        "Number of worker processes.  [default: one per core; on a cluster, by --memory]",
        comparing="Number of threads that read and compare.  [default: 4; with a bucket 8]",
        metavar="N",
        parse=parse_workers,
    )
    memory: int = option(
        "Memory for the whole run, e.g. 512M or 1GiB (powers of 1024), 2GB (powers of 1000).",
        default=1 << 30,
        python='Memory for the whole run, beyond the interpreter\'s own: bytes, or text like "1GiB".',
        metavar="M",
        shown="1GiB",
        parse=parse_memory,
    )
    scratch: Path | None = option(
        "Folder for files before they are uploaded, if DST is in a bucket.  [default: $UCP_SCRATCH, or the "
        "system's temporary folder]",
        metavar="DIR",
        parse=path_parser("scratch"),
    )
    resume: bool = option("Continue an interrupted conversion; with --overwrite, one that replaces DST.", default=False)
    overwrite: bool = option(
        "Replace DST if ucp wrote it: in a folder when the new one is complete, in a bucket at once.", default=False
    )
    fsync: bool = option(
        "Do not wait until bytes are on disk, like cp: safe if the process is killed, not if the power fails.",
        default=True,
        python="Wait until everything is on disk. If False, the system writes it later, as after `cp`: safe if the "
        "process is killed, not if the power fails soon after.",
        flag="--no-fsync",
    )
    verify: bool = option(
        "Read everything back and compare it with SRC, bit for bit, before DST appears.", default=False
    )
    part: Share | None = option(
        "Do only part K of N of the work. Parts may run on several machines that see the same folders, in any order, "
        "at the same time, and again after a failure; then run --finalize. auto: K and N from Slurm's variables "
        "(srun, job arrays).",
        python='Do only this part of the work: "3/8", (3, 8), or "auto" for the part in Slurm\'s variables. Parts may '
        "run on several machines that see the same folders, in any order, at the same time, and again after a "
        "failure; then call with `finalize`.",
        metavar="K/N",
        parse=parse_part,
    )
    finalize: bool = option(
        "After all parts: check that everything is there, and put DST in place. Takes the options of the parts. Reads "
        "back only what was written with --no-fsync, or by a part that was interrupted.",
        default=False,
        python="After all parts: check that everything is there, and put DST in place. Takes the options of the "
        "parts. Reads back only what was written with `fsync=False`, or by a part that was interrupted.",
    )

    def __post_init__(self) -> None:
        """Raise UsageError for options that exclude one another."""
        if self.virtual and (self.to != "ucp" or self.layout not in ("", "virtual")):
            other = f"--layout {self.layout}" if self.to == "ucp" else f"--to {self.to}"
            raise UsageError(f"--virtual makes a store of references to the source: it cannot be combined with {other}")
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
        """The options for the source."""
        return SourceOptions(**{field.name: getattr(self, field.name) for field in fields(SourceOptions)})

    @property
    def target(self) -> TargetOptions:
        """The options for the destination."""
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
    """The checked options, from arguments as users pass them; the engine gets its settings. Raises UsageError."""
    values: dict[str, Any] = {
        name: OPTIONS[name].parse_argument(value)
        for name, value in arguments.items()
        if value is not None or OPTIONS[name].default is not None
    }
    options = ConvertOptions(**take_placement(values))
    if options.engine is None:
        return options
    chosen = {name: value for name, value in options.settings.items() if name in options.engine.settings}
    others = {name: value for name, value in options.settings.items() if name not in chosen}
    return replace(options, engine=options.engine.configured(chosen), settings=others)
