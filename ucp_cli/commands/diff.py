"""`ucp diff`: where two checkpoints differ, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click
from rich.text import Text

from ucp import api
from ucp.errors import counted
from ucp_cli.exits import DIFFERENT
from ucp_cli.options import PATH, CompareArguments, as_json, compare_options, example, progress
from ucp_cli.pages.changes import change_tables
from ucp_cli.pages.documents import diff_document
from ucp_cli.pages.render import lines, write, write_json
from ucp_cli.pages.units import nbytes_text
from ucp_cli.progress import watch

__all__ = ["command"]


@click.command(
    "diff",
    epilog=example(
        "ucp diff checkpoints/global_step1000 atoms/", "ucp diff checkpoints/global_step1000 export/ --weights"
    ),
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--extras", is_flag=True, help="Also compare what is not a parameter: schedulers, client state, ...")
@compare_options
@progress
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    *,
    a: Path,
    b: Path,
    extras: bool,
    progress: str,
    quiet: bool,
    as_json: bool,
    **asked: Unpack[CompareArguments],
) -> None:
    """Compare two checkpoints of any formats.

    Parameters, states, dtypes, hyper-parameters and every element are compared, bit for bit, whatever the layout. With
    --extras, so is everything else (schedulers, random states, arguments), entry by entry under the names that `ucp
    inspect` shows. Exit code 0 if they are equal, 3 if they differ. --family and --patterns apply to both; a checkpoint
    that needs no family, such as atoms, ignores them.
    """
    report = api.diff(a, b, extras=extras, observer=watch(progress, quiet=quiet), **asked)
    if as_json:
        write_json(diff_document(report))
    elif not quiet:
        shared = f"{counted(report.compared, 'state')} of {nbytes_text(report.nbytes_compared)} compared"
        verdict = "equal" if report.equal else counted(len(report.changes), "difference")
        tables = change_tables(report.changes, a=report.a, b=report.b)
        write(Text(f"{verdict}; {shared}"), tables, lines("Notes", report.notes))
    if not report.equal:
        ctx.exit(DIFFERENT)
