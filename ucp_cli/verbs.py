"""`ucp VERB ...`: the group of all verbs, and how their failures end.

The module of a verb is imported when the verb is run, so that `ucp --help` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

SUMMARIES = {
    "inspect": "Show what a checkpoint holds.",
    "plan": "Show what a conversion would do.",
    "convert": "Convert a checkpoint to atoms, or for another run or framework.",
    "verify": "Prove that a checkpoint is complete and undamaged.",
    "diff": "Compare two checkpoints of any formats.",
    "chain": "List checkpoints of one run, so that they are read as one.",
    "delta": "Write a checkpoint as patches of another one.",
    "place": "Place experts on GPUs by load, so that lost nodes cost none.",
    "advise": "Say how often to save a run, and how.",
    "bench": "Measure how fast this machine reads, writes and copies.",
    "patterns": "Show model families, and what their rules say about a checkpoint.",
}
"""Verb to the first line of its help, in the order of the help page."""


class Verbs(click.Group):
    """The verbs, found by module name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name; imports its module."""
        if cmd_name not in SUMMARIES:
            return None
        command: click.Command = import_module(f"ucp_cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that `args` start with. Raises UsageError naming the nearest."""
        if args and not args[0].startswith("-") and args[0] not in SUMMARIES:
            from difflib import get_close_matches

            near = get_close_matches(args[0], SUMMARIES, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(SUMMARIES)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of a call. An interrupt while it is made becomes one message and its exit code."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except KeyboardInterrupt as stop:
            from ucp_cli.failures import make_stopped

            raise make_stopped(stop) from None

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; an expected failure becomes one message and its exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (KeyboardInterrupt, Exception) as error:
            from ucp_cli.failures import to_failure

            failure = to_failure(error)
            if failure is None:
                raise
            if ctx.params["debug"]:
                import traceback

                traceback.print_exc()
            raise failure from error


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  ucp inspect checkpoints/\n  ucp convert checkpoints/ atoms/ --verify",
)
@click.option("--debug", is_flag=True, envvar="UCP_DEBUG", help="Show the traceback of a failure (or UCP_DEBUG=1).")
@click.version_option(package_name="universal-checkpoint", message="ucp %(version)s")
def cli(*, debug: bool) -> None:
    """Read DeepSpeed, Megatron, PyTorch and Hugging Face checkpoints in any layout, and write them for any other.

    Results go to stdout, messages to stderr. Exit codes: 0 done, 1 failed or damaged, 2 usage error, 3 differences
    found.
    """
    del debug  # read by `Verbs.invoke`
