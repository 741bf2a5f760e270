"""`ucp convert`: a checkpoint as atoms, or for another run or framework."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.options import PlanArguments
from ucp_cli.failures import stopped
from ucp_cli.options import PATH, as_json, convert_options, example, progress
from ucp_cli.progress import watch

__all__ = ["command"]


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
@convert_options
@click.option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted conversion; with --overwrite, one that replaces DST.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a DST that ucp wrote, once the new one is complete (in a bucket: at once).",
)
@click.option(
    "--no-fsync",
    is_flag=True,
    help="Let the system decide when bytes reach the disk, like cp: safe against kill -9, not against a power failure.",
)
@click.option(
    "--verify", is_flag=True, help="Read everything back and compare it with SRC, bit for bit, before DST appears."
)
@click.option(
    "--part",
    metavar="K/N",
    help="Do part K of N alone, here or on another machine that sees the same folders: in any order, side by side, "
    "again after a failure. auto: as Slurm's variables say (srun, job arrays).",
)
@click.option(
    "--finalize",
    is_flag=True,
    help="Complete what parts did: check that all of it is there, and put DST in place. Reads back only what was "
    "written with --no-fsync or by a part that was cut off. Takes the same options.",
)
@progress
@as_json
def command(
    *,
    src: Path,
    dst: Path,
    resume: bool,
    overwrite: bool,
    no_fsync: bool,
    verify: bool,
    part: str | None,
    finalize: bool,
    progress: str,
    quiet: bool,
    as_json: bool,
    **asked: Unpack[PlanArguments],
) -> None:
    """Convert a checkpoint to atoms, or for another run or framework.

    SRC is a checkpoint of any format; it is never written to. DST is a folder that appears once it is complete, or the
    URL of a bucket (s3://bucket/run), where what is unfinished is refused by `ucp` as a source.
    Numbers are copied bit for bit, except for casts requested with --dtype.
    """
    try:
        report = api.convert(
            src,
            dst,
            resume=resume,
            overwrite=overwrite,
            fsync=not no_fsync,
            verify=verify,
            part=part,
            finalize=finalize,
            observer=watch(progress, quiet=quiet),
            **asked,
        )
    except KeyboardInterrupt as stop:
        raise stopped(stop, _advice(dst, part)) from None
    if not as_json and quiet:
        return
    from ucp_cli.pages.documents import convert_document  # drawing takes a while to import: only for who looks
    from ucp_cli.pages.render import write, write_json

    if as_json:
        write_json(convert_document(report))
    else:
        write(*report.page())


def _advice(dst: Path, part: str | None) -> str:
    """How to go on after an interrupt."""
    if part is not None:
        return f"; the same command continues this part of {dst}"
    if api.is_unfinished(dst):
        return f"; the same command with --resume continues {dst}"
    return "" if dst.exists() else "; nothing was written"
