"""Proofs: a checkpoint is whole and undamaged; two are equal; what was written reads back as its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ucp.atom import Index, check_cover
from ucp.compare import Change, casts_between, checked_bytes, compare, compare_copies, scan_digests, scan_records
from ucp.convert import owners
from ucp.errors import ChangedError, CorruptError, CoverError, MalformedError, MissingFileError, listed
from ucp.prepare import index_of
from ucp.protocols import Observer, SourceOptions
from ucp.registry import recognise

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

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.changes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """How two checkpoints differ."""

    a: str
    """The first."""
    b: str
    """The second."""
    compared: int
    """States that both have."""
    nbytes: int
    """Bytes of them in the first."""
    changes: tuple[Change, ...]
    """Differences; empty when equal bit for bit."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.changes


def prove(path: Path, *, against: Path | None, source: SourceOptions, threads: int, observer: Observer) -> VerifyReport:
    """What `ucp.verify` finds. `source`: about `against` where it is given, else about `path`."""
    fmt, _ = recognise(path, options=source if against is None else None)
    other = None if against is None else index_of(against, source=source)
    changes: list[Change] = []
    drift: list[str] = []
    casts: tuple[str, ...] = ()
    checked = 0
    try:
        index = fmt.read(path)
        check_cover(index)
        problems = _damage(index, observer, threads)
        drift = _drift(index, observer, threads)
        problems += drift
        checked = checked_bytes(index)
        if other is not None and not problems:
            changes = compare(other, index, observer, cast=True, threads=threads)
            casts = casts_between(other, index)
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
    )


def differences(a: Path, b: Path, *, threads: int, observer: Observer) -> DiffReport:
    """What `ucp.diff` finds."""
    left, right = index_of(a), index_of(b)
    shared = [(s, right.atoms[atom.name].states) for atom, s, _ in left.states() if atom.name in right.atoms]
    return DiffReport(
        a=str(a),
        b=str(b),
        compared=sum(state in states for state, states in shared),
        nbytes=left.nbytes,
        changes=tuple(compare(left, right, observer, threads=threads)),
    )


def prove_written(source: Index, written: Path, *, observer: Observer, threads: int) -> None:
    """Read back what was written, before it is put in place, and compare it with the source. Raises CorruptError."""
    index = index_of(written, unfinished=True)
    changes = compare(source, index, observer, cast=True, threads=threads)
    lines = [
        *_damage(index, observer, threads),
        *_drift(index, observer, threads),
        *(f"{c.param}/{c.state} {c.what}: {c.a} in the source, {c.b} written" for c in changes),
    ]
    if lines:
        raise CorruptError(f"what was written does not read back as the source; it is removed:\n{listed(lines)}")


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
