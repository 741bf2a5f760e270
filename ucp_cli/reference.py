"""The reference page of the command line: every help page, as it is printed.

python -m ucp_cli.reference > docs/reference/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from ucp.contract import plugins, registry
from ucp_cli.verbs import SUMMARIES, cli

_WIDTH = 80
"""Columns of a help page."""

_HEAD = """\
# Command line

Made by `python -m ucp_cli.reference > docs/reference/cli.md`; do not edit.

Results go to stdout, messages and progress to stderr. On a terminal, lines are wrapped to its width; elsewhere
they are never wrapped and have no colours. What `--json` prints is described in [json.md](json.md).

| exit code | means |
|---|---|
| 0 | done; for `verify` and `diff`: nothing wrong, no difference |
| 1 | failed: something is missing, damaged, of another kind or in the way; for `verify`: damage was found |
| 2 | usage error: an argument makes no sense (DST lies in SRC), or asks what this source, target or memory cannot do |
| 3 | done, and differences were found: `diff`, `verify --against`, `patterns check` |
| 130 | interrupted from the keyboard; `convert --resume` continues |
| 129 | ended by SIGHUP (as when a terminal closes); `convert --resume` continues |
| 143 | ended by SIGTERM (as a scheduler sends); `convert --resume` continues |

A failure is one message without a traceback; `ucp --debug VERB ...` or `UCP_DEBUG=1` shows the traceback."""


_SETTINGS = """\
## Settings

What `--set NAME=VALUE` takes, by target and by engine. Every target takes `drop=EXTRA,...`, which leaves extras of the
source out, and `frozen=GLOB,...` or `frozen=none`, which says what parameters are frozen. A target that a run resumes
from (dcp, deepspeed, deepspeed-universal, megatron, torch) takes `step=N` and `scheduler=KEY`, for a source that does
not record its step or has the state of the scheduler under a key of its own; megatron also takes what the source
records among its arguments. Any other name is refused. With `--names`, and to megatron and huggingface, sizes of the
model are taken by the names of Megatron's arguments or of config.json (`num_attention_heads`, `num_query_groups` or
`num_key_value_heads`, `head_dim`, ...), where names are translated and the source does not record them. With
`--optimizer zero`: `lr`, `beta1`, `beta2`, `eps`, `weight_decay`."""


def page() -> str:
    """The page, as Markdown."""
    root = click.Context(cli, info_name="ucp", terminal_width=_WIDTH, **cli.context_settings)
    parts = [_HEAD, _section("ucp", root)]
    for verb in SUMMARIES:
        command = cli.get_command(root, verb)
        if command is not None:
            ctx = _below(root, verb, command)
            below = command.commands.items() if isinstance(command, click.Group) else ()
            parts.append(_section(f"ucp {verb}", ctx))
            parts += [_section(f"ucp {verb} {name}", _below(ctx, name, part)) for name, part in below]
    parts.append(_SETTINGS)
    for target in map(registry.target, plugins.names("ucp.targets")):
        parts += _table(f"### {target.name}", target.settings)
    for engine in map(registry.engine, plugins.names("ucp.engines")):
        parts += _table(f"### --engine {engine.name}", engine.settings)
    return "\n\n".join(parts) + "\n"


def _table(head: str, settings: Mapping[str, str]) -> Iterator[str]:
    """A table of settings, if there are any."""
    by_meaning: dict[str, list[str]] = {}
    for name, meaning in settings.items():
        by_meaning.setdefault(meaning, []).append(f"`{name}`")
    if by_meaning:
        rows = [f"| {', '.join(names)} | {meaning} |" for meaning, names in by_meaning.items()]
        yield "\n".join((head, "", "| setting | value |", "|---|---|", *rows))


def _below(parent: click.Context, name: str, command: click.Command) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, terminal_width=_WIDTH)


def _section(title: str, ctx: click.Context) -> str:
    return f"## {title}\n\n```text\n{ctx.get_help()}\n```"


if __name__ == "__main__":
    click.echo(page(), nl=False)
