"""Formats, targets, engines and model families, by name or by what a checkpoint is (`plugins` loads them)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ucp.contract import plugins
from ucp.contract.locating import Evidence, Strength
from ucp.contract.protocols import Engine, Format, SourceOptions, Target
from ucp.contract.run_extras import RunExtras
from ucp.core.index import Index
from ucp.core.layout import AxisLayout, Layout, Pattern, compute_local_shape
from ucp.core.target import TargetOptions
from ucp.errors import (
    IdleOptionError,
    MisfitError,
    TopologyError,
    UcpError,
    UnknownFamilyError,
    UnknownFormatError,
    format_list,
)
from ucp.io.folder import is_url, refuse_partial, url_scheme
from ucp.io.pickle.callables import CALLS, GROUPS, find_unusual_calls

if TYPE_CHECKING:
    from ucp.families.family import Family
    from ucp.families.library import Library
    from ucp.live.adapters import LiveAdapter

BY_RULE = "the rule of --patterns"
"""What says how data-parallel ranks cut a parameter."""
_MOST_TRIED = 50
"""Folders that are searched for a checkpoint to suggest."""


def _formats() -> list[Format]:
    # every entry point of the group is a Format; the casts below rely on the same for their groups
    return [cast("Format", plugins.instance("ucp.formats", name)) for name in plugins.names("ucp.formats")]


def is_owned_by_another(name: str, fmt: str) -> bool:
    """Whether a format other than `fmt` claims files of that name (`Format.owns`)."""
    return any(other.owns(name) for other in _formats() if other.name != fmt)


def run_extras(index: Index) -> RunExtras:
    """Extras of a checkpoint that a run resumes from, according to its format."""
    return next((fmt.run for fmt in _formats() if fmt.name == (index.origin or index.format)), RunExtras())


def naming_style_of(index: Index) -> str:
    """Naming style that all checkpoints of its format use; empty if they can use any."""
    return next((fmt.names for fmt in _formats() if fmt.name == (index.origin or index.format)), "")


def target(name: str) -> Target:
    """The target of that name. Raises UsageError listing the registered names."""
    return cast("Target", plugins.instance("ucp.targets", name))


def engine(name: str) -> Engine:
    """The engine of that name. Raises UsageError listing the registered names."""
    return cast("Engine", plugins.instance("ucp.engines", name))


def live_adapters() -> list[LiveAdapter]:
    """The adapters that describe live runs of a framework."""
    return [cast("LiveAdapter", plugins.instance("ucp.live", name)) for name in plugins.names("ucp.live")]


@cache
def library() -> Library:
    """All registered model families. Raises UsageError when two have one name."""
    from ucp.families.library import Library  # most checkpoints are read without a family

    return Library.from_packages(list(plugins.registered("ucp.families").values()), plugins.pattern_factory)


def families() -> tuple[str, ...]:
    """Names of the model families that a checkpoint can belong to."""
    return tuple(family.name for family in library().concrete())


def family(name: str) -> Family:
    """The model family of that name. Raises UsageError listing the registered names."""
    return library().family(name)


def choose_family(
    *,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    arguments: Mapping[str, object] | None = None,
    axes: Mapping[str, int] | None = None,
    options: SourceOptions | None = None,
    explain: bool = True,
) -> tuple[Family, tuple[str, ...]]:
    """The family of a checkpoint, bound to its sizes, and the reasons; detected, unless `options` name it.

    `names`: names of the model's tensors, in any style. `shapes`: global shapes; or local shapes of a rank, with the
    degrees in `axes`. `arguments`: arguments that the checkpoint records. `explain`: whether an error says why the
    nearest family does not fit, which reads all families. Raises UnknownFamilyError if none or several fit, MisfitError
    if the family that `options` name contradicts the checkpoint, UsageError for an unknown family or a mistake in a
    rules file.
    """
    known = library()
    name = options.family if options is not None else None
    why = f"chosen with --family {name}"
    if options is not None and options.patterns is not None:
        known, own_family = known.with_file(options.patterns)
        name, why = (name, why) if name else (own_family, f"chosen with --patterns {options.patterns}")
        if replaced := known.list_replaced(own_family):
            why += (
                f", whose rules are used in place of known ones for {', '.join(replaced)}: a mistake in them joins the "
                "wrong rows, and no check that uses the same rules can notice it"
            )
    if name is not None:
        bound = known.get_concrete(name).bind(arguments=arguments, shapes=shapes, axes=axes)
        if bound.conflicts and (options is None or options.patterns is None):
            raise MisfitError(
                f"the model is not of the family {name!r}: {'; '.join(bound.conflicts)}. Drop --family, and the family "
                "is detected; or, where the checkpoint is wrong, give the right values under [given] in a rules file "
                "of your own (--patterns)"
            )
        return bound.among(names), (why,)
    from ucp.families.library import choose

    choice = partial(choose, names=list(names), shapes=shapes or {}, arguments=arguments or {}, axes=axes or {})
    try:
        return choice(known.likely(arguments or {}), explain=False)
    except UnknownFamilyError:
        if not explain:
            raise
        return choice(known.concrete())  # the message says why each family does not fit


def data_parallel_cuts(names: Iterable[str], patterns: Path | str | None) -> dict[str, Pattern]:
    """Parameters among `names` that every data-parallel rank has a part of, with the pattern of the parts.

    Only a rule of the user's says so (`dp = { pattern = "shard", dim = 1 }`), in the file `patterns`: frameworks do not
    record it. Raises UsageError for a mistake in the file.
    """
    if not patterns:
        return {}
    known, own_family = library().with_file(Path(patterns))
    family = known.family(own_family)
    return {
        name: axis.make_pattern(family.values)
        for name in names
        if (named := family.read(name))
        for axis in named.rule.axes
        if axis.axis == "dp"
    }


def has_data_parallel_rules(patterns: Path | None) -> bool:
    """Whether the user's rules say how data-parallel ranks cut a parameter: then they may be for the target alone."""
    if patterns is None:
        return False
    known, own_family = library().with_file(patterns)
    return any(axis.axis == "dp" for rule in known.family(own_family).rules for axis in rule.axes)


def lay_out_cuts(index: Index, patterns: str, ranks: int) -> dict[str, Layout]:
    """`data_parallel_cuts` of a target with `ranks` ranks, as layouts. Raises TopologyError for parts of two sizes."""
    layouts = {
        name: Layout((AxisLayout("dp", ranks, cut, BY_RULE),))
        for name, cut in (data_parallel_cuts(index.atoms, patterns) if ranks > 1 else {}).items()
    }
    uneven = [
        f"{name}: {list(index.atoms[name].global_shape)} by {layout.axes[0].pattern.name}"
        for name, layout in layouts.items()
        if len({compute_local_shape(layout, index.atoms[name].global_shape, rank) for rank in layout.ranks()}) > 1
    ]
    if uneven:
        raise TopologyError(f"expected parts of equal shape on {ranks} data-parallel ranks; got\n{format_list(uneven)}")
    return layouts


def target_family(
    index: Index, options: TargetOptions, arguments: Mapping[str, object] | None = None
) -> tuple[Family, tuple[str, ...]]:
    """The family of the model that a target writes, and the reasons: see `choose_family`."""
    source_options = SourceOptions(options.family or None, Path(options.patterns) if options.patterns else None)
    return choose_family(names=index.atoms, shapes=index.shapes, arguments=arguments, options=source_options)


def add_call_notes(index: Index) -> Index:
    """The index, with a note on unusual functions that objects in it call when they are unpickled."""
    usual = {name for fmt in _formats() for name in fmt.pickles}
    values = [*((extra.name, extra.value) for extra in index.extras), *((GROUPS, dict(g.hyper)) for g in index.groups)]
    notes = [note for note in index.notes if not note.startswith(CALLS)]
    return replace(index, notes=(*notes, *find_unusual_calls(values, usual)))


def _configured(fmt: Format, options: SourceOptions | None) -> Format:
    if options is None or options == SourceOptions():
        return fmt
    if options.family is not None:
        family(options.family)  # raises for a misspelt name, before the format is asked
    if options.shapes_from is not None and not fmt.takes_shapes:
        raise IdleOptionError(f"{fmt.name} checkpoints record the shapes of their parameters: drop --shapes-from")
    if options.param_order is not None and not fmt.takes_order:
        raise IdleOptionError(f"{fmt.name} checkpoints record the parameter of each state: drop --param-order")
    if options.at is not None and not fmt.takes_time:
        raise IdleOptionError(f"{fmt.name} checkpoints hold one iteration: drop --at")
    options = replace(options, exact=False, max_plt=None)  # checked by `ucp.source.read`
    return fmt if options == SourceOptions() else fmt.configured(options)


def recognise(path: Path, *, unfinished: bool = False, options: SourceOptions | None = None) -> tuple[Format, Evidence]:
    """The only format that recognises `path`. `unfinished`: accept the working folder of a conversion, too.

    `options`: the user's options for the source. Raises UnknownFormatError when none or several formats recognise it,
    IncompleteError for an unfinished conversion, IdleOptionError for options that the format has no use for.
    """
    if not path.exists():
        raise UnknownFormatError(f"expected a checkpoint at {path}; {_absent(path)}")
    if not unfinished:
        refuse_partial(path.resolve())
    formats = _formats()
    claims = [(fmt, evidence) for fmt in formats if (evidence := fmt.detect(path)) is not None]
    strongest = [claim for claim in claims if not any(_outdoes(path, other, claim[1]) for _, other in claims)]
    if len(strongest) == 1:
        ((fmt, evidence),) = strongest
        _check_only(path, fmt, evidence, formats)
        weak = [other.reasons for _, other in claims if other is not evidence and other.strength is Strength.SUFFIX]
        return _configured(fmt, options), replace(evidence, not_read=tuple(chain.from_iterable(weak)))
    if strongest:
        lines = [
            f"{evidence_of.root}: {fmt.name}, because of {', '.join(evidence_of.reasons[:3])}"
            for fmt, evidence_of in strongest
        ]
        raise UnknownFormatError(
            f"{path} could be several formats; pass the folder or file of one of them:\n{format_list(lines)}"
        )
    by_use = sorted(formats, key=lambda fmt: fmt.takes_time)  # most people have those of one iteration
    raise UnknownFormatError(
        f"expected a checkpoint of {', '.join(fmt.name for fmt in by_use)}; {path} is none of them "
        f"({_contents(path)}). {_advice(path, formats)}"
    )


def _outdoes(path: Path, claim: Evidence, other: Evidence) -> bool:
    """Whether a claim about `path` itself, or about what a run saved in it, is stronger than `other`.

    If both are equally strong, it is if `other` is about a subfolder: chains have checkpoints in theirs.
    """
    is_about_path = claim.root == path and _is_below(path, other)
    return not _is_below(path, claim) and claim.strength >= other.strength + (not is_about_path)


def _is_below(path: Path, evidence: Evidence) -> bool:
    """Whether the checkpoint is a mere subfolder of `path`: nothing there says that a run saved it in `path`."""
    return not evidence.is_saved_in and evidence.root.parent == path


def _check_only(path: Path, fmt: Format, evidence: Evidence, formats: Sequence[Format]) -> None:
    """Raise UnknownFormatError if the checkpoint is a subfolder of `path`, and another subfolder has another format."""
    if not _is_below(path, evidence):
        return
    other_formats = [candidate for candidate in formats if candidate is not fmt]
    folders = [folder for folder in _folders(path) if folder != evidence.root]
    claims = ((folder, other.detect(folder)) for folder in folders for other in other_formats)
    checkpoints = dict.fromkeys(folder for folder, claim in claims if claim is not None and claim.root == folder)
    if checkpoints:
        lines = format_list(map(str, sorted([evidence.root, *checkpoints])))
        raise UnknownFormatError(
            f"{path} holds {len(checkpoints) + 1} checkpoints, of several formats, and nothing says which is meant; "
            f"pass one of them:\n{lines}"
        )


def _folders(path: Path) -> list[Path]:
    """Subfolders, up to the number that is searched."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir())[:_MOST_TRIED] if path.is_dir() else []


def _absent(path: Path) -> str:
    if url_scheme(path) == "file":
        return "pass the path alone, without file://"
    if not is_url(str(path)):
        return "nothing is there. Check the path"
    from ucp.io.remote.listing import why_absent

    return why_absent(str(path))


def _advice(path: Path, formats: Sequence[Format]) -> str:
    """What to pass instead: a checkpoint in `path`; else what a plugin says; else the checkpoint that it is part of."""
    inside = [str(folder) for folder in _folders(path) if any(fmt.detect(folder) for fmt in formats)]
    if len(inside) > 1:
        return f"It holds several:\n{format_list(inside)}\nPass one of them"
    if inside:
        return f"Did you mean {inside[0]}?"
    parent = path.absolute().parent
    around = [evidence.strength for fmt in formats if (evidence := fmt.detect(parent)) is not None]
    is_empty = path.is_dir() and not any(path.iterdir())
    is_part = not is_empty and max(around, default=Strength.SUFFIX) > Strength.SUFFIX
    known = (
        cast("Callable[[Path], str | None]", plugins.load("ucp.unread", name)) for name in plugins.names("ucp.unread")
    )
    remedy = next((answer for tell in known if (answer := tell(path))), None)
    return remedy or (f"Did you mean {parent}?" if is_part else "Pass the folder that the framework saved to")


def _contents(path: Path) -> str:
    if not path.is_dir():
        return f"a file of {path.stat().st_size} bytes"
    try:
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise UcpError(f"cannot read {path}: {error.strerror}") from error
    shown = ", ".join(entries[:5]) or "nothing"
    return f"it holds {shown}{', ...' if len(entries) > 5 else ''}"
