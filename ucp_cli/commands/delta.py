"""`ucp delta`: a checkpoint as patches of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import ExpertArguments
from ucp_cli.options import PATH, as_json, example, progress, takes_options
from ucp_cli.pages.documents import delta_document
from ucp_cli.pages.render import write, write_json
from ucp_cli.progress import watch


@click.command("delta", epilog=example("ucp delta step100/ step110/ --out run/weight_v000001"))
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    required=True,
    help="Folder to write. A name such as weight_v000007 gives the version.",
)
@click.option(
    "--encoding",
    type=click.Choice(["xor", "overwrite"]),
    default="xor",
    show_default=True,
    help="What a patch holds: old bytes xor new ones, or positions and new bytes.",
)
@takes_options(ExpertArguments)
@progress
@as_json
def command(
    *,
    a: Path,
    b: Path,
    out: Path,
    encoding: str,
    progress: str,
    quiet: bool,
    as_json: bool,
    **options: Unpack[ExpertArguments],
) -> None:
    """Write a checkpoint as patches of another one.

    A and B are checkpoints of one model, in any formats; B is written as patches of A.

    The folder has the layout of slime and SGLang. ucp reads it as B, as long as A stays where it is.
    """
    report = api.delta(a, b, out, encoding=encoding, observer=watch(progress, quiet=quiet), **options)
    if as_json:
        write_json(delta_document(report))
    elif not quiet:
        write(*report.page())
