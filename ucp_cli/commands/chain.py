"""`ucp chain`: several checkpoints of one run, read as one."""

from __future__ import annotations

from pathlib import Path

import click

from ucp import api
from ucp_cli.options import PATH, example
from ucp_cli.pages.render import table, write


@click.group(
    "chain",
    epilog=example(
        "ucp chain add run/ run/step100 run/step110", "ucp inspect run/", "ucp convert run/ atoms/ --at 110"
    ),
)
def command() -> None:
    """List checkpoints of one run, so that they are read as one.

    Each parameter, with all of its states, is then read from the newest checkpoint that has it. Use this for runs that
    save only some of the experts each time. `ucp inspect CHAIN` shows which parameters are older than the others.
    """


@command.command("add", epilog=example("ucp chain add run/ run/step100 run/step110"))
@click.argument("chain", type=PATH)
@click.argument("links", type=PATH, nargs=-1, required=True)
@click.option("--iteration", type=click.IntRange(min=0), metavar="ITER", help="Training step, if LINK records none.")
def add(*, chain: Path, links: tuple[Path, ...], iteration: int | None) -> None:
    """Add checkpoints to a chain.

    CHAIN is a folder, created if needed, whose chain.json lists the checkpoints LINKS. Nothing is copied, and
    adding a checkpoint that is already listed changes nothing.
    """
    rows = [(f"{step:,}", path) for step, path in api.add_to_chain(chain, links, iteration=iteration)]
    write(table(str(chain), (">iteration", "checkpoint"), rows))
