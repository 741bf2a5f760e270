"""`ucp plan`: what a conversion would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import click

from ucp import api
from ucp.prepare import ConvertOptions, Prepared
from ucp_cli.documents import plan_document
from ucp_cli.options import PATH, ConvertArguments, as_json, convert_options, example
from ucp_cli.overview import source_facts
from ucp_cli.render import facts, heading, lines, write, write_json
from ucp_cli.tally import count_patterns
from ucp_cli.units import nbytes_text, plural, seconds_text

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
@convert_options
@as_json
def command(*, src: Path, as_json: bool, **asked: Unpack[ConvertArguments]) -> None:
    """Show what a conversion would do.

    Takes the options of `ucp convert`, writes nothing, and reads indexes only; with --drift first or mean, copies of
    tensors too.
    """
    options = api.make_options(**asked)
    prepared = api.plan(src, options=options)
    if as_json:
        write_json(plan_document(prepared, options))
        return
    index, target = prepared.job.index, prepared.job.target
    write(
        facts(source_facts(index)),
        heading("Conversion"),
        facts(_facts(prepared, options)),
        lines("Warnings", prepared.warnings, style="bold red"),
        lines("Layout of the source", [f"{p}: {plural(n, 'tensor')}" for p, n in count_patterns(index).items()]),
        lines("Casts", target.casts, style="yellow"),
        lines("Notes", (*index.notes, *target.notes)),
        lines("Left behind", index.dropped, style="yellow"),
    )


def _facts(prepared: Prepared, options: ConvertOptions) -> Iterator[tuple[str, str]]:
    index, target, wide = prepared.job.index, prepared.job.target, prepared.threads
    variant = options.target.layout or ("compressed" if options.target.compress else "")
    yield "to", " ".join(filter(None, [options.to, variant, str(target.topology or options.topology or "")]))
    read = index.nbytes if target.placements else 0
    yield "tensors", _tensors(prepared, read)
    packs = "what the tensors compress to, and " if target.compress else ""
    files = f"{plural(len(target.files), 'file')} of {packs}{nbytes_text(prepared.nbytes_out)}"
    yield "files", f"{files}, and the index"
    at_best = seconds_text((read + prepared.nbytes_out) / _DISK)
    yield "time", f"{at_best} or more, where the disk reads and writes 1 GiB/s"
    workers = f"{plural(prepared.workers, 'worker')} of {plural(wide, 'thread')}"
    yield "work", f"{plural(len(prepared.job.tasks), 'task')} by {workers}"
    yield "memory", f"{nbytes_text(prepared.projected_bytes)} at most, of {nbytes_text(options.memory)} allowed"


def _tensors(prepared: Prepared, read: int) -> str:
    """What is done with the bytes of tensors."""
    index, target = prepared.job.index, prepared.job.target
    whose = f"of {plural(len(index.atoms), 'parameter')}"
    if not target.placements:
        references = plural(prepared.references, "reference")
        return f"{nbytes_text(index.nbytes)} {whose}: {references} into the source, nothing copied"
    return f"{nbytes_text(read)} to read, {nbytes_text(prepared.job.nbytes)} to write, {whose}"
