"""`chain.json`: which checkpoints a chain has, oldest first. Version 1; see docs/how-to/read-a-chain.md.

{"version": 1, "links": [{"path": "step100", "iteration": 100}, {"path": "step110", "iteration": 110}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ucp.errors import MalformedError, UnsupportedError, UsageError, format_list
from ucp.io.files import open_source
from ucp.io.folder import is_url, resolve_from
from ucp.io.json_text import Natural, NotJson, decode
from ucp.io.writing import replace_file

CHAIN = "chain.json"
_VERSION = 1
_LONGEST = 64 << 20
"""Bytes of a chain.json, at most: half a million links."""


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint of a chain."""

    path: Annotated[str, Meta(min_length=1)]
    """The checkpoint; relative to the chain, absolute, or a URL."""
    iteration: Natural
    """Training step of the states in the checkpoint."""


class ChainDocument(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document."""

    version: int
    """1."""
    links: tuple[Link, ...]
    """In increasing iteration."""
    oldest: Natural | None = None
    """Oldest iteration that can be read, as links that older ones need were removed; None if that is the first."""


class _Version(Struct):
    version: Annotated[int, Meta(ge=1)]


def read_chain(folder: Path) -> tuple[Link, ...]:
    """Links of the chain in `folder`, with paths that are resolved. Raises what `read_document` raises."""
    links = read_document(folder).links
    return tuple(Link(path=str(resolve_from(folder, link.path)), iteration=link.iteration) for link in links)


def read_document(folder: Path) -> ChainDocument:
    """The document of the chain in `folder`. Raises MalformedError, MissingFileError, UnsupportedError."""
    path = folder / CHAIN
    with open_source(str(path)) as file:
        text = file.read(0, min(file.nbytes, _LONGEST + 1))
    try:
        version = decode(text, _Version).version
        if version > _VERSION:
            raise UnsupportedError(
                f"expected version {_VERSION} of {path}; got {version}. It needs a newer ucp: upgrade"
            )
        document = decode(text, ChainDocument)
    except NotJson as error:
        raise MalformedError(
            f"expected the links of a chain in {path}; {error}. Delete it and list the links again (ucp chain add)"
        ) from error
    wrong = [
        f"{later.path} of iteration {later.iteration} after {earlier.path} of {earlier.iteration}"
        for earlier, later in pairwise(document.links)
        if later.iteration <= earlier.iteration
    ]
    if wrong or not document.links:
        what = f"got\n{format_list(wrong)}\n" if wrong else "there are none. "
        raise MalformedError(
            f"expected links of increasing iterations in {path}; {what}Delete it and list the links again "
            "(ucp chain add)"
        )
    return document


def sort_links(links: Iterable[Link]) -> tuple[Link, ...]:
    """Links in increasing iteration. Raises UsageError for two links of one iteration."""
    links = tuple(sorted(links, key=lambda link: link.iteration))
    twice = [f"{a.path} and {b.path}: {a.iteration}" for a, b in pairwise(links) if a.iteration == b.iteration]
    if twice:
        raise UsageError(
            f"expected one checkpoint for each iteration of a chain; got two:\n{format_list(twice)}\nLeave one out, or "
            "say of which iteration it is (--iteration)"
        )
    return links


def write_chain(folder: Path, links: tuple[Link, ...], *, oldest: int | None = None) -> None:
    """Write `chain.json` atomically, with `links` (absolute paths) in increasing iteration.

    `oldest`: the oldest iteration that can be read; None leaves it. Paths below `folder` are written as relative ones.
    Raises UsageError if two links have the same iteration.
    """
    root = str(folder.absolute())
    documents = [{"path": _shorten(link.path, root), "iteration": link.iteration} for link in sort_links(links)]
    if oldest is None and (folder / CHAIN).is_file():
        oldest = read_document(folder).oldest
    document = {"version": _VERSION, "links": documents, **({} if oldest is None else {"oldest": oldest})}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    replace_file(folder / CHAIN, text.encode("utf-8", "surrogateescape") + b"\n")


def _shorten(path: str, root: str) -> str:
    return os.path.relpath(path, root) if not is_url(path) and path.startswith(root + os.sep) else path
