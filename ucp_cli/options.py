"""What option values mean, and the options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TypedDict, TypeVar

import click

from ucp.contract.companions import Companions
from ucp.conversion.options import nbytes_of
from ucp.conversion.source.new_optimizer import NewOptimizer
from ucp.conversion.source.replica_policy import Drift
from ucp.conversion.source.zero_moments import ZeroMoments
from ucp.core.index import DoubtKind
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.folder import given

__all__ = [
    "PATH",
    "CompareArguments",
    "as_json",
    "compare_options",
    "completed",
    "convert_options",
    "count_of",
    "example",
    "family_names",
    "memory_of",
    "progress",
    "setting",
    "source_options",
    "state_and_dtype",
    "topology_of",
]

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


class _AnyPath(click.Path):
    """A path that is not empty: pathlib takes "" for the current folder."""

    def convert(
        self, value: str | PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | PathLike[str]:
        """The path. Raises BadParameter for ""."""
        if value == "":
            self.fail("expected a path; got '' (is a shell variable unset?)", param, ctx)
        try:
            return given(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


PATH = _AnyPath(path_type=Path)
"""A path; whether a checkpoint is there is for `ucp` to say."""


class CompareArguments(TypedDict):
    """What `source_options` and `compare_options` pass to a verb: keyword arguments of `ucp.verify` and `ucp.diff`."""

    family: str | None
    patterns: Path | None
    shapes_from: Path | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    weights: bool
    param_order: Path | None
    workers: int | None
    memory: int


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse`, with a usage error as click shows it: BadParameter."""

    def value(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise click.BadParameter(str(error)) from error

    return value


memory_of = _parsed(nbytes_of)
"""Bytes of text like 512M, 1GiB or 2GB. Raises BadParameter."""
topology_of = _parsed(Topology.parse)
"""Topology of text like dp=4,zero=3. Raises BadParameter."""


def count_of(text: str) -> int:
    """A number of workers. Raises BadParameter for what is not a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise click.BadParameter(f"expected a number of workers, 1 or more; got {text!r}")
    return int(text)


def state_and_dtype(text: str) -> tuple[str, str]:
    """State and name of the dtype to store it in. Raises BadParameter.

    >>> state_and_dtype("weight=bf16")
    ('weight', 'bf16')
    """
    state, equals, dtype = (part.strip() for part in text.partition("="))
    if not (state and equals and dtype):
        raise click.BadParameter(f"expected STATE=DTYPE such as weight=bfloat16; got {text!r}")
    return state, dtype


def setting(text: str) -> tuple[str, str]:
    """Name and value of a setting. Raises BadParameter.

    >>> setting("num_attention_heads=32")
    ('num_attention_heads', '32')
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name.isidentifier() and equals):
        shown = f"{name}=VALUE" if name.isidentifier() else "NAME=VALUE"
        raise click.BadParameter(f"expected {shown}; got {text!r}")
    return name, value


def completed(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What a shell completes a value with: those of `names` that begin with what was typed."""

    def complete(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
        return [name for name in names() if name.startswith(typed)]

    return complete


def _targets() -> Iterable[str]:
    from ucp.contract import registry

    return registry.names("ucp.targets")


def _engines() -> Iterable[str]:
    from ucp.contract import registry

    return registry.names("ucp.engines")


class _EngineOption(click.Option):
    """An option whose help lists the installed engines, which are imported only for that."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option, and its help with the engines in it."""
        from ucp.contract import registry

        engines = map(registry.engine, registry.names("ucp.engines"))
        told = ", ".join(f"{engine.name} ({engine.summary})" for engine in engines)
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].format(engines=told))


def family_names() -> Iterable[str]:
    """Names of the families that are installed."""
    from ucp.contract import registry

    return registry.families()


def _once(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
    states = [state for state, _ in value]
    twice = sorted({state for state in states if states.count(state) > 1})
    if twice:
        raise click.BadParameter(f"given twice for {', '.join(twice)}", ctx, param)
    return dict(value)


def _policy(name: str, default: StrEnum, text: str) -> Callable[[F], F]:
    """An option that takes one of an enumeration."""
    choices = click.Choice([policy.value for policy in type(default)])
    return click.option(name, type=choices, default=default.value, show_default=True, help=text)


_SOURCE_OPTIONS = (
    click.option(
        "--family",
        metavar="NAME",
        help="Model family of the source; see `ucp patterns list`.",
        shell_complete=completed(family_names),
    ),
    click.option("--patterns", type=PATH, metavar="FILE", help="Model family of your own, as a TOML file."),
    click.option(
        "--shapes-from",
        type=PATH,
        metavar="PATH",
        help="Checkpoint, or JSON of name to shape, that has the shapes which the source lacks (FSDP1, LOCAL).",
    ),
    click.option(
        "--param-order",
        type=PATH,
        metavar="FILE",
        help="JSON of the names that the source's optimizer numbers, in its order: a list per group, or one.",
    ),
)

_NAME_OPTIONS = (
    click.option(
        "--include",
        metavar="GLOB",
        multiple=True,
        help="Only these parameters (NAME) or states (NAME/STATE). May be repeated.",
    ),
    click.option("--exclude", metavar="GLOB", multiple=True, help="Leave these out. May be repeated."),
)

_MEMORY_OPTION = click.option(
    "--memory",
    type=memory_of,
    default="1GiB",
    show_default=True,
    metavar="M",
    help="Memory for the whole run: 512M or 1GiB are powers of 1024, 2GB of 1000.",
)

_CONVERT_OPTIONS = (
    click.option(
        "--to",
        metavar="FORMAT",
        shell_complete=completed(_targets),
        default="ucp",
        show_default=True,
        help="What to write: ucp (atoms), dcp, deepspeed, deepspeed-universal, huggingface, megatron, torch, or any "
        "installed target.",
    ),
    click.option(
        "--topology",
        type=topology_of,
        metavar="T",
        help="Layout of the run that will load it, such as dp=4,zero=3. Axes left out are 1; deepspeed requires zero; "
        "dcp takes dp_replicate=2,dp_shard=4 for HSDP. Without the option: a run like the source. deepspeed-universal "
        "fits any run and takes tp and pp only.",
    ),
    click.option(
        "--layout",
        "--megatron-format",
        "layout",
        metavar="NAME",
        shell_complete=completed(lambda: ("packed", "per-parameter", "torch_dist", "torch")),
        default="",
        help="Of atoms: packed (default) or per-parameter. Of megatron: torch_dist (default) or torch.",
    ),
    click.option("--virtual", is_flag=True, help="Write atoms that refer to the source's bytes; nothing is copied."),
    click.option("--compress", is_flag=True, help="Compress atoms with zstd."),
    *_NAME_OPTIONS,
    click.option(
        "--dtype",
        "dtypes",
        type=state_and_dtype,
        metavar="STATE=DTYPE",
        multiple=True,
        callback=_once,
        help="Cast a state, e.g. weight=bfloat16. May be repeated.",
    ),
    click.option(
        "--set",
        "settings",
        type=setting,
        metavar="NAME=VALUE",
        multiple=True,
        callback=_once,
        help="What the target needs and the source does not record, e.g. num_attention_heads=N (an unknown name lists "
        "those there are); drop=EXTRA,... leaves extras of the source out; frozen=GLOB,... or none says what is "
        "frozen; step=N and scheduler=KEY what a run resumes from. Also settings of --engine.",
    ),
    click.option(
        "--names",
        metavar="STYLE",
        help="Write names and tensors of another framework, by the model's family: huggingface, mcore, ... "
        "FROM:STYLE where the source's names are those of several.",
    ),
    click.option("--rename", type=PATH, metavar="FILE", help="Other names by rules of your own, as a TOML file."),
    *_SOURCE_OPTIONS,
    _policy(
        "--drift",
        Drift.ERROR,
        "If copies that should be equal differ: stop, take the first rank's, or take their mean.",
    ),
    _policy(
        "--zero-moments",
        ZeroMoments.ERROR,
        "If all moments are zero although steps were taken (the optimizer was lost): stop, or keep them.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice([new.value for new in NewOptimizer]),
        help="Make optimizer states for a source that has none, such as a published model: moments of zero, and one "
        "parameter group (--set lr=, beta1=, beta2=, eps=, weight_decay=).",
    ),
    click.option(
        "--accept",
        type=click.Choice([kind.value for kind in DoubtKind]),
        multiple=True,
        help="Continue even if the files of two ranks are copies of one another, or a pipeline layer has no file.",
    ),
    click.option(
        "--tag",
        metavar="NAME",
        help="Tag, the folder that DeepSpeed's files are saved in.  [default: that of the source]",
    ),
    _policy(
        "--companions",
        Companions.SMALL,
        "Of the files that a training script saved beside the checkpoint (Trainer state, scheduler, tokenizer, ...), "
        "keep those of up to 64 MiB each, all, or none.",
    ),
    click.option(
        "--engine",
        cls=_EngineOption,
        metavar="NAME",
        shell_complete=completed(_engines),
        help="What does the work, with its settings by --set: {engines}.  [default: processes, or serial where one is "
        "enough]",
    ),
    click.option(
        "--workers", type=count_of, metavar="N", help="Processes.  [default: one per core; on a cluster, by --memory]"
    ),
    _MEMORY_OPTION,
    click.option(
        "--scratch",
        type=PATH,
        metavar="DIR",
        help="Where files grow before they are uploaded to a DST in a bucket.  [default: $UCP_SCRATCH, or the "
        "system's temporary folder]",
    ),
)


def convert_options(command: F) -> F:
    """Add the options that say what to write and with what means."""
    return _with(_CONVERT_OPTIONS, command)


def source_options(command: F) -> F:
    """Add --family, --patterns, --shapes-from and --param-order, passed under these names."""
    return _with(_SOURCE_OPTIONS, command)


def compare_options(command: F) -> F:
    """Add the options of a verb that reads and compares: `CompareArguments`."""
    workers = click.option(
        "--workers", type=count_of, metavar="N", help="Threads that read and compare.  [default: 4; with a bucket 8]"
    )
    weights = click.option(
        "--weights", is_flag=True, help="Compare weights alone, as of a run and an export: --include '*/weight'."
    )
    return _with((*_SOURCE_OPTIONS, *_NAME_OPTIONS, weights, workers, _MEMORY_OPTION), command)


def _with(options: Sequence[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def as_json(command: F) -> F:
    """Add --json, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of text.")(command)


def progress(command: F) -> F:
    """Add --progress and --quiet, passed as `progress` and `quiet`."""
    shown = click.option(
        "--progress",
        type=click.Choice(["auto", "bar", "log", "json", "none"]),
        default="auto",
        show_default=True,
        help="On stderr: a bar (auto: only on a terminal), log lines (for Slurm and tee), or JSON events.",
    )
    silent = click.option(
        "-q", "--quiet", is_flag=True, help="Print only errors, and what --json or --progress asks for."
    )
    return shown(silent(command))


def example(*lines: str) -> str:
    """Epilog of a help page that shows command lines."""
    return "\n".join(("\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)))
