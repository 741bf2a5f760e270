"""Merge the links of a chain: each parameter, with all of its states, comes from the newest link that has them all.

1. Links are checkpoints of one run at increasing iterations. A link may hold only some parameters: some of the
   experts (partial-expert checkpoints) or some of the operators (sparse windows).
2. `merge` takes each parameter, with all of its states, from the newest link that has all of them. States of one
   parameter never come from two links: a weight does not belong with moments of another iteration.
3. A parameter that is older than the newest link records its iteration (`AtomIndex.iteration`): see
   `ucp.chain.staleness`.

Pure: the indexes of the links go in, an index comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from ucp.core.index import Index, ParamGroup
from ucp.errors import MalformedError, MissingStateError, UsageError, format_list

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkIndex:
    """A link, read."""

    iteration: int
    """Training step of its states."""
    index: Index
    """What it holds."""


def choose_links(iterations: Sequence[int], at: int | None) -> int:
    """Number of links up to iteration `at`; all if it is None. Raises UsageError if there are none."""
    count = len(iterations) if at is None else sum(iteration <= at for iteration in iterations)
    if not count:
        raise UsageError(f"expected iteration {iterations[0]} or later, because the chain begins there; got --at {at}")
    return count


def merge(links: Sequence[LinkIndex], *, path: str, evidence: tuple[str, ...]) -> Index:
    """The checkpoint that `links`, oldest first, form together. Raises MalformedError, MissingStateError."""
    newest = links[-1]
    holders: dict[str, list[LinkIndex]] = {name: [] for name in _list_names(links)}
    for link in links:
        for name, atom in link.index.atoms.items():
            if not atom.is_cast:
                holders[name].append(link)
    unsaved = [name for name, of_param in holders.items() if not of_param]
    if unsaved:
        raise MissingStateError(
            f"expected a link of {path} that has the full states of every parameter; those of these are in none up to "
            f"iteration {newest.iteration}, in which a window is incomplete:\n{format_list(unsaved)}\nRead the first "
            f"link of the window alone: it has the weights with which the model computes"
        )
    chosen = {name: _choose(name, links_of_param) for name, links_of_param in holders.items()}
    atoms = {
        name: replace(link.index.atoms[name], iteration=link.iteration if link is not newest else None)
        for name, link in chosen.items()
    }
    used = [link.index for link in links if any(link is other for other in chosen.values()) or link is newest]
    return replace(
        newest.index,
        path=path,
        format="chain",
        evidence=evidence,
        step=newest.iteration,
        atoms=atoms,
        groups=_merge_groups(links),
        aliases={alias: name for link in links for alias, name in link.index.aliases.items() if alias not in atoms},
        files=_join(index.files for index in used),
        records=_join(index.records for index in used),
        notes=_join(index.notes for index in used),
        lost={name: loss for link in links for name, loss in link.index.lost.items() if chosen.get(name) is link},
        doubts=_join(index.doubts for index in used),
        unchecked=_join(index.unchecked for index in used),
        origin=newest.index.origin or newest.index.format,
        keys=None,
    )


def _join(values: Iterable[Iterable[T]]) -> tuple[T, ...]:
    """All values in order, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(values)))


def _list_names(links: Sequence[LinkIndex]) -> list[str]:
    """Names of all parameters, in the order of the link with the most parameters, then of the others."""
    order = sorted(links, key=lambda link: -len(link.index.atoms))
    return list(dict.fromkeys(name for link in order for name in link.index.atoms))


def _choose(name: str, holders: Sequence[LinkIndex]) -> LinkIndex:
    """The newest of the links that have a parameter which has all of its states. Raises MissingStateError.

    Raises MalformedError where they have it in different shapes.
    """
    shapes = {link.index.atoms[name].global_shape: link for link in holders}
    if len(shapes) > 1:
        raise MalformedError(
            f"expected checkpoints of one model in a chain; {name} has\n"
            + format_list(f"{list(shape)} in {link.index.path}" for shape, link in shapes.items())
        )
    wanted = {state for link in holders for state in link.index.atoms[name].states}
    for link in reversed(holders):
        if wanted <= link.index.atoms[name].states.keys():
            return link
    held = (
        f"{', '.join(link.index.atoms[name].states)} in {link.index.path}, iteration {link.iteration}"
        for link in holders
    )
    raise MissingStateError(
        f"expected all states of {name} in one link of the chain, because states of different iterations do not "
        f"belong together; got\n{format_list(held)}\nAdd a link that has them all"
    )


def _merge_groups(links: Sequence[LinkIndex]) -> tuple[ParamGroup, ...]:
    """Param groups of the newest link that has any; each parameter is in the group where its newest link lists it.

    Raises MalformedError if links differ in the number of groups: it does not change during a run.
    """
    newest = next((link for link in reversed(links) if link.index.groups), links[-1])
    order = sorted(links, key=lambda link: -sum(len(group.params) for group in link.index.groups))
    names = dict.fromkeys(name for link in order for group in link.index.groups for name in group.params)
    number_of: dict[str, int] = {}
    for link in links:
        groups = link.index.groups
        if groups and len(groups) != len(newest.index.groups):
            raise MalformedError(
                f"expected {len(newest.index.groups)} parameter groups in every link of the chain, as in "
                f"{newest.index.path}; got {len(groups)} in {link.index.path}"
            )
        for name in link.index.atoms:
            number_of.pop(name, None)
        number_of |= {name: number for number, group in enumerate(groups) for name in group.params}
    return tuple(
        replace(group, params=tuple(name for name in names if number_of.get(name) == number))
        for number, group in enumerate(newest.index.groups)
    )
