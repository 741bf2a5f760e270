"""A save as the newest link of a chain: the folder above it has a `chain.json`, which lists it once it is whole.

The link is written, then listed: a save that is killed in between leaves the chain at its last link, and a folder that
the next save of the same name replaces.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ucp.chain.document import CHAIN, Link, read_chain, write_chain
from ucp.contract.registry import recognise
from ucp.errors import UsageError, format_list
from ucp.io.folder import path_of


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


def add_link(path: Path, links: tuple[Link, ...], step: int | None) -> None:
    """List the store at `path` as the newest link."""
    assert step is not None  # by `check_next`
    write_chain(path.parent, (*links, Link(path=str(path), iteration=step)))


def check_first_link(links: tuple[Link, ...], names: Collection[str]) -> None:
    """Raise UsageError unless the first link holds all parameters `names`: a later one holds only some."""
    if not links:
        raise UsageError(
            "expected a first link that holds everything, before one of some experts: save it with plan=Full()"
        )
    path = path_of(links[0].path)
    fmt, _ = recognise(path)
    index = fmt.read(path)
    missing = [name for name in names if name not in index.atoms and name not in index.aliases]
    if missing:
        raise UsageError(
            f"expected a first link that holds everything, before one of some experts; {path} lacks\n"
            f"{format_list(missing)}\nSave with plan=Full()"
        )
