"""`ucp verify`: whether a checkpoint is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click
from rich.console import RenderableType
from rich.text import Text

from ucp import api
from ucp.checks.verify import VerifyReport
from ucp.errors import counted
from ucp_cli.exits import DIFFERENT, FAILED
from ucp_cli.options import PATH, CompareArguments, as_json, compare_options, example, progress
from ucp_cli.pages.changes import change_tables
from ucp_cli.pages.documents import verify_document
from ucp_cli.pages.render import facts, lines, write, write_json
from ucp_cli.pages.units import nbytes_text
from ucp_cli.progress import watch

__all__ = ["command"]


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
@compare_options
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
    **asked: Unpack[CompareArguments],
) -> None:
    """Prove that a checkpoint is complete and undamaged.

    Shards must tile every tensor, bytes must match their recorded checksums, and copies must be equal. Exit code 1 if
    PATH is damaged, 3 if it is not but differs from SRC. --family and --patterns apply to both; a checkpoint that needs
    no family, such as atoms, ignores them.
    """
    report = api.verify(path, against=against, observer=watch(progress, quiet=quiet), **asked)
    if as_json:
        write_json(verify_document(report))
    elif not quiet:
        write(*_parts(report))
    if not report.ok:
        ctx.exit(FAILED if report.problems else DIFFERENT)


def _verdict(report: VerifyReport) -> str:
    """The first line: what was found, in a word."""
    if len(report.problems) > len(report.drift) + len(report.unnamed):
        return f"{report.path}: damaged"
    if report.unnamed:
        return f"{report.path}: undamaged, but the states of its optimizer cannot be given to parameters"
    if report.drift:
        return f"{report.path}: holds copies that should be equal and are not"
    if report.changes:
        return f"{report.path}: differs from {report.against}, {counted(len(report.changes), 'difference')}"
    return f"{report.path}: complete and undamaged"


def _parts(report: VerifyReport) -> list[RenderableType | None]:
    same = f"{report.against}{', after the casts below' if report.casts else ''}"
    checked = f"{nbytes_text(report.checked_bytes)} against checksums" if report.checked_bytes else ""
    whole = "complete and undamaged" if report.changes else ""
    not_compared = report.against if report.problems and report.against else ""
    return [
        Text(_verdict(report)),
        facts(
            [
                ("in itself", whole),
                ("checked", checked),
                ("equal to", same if report.against and report.ok else ""),
                ("not compared with", not_compared),
            ]
        ),
        lines("Casts", report.casts, style="yellow"),
        lines(
            "Damage", [line for line in report.problems if line not in (*report.drift, *report.unnamed)], style="red"
        ),
        lines("Optimizer", report.unnamed, style="red"),
        lines("Copies that differ", report.drift, style="red"),
        lines("Notes", report.notes),
        change_tables(report.changes, a=report.path, b=report.against or ""),
    ]
