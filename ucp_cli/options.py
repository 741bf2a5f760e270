"""The options of `ucp.conversion.options` as click options, and those that only the command line has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import click

from ucp.contract import plugins, registry
from ucp.conversion.arguments import CompareArguments, ExpertArguments, SourceArguments, VerifyArguments, list_options
from ucp.conversion.option import Option, parse_iteration, parse_memory, parse_share
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.folder import parse_path
from ucp_cli.pages.web.write import check_page

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
            return parse_path(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


PATH = _AnyPath(path_type=Path)
"""A path; the library checks whether a checkpoint is there."""


def _raise_bad_parameter(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse`, with a usage error as click shows it: BadParameter."""

    def value(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise click.BadParameter(str(error)) from error

    return value


parse_memory_option = _raise_bad_parameter(parse_memory)
"""Bytes of text like 512M, 1GiB or 2GB. Raises BadParameter."""


def parse_count(text: str) -> int:
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


def make_completer(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A function for shell completion: it lists those of `names` that begin with what was typed."""

    def complete(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
        return [name for name in names() if name.startswith(typed)]

    return complete


class _EngineOption(click.Option):
    """An option whose help lists the installed engines, and imports them only then."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option, and its help with the engines in it."""
        engines = map(registry.engine, plugins.names("ucp.engines"))
        names = ", ".join(f"{engine.name} ({engine.summary})" for engine in engines)
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].format(engines=names))


def _refuse_repeated(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
    names = [name for name, _ in value]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise click.BadParameter(f"given twice for {', '.join(twice)}", ctx, param)
    return dict(value)


_DETAILS: dict[str, dict[str, Any]] = {
    "to": {"shell_complete": make_completer(lambda: plugins.names("ucp.targets"))},
    "topology": {"type": _raise_bad_parameter(Topology.parse)},
    "layout": {"shell_complete": make_completer(lambda: ("packed", "per-parameter", "torch_dist", "torch"))},
    "dtypes": {"type": state_and_dtype, "callback": _refuse_repeated},
    "settings": {"type": setting, "callback": _refuse_repeated},
    "family": {"shell_complete": make_completer(registry.families)},
    "engine": {"cls": _EngineOption, "shell_complete": make_completer(lambda: plugins.names("ucp.engines"))},
    "workers": {"type": parse_count},
    "at": {"type": _raise_bad_parameter(parse_iteration)},
    "max_plt": {"type": _raise_bad_parameter(parse_share)},
    "memory": {"type": parse_memory_option},
    "fsync": {"callback": lambda *call: not call[2]},
    **{name: {"type": PATH} for name in ("rename", "patterns", "placement", "shapes_from", "param_order", "scratch")},
}
"""Argument to its click settings that `Option` does not have."""


def takes_options(arguments: type[SourceArguments]) -> Callable[[F], F]:
    """Add the options that are among `arguments`; the command receives them under the names of library arguments."""

    def decorate(command: F) -> F:
        for option in reversed(list_options(arguments)):
            command = _option(option, arguments)(command)
        return command

    return decorate


def _option(option: Option, arguments: type[SourceArguments]) -> Callable[[F], F]:
    keywords: dict[str, Any] = {"metavar": option.metavar, "multiple": option.repeats}
    if option.choices is not None:
        keywords["type"] = click.Choice([choice.value for choice in option.choices])
    if isinstance(option.default, bool):
        keywords = {"is_flag": True}
    if option.shown or isinstance(option.default, str):
        keywords |= {"default": option.shown or option.default, "show_default": bool(option.shown)}
    is_comparing = arguments in (CompareArguments, VerifyArguments, ExpertArguments)
    text = option.comparing if is_comparing and option.comparing else option.help
    names = filter(None, (option.flag, option.alternative, option.name))
    return click.option(*names, help=text, **keywords | _DETAILS.get(option.name, {}))


def as_json(command: F) -> F:
    """Add --json, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of text.")(command)


def as_html(command: F) -> F:
    """Add --html, passed as `html`."""

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            check_page(value)
        return value

    return click.option(
        "--html",
        type=click.Path(path_type=Path),
        metavar="FILE",
        callback=check,
        help="Also write a page for a browser: one file that loads nothing from a network.",
    )(command)


def progress(command: F) -> F:
    """Add --progress and --quiet, passed as `progress` and `quiet`."""
    shown = click.option(
        "--progress",
        type=click.Choice(["auto", "bar", "log", "json", "none"]),
        default="auto",
        show_default=True,
        help="Show progress on stderr: bar, log (lines for Slurm and tee), json (one event per line), or none. auto is "
        "bar on a terminal, none elsewhere.",
    )
    silent = click.option(
        "-q", "--quiet", is_flag=True, help="Print only errors, and what --json or --progress asks for."
    )
    return shown(silent(command))


def example(*lines: str) -> str:
    """End of a help page: examples of command lines."""
    return "\n".join(("\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)))
