"""Proof that what a conversion wrote reads back as its source; and what damage a checkpoint shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ucp.contract.protocols import Observer, SourceOptions
from ucp.contract.sidecars import list_sidecars
from ucp.core.index import WEIGHT, Index
from ucp.core.tensor import Record, TensorRef
from ucp.errors import CorruptError, listed
from ucp.source.read import index_as_told
from ucp.transfer.compare import compare_copies, scan_digests, scan_records
from ucp.transfer.differences import compare, keeps_extras
from ucp.transfer.plan.job import Job


def verify_written(job: Job, written: Path, *, source: SourceOptions, observer: Observer, threads: int) -> None:
    """Read back what was written, before it is put in place, and compare it with the source. Raises CorruptError.

    `source`: what the user says of the source, or of a target that knows families alone.
    """
    before, index = job.index, index_as_told(written, source=source, unfinished=True)
    before = _tied_as(index, before)
    if job.target.regrouped:
        before, index = (replace(own, groups=()) for own in (before, index))
    if not keeps_extras(before, index):
        before, index = (_with_companions_alone(own, job) for own in (before, index))
    before = _grouped_as(index, before, job)
    changes = compare(before, index, observer, cast=True, extras=True, threads=threads)
    lines = [
        *damage(index, observer, threads),
        *drift(index, observer, threads),
        *(
            f"{c.param}/{c.state} {c.what}: {c.a} in the source, {c.b} written"
            for c in changes
            if c.what != "missing" or c.state not in job.target.zeros.get(c.param, ())
        ),
    ]
    if lines:
        raise CorruptError(f"what was written does not read back as the source; it is removed:\n{listed(lines)}")


def _with_companions_alone(index: Index, job: Job) -> Index:
    """`index` without extras, but for the companion files that were carried along."""
    carried = {own.name for own in list_sidecars(job.index)}
    names = {file.path for file in job.target.files if file.path in carried}
    kept = tuple(own for own in index.extras if own.is_sidecar and own.name.partition("/")[2] in names)
    return replace(index, extras=kept)


def _tied_as(written: Index, source: Index) -> Index:
    """`source`, tied as the reader of what was written sees it: it may know of more ties, or of fewer.

    A second name that it reads as a tensor of its own is one to compare with the first.
    """
    untied = {alias: name for alias, name in source.aliases.items() if alias in written.atoms}
    copies = {
        alias: replace(source.atoms[name], name=alias, states={WEIGHT: source.atoms[name].states[WEIGHT]})
        for alias, name in untied.items()
    }
    aliases = {alias: name for alias, name in source.aliases.items() if alias not in untied}
    return replace(source, atoms={**source.atoms, **copies}, aliases={**written.aliases, **aliases})


def _grouped_as(written: Index, source: Index, job: Job) -> Index:
    """`source` without the places in groups that go with optimizer states which the target does not hold."""
    kept = {name for group in written.groups for name in group.params}
    bare = {name for name, atom in source.atoms.items() if not atom.states.keys() - {WEIGHT}} | job.target.lost.keys()
    groups = (replace(g, params=tuple(p for p in g.params if p in kept or p not in bare)) for g in source.groups)
    return replace(source, groups=tuple(groups))


def damage(index: Index, observer: Observer, threads: int) -> list[str]:
    """A line for everything in a checkpoint that is not as it was recorded."""
    summed = scan_records(index, observer, threads=threads)
    return [
        *(f"CRC-32 differs: {r.path}: {r.name}{owners(index, r)}" for r in summed),
        *(f"digest differs: {line}" for line in scan_digests(index, observer, threads=threads)),
    ]


def drift(index: Index, observer: Observer, threads: int) -> list[str]:
    """A line for every state that is not the same in all its copies."""
    return [f"copies differ: {line}" for line in compare_copies(index, observer, threads=threads)]


def owners(index: Index, record: Record) -> str:
    """Names of the states that lie in a record."""
    held = []
    for atom, name, state in index.states():
        for fragment in state.fragments:
            ref = fragment.ref
            if not isinstance(ref, TensorRef) or ref.path != record.path or not ref.numel:
                continue
            if ref.offset < record.offset + record.nbytes and record.offset < ref.offset + ref.extent:
                held.append(f"{atom.name}/{name}")
                break
    shown = ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")
    return f", part of {shown}" if held else ""
