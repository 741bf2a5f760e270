"""Proofs: a checkpoint is whole and undamaged; two are equal; what was written reads back as its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.companions import companions_of, is_companion
from ucp.contract.protocols import Observer, SourceOptions
from ucp.contract.registry import recognise
from ucp.contract.state_gaps import gap_text, state_gaps
from ucp.conversion.execute import owners
from ucp.conversion.prepare import index_as_told, index_of
from ucp.core.fused_names import joined
from ucp.core.index import TAG, Index
from ucp.core.names import WEIGHT
from ucp.errors import (
    ChangedError,
    CorruptError,
    CoverError,
    IdleOptionError,
    MalformedError,
    MissingFileError,
    counted,
    listed,
)
from ucp.io.files import open_source
from ucp.transfer.compare import (
    Change,
    casts_between,
    checked_bytes,
    compare,
    compare_copies,
    keeps_extras,
    scan_digests,
    scan_records,
)
from ucp.transfer.tasks import BLOCK, Job

__all__ = ["DiffReport", "VerifyReport", "differences", "prove", "prove_written"]

_DAMAGE = (ChangedError, CorruptError, CoverError, MalformedError, MissingFileError)
"""What keeps a checkpoint from being read that was once whole: a finding of `verify`, not its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    path: str
    """What was verified."""
    against: str | None
    """What it was compared with, bit for bit."""
    checked_bytes: int
    """Bytes that recorded checksums or digests cover."""
    problems: tuple[str, ...]
    """Damage: bytes that are not what they should be, copies that drifted."""
    changes: tuple[Change, ...]
    """Differences from `against`, which is compared only with what has no problem."""
    drift: tuple[str, ...] = ()
    """Those of `problems` that are copies which differ: every byte of them may be as it was written."""
    casts: tuple[str, ...] = ()
    """Changes of dtype after which states of `against` were compared; empty when it was bit for bit."""
    notes: tuple[str, ...] = ()
    """What was not checked, and what explains the differences as a whole."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.changes

    def __str__(self) -> str:
        equal = f", equal to {self.against}" if self.against and not self.changes else ""
        verdict = f"{counted(len(self.problems), 'problem')}" if self.problems else f"whole and undamaged{equal}"
        text = [f"{self.path}: {verdict}; {self.checked_bytes:,} bytes checked against checksums"]
        text += [f"problem: {line}" for line in self.problems]
        text += [f"compared after a cast: {line}" for line in self.casts]
        if self.changes:
            text += [f"{counted(len(self.changes), 'difference')} from {self.against}:", listed(map(str, self.changes))]
        return "\n".join([*text, *(f"note: {line}" for line in self.notes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """How two checkpoints differ."""

    a: str
    """The first."""
    b: str
    """The second."""
    compared: int
    """States that both have in one shape."""
    nbytes: int
    """Bytes of all states of the first."""
    nbytes_compared: int
    """Bytes of them in the first."""
    changes: tuple[Change, ...]
    """Differences; empty when equal bit for bit."""
    notes: tuple[str, ...] = ()
    """What explains them as a whole."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.changes

    def __str__(self) -> str:
        verdict = "equal" if self.equal else counted(len(self.changes), "difference")
        shared = f"{counted(self.compared, 'state')} of {self.nbytes_compared:,} bytes compared"
        text = [f"{self.a} and {self.b}: {verdict}; {shared}"]
        text += [listed(map(str, self.changes))] if self.changes else []
        return "\n".join([*text, *(f"note: {line}" for line in self.notes)])


def prove(path: Path, *, against: Path | None, source: SourceOptions, threads: int, observer: Observer) -> VerifyReport:
    """What `ucp.verify` finds. `source`: about both, as far as their formats have a use for it. Raises UsageError."""
    recognise(path)
    told = _Told(source)
    other = None if against is None else told.index_of(against)
    changes: list[Change] = []
    drift: list[str] = []
    casts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checked = 0
    try:
        index = told.index_of(path)
        told.check_used()
        problems = [*_oddities(index), *_damage(index, observer, threads)]
        drift = _drift(index, observer, threads)
        problems += drift
        checked, notes = checked_bytes(index), index.unchecked
        if other is not None and not problems:
            kept = keeps_extras(other, index)
            a, b = _without_chosen(other, index), _without_chosen(index, index)
            changes = compare(a, b, observer, cast=True, extras=kept, threads=threads)
            casts, notes = casts_between(other, index), (*notes, *_strangers(other, index))
    except _DAMAGE as error:
        problems = [str(error)]
    return VerifyReport(
        path=str(path),
        against=None if against is None else str(against),
        checked_bytes=checked,
        problems=tuple(problems),
        changes=tuple(changes),
        drift=tuple(drift),
        casts=casts,
        notes=notes,
    )


def _without_chosen(index: Index, store: Index) -> Index:
    """`index` less the extras of which a conversion to `store` decides: the tag, and companions that were left."""
    held = {extra.name for extra in store.extras}
    extras = (own for own in index.extras if own.name in held or not is_companion(own))
    return replace(index, extras=tuple(own for own in extras if own.name != TAG))


def differences(
    a: Path, b: Path, *, extras: bool, source: SourceOptions, threads: int, observer: Observer
) -> DiffReport:
    """What `ucp.diff` finds. `source`: about both, as far as their formats have a use for it. Raises UsageError."""
    told = _Told(source)
    left, right = told.index_of(a), told.index_of(b)
    told.check_used()
    both = [
        state
        for atom, name, state in left.states()
        if atom.name in right.atoms and name in right.atoms[atom.name].states
        if right.atoms[atom.name].states[name].global_shape == state.global_shape
    ]
    return DiffReport(
        a=str(a),
        b=str(b),
        compared=len(both),
        nbytes=left.nbytes,
        nbytes_compared=sum(state.nbytes for state in both),
        changes=tuple(compare(left, right, observer, extras=extras, threads=threads)),
        notes=(*_strangers(left, right), *(f"{own.path}: {line}" for own in (left, right) for line in _oddities(own))),
    )


def _strangers(a: Index, b: Index) -> tuple[str, ...]:
    """What to say where two checkpoints have no name in common."""
    if not a.atoms or not b.atoms or a.atoms.keys() & b.atoms.keys():
        return ()
    note = (
        f"not one parameter has the same name in both ({next(iter(a.atoms))} in one, {next(iter(b.atoms))} in the "
        "other): they are of other models, or name the modules of one in other ways. What a conversion renames, "
        "`ucp convert --verify` compares under the new names"
    )
    return (note,)


class _Told:
    """What the user says of several checkpoints: each takes it that has a use for it, and one of them must."""

    def __init__(self, source: SourceOptions) -> None:
        self._source = source
        self._idle: IdleOptionError | None = None
        self._is_used = False

    def index_of(self, path: Path) -> Index:
        """Index of one of them."""
        try:
            index = index_of(path, source=self._source)
        except IdleOptionError as error:
            self._idle = self._idle or error
            return index_of(path)
        self._is_used = True
        return index

    def check_used(self) -> None:
        """Raise IdleOptionError where none had a use for it."""
        if self._idle is not None and not self._is_used:
            raise self._idle


def prove_written(job: Job, written: Path, *, told: SourceOptions, observer: Observer, threads: int) -> None:
    """Read back what was written, before it is put in place, and compare it with the source. Raises CorruptError.

    Where the target has names of its own, the source is looked at under these; groups and tied names are not compared
    then. `told`: what the user says of the source, or of a target that knows families alone.
    """
    source, index = job.index, index_as_told(written, source=told, unfinished=True)
    if job.target.joined:
        source, index = joined(source, job.target.joined), replace(index, groups=(), aliases={})
    source = _grouped_as(index, source, job)
    changes = compare(source, index, observer, cast=True, extras=keeps_extras(source, index), threads=threads)
    lines = [
        *_damage(index, observer, threads),
        *_drift(index, observer, threads),
        *_changed_companions(job, written),
        *(
            f"{c.param}/{c.state} {c.what}: {c.a} in the source, {c.b} written"
            for c in changes
            if c.what != "missing" or c.state not in job.target.zeros.get(c.param, ())
        ),
    ]
    if lines:
        raise CorruptError(f"what was written does not read back as the source; it is removed:\n{listed(lines)}")


def _oddities(index: Index) -> list[str]:
    """A line for everything that speaks against the files, and one for states that were lost."""
    lost = state_gaps(index)
    return [*(doubt.text for doubt in index.doubts), *([gap_text(lost)] if lost else [])]


def _changed_companions(job: Job, written: Path) -> Iterator[str]:
    """A line for every companion file that was not written as it is in the source."""
    names = {file.path for file in job.target.files}
    for own in companions_of(job.index):
        if own.name not in names:
            continue
        with open_source(own.ref.path) as source, open_source(str(written / own.name)) as copy:
            starts = range(0, own.ref.nbytes, BLOCK)
            lengths = ((start, min(BLOCK, own.ref.nbytes - start)) for start in starts)
            same = copy.nbytes == own.ref.nbytes and all(
                source.read(own.ref.offset + start, nbytes) == copy.read(start, nbytes) for start, nbytes in lengths
            )
        if not same:
            yield f"{own.name} is not as it is beside the source"


def _grouped_as(written: Index, source: Index, job: Job) -> Index:
    """`source` without the places in groups that go with optimizer states which the target does not hold."""
    kept = {name for group in written.groups for name in group.params}
    bare = {name for name, atom in source.atoms.items() if not atom.states.keys() - {WEIGHT}} | job.target.lost.keys()
    groups = (replace(g, params=tuple(p for p in g.params if p in kept or p not in bare)) for g in source.groups)
    return replace(source, groups=tuple(groups))


def _damage(index: Index, observer: Observer, threads: int) -> list[str]:
    """A line for everything in a checkpoint that is not as it was recorded."""
    summed = scan_records(index, observer, threads=threads)
    return [
        *(f"CRC-32 differs: {r.path}: {r.name}{owners(index, r)}" for r in summed),
        *(f"digest differs: {line}" for line in scan_digests(index, observer, threads=threads)),
    ]


def _drift(index: Index, observer: Observer, threads: int) -> list[str]:
    """A line for every state that is not the same in all its copies."""
    return [f"copies differ: {line}" for line in compare_copies(index, observer, threads=threads)]
