"""Two checkpoints that are compared: read with one set of options, under the same names, narrowed to a selection."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import naming_style_of
from ucp.conversion.convert import match_ties
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import prepare
from ucp.core.index import TAG, WEIGHT, DoubtKind, Index
from ucp.errors import IdleOptionError, UcpError
from ucp.source.moments import ZeroMoments
from ucp.source.read import index_of
from ucp.source.selection import NameFilter

ALL = NameFilter()
"""Selects everything."""


class SourceReader:
    """Reads several checkpoints with the same options; at least one of them must have a use for the options."""

    def __init__(self, source: SourceOptions) -> None:
        self._source = source
        self._idle: IdleOptionError | None = None
        self._is_used = False

    def read(self, path: Path) -> Index:
        """Index of one checkpoint; its format may have no use for the options."""
        try:
            index = index_of(path, source=self._source)
        except IdleOptionError as error:
            self._idle = self._idle or error
            return index_of(path)
        self._is_used = True
        return index

    def check_used(self) -> None:
        """Raise IdleOptionError if no checkpoint had a use for the options."""
        if self._idle is not None and not self._is_used:
            raise self._idle


def rename_as(index: Index, other: Index, path: Path, source: SourceOptions) -> Index:
    """`other`, the checkpoint at `path`, under the names of `index`, as a conversion would write it.

    Unchanged if they share names, or if not all checkpoints of the format of `index` have names of one style, as those
    of transformers have.
    """
    if not naming_style_of(index) or index.atoms.keys() & other.atoms.keys():
        return other
    options = ConvertOptions(
        to=index.format,
        accept=frozenset(DoubtKind),
        zero_moments=ZeroMoments.KEEP,
        settings={"config": index.path},
        **{option.name: getattr(source, option.name) for option in fields(source)},
    )
    try:
        return match_ties(index, prepare(path, options).job.index)
    except UcpError:  # the note on names tells what to do instead
        return other


def drop_optional(index: Index, store: Index) -> Index:
    """`index` without extras that a conversion may leave out: the tag, and sidecar files that `store` does not have."""
    names = {extra.name for extra in store.extras}
    extras = (stored for stored in index.extras if stored.name in names or not stored.is_sidecar)
    return replace(index, extras=tuple(stored for stored in extras if stored.name != TAG))


def select_compared(both: tuple[Index, Index], names: NameFilter) -> tuple[Index, Index]:
    """Two checkpoints, narrowed to the parameters and states that `names` selects.

    Hyper-parameters are kept for parameters with selected optimizer states. Raises UsageError for a glob that matches
    nothing in either checkpoint.
    """
    if names == ALL:
        return both
    names.check_used((atom.name, state) for index in both for atom, state, _ in index.states())
    a, b = (_narrow(index, names) for index in both)
    return a, b


def _narrow(index: Index, names: NameFilter) -> Index:
    narrowed = {
        name: replace(atom, states={state: stored for state, stored in atom.states.items() if names.keeps(name, state)})
        for name, atom in index.atoms.items()
    }
    atoms = {name: atom for name, atom in narrowed.items() if atom.states}
    with_states = {name for name, atom in atoms.items() if atom.states.keys() - {WEIGHT}}
    groups = [replace(group, params=tuple(p for p in group.params if p in with_states)) for group in index.groups]
    return replace(
        index,
        atoms=atoms,
        groups=tuple(group for group in groups if group.params),
        aliases={alias: name for alias, name in index.aliases.items() if name in atoms},
    )


def describe_no_overlap(a: Index, b: Index) -> tuple[str, ...]:
    """A note if two checkpoints have no parameter name in common."""
    if not a.atoms or not b.atoms or a.atoms.keys() & b.atoms.keys():
        return ()
    note = (
        f"no parameter name occurs in both ({next(iter(a.atoms))} in one, {next(iter(b.atoms))} in the other): these "
        "are different models, or one model with different names for its modules. If a conversion renamed the "
        "parameters, `ucp convert --verify` compares them under the new names"
    )
    return (note,)
