"""`ucp convert`: a checkpoint as atoms, or for another run or framework."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.conversion.convert import ConvertReport
from ucp.conversion.options import PlanArguments
from ucp.errors import counted
from ucp_cli.failures import stopped
from ucp_cli.options import PATH, as_json, convert_options, example, progress
from ucp_cli.pages.units import nbytes_text, rate_text, seconds_text
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
    begun = time.monotonic()
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
    seconds = time.monotonic() - begun
    if as_json or not quiet:
        _tell(report, seconds, verified=verify, as_json=as_json)


def _tell(report: ConvertReport, seconds: float, *, verified: bool, as_json: bool) -> None:
    from ucp_cli.pages.documents import convert_document  # drawing takes a while to import: only for who looks
    from ucp_cli.pages.render import facts, lines, write, write_json

    if as_json:
        write_json(convert_document(report, seconds=seconds, verified=verified))
        return
    write(
        facts(_facts(report, seconds, verified=verified)),
        lines("Warnings", report.warnings, style="bold red"),
        lines("Casts", report.casts, style="yellow"),
        lines("Notes", report.notes),
        lines("Left behind", report.dropped, style="yellow"),
    )


def _advice(dst: Path, part: str | None) -> str:
    """How to go on after an interrupt."""
    if part is not None:
        return f"; the same command continues this part of {dst}"
    if api.is_unfinished(dst):
        return f"; the same command with --resume continues {dst}"
    return "" if dst.exists() else "; nothing was written"


def _facts(report: ConvertReport, seconds: float, *, verified: bool) -> Iterator[tuple[str, str]]:
    layout = ", ".join(filter(None, [report.to, report.layout, str(report.topology or "")]))
    part = "" if report.already_complete or not report.part else f"part {report.part} of "
    yield "wrote", f"{part}{report.dst} ({layout})"
    if report.already_complete:
        yield "", "already complete: nothing was written"
        return
    yield "tensors", _tensors(report, seconds, verified=verified)
    if report.part:
        yield "resumed", _resumed(report)
        yield "then", "when all parts are done, the same command with --finalize completes it"
        return
    last = f"{'manifest' if report.references else 'index'}: {_files(report.files_last, report.nbytes_last)}"
    yield "files", f"{_files(report.files_out, report.nbytes_out)}, and the {last}"
    yield "scratch", f"{nbytes_text(report.scratch_bytes)} at most" if report.scratch_bytes else ""
    yield "resumed", _resumed(report)
    yield "checked", ", ".join(_checks(report))
    yield "verified", "read back and equal to the source" if verified else ""


def _resumed(report: ConvertReport) -> str:
    if not report.resumed_bytes:
        return ""
    amounts = {"believed as noted": report.believed_bytes, "read back": report.read_back_bytes}
    how = ", ".join(f"{nbytes_text(nbytes)} {what}" for what, nbytes in amounts.items() if nbytes)
    return f"{nbytes_text(report.resumed_bytes)} already there{how and f': {how}'}"


def _tensors(report: ConvertReport, seconds: float, *, verified: bool) -> str:
    """What was done with the bytes of tensors."""
    whose, spent = f"of {counted(report.atoms, 'parameter')}", f"in {seconds_text(seconds)}"
    if report.references:
        return f"{counted(report.references, 'reference')} into the source, {whose}; nothing copied; {spent}"
    rate = rate_text(report.nbytes_written, seconds) if report.nbytes_written else ""
    how = "with --verify" if verified else rate
    return f"{nbytes_text(report.nbytes_written)} written, {whose}, {spent}{f' ({how})' if how else ''}"


def _files(count: int, nbytes: int) -> str:
    return f"{counted(count, 'file')} of {nbytes_text(nbytes)}"


def _checks(report: ConvertReport) -> Iterator[str]:
    if report.checked_bytes:
        yield f"{nbytes_text(report.checked_bytes)} of the source against checksums"
    if report.copies_checked:
        yield f"{counted(report.copies_checked, 'state')} against copies in the source"
    if report.unchecked_files:
        yield f"{counted(len(report.unchecked_files), 'file')} of the source without checksums"
