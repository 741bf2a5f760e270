"""Decide a conversion: read indexes, plan the target, plan the work. Nothing is written, no tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from ucp.atom import AtomIndex, Index, check_cover
from ucp.errors import UsageError
from ucp.identity import producer
from ucp.plan import BLOCK, Job, fit_workers, make_job
from ucp.protocols import Target
from ucp.registry import recognise, target
from ucp.state import NameFilter
from ucp.target import TargetOptions
from ucp.topology import Topology

__all__ = ["ConvertOptions", "Prepared", "index_of", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the user asked for."""

    to: str = "ucp"
    """Name of the target."""
    topology: Topology | None = None
    """Layout of the run that will load it; None where the target has no ranks."""
    target: TargetOptions = field(default_factory=TargetOptions)
    """Options of the target."""
    names: NameFilter = field(default_factory=NameFilter)
    """Which parameters and states to take."""
    workers: int = 0
    """Processes; 0 for one per core."""
    memory: int = 1 << 30
    """Bytes of memory for the whole run, beyond the interpreter's own."""
    resume: bool = False
    """Continue an unfinished conversion."""
    overwrite: bool = False
    """Replace a destination that ucp wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversion that is decided and not begun."""

    job: Job
    """The work."""
    target: Target
    """Who planned it."""
    workers: int
    """Processes."""
    threads: int
    """Threads in each."""
    fingerprint: str
    """Digest of source files, options and target: two conversions of the same fingerprint write the same bytes."""

    @property
    def nbytes_out(self) -> int:
        """Bytes of all files of the destination, as far as known before."""
        return sum(file.nbytes for file in self.job.target.files)

    @property
    def projected_bytes(self) -> int:
        """Memory that the workers need at once."""
        return self.workers * self.threads * max((task.projected_bytes for task in self.job.tasks), default=0)


def index_of(path: Path, names: NameFilter | None = None, *, unfinished: bool = False) -> Index:
    """Index of the checkpoint at `path`, its cover proved; only what `names` keeps.

    `unfinished`: it may be the growing part of a conversion.

    Raises SourceError, CoverError, UsageError.
    """
    fmt, _ = recognise(path, unfinished=unfinished)
    index = fmt.read(path)
    check_cover(index)
    return index if names is None or names == NameFilter() else _kept(index, names)


def _kept(index: Index, names: NameFilter) -> Index:
    names.check_used((atom.name, state) for atom, state, _ in index.states())
    atoms: dict[str, AtomIndex] = {}
    for atom in index.atoms.values():
        states = {name: state for name, state in atom.states.items() if names.keeps(atom.name, name)}
        if states:
            atoms[atom.name] = replace(atom, states=states)
    if not atoms:
        raise UsageError("--include and --exclude together leave nothing; `ucp plan` shows what a selection holds")
    groups = tuple(replace(g, params=tuple(p for p in g.params if p in atoms)) for g in index.groups)
    aliases = {alias: name for alias, name in index.aliases.items() if name in atoms}
    left = sum(len(atom.states) for atom in index.atoms.values()) - sum(len(atom.states) for atom in atoms.values())
    dropped = (
        *index.dropped,
        f"{left} states of parameters: left out by --include/--exclude; a whole model does not resume from the rest",
    )
    return replace(index, atoms=atoms, groups=groups, aliases=aliases, dropped=dropped)


def prepare(src: Path, options: ConvertOptions) -> Prepared:
    """Decide everything: writes nothing, reads no tensor."""
    index = index_of(src, options.names)
    _check_dtypes(index, options.target.dtypes)
    chosen = target(options.to)
    plan = chosen.plan(index, options.topology, options.target)
    job = make_job(index, plan)
    workers, threads = fit_workers(options.memory, workers=options.workers or _cores(), threads=2)
    return Prepared(
        job=job,
        target=chosen,
        workers=workers,
        threads=threads,
        fingerprint=_fingerprint(index, options),
    )


def _check_dtypes(index: Index, dtypes: Mapping[str, str]) -> None:
    known = dict.fromkeys(name for _, name, _ in index.states())
    unknown = [state for state in dtypes if state not in known]
    if unknown:
        raise UsageError(f"no parameter has a state {', '.join(unknown)} to cast; there are {', '.join(known)}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprint(index: Index, options: ConvertOptions) -> str:
    asked = [
        producer(),
        index.format,
        sorted((file.path, file.nbytes, file.mtime_ns) for file in index.files),
        options.to,
        str(options.topology),
        asdict(options.target),
        asdict(options.names),
        BLOCK,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())
