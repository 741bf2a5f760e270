"""Reads the index of the checkpoint at a path, or surveys its files if the index cannot be read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.chain.staleness import check_staleness, describe_casts, describe_staleness, measure_staleness
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import recognise
from ucp.core.gaps import add_state_gaps, check_cover, check_names
from ucp.core.index import Index, SourceFile
from ucp.errors import IdleOptionError, format_list
from ucp.io.folder import files_below
from ucp.moe.faults import find_odd_experts
from ucp.source.copied_ranks import find_copied_ranks
from ucp.source.moments import find_odd_moments
from ucp.source.selection import NameFilter, select


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Facts about a checkpoint whose index cannot be read."""

    path: str
    """Directory or file that was resolved, absolute."""
    format: str
    """Name of the format that it looks like."""
    evidence: tuple[str, ...]
    """What the format was recognised by."""
    files: tuple[SourceFile, ...]
    """Every file there, sorted by name; their roles are not known."""


def survey(path: Path) -> Survey:
    """Survey `path` by names and sizes alone. Raises UnknownFormatError, IncompleteError."""
    fmt, evidence = recognise(path)
    root = evidence.root.absolute()
    files = []
    for file in sorted(files_below(root)) if root.is_dir() else [root]:
        status = file.stat() if file.exists() else file.lstat()
        nbytes = status.st_size if file.exists() else 0  # a link that leads nowhere has none
        files.append(SourceFile(path=str(file), nbytes=nbytes, mtime_ns=status.st_mtime_ns, role=""))
    return Survey(
        path=str(root),
        format=fmt.name,
        evidence=evidence.reasons,
        files=tuple(files),
    )


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector, which is slow while an index of millions of objects is built.

    Objects outside of reference cycles are still freed.

    >>> with pause_gc():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@pause_gc()
def index_of(
    path: Path,
    names: NameFilter | None = None,
    *,
    source: SourceOptions | None = None,
    unfinished: bool = False,
) -> Index:
    """Index of the checkpoint at `path`, after proving that its shards tile every tensor; only what `names` keeps.

    `source`: the user's options for it. `unfinished`: accept the working folder of a conversion, too.

    Raises SourceError, CoverError, UsageError.
    """
    index = read_index(path, source=source, unfinished=unfinished)
    check_cover(index)
    check_names(index)
    if source is not None:
        check_staleness(index, exact=source.exact, max_plt=source.max_plt)
    index = add_doubts(index)
    return index if names is None else select(index, names)


def read_index(path: Path, *, source: SourceOptions | None = None, unfinished: bool = False) -> Index:
    """Index of the checkpoint at `path`, unchecked, with a note on files there that could be other checkpoints."""
    fmt, evidence = recognise(path, unfinished=unfinished, options=source)
    index = fmt.read(path)
    stale = [note for note in describe_staleness(measure_staleness(index)) if note not in index.notes]
    index = replace(index, notes=(*index.notes, *stale, *describe_casts(index)))
    if not evidence.not_read:
        return index
    note = (
        f"not read, as this is a checkpoint of {fmt.name} ({evidence.reasons[0]}); to read such a file, "
        f"pass it by itself:\n{format_list(evidence.not_read)}"
    )
    return replace(index, notes=(*index.notes, note))


def add_doubts(index: Index) -> Index:
    """`index` with doubts that its contents raise (copied files, odd moments or experts), and states that were lost."""
    doubts = (*find_copied_ranks(index), *find_odd_moments(index), *find_odd_experts(index))
    return add_state_gaps(replace(index, doubts=(*index.doubts, *doubts)))


def read_with_options(path: Path, *, source: SourceOptions, unfinished: bool = False) -> Index:
    """`index_of`, without the options that the format has no use for: they may be meant for another checkpoint."""
    for options in dict.fromkeys((source, source.without_family())):
        try:
            return index_of(path, source=options, unfinished=unfinished)
        except IdleOptionError:
            continue
    return index_of(path, unfinished=unfinished)
