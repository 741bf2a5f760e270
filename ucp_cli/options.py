"""What option values mean, and the options that several verbs share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar

import click

from ucp.errors import UsageError
from ucp.topology import Topology

__all__ = [
    "PATH",
    "ConvertArguments",
    "as_json",
    "convert_options",
    "example",
    "nbytes_of",
    "progress",
    "state_and_dtype",
    "topology_of",
]

F = TypeVar("F", bound=Callable[..., object])

PATH = click.Path(path_type=Path)
"""A path; whether a checkpoint is there is for `ucp` to say."""

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
"""Number, prefix, "iB" or "B". Examples: 512M, 1.5GiB, 2GB, 1073741824."""

_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class ConvertArguments(TypedDict):
    """What `convert_options` pass to a verb: keyword arguments of `ucp.api.make_options`."""

    to: str
    topology: Topology | None
    layout: str
    virtual: bool
    compress: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    dtypes: dict[str, str]
    workers: int
    memory: int


def nbytes_of(text: str) -> int:
    """Bytes of text like 512M, 1GiB (powers of 1024) or 2GB (powers of 1000). Raises BadParameter.

    >>> nbytes_of("1.5G"), nbytes_of("2GB")
    (1610612736, 2000000000)
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"expected an amount of memory such as 512M or 2GiB; got {text!r}")
    number, prefix, unit = match.groups()
    base = 1000 if unit in {"B", "b"} else 1024
    return int(float(number) * base ** _EXPONENTS[prefix.upper()])


def topology_of(text: str) -> Topology:
    """Topology of text like dp=4,zero=3. Raises BadParameter."""
    try:
        return Topology.parse(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from error


def state_and_dtype(text: str) -> tuple[str, str]:
    """State and name of the dtype to store it in. Raises BadParameter.

    >>> state_and_dtype("weight=bf16")
    ('weight', 'bfloat16')
    """
    state, equals, dtype = (part.strip() for part in text.partition("="))
    if not (state and equals and dtype):
        raise click.BadParameter(f"expected STATE=DTYPE such as weight=bfloat16; got {text!r}")
    return state, _SHORT_DTYPES.get(dtype, dtype)


def _once(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
    states = [state for state, _ in value]
    twice = sorted({state for state in states if states.count(state) > 1})
    if twice:
        raise click.BadParameter(f"given twice for {', '.join(twice)}", ctx, param)
    return dict(value)


_CONVERT_OPTIONS = (
    click.option(
        "--to",
        metavar="FORMAT",
        default="ucp",
        show_default=True,
        help="What to write: ucp (atoms), deepspeed, deepspeed-universal, or any installed target.",
    ),
    click.option(
        "--topology",
        type=topology_of,
        metavar="T",
        help="Run that will load it, for a target with ranks: dp=4,zero=3.",
    ),
    click.option(
        "--layout",
        metavar="packed|per-parameter",
        default="",
        help="Of atoms: a few large packs (default), or a folder per parameter.",
    ),
    click.option("--virtual", is_flag=True, help="Atoms that refer to the source's bytes: no copy is made."),
    click.option("--compress", is_flag=True, help="Compress atoms with zstd."),
    click.option(
        "--include",
        metavar="GLOB",
        multiple=True,
        help="Only these parameters (NAME) or states (NAME/STATE). May be repeated.",
    ),
    click.option("--exclude", metavar="GLOB", multiple=True, help="But not these. May be repeated."),
    click.option(
        "--dtype",
        "dtypes",
        type=state_and_dtype,
        metavar="STATE=DTYPE",
        multiple=True,
        callback=_once,
        help="Cast a state, e.g. weight=bfloat16. May be repeated.",
    ),
    click.option("--workers", type=int, default=0, metavar="N", help="Processes.  [default: one per core]"),
    click.option(
        "--memory",
        type=nbytes_of,
        default="1GiB",
        show_default=True,
        metavar="M",
        help="Memory for the whole run: 512M or 1GiB are powers of 1024, 2GB of 1000.",
    ),
)


def convert_options(command: F) -> F:
    """Add the options that say what to write and with what means."""
    for option in reversed(_CONVERT_OPTIONS):
        command = option(command)
    return command


def as_json(command: F) -> F:
    """Add --json, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of text.")(command)


def progress(command: F) -> F:
    """Add --progress and --quiet, passed as `progress` and `quiet`."""
    shown = click.option(
        "--progress",
        type=click.Choice(["auto", "bar", "json", "none"]),
        default="auto",
        show_default=True,
        help="On stderr: a bar (auto: on a terminal only), or one JSON event per line.",
    )
    silent = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
    return shown(silent(command))


def example(*lines: str) -> str:
    """Epilog of a help page that shows command lines."""
    return "\n".join(("\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)))
