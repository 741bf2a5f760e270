"""`ucp bench`: how fast this machine reads, writes and copies, to compare conversions with."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ucp.checks.floor import measure_floor
from ucp.conversion.prepare import count_cores
from ucp.core.text.units import nbytes_text, rate_text, seconds_text
from ucp.errors import format_count
from ucp_cli.options import PATH, as_json, example, parse_count, parse_memory_option
from ucp_cli.pages.render import table, write, write_json


@click.command("bench", epilog=example("ucp bench /checkpoints", "ucp bench /dev/shm --size 4GiB"))
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--size",
    type=parse_memory_option,
    default="1GiB",
    show_default=True,
    metavar="N",
    help="Size of the file to measure with; twice as much space is needed.",
)
@click.option(
    "--workers", type=parse_count, metavar="N", help="Measure one thread, and N threads.  [default: one per core]"
)
@as_json
def command(*, folder: Path, size: int, workers: int | None, as_json: bool) -> None:
    """Measure how fast this machine reads, writes and copies.

    Files are created in a new folder in DIR, then deleted. A conversion reads, computes checksums (CRC-32 and xxh3) and
    writes: compare the rate that `ucp convert` prints with the row "copy, with digests". Files are read from the page
    cache, as they were written a moment ago; from a cold disk everything is slower.
    """
    rates = list(measure_floor(folder, size, workers or count_cores()))
    if as_json:
        records = [{**asdict(rate), "bytes_per_second": round(rate.bytes_per_second)} for rate in rates]
        write_json({"schema": "ucp.bench/1", "folder": str(folder), "rates": records})
        return
    rows = [
        (
            rate.what,
            format_count(rate.threads, "thread"),
            rate_text(rate.nbytes, rate.seconds),
            seconds_text(rate.seconds),
        )
        for rate in rates
    ]
    write(table(f"{nbytes_text(size)} in {folder}", ("operation", "by", ">rate", ">time"), rows))
