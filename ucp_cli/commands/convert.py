"""`ucp convert`: a checkpoint as atoms, or for another run or framework."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.arguments import ConvertArguments
from ucp_cli.failures import make_stopped
from ucp_cli.options import PATH, as_json, example, progress, takes_options
from ucp_cli.progress import watch


@click.command(
    "convert",
    epilog=example(
        "ucp convert checkpoints/ atoms/",
        "ucp convert checkpoints/ resumed/ --to deepspeed --topology dp=4,zero=3",
        "ucp convert checkpoints/ weights/ --include '*/weight' --dtype weight=bfloat16 --verify",
        "ucp convert checkpoints/ atoms/ --part 3/8",
        "ucp convert checkpoints/ atoms/ --finalize",
    ),
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@takes_options(ConvertArguments)
@progress
@as_json
def command(
    *,
    src: Path,
    dst: Path,
    progress: str,
    quiet: bool,
    as_json: bool,
    **options: Unpack[ConvertArguments],
) -> None:
    """Convert a checkpoint to atoms, or for another run or framework.

    SRC is a checkpoint of any format; it is never written to. DST is a new folder, which appears once it is complete,
    or a URL in a bucket (s3://bucket/run), where files appear one by one and ucp does not read unfinished results.
    Atoms, the default, hold one unsharded tensor per parameter and optimizer state, from which any layout can be made.

    Numbers are copied bit for bit; the report lists every cast.
    """
    try:
        report = api.convert(
            src,
            dst,
            observer=watch(progress, quiet=quiet),
            **options,
        )
    except KeyboardInterrupt as stop:
        raise make_stopped(stop, _advice(dst, is_part=options.get("part") is not None)) from None
    if not as_json and quiet:
        return
    from ucp_cli.pages.documents import convert_document  # slow to import, and not needed with --quiet
    from ucp_cli.pages.render import write, write_json

    if as_json:
        write_json(convert_document(report))
    else:
        write(*report.page())


def _advice(dst: Path, *, is_part: bool) -> str:
    """How to go on after an interrupt."""
    if is_part:
        return f"; the same command continues this part of {dst}"
    if api.is_unfinished(dst):
        return f"; the same command with --resume continues {dst}"
    return "" if dst.exists() else "; nothing was written"
