"""Checks that a checkpoint is complete and undamaged, and that two checkpoints are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.checks.changes import make_tables
from ucp.checks.pair import (
    ALL,
    SourceReader,
    describe_no_overlap,
    drop_optional,
    rename_as,
    select_compared,
)
from ucp.contract.protocols import Observer, SourceOptions
from ucp.contract.registry import recognise
from ucp.core.gaps import describe_state_gaps, find_state_gaps
from ucp.core.index import DoubtKind, Index
from ucp.core.text.page import Page, Report, facts, lines
from ucp.core.text.units import nbytes_text
from ucp.errors import (
    ChangedError,
    CorruptError,
    CoverError,
    DestinationError,
    MalformedError,
    MissingFileError,
    UsageError,
    format_count,
    format_list,
)
from ucp.io.folder import path_of
from ucp.io.provenance import check_unchanged, find_damage, find_destination, read_mark
from ucp.moe.report import check_experts
from ucp.source.selection import NameFilter
from ucp.transfer.compare import count_checked_bytes, find_corruption, find_drift
from ucp.transfer.differences import Change, compare, describe_casts, find_equal_casts, keeps_extras, pair_states

_UNPROVED = (
    "its files record no checksums: headers, sizes and shapes were checked, but not the bytes of tensors. Use "
    "--against to compare these with another copy"
)
"""Note for a checkpoint in which a flipped bit would not be noticed."""

_DAMAGE = (ChangedError, CorruptError, CoverError, MalformedError, MissingFileError)
"""Errors that mean damage: `verify` reports them as problems instead of raising them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """What a verification found."""

    path: str
    """What was verified."""
    against: str | None
    """The checkpoint that it was compared with, bit for bit; None if with none."""
    checked_bytes: int
    """Number of bytes that were checked against recorded checksums or digests."""
    problems: tuple[str, ...]
    """What is wrong: damage, copies that differ, states without parameters."""
    changes: tuple[Change, ...]
    """Differences from `against`; a checkpoint with other problems than `unnamed` is not compared."""
    drift: tuple[str, ...] = ()
    """Problems of copies that differ, although no byte may be damaged; also in `problems`."""
    casts: tuple[str, ...] = ()
    """Casts that were applied to states of `against` before they were compared; empty if there were none."""
    experts: tuple[str, ...] = ()
    """Problems of experts that cannot be right, although their bytes are undamaged; also in `problems`."""
    unnamed: tuple[str, ...] = ()
    """Problems of states that cannot be assigned to parameters, though undamaged; also in `problems`."""
    notes: tuple[str, ...] = ()
    """What was not checked, and what explains the differences as a whole."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.changes

    def page(self) -> Page:
        """The verdict, what it is based on, and everything that is wrong."""
        same = f"{self.against}{', after the casts below' if self.casts else ''}"
        yield self._verdict()
        yield facts(
            [
                ("in itself", "complete and undamaged" if self.changes else ""),
                ("checked", f"{nbytes_text(self.checked_bytes)} against checksums" if self.checked_bytes else ""),
                ("equal to", same if self.against and self.ok else ""),
                ("not compared with", self.against if self.problems and self.against else ""),
            ]
        )
        yield lines("Casts", self.casts)
        yield lines("Damage", [line for line in self.problems if line not in self._undamaged])
        yield lines("Experts", self.experts)
        yield lines("Optimizer", self.unnamed)
        yield lines("Copies that differ", self.drift)
        yield lines("Notes", self.notes)
        yield from make_tables(self.changes, a=self.path, b=self.against or "")

    @property
    def _undamaged(self) -> tuple[str, ...]:
        """Problems that are not explained by damaged files."""
        return (*self.drift, *self.experts, *self.unnamed)

    def _verdict(self) -> str:
        """The first line of the page: the result."""
        if len(self.problems) > len(self._undamaged):
            return f"{self.path}: damaged"
        if self.experts:
            return f"{self.path}: undamaged, but its experts cannot be right"
        if self.unnamed:
            return f"{self.path}: undamaged, but the states of its optimizer cannot be assigned to parameters"
        if self.drift:
            return f"{self.path}: holds copies that should be equal and are not"
        if self.changes:
            return f"{self.path}: differs from {self.against}, {format_count(len(self.changes), 'difference')}"
        return f"{self.path}: complete and undamaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """How two checkpoints differ."""

    a: str
    """The first checkpoint."""
    b: str
    """The second checkpoint."""
    compared: int
    """Number of states that both have, with the same shape."""
    nbytes: int
    """Bytes of all states of the first checkpoint."""
    nbytes_compared: int
    """Bytes of the compared states in the first checkpoint."""
    changes: tuple[Change, ...]
    """Differences; empty if the two are equal bit for bit, apart from the dtype of counts such as `step`."""
    notes: tuple[str, ...] = ()
    """What explains the differences as a whole."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.changes

    def page(self) -> Page:
        """The verdict, and the differences as tables."""
        verdict = "equal" if self.equal else format_count(len(self.changes), "difference")
        yield f"{verdict}; {format_count(self.compared, 'state')} of {nbytes_text(self.nbytes_compared)} compared"
        yield from make_tables(self.changes, a=self.a, b=self.b)
        yield lines("Notes", self.notes)


def verify_checkpoint(
    path: Path,
    *,
    against: Path | None,
    names: NameFilter = ALL,
    source: SourceOptions,
    accept: Collection[DoubtKind] = (),
    threads: int,
    observer: Observer,
) -> VerifyReport:
    """Verify a checkpoint for `ucp.verify`. Raises UsageError.

    `source`: options for reading; each applies to `path`, `against` or both, wherever a format can use it. `names`:
    which parameters and states are compared with `against`; all of `path` is checked for damage in any case. `accept`:
    doubts that are notes, not problems.
    """
    if against is None and names != ALL:
        raise UsageError(
            "--include, --exclude and --weights select what is compared with another checkpoint: name it by --against"
        )
    recognise(path)
    reader = SourceReader(source)
    other = None if against is None else reader.read(against)
    changes: list[Change] = []
    drift: list[str] = []
    casts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checked = 0
    unnamed: tuple[str, ...] = ()
    experts: list[str] = []
    try:
        index = reader.read(path)
        reader.check_used()
        accepted = [f"--accept {doubt.kind}: {doubt.text}" for doubt in index.doubts if doubt.kind in accept]
        index = replace(index, doubts=tuple(doubt for doubt in index.doubts if doubt.kind not in accept))
        problems = [*_list_oddities(index), *_find_changed_files(index), *find_corruption(index, observer, threads)]
        drift = find_drift(index, observer, threads)
        unnamed = _list_unnamed(index)
        checked = count_checked_bytes(index)
        notes = (
            *accepted,
            *_describe_buffers(index),
            *index.unchecked,
            *([_UNPROVED] if index.nbytes and not checked else []),
        )
        experts = [doubt.text for doubt in index.doubts if doubt.kind is DoubtKind.EXPERTS]
        if len(problems) == len(experts):  # of damaged bytes nothing else is to be said
            faults, expert_notes = check_experts(index, observer, threads=threads)
            experts, problems, notes = [*experts, *faults], [*problems, *faults], (*notes, *expert_notes)
        problems += [*drift, *unnamed]
        if against is not None and other is not None and len(problems) == len(unnamed):
            other = rename_as(index, other, against, source)
            compares_extras = keeps_extras(other, index) and names == ALL
            a, b = select_compared((drop_optional(other, index), drop_optional(index, index)), names)
            changes = [
                change.swapped()
                for change in compare(a, b, observer, cast=True, extras=compares_extras, threads=threads)
            ]
            casts, notes = describe_casts(a, b), (*notes, *describe_no_overlap(other, index))
            check_unchanged(other.files)
        check_unchanged(index.files)
    except _DAMAGE as error:
        problems = [str(error)]
    return VerifyReport(
        path=str(path),
        against=None if against is None else str(against),
        checked_bytes=checked,
        problems=tuple(problems),
        changes=tuple(changes),
        experts=tuple(experts),
        drift=tuple(drift),
        unnamed=unnamed,
        casts=casts,
        notes=notes,
    )


def diff_checkpoints(
    a: Path,
    b: Path,
    *,
    names: NameFilter = ALL,
    extras: bool,
    source: SourceOptions,
    threads: int,
    observer: Observer,
) -> DiffReport:
    """Compare two checkpoints for `ucp.diff`. Raises UsageError.

    `source`: options for reading; each applies to `a`, `b` or both, wherever a format can use it. `names`: which
    parameters and states are compared.
    """
    reader = SourceReader(source)
    index_a, index_b = reader.read(a), reader.read(b)
    reader.check_used()
    index_a, index_b = select_compared((index_a, index_b), names)
    both = [pair.a for pair in pair_states(index_a, index_b) if pair.a.global_shape == pair.b.global_shape]
    changes = compare(index_a, index_b, observer, extras=extras, threads=threads)
    recast = _find_recast_counts(changes, index_a)
    casts = find_equal_casts(
        index_a, index_b, (change for change in changes if change not in recast), observer, threads=threads
    )
    check_unchanged((*index_a.files, *index_b.files))
    return DiffReport(
        a=str(a),
        b=str(b),
        compared=len(both),
        nbytes=index_a.nbytes,
        nbytes_compared=sum(state.nbytes for state in both),
        changes=tuple(change for change in changes if change not in recast),
        notes=(
            *describe_no_overlap(index_a, index_b),
            *casts,
            *(
                f"{line}, for {format_count(count, 'parameter')}: the numbers are equal, only their dtypes differ"
                for line, count in Counter(
                    f"{change.state} is {change.a} in a, {change.b} in b" for change in recast
                ).items()
            ),
            *(
                f"{index.path}: {line}"
                for index in (index_a, index_b)
                for line in (*_list_oddities(index), *_list_unnamed(index))
            ),
        ),
    )


def _find_recast_counts(changes: Iterable[Change], index: Index) -> list[Change]:
    """Changes of the dtype of counts, such as `step`, with equal numbers: these have no consequence."""
    valued = {(change.param, change.state) for change in changes if change.what == "values"}
    of_type = (change for change in changes if change.what == "dtype" and (change.param, change.state) not in valued)
    return [change for change in of_type if index.atoms[change.param].is_count(change.state)]


def _find_changed_files(index: Index) -> list[str]:
    """A line for each file of a destination that is not as the conversion wrote it: files of tensors, and of metadata.

    Links of a chain may be destinations, too. Checksums do not cover bytes that somebody appended, but a framework may
    refuse a file because of them.
    """
    paths = {str(fragment.path) for _, _, state in index.states() for fragment in state.fragments if fragment.path}
    parents = sorted({path_of(path).parent for path in paths})
    changed = []
    for folder in dict.fromkeys(map(find_destination, (path_of(index.path), *parents))):
        if folder is None:
            continue
        measured = {path[len(f"{folder}/") :] for path in paths if path.startswith(f"{folder}/")}
        try:
            changed += [f"{folder}/{line}" for line in find_damage(folder, read_mark(folder), measured=measured)]
        except DestinationError as error:
            changed.append(str(error))
    return changed


def _list_oddities(index: Index) -> list[str]:
    """A line for each sign that the files are incomplete or inconsistent, and one for states that were lost."""
    lost = find_state_gaps(index)
    return [*(problem.text for problem in index.doubts), *([describe_state_gaps(lost)] if lost else [])]


def _describe_buffers(index: Index) -> Iterator[str]:
    """A note on buffers, such as running statistics, of which ranks hold other values."""
    extras = (extra.name for extra in index.extras if not extra.is_sidecar)
    names = dict.fromkeys(name.rpartition("buffer/")[2] for name in extras if "buffer/" in name)
    if names:
        yield f"ranks hold different values of these buffers; the first rank's are compared:\n{format_list(names)}"


def _list_unnamed(index: Index) -> tuple[str, ...]:
    """A line for states that could not be assigned to parameters, if there are any."""
    return () if index.unnamed is None else (index.unnamed.reason,)
