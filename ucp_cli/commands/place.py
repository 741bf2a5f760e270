"""`ucp place`: which GPU holds which experts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource

from ucp import api
from ucp.errors import UsageError
from ucp.moe.plot import check_plot
from ucp.placement.forms import FORMS, read_placement, write_placement
from ucp.placement.plot import plot_placement
from ucp.placement.tasks import allot_gpus
from ucp_cli.options import PATH, as_json, example, parse_memory_option
from ucp_cli.pages.documents import placement_document
from ucp_cli.pages.render import write, write_json

_COUNT = click.IntRange(min=1)


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, as in 2,5. Raises BadParameter."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise click.BadParameter(f"expected numbers of nodes such as 2,5; got {text!r}")
    return tuple(map(int, numbers))


def parse_loads_of_tasks(text: str) -> tuple[float, ...]:
    """Loads of tasks, as in 1:1:2. Raises BadParameter."""
    try:
        return tuple(map(float, text.split(":")))
    except ValueError:
        raise click.BadParameter(f"expected loads of tasks such as 1:1:2; got {text!r}") from None


def _list_given() -> list[str]:
    """Options that the command line has."""
    context = click.get_current_context()
    return [name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT]


@click.command(
    "place",
    epilog=example(
        "ucp place --loads expert_distribution_recorder_1700000000.pt --nodes 4 --gpus 8 --slots 10",
        "ucp place --loads loads.json --nodes 4 --gpus 8 --slots 10 --out placement.json --form sglang",
        "ucp place --loads loads.json --nodes 3 --gpus 8 --slots 14 --from placement.json --lost 2",
        "ucp place --tasks 512:256:128:128 --gpus 8",
    ),
)
@click.option("--loads", type=PATH, metavar="FILE", help="Tokens of each expert: a file, or a checkpoint.")
@click.option("--nodes", type=_COUNT, metavar="N", help="Number of nodes.")
@click.option("--gpus", type=_COUNT, metavar="G", default=1, show_default=True, help="GPUs in a node.")
@click.option("--slots", type=_COUNT, metavar="C", help="Experts of a layer that fit on a GPU.")
@click.option(
    "--threshold",
    type=_COUNT,
    metavar="F",
    default=2,
    show_default=True,
    help="Least number of distinct nodes that an expert is on.",
)
@click.option(
    "--goal",
    type=click.Choice(["survival", "balance"]),
    default="survival",
    show_default=True,
    help="What counts first; the other decides between equals.",
)
@click.option("--form", type=click.Choice(list(FORMS)), metavar="FORM", help=f"Form of --out: {', '.join(FORMS)}.")
@click.option("--out", type=PATH, metavar="FILE", help="Also write the placement to FILE, in the form of --form.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the experts of each node (.svg)."
)
@click.option(
    "--from", "previous", type=PATH, metavar="FILE", help="The placement so far, in any form: show what must move."
)
@click.option("--lost", type=parse_nodes, metavar="N,N", help="With --from: those of its nodes that are lost.")
@click.option(
    "--from-nodes", type=_COUNT, metavar="N", help="With --from: how many nodes it has.  [default: --nodes plus --lost]"
)
@click.option("--checkpoint", type=PATH, metavar="PATH", help="With --from: a checkpoint, for the bytes of an expert.")
@click.option(
    "--bandwidth", type=parse_memory_option, metavar="N", help="With --from: bytes per second of a node, such as 25GB."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="SHARE",
    help="With --from: let experts exchange slots, so that fewer move, if the busiest GPU gets at most this share more "
    "tokens, such as 0.05. Survival does not change.",
)
@click.option(
    "--tasks", type=parse_loads_of_tasks, metavar="X:X", help="Instead of experts: loads of tasks that share --gpus."
)
@as_json
def command(
    *,
    loads: Path | None,
    nodes: int | None,
    gpus: int,
    slots: int | None,
    threshold: int,
    goal: Literal["survival", "balance"],
    form: str | None,
    out: Path | None,
    plot: Path | None,
    previous: Path | None,
    lost: tuple[int, ...] | None,
    from_nodes: int | None,
    checkpoint: Path | None,
    bandwidth: int | None,
    tolerance: float | None,
    tasks: tuple[float, ...] | None,
    as_json: bool,
) -> None:
    """Place experts on GPUs by load, so that lost nodes cost none.

    Experts with many tokens get several slots, and every expert is on --threshold distinct nodes. Of several placements
    ucp takes the one that least often loses an expert when nodes are lost (--goal survival), or the one whose busiest
    GPU has the fewest tokens (--goal balance).

    --loads takes a file of SGLang's recorder (.pt), an EPLB log (.jsonl), JSON ([layers][experts], {layer: [experts]}),
    or a checkpoint. With --from, the page also says which experts move, and from which node to which.

    With --tasks, it shares --gpus out among the tasks of a multi-task run, so that the busiest GPU has the least load.
    """
    if tasks is not None and set(_list_given()) <= {"tasks", "gpus", "as_json"}:
        allotted = allot_gpus(tasks, gpus=gpus)
        if as_json:
            write_json({"schema": "ucp.tasks/1", **asdict(allotted), "load_by_gpu": allotted.load_by_gpu})
        else:
            write(*allotted.page())
        return
    if tasks is not None or loads is None or nodes is None or slots is None:
        raise UsageError("expected --loads, --nodes and --slots for experts, or --tasks and --gpus alone")
    if out is not None and form is None:
        raise UsageError(f"expected --form with --out; one of {', '.join(FORMS)}")
    if out is None and form is not None:
        raise UsageError(f"expected --out with --form {form}: the file that the placement is written to")
    if out is not None and out == plot:
        raise UsageError(f"expected two files for --out and --plot; got {out} for both")
    if previous is None and (lost or from_nodes or checkpoint or bandwidth or tolerance is not None):
        raise UsageError("--lost, --from-nodes, --checkpoint, --bandwidth and --tolerance are only used with --from")
    if plot is not None:
        check_plot(plot)
    placement, migration = api.place(loads, nodes=nodes, gpus=gpus, slots=slots, threshold=threshold, goal=goal), None
    if previous is not None:
        count = from_nodes or nodes + len(set(lost or ()))
        before = read_placement(previous, nodes=count, gpus=gpus, moe_layers=placement.layers)
        migration = api.migrate(
            before, placement, lost=lost or (), checkpoint=checkpoint, bandwidth=bandwidth, tolerance=tolerance
        )
        placement = migration.placement
    if out is not None and form is not None:
        write_placement(placement, out, form)
    if plot is not None:
        plot_placement(placement, plot)
    if as_json:
        write_json(placement_document(placement, migration))
        return
    write(*placement.page())
    if migration is not None:
        write(*migration.page())
