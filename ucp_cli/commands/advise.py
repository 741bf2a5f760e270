"""`ucp advise`: how often to save a run, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ucp import api
from ucp.advice.plot import plot_advice
from ucp.advice.report import to_document
from ucp.advice.run import Range
from ucp.moe.plot import check_plot
from ucp_cli.options import PATH, as_json, example
from ucp_cli.pages.render import write, write_json

_HOUR = 3600
_NUMBERS = {
    "iter-time": ("S", "Seconds of an iteration."),
    "mtbf": ("H", "Mean hours between failures.  [default: those of --trace]"),
    "params-dense": ("N", "Parameters outside experts."),
    "params-expert": ("N", "Parameters of all experts of all layers."),
    "experts": ("N", "Experts in a layer."),
    "moe-layers": ("N", "Layers with experts."),
    "bandwidth": ("N", "Bytes per second that all ranks together write to storage (`ucp bench`)."),
    "copy-bandwidth": ("N", "Bytes per second that all GPUs copy to hosts.  [default: copies take no time]"),
    "peer-bandwidth": ("N", "Bytes per second that all hosts copy to one another.  [default: they copy none]"),
    "overlap": ("X", "Share of an iteration in which copies do not slow it down.  [default: 0.5]"),
    "restart": ("S", "Seconds from a failure until loading begins.  [default: 0]"),
    "weight-nbytes": ("N", "Bytes of a parameter as the model computes with it.  [default: 2]"),
    "state-nbytes": ("N", "Bytes of a parameter's master and moments.  [default: 12]"),
    "iterations": ("N", "Iterations of the whole run, to count lost tokens.  [default: 100000]"),
    "max-plt": ("X", "Share of tokens that experts may lose.  [default: 0.0375]"),
    "gpu-memory": ("N", "Memory of all GPUs in bytes, for the memory plan; with --host-memory and --disk."),
    "host-memory": ("N", "Memory of all hosts in bytes."),
    "disk": ("N", "Disks of all hosts in bytes."),
}
"""Options with a number or a range."""


def takes_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `_NUMBERS`."""
    for name, (metavar, text) in reversed(_NUMBERS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    return command


@click.command(
    "advise",
    epilog=example(
        "ucp advise --iter-time 2.9 --mtbf 1-4 --checkpoint ckpt/ --bandwidth 20GB --copy-bandwidth 400GB",
        "ucp advise --iter-time 2.9 --trace failures.txt --params-dense 2G --params-expert 14G --experts 64 "
        "--bandwidth 20GB",
    ),
)
@takes_numbers
@click.option(
    "--checkpoint", type=PATH, metavar="PATH", help="A checkpoint of the run, for its parameters and experts."
)
@click.option(
    "--measure",
    type=PATH,
    metavar="DIR",
    help="Folder in the run's storage: write 1 GiB there, and use the rate as --bandwidth.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the progress of each way (.svg)."
)
@click.option("--trace", type=PATH, metavar="FILE", help="Times of failures, seconds from the start, one per line.")
@as_json
def command(
    *,
    checkpoint: Path | None,
    trace: Path | None,
    measure: Path | None,
    plot: Path | None,
    as_json: bool,
    **numbers: str | None,
) -> None:
    """Say how often to save a run, and how.

    For each way of saving, shows the best interval, the stall of a save, what a failure costs, and the share of time in
    which the run makes progress, by a formula and by a simulation of failures. A number may be a range, such as 2-4;
    results are then ranges, too. Numbers may have units: 25GB, 14G.
    """
    values: dict[str, Range | float | str] = {name: text for name, text in numbers.items() if text is not None}
    if "mtbf" in values:
        hours = Range.parse(values["mtbf"])
        values["mtbf"] = Range(hours.low * _HOUR, hours.high * _HOUR)
    if plot is not None:
        check_plot(plot)
    report = api.advise(checkpoint=checkpoint, trace=trace, measure=measure, **values)
    if plot is not None:
        plot_advice(report, plot)
    if as_json:
        write_json(to_document(report))
    else:
        write(*report.page())
