"""`ucp patterns`: the model families, their rules, and what they say about a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp.checks.explain import explain
from ucp.contract import plugins, registry
from ucp.conversion.arguments import SourceArguments
from ucp.conversion.options import make_options
from ucp.core.text.page import lines
from ucp.errors import UnknownFamilyError
from ucp_cli.failures import DIFFERENT, Failure
from ucp_cli.options import PATH, as_json, example, make_completer, takes_options
from ucp_cli.pages.families import (
    families_document,
    family_document,
    family_page,
    family_table,
    report_document,
    report_page,
)
from ucp_cli.pages.render import write, write_json


@click.group(
    "patterns",
    epilog=example("ucp patterns list", "ucp patterns show llama", "ucp patterns check checkpoints/"),
)
def command() -> None:
    """Show model families, and what their rules say about a checkpoint.

    A family is a TOML file with rules for the parameters of one model architecture: a rule says, for a template of
    names, how tensors are cut along each parallel axis (tp, ep, ...). The family of a checkpoint is found by its names
    and recorded arguments; --family chooses another, --patterns takes your own file.
    """


@command.command("list", epilog=example("ucp patterns list", "ucp patterns list --json | jq -r '.families[].name'"))
@as_json
def list_command(*, as_json: bool) -> None:
    """List the known families and patterns."""
    families = [registry.family(name) for name in registry.families()]
    patterns = plugins.names("ucp.patterns")
    if as_json:
        write_json(families_document(families, patterns))
    else:
        write(family_table(families), lines("Patterns", patterns))


def _styles(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
    """Shell completion of --style: styles of the family that was typed before, or of all families."""
    del param
    named = ctx.params.get("family")
    families = [named] if named in registry.families() else registry.families()
    styles = dict.fromkeys(style for name in families for style in registry.family(name).styles)
    return [style for style in styles if style.startswith(typed)]


@command.command(
    "show",
    epilog=example("ucp patterns show llama", "ucp patterns show llama --style huggingface"),
)
@click.argument("family", shell_complete=make_completer(registry.families))
@click.option(
    "--style",
    metavar="STYLE",
    shell_complete=_styles,
    help="Also show the names in this style: te, torch_dist, huggingface, ...",
)
@as_json
def show_command(*, family: str, style: str | None, as_json: bool) -> None:
    """Show the rules of a family.

    They say how the parameters of FAMILY are cut along each parallel axis, what they are, and their names in other
    naming styles.
    """
    shown = registry.library().family(family)
    if style is not None and shown.rules:
        shown.written_names(shown.rules[0], style)  # raises for an unknown style, also with --json
    if as_json:
        write_json(family_document(shown))
    else:
        write(*family_page(shown, style))


@command.command(
    "check",
    epilog=example("ucp patterns check checkpoints/", "ucp patterns check checkpoints/ --patterns my.toml"),
)
@click.argument("path", metavar="CKPT", type=PATH)
@takes_options(SourceArguments)
@as_json
@click.pass_context
def check_command(
    ctx: click.Context,
    *,
    path: Path,
    as_json: bool,
    **options: Unpack[SourceArguments],
) -> None:
    """Explain every parameter of a checkpoint.

    Shows for each name the rule of the family that matches it, and what that means; then names without a rule, and
    rules that matched nothing. For a checkpoint that records its own layout, and so needs no family, shows what it
    records, and where. Exit code 3 if a name has no rule, if a shape does not fit its rule, or if a family is needed
    and none fits.
    """
    try:
        report = explain(path, make_options(**options).source)
    except UnknownFamilyError as error:
        raise Failure(str(error), DIFFERENT) from error
    if as_json:
        write_json(report_document(report))
    else:
        write(*report_page(report))
    if not report.ok:
        ctx.exit(DIFFERENT)
