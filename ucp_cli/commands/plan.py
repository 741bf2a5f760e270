"""`ucp plan`: what a conversion would do."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import PlanArguments
from ucp_cli.options import PATH, as_json, example, takes_options
from ucp_cli.pages.documents import plan_document
from ucp_cli.pages.render import write, write_json


@click.command(
    "plan",
    epilog=example(
        "ucp plan checkpoints/",
        "ucp plan checkpoints/ --to deepspeed --topology dp=4,zero=3",
        "ucp plan checkpoints/ --include '*/weight' --dtype weight=bfloat16",
    ),
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH, required=False)
@takes_options(PlanArguments)
@as_json
def command(*, src: Path, dst: Path | None, as_json: bool, **options: Unpack[PlanArguments]) -> None:
    """Show what a conversion would do.

    Takes the options of `ucp convert` (DST may be left out: of one in a bucket, the disk that files take before they
    are uploaded is shown too) and writes nothing. Reads indexes and windows of a few
    moments (the whole of those that are zero there); with --drift first or mean, copies of tensors too.
    """
    report = api.plan(src, dst, **options)
    if as_json:
        write_json(plan_document(report))
        return
    write(*report.page())
