"""`ucp diff`: where two checkpoints differ, and by how much."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from ucp import api
from ucp_cli.changes import change_tables
from ucp_cli.documents import diff_document
from ucp_cli.exits import DIFFERENT
from ucp_cli.options import PATH, as_json, compare_options, example, progress
from ucp_cli.progress import watch
from ucp_cli.render import write, write_json
from ucp_cli.units import nbytes_text, plural

__all__ = ["command"]


@click.command("diff", epilog=example("ucp diff checkpoints/global_step1000 atoms/"))
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@compare_options
@progress
@as_json
@click.pass_context
def command(
    ctx: click.Context, *, a: Path, b: Path, workers: int, memory: int, progress: str, quiet: bool, as_json: bool
) -> None:
    """Compare two checkpoints of any formats.

    Parameters, states, dtypes, hyper-parameters and every element are compared, bit for bit, whatever the layout.
    Exit code 0 when they are equal, 3 when they differ.
    """
    report = api.diff(a, b, workers=workers, memory=memory, observer=watch(progress, quiet=quiet))
    if as_json:
        write_json(diff_document(report))
    elif not quiet:
        shared = f"{plural(report.compared, 'state')} of {nbytes_text(report.nbytes)} compared"
        verdict = "equal" if report.equal else plural(len(report.changes), "difference")
        write(Text(f"{verdict}; {shared}"), change_tables(report.changes, a=report.a, b=report.b))
    if not report.equal:
        ctx.exit(DIFFERENT)
