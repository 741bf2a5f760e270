"""The reference page of the command line: every help page, as it is printed.

python -m ucp_cli.reference > docs/reference/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from ucp_cli.main import SUMMARIES, cli

__all__ = ["page"]

_HEAD = """\
# Command line

Made by `python -m ucp_cli.reference > docs/reference/cli.md`; do not edit.

Results go to stdout, messages and progress to stderr. On a terminal lines are folded at its width; anywhere else they
are as long as they need to be and have no colours. What `--json` prints is described in [json.md](json.md).

| exit code | means |
|---|---|
| 0 | done; for `verify` and `diff`: nothing wrong, no difference |
| 1 | failed; the message says why, and what to do |
| 2 | an option or argument cannot mean anything |
| 3 | `verify`, `diff`: done, and damage or differences were found |
| 130 | interrupted from the keyboard; `convert --resume` continues |

A failure is one message without a traceback; `ucp --debug VERB ...` or `UCP_DEBUG=1` shows the traceback."""


def page() -> str:
    """The page, as Markdown."""
    return "\n\n".join((_HEAD, *_sections())) + "\n"


def _sections() -> Iterator[str]:
    root = click.Context(cli, info_name="ucp", terminal_width=80, **cli.context_settings)
    yield _section("ucp", root)
    for verb in SUMMARIES:
        command = cli.get_command(root, verb)
        if command is not None:
            yield _section(f"ucp {verb}", click.Context(command, info_name=verb, parent=root, terminal_width=80))


def _section(title: str, ctx: click.Context) -> str:
    return f"## {title}\n\n```text\n{ctx.get_help()}\n```"


if __name__ == "__main__":
    click.echo(page(), nl=False)
