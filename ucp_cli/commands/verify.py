"""`ucp verify`: whether a checkpoint is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import VerifyArguments
from ucp_cli.failures import DIFFERENT, FAILED
from ucp_cli.options import PATH, as_json, example, progress, takes_options
from ucp_cli.pages.documents import verify_document
from ucp_cli.pages.render import write, write_json
from ucp_cli.progress import watch


@click.command(
    "verify",
    epilog=example(
        "ucp verify atoms/",
        "ucp verify atoms/ --against checkpoints/global_step1000",
        "ucp verify export/ --against checkpoints/global_step1000 --weights",
    ),
)
@click.argument("path", type=PATH)
@click.option("--against", type=PATH, metavar="SRC", help="Also compare with this checkpoint, bit for bit.")
@takes_options(VerifyArguments)
@progress
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    *,
    path: Path,
    against: Path | None,
    progress: str,
    quiet: bool,
    as_json: bool,
    **options: Unpack[VerifyArguments],
) -> None:
    """Prove that a checkpoint is complete and undamaged.

    Shards must cover every element of every tensor once, bytes must match their recorded checksums, and replicas must
    be equal. Exit code 1 if PATH is damaged, 3 if it is undamaged but differs from SRC.

    --family and --patterns apply to both; a checkpoint that needs no family, such as atoms, ignores them.
    """
    report = api.verify(path, against=against, observer=watch(progress, quiet=quiet), **options)
    if as_json:
        write_json(verify_document(report))
    elif not quiet:
        write(*report.page())
    if not report.ok:
        ctx.exit(FAILED if report.problems else DIFFERENT)
