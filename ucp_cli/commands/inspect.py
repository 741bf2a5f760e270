"""`ucp inspect`: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click
from click.core import ParameterSource

from ucp import api
from ucp.contract.protocols import Observer
from ucp.conversion.arguments import ExpertArguments, SourceArguments
from ucp.core.text.overview import describe_missing
from ucp.errors import CorruptError, FamilyError, SourceError, StaleError, UsageError
from ucp.source.selection import NameFilter
from ucp_cli.options import PATH, as_html, as_json, example, progress, takes_options
from ucp_cli.pages.documents import experts_document, index_document, survey_document
from ucp_cli.pages.inspect import extra_section, file_rows, find_extras, inspect_page, param_page, survey_page
from ucp_cli.pages.render import table, write, write_json
from ucp_cli.pages.web.contents import inspect_contents, survey_contents
from ucp_cli.pages.web.write import write_page
from ucp_cli.progress import watch

if TYPE_CHECKING:
    from ucp.moe.report import ExpertsReport

__all__ = ["command"]

_OF_EXPERTS = ("plot", "workers", "memory", "progress", "quiet")
"""Options that say how tensors are read and shown."""


@click.command(
    "inspect",
    epilog=example(
        "ucp inspect checkpoints/",
        "ucp inspect checkpoints/global_step1000 --param 'layers.0.*'",
        "ucp inspect megatron/ --extra args",
        "ucp inspect checkpoints/ --json | jq .topology",
        "ucp inspect checkpoints/ --html checkpoint.html",
        "ucp inspect checkpoints/ --experts --html experts.html",
    ),
)
@click.argument("path", type=PATH)
@click.option(
    "--param",
    "params",
    metavar="GLOB",
    multiple=True,
    help="Show the shards of these parameters, with file and position. May be repeated.",
)
@click.option(
    "--extra",
    "extras",
    metavar="GLOB",
    multiple=True,
    help="Show all values of these extras, such as the arguments of the run (args). May be repeated.",
)
@click.option("--files", is_flag=True, help="List the files and what they hold.")
@click.option(
    "--experts", is_flag=True, help="Read the experts: how much each is trained, which stand out, what is wrong."
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="With --experts: also draw them (.svg).")
@takes_options(ExpertArguments)
@progress
@as_html
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    *,
    path: Path,
    params: tuple[str, ...],
    extras: tuple[str, ...],
    files: bool,
    experts: bool,
    plot: Path | None,
    progress: str,
    quiet: bool,
    html: Path | None,
    as_json: bool,
    **options: Unpack[ExpertArguments],
) -> None:
    """Show what a checkpoint holds.

    PATH is the folder that the framework saved to, or one checkpoint in it. Only indexes are read, not tensors; nothing
    in the checkpoint is executed. If elements of a tensor are missing, the page says which.

    --json prints everything on the page, and every parameter, state, extra and file. Shards are only printed for the
    parameters that match --param.

    If missing or damaged files make a checkpoint unreadable, what is known without them is shown, and the exit code
    is 1. Other problems are listed on the page, with exit code 0; `ucp verify` exits with 1 for them.

    --experts reads the tensors of experts and routers; --plot, --workers, --memory, --progress and --quiet require it.
    """
    if experts:
        report = _read_experts(path, plot, watch(progress, quiet=quiet), **options)
        if html is not None:
            write_page(html, inspect_contents(api.inspect(path, **_source(options)), report))
        if as_json:
            write_json(experts_document(report))
        else:
            write(*report.page())
        return
    idle = [name for name in _OF_EXPERTS if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if idle:
        raise UsageError(f"--{' and --'.join(idle)} {'is' if len(idle) == 1 else 'are'} only used with --experts")
    try:
        index = api.inspect(path, **_source(options))
    except (SourceError, CorruptError) as error:
        is_of_family = isinstance(error, FamilyError) and (options.get("family") or options.get("patterns"))
        if is_of_family or isinstance(error, StaleError):
            raise  # --family, --patterns, --exact or --max-plt may be wrong, not the checkpoint
        survey = api.survey(path)
        if html is not None:
            write_page(html, survey_contents(survey, str(error)))
        if as_json:
            write_json(survey_document(survey, str(error)))
        else:
            write(*survey_page(survey, str(error), each=files))
        raise
    if html is not None:
        write_page(html, inspect_contents(index))
    wanted = []
    if params:
        names = NameFilter(include=params)
        names.check_used((atom.name, state) for atom, state, _ in index.states())
        wanted = [name for name, atom in index.atoms.items() if any(names.keeps(name, s) for s in atom.states)]
    shown = find_extras(index, extras)
    if as_json:
        write_json(index_document(index, missing=describe_missing(index), detailed=frozenset(wanted)))
        return
    if not wanted and not files and not shown:
        write(*inspect_page(index))
        return
    listing = table("Files", ("file", "holds", ">bytes"), file_rows(index)) if files else None
    write(*(param_page(index, index.atoms[name]) for name in wanted), *map(extra_section, shown), listing)


def _source(options: ExpertArguments) -> SourceArguments:
    return SourceArguments(
        family=options["family"],
        patterns=options["patterns"],
        shapes_from=options["shapes_from"],
        param_order=options["param_order"],
        at=options["at"],
        exact=options["exact"],
        max_plt=options["max_plt"],
    )


def _read_experts(
    path: Path, plot: Path | None, observer: Observer, **options: Unpack[ExpertArguments]
) -> ExpertsReport:
    if plot is not None:
        from ucp.moe.plot import check_plot, plot_experts

        check_plot(plot)
    report = api.experts(path, observer=observer, **options)
    if plot is not None:
        plot_experts(report, plot)
    return report
