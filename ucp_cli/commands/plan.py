"""`ucp plan`: what a conversion would do."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import PlanArguments
from ucp_cli.options import PATH, as_html, as_json, example, takes_options
from ucp_cli.pages.documents import plan_document
from ucp_cli.pages.render import write, write_json
from ucp_cli.pages.web.write import write_page


@click.command(
    "plan",
    epilog=example(
        "ucp plan checkpoints/",
        "ucp plan checkpoints/ --to deepspeed --topology dp=4,zero=3",
        "ucp plan checkpoints/ --include '*/weight' --dtype weight=bfloat16",
        "ucp plan checkpoints/ --to deepspeed --topology dp=4,zero=3 --html plan.html",
    ),
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH, required=False)
@takes_options(PlanArguments)
@as_html
@as_json
def command(*, src: Path, dst: Path | None, html: Path | None, as_json: bool, **options: Unpack[PlanArguments]) -> None:
    """Show what a conversion would do.

    Takes the options of `ucp convert` that say what is written, and writes nothing. DST may be left out. If it is in a
    bucket, the plan also shows how much disk files take before they are uploaded.

    Only the indexes in SRC are read, and samples of the optimizer's moments (all elements, if the samples are zero);
    with --drift first or mean also the replicas of tensors.
    """
    report = api.plan(src, dst, **options)
    if html is not None:
        from ucp_cli.pages.web.contents import plan_contents

        write_page(html, plan_contents(report))
    if as_json:
        write_json(plan_document(report))
        return
    write(*report.page())
