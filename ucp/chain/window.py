"""Sparse windows: links at successive iterations, each with the full states of some operators (MoEtion).

In iteration t of a window, a link has the full states of the operators of one slot. Of the operators of later slots it
has the weights with which the model computes (`AtomIndex.is_cast`), of those of earlier slots nothing. So the first
link has the weights of all; the operators' full states are each of one iteration. A replay carries them to the last.

Pure: the indexes of links go in, views of them come out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from ucp.chain.merge import LinkIndex
from ucp.core.index import Index, Kind
from ucp.errors import MissingStateError, format_list

CLIP_NORM, SKIPPED, LR, STEPS = "clip_norm", "skipped", "lr", "step"
"""Extras of a link: the norm that clipped the gradients of its iteration, whether the loss scaler skipped it, its
learning rate, its number of optimizer steps."""


@runtime_checkable
class HoldsLinks(Protocol):
    """A format whose checkpoints consist of links, which can be read one by one."""

    def read_links(self, path: Path) -> tuple[LinkIndex, ...]:
        """The links up to the iteration in the format's options, the oldest first. Raises SourceError, UsageError."""


def list_needed(extras: Collection[str]) -> list[str]:
    """Numbers of an iteration that its replay needs, because it lacks the gradients of some operators.

    `extras`: names of the extras of its link.
    """
    return [CLIP_NORM, *([SKIPPED] if "scaler" in extras else [])]


def find_window(links: Sequence[LinkIndex], *, path: str) -> tuple[LinkIndex, ...]:
    """The newest links, oldest first, of which the first has all parameters, and each has those of one slot in full.

    Raises MissingStateError if there are none.
    """
    full = [list_full(link) for link in links]
    params = {name for link in links for name in _list_params(link)}
    for last in reversed(range(len(links))):
        seen: set[str] = set()
        for first in reversed(range(last + 1 if full[last] else 0)):
            if full[first] & seen:
                break
            seen |= full[first]
            if seen == params and _is_window(links[first : last + 1]):
                return tuple(links[first : last + 1])
    names = (f"iteration {link.iteration}: {len(of_link)}" for link, of_link in zip(links, full, strict=True))
    raise MissingStateError(
        f"expected a whole window in {path}: links of successive iterations, the first with all {len(params)} "
        f"parameters, each of them in full in one link; in full are\n{format_list(names)}\nConvert the chain as it is, "
        "with its mixed iterations, or take an older checkpoint"
    )


def _is_window(links: Sequence[LinkIndex]) -> bool:
    left = _list_params(links[0])
    for number, link in enumerate(links):
        if link.iteration != links[0].iteration + number or _list_params(link) != left:
            return False
        left -= list_full(link)
    return True


def list_full(link: LinkIndex) -> frozenset[str]:
    """Parameters of which a link has the full states."""
    return frozenset(name for name in _list_params(link) if not link.index.atoms[name].is_cast)


def _list_params(link: LinkIndex) -> frozenset[str]:
    return frozenset(name for name, atom in link.index.atoms.items() if atom.kind is not Kind.BUFFER)


def list_views(links: Sequence[LinkIndex]) -> list[Index]:
    """For each link of a window the index of all parameters at its iteration.

    Those that an earlier link has in full are older there: a replay has carried them on.
    """
    groups, views = links[0].index.groups, []
    atoms = links[0].index.atoms
    for link in links:
        atoms = {name: link.index.atoms.get(name, atom) for name, atom in atoms.items()}
        of_link = zip(groups, link.index.groups, strict=True)
        named = tuple(replace(group, hyper=other.hyper) for group, other in of_link)
        views.append(replace(link.index, atoms=atoms, groups=named, aliases=links[0].index.aliases, lost={}))
    return views
