"""`ucp diff`: where two checkpoints differ, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import CompareArguments
from ucp_cli.failures import DIFFERENT
from ucp_cli.options import PATH, as_html, as_json, example, progress, takes_options
from ucp_cli.pages.documents import diff_document
from ucp_cli.pages.render import write, write_json
from ucp_cli.pages.web.write import write_page
from ucp_cli.progress import watch


@click.command(
    "diff",
    epilog=example(
        "ucp diff checkpoints/global_step1000 atoms/", "ucp diff checkpoints/global_step1000 export/ --weights"
    ),
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--extras", is_flag=True, help="Also compare what is not a parameter: schedulers, client state, ...")
@takes_options(CompareArguments)
@progress
@as_html
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
    html: Path | None,
    as_json: bool,
    **options: Unpack[CompareArguments],
) -> None:
    """Compare two checkpoints of any formats.

    Parameters, states, dtypes, hyper-parameters and every element are compared, bit for bit, whatever the layout. With
    --extras, everything else (schedulers, RNG states, arguments) is compared too, entry by entry under the names that
    `ucp inspect` shows. Exit code 0 if the checkpoints are equal, 3 if they differ.

    --family and --patterns apply to both; a checkpoint that needs no family, such as atoms, ignores them.
    """
    report = api.diff(a, b, extras=extras, observer=watch(progress, quiet=quiet), **options)
    if html is not None:
        from ucp_cli.pages.web.contents import diff_contents

        write_page(html, diff_contents(report))
    if as_json:
        write_json(diff_document(report))
    elif not quiet:
        write(*report.page())
    if not report.equal:
        ctx.exit(DIFFERENT)
