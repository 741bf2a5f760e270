"""`ucp plan`: what a conversion would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.api import PlanReport
from ucp.conversion.options import PlanArguments
from ucp.errors import counted
from ucp_cli.options import PATH, as_json, convert_options, example
from ucp_cli.pages.documents import plan_document
from ucp_cli.pages.overview import source_facts
from ucp_cli.pages.render import facts, heading, lines, write, write_json
from ucp_cli.pages.tally import count_patterns
from ucp_cli.pages.units import nbytes_text, seconds_text

__all__ = ["command"]

_DISK = 1 << 30
"""Bytes per second of the disk that the time is given for."""


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
@convert_options
@as_json
def command(*, src: Path, dst: Path | None, as_json: bool, **asked: Unpack[PlanArguments]) -> None:
    """Show what a conversion would do.

    Takes the options of `ucp convert` (DST may be left out: of one in a bucket, the disk that files take before they
    are uploaded is shown too) and writes nothing. Reads indexes and windows of a few
    moments (the whole of those that are zero there); with --drift first or mean, copies of tensors too.
    """
    report = api.plan(src, dst, **asked)
    if as_json:
        write_json(plan_document(report))
        return
    patterns = count_patterns(report.source)
    write(
        facts(source_facts(report.source)),
        heading("Conversion"),
        facts(_facts(report)),
        lines("Warnings", report.warnings, style="bold red"),
        lines("Layout of the source", [f"{name}: {counted(count, 'tensor')}" for name, count in patterns.items()]),
        lines("Casts", report.casts, style="yellow"),
        lines("Notes", report.notes),
        lines("Left behind", report.dropped, style="yellow"),
    )


def _facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    yield "to", " ".join(filter(None, [report.to, report.layout, str(report.topology or "")]))
    yield "tensors", _tensors(report)
    packs = "what the tensors compress to, and " if report.compressed else ""
    files = f"{counted(len(report.files), 'file')} of {packs}{nbytes_text(report.nbytes_out)}"
    yield "files", f"{files}, and the index"
    at_best = seconds_text((report.nbytes_read + report.nbytes_out) / _DISK)
    yield "time", f"{at_best} or more, where the disk reads and writes 1 GiB/s"
    workers = f"{counted(report.workers, 'worker')} of {counted(report.threads, 'thread')}"
    yield "work", f"{counted(report.tasks, 'task')} by {workers}"
    yield "memory", f"{nbytes_text(report.projected_bytes)} at most, of {nbytes_text(report.memory)} allowed"
    if report.scratch:
        yield "scratch", f"{nbytes_text(report.scratch_bytes)} of {report.scratch} at most, for files to be uploaded"
    yield "index", f"{nbytes_text(report.index_bytes)} of memory at most, beside that"


def _tensors(report: PlanReport) -> str:
    """What is done with the bytes of tensors."""
    whose = f"of {counted(report.atoms, 'parameter')}"
    if report.references:
        references = counted(report.references, "reference")
        return f"{nbytes_text(report.nbytes)} {whose}: {references} into the source, nothing copied"
    return f"{nbytes_text(report.nbytes_read)} to read, {nbytes_text(report.nbytes_written)} to write, {whose}"
