"""A save as the newest link of a chain: the folder above it has a `chain.json`, which lists it once it is whole.

The link is written, then listed: a save that is killed in between leaves the chain at its last link, and a folder that
the next save of the same name replaces. With `keep`, links that no restore point needs are taken off the list, then
removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ucp.chain.document import CHAIN, Link, read_chain, write_chain
from ucp.chain.format import ChainFormat, lock_chain
from ucp.chain.merge import LinkIndex, merge
from ucp.chain.window import find_window
from ucp.contract.registry import recognise
from ucp.errors import MissingStateError, UsageError, format_list
from ucp.io.folder import path_of
from ucp.saving.commit import remove_store, was_saved


def read_links(path: Path) -> tuple[Link, ...]:
    """Links of the chain in the folder above `path`, oldest first; none if there is no chain yet."""
    return read_chain(path.parent) if (path.parent / CHAIN).is_file() else ()


def check_next(path: Path, links: tuple[Link, ...], step: int | None) -> int:
    """The step. Raises UsageError unless a save of it to `path` can be the newest of the chain's links."""
    if step is None:
        raise UsageError("expected step=, as a chain lists the training step of each link, and no optimizer counts it")
    last = links[-1].iteration if links else -1
    if step <= last:
        raise UsageError(
            f"expected a step after {last}, the newest in {path.parent / CHAIN}; got {step}. If the run went back to "
            "an earlier link, begin a new chain in another folder"
        )
    return step


def add_link(path: Path, step: int | None) -> None:
    """List the store at `path` as the newest link, beside those that others have listed since the save began."""
    assert step is not None  # by `check_next`
    with lock_chain(path.parent):
        write_chain(path.parent, (*read_links(path), Link(path=str(path), iteration=step)))


def list_held(links: tuple[Link, ...], names: Collection[str]) -> frozenset[str]:
    """Parameters that the newest link holds. Raises UsageError unless the links together hold all of `names`."""
    newest: frozenset[str] = frozenset()
    missing = set(names)
    for number, link in enumerate((*links[-1:], *links[:-1])):
        if missing or not number:
            index = recognise(path_of(link.path))[0].read(path_of(link.path))
            held = frozenset(name for name, atom in index.atoms.items() if not atom.is_cast)
            missing -= {*held, *index.aliases}
            newest = newest or held
    if missing:
        raise UsageError(
            "expected a chain whose links hold everything, before a link of some experts; in none are\n"
            f"{format_list(name for name in names if name in missing)}\nSave with plan=Full()"
        )
    return newest


def collect_links(folder: Path, keep: int) -> None:
    """Remove what the newest `keep` restore points of a chain do not need: from its list, then from the disk.

    Links that no save wrote, or that are elsewhere, stay.
    """
    with lock_chain(folder):
        removed = _take_off_list(folder, keep)
    for path in removed:
        remove_store(path)


def _take_off_list(folder: Path, keep: int) -> list[Path]:
    """The stores of links that are not needed, which are no longer listed."""
    needed, oldest = find_needed(ChainFormat().read_links(folder), keep)
    links = read_chain(folder)
    removed = [Path(link.path) for link in links if link.iteration not in needed]
    removed = [path for path in removed if path.parent == folder and not path.is_symlink() and was_saved(path)]
    if removed:
        write_chain(folder, tuple(link for link in links if Path(link.path) not in removed), oldest=oldest)
    return removed


def find_needed(links: Sequence[LinkIndex], keep: int) -> tuple[frozenset[int], int]:
    """Iterations of the links that the newest `keep` restore points consist of, and the oldest of these points.

    A restore point is a link up to which the links hold all parameters; in a chain of sparse windows the last link of a
    window. Links after the newest point are needed, too.
    """
    names = {name for link in links for name in link.index.atoms}
    needed: set[int] = set()
    points: list[int] = []
    for count in reversed(range(1, len(links) + 1)):
        used = _find_used(links[:count], names)
        if used:
            points.append(links[count - 1].iteration)
        elif not points:
            needed.add(links[count - 1].iteration)
        needed |= used
        if len(points) == keep:
            return frozenset(needed), points[-1]
    return frozenset(link.iteration for link in links), links[0].iteration


def _find_used(links: Sequence[LinkIndex], names: Collection[str]) -> frozenset[int]:
    """Iterations of the links that a read at the last of them uses; none if that is no restore point."""
    try:
        atoms = merge(links, path="", evidence=()).atoms
        window: set[int] = set()
        if any(atom.is_cast for link in links for atom in link.index.atoms.values()):
            window = {link.iteration for link in find_window(links, path="")}
    except MissingStateError:
        return frozenset()
    if len(atoms) < len(names) or (window and links[-1].iteration not in window):
        return frozenset()
    iterations = {atom.iteration for atom in atoms.values() if atom.iteration is not None}
    return frozenset({links[-1].iteration, *iterations, *window})
