"""Format `chain`: several checkpoints of one run, of any formats, read as the newest state of every parameter."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ucp.chain.document import CHAIN, Link, read_chain, read_document, sort_links, write_chain
from ucp.chain.merge import LinkIndex, choose_links, merge
from ucp.contract.locating import Evidence, Strength
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.registry import recognise
from ucp.core.index import Index
from ucp.errors import MalformedError, SourceError, UnknownFormatError, UsageError
from ucp.io.folder import is_url, path_of, to_absolute


@dataclass(frozen=True, slots=True)
class ChainFormat(Format):
    """Reads chains."""

    options: SourceOptions = field(default_factory=SourceOptions)
    """Options for reading the links, and the iteration to read."""

    name = "chain"
    takes_shapes = True
    takes_order = True
    takes_time = True

    def detect(self, path: Path) -> Evidence | None:
        """Detect a folder with `chain.json`, or that file."""
        root = path.parent if path.name == CHAIN else path
        return Evidence(root, (CHAIN,)) if (root / CHAIN).is_file() else None

    def configured(self, options: SourceOptions) -> ChainFormat:
        """The same format with these options; the links are read with them, too."""
        return ChainFormat(options)

    def read(self, path: Path) -> Index:
        """Index of the chain at the iteration in the options. Raises SourceError, UsageError."""
        indexes = self.read_links(path)
        folder = _find_folder(path)
        return merge(indexes, path=str(folder), evidence=(CHAIN, f"{len(indexes)} of {len(read_chain(folder))} links"))

    def read_links(self, path: Path) -> tuple[LinkIndex, ...]:
        """The links of the chain up to that iteration, the oldest first. Raises SourceError, UsageError."""
        links, at = read_chain(_find_folder(path)), self.options.at
        oldest = read_document(_find_folder(path)).oldest
        if at is not None and oldest is not None and at < oldest:
            raise UsageError(f"expected iteration {oldest} or later, as links before it were removed; got --at {at}")
        wanted = links[: choose_links([link.iteration for link in links], at)]
        of_links = replace(self.options, at=None)
        return tuple(LinkIndex(link.iteration, _read_link(link, of_links)) for link in wanted)


def _find_folder(path: Path) -> Path:
    return (path.parent if path.name == CHAIN else path).absolute()


def add_links(folder: Path, paths: Iterable[Path], *, iteration: int | None) -> tuple[Link, ...]:
    """Add checkpoints to the chain in `folder`, which is created if needed. Returns all links of the chain.

    `iteration`: training step of a checkpoint that records none. Raises SourceError, UsageError.
    """
    if is_url(str(folder)):
        raise UsageError(
            f"expected a local folder for a chain; got {folder}. Create it locally, then upload chain.json"
        )
    if not (folder / CHAIN).exists():
        _check_free(folder)
    if iteration is not None and (type(iteration) is not int or not 0 <= iteration < 1 << 63):
        raise UsageError(f"expected --iteration to be a whole number from 0 on; got {iteration!r}")
    links = _list(folder)
    for path in paths:
        fmt, evidence = recognise(path)
        if fmt.takes_time:
            raise UsageError(f"expected checkpoints to add to a chain; {path} is a chain itself: add its links")
        place = to_absolute(evidence.root)
        key = _identify(place)
        if key == _identify(str(folder)):
            raise UsageError(f"expected a chain in a folder of its own; {folder} holds the checkpoint {path} itself")
        if key in links:
            listed = links[key].iteration
            if iteration not in (None, listed):
                raise UsageError(f"expected --iteration {listed}, which the chain lists for {path}; got {iteration}")
            continue
        step = fmt.read(path).step
        if step is None and iteration is None:
            raise UsageError(f"expected a checkpoint that records its training step; {path} does not: pass --iteration")
        if step is not None and iteration not in (None, step):
            raise UsageError(f"expected --iteration {step}, which {path} records; got {iteration}")
        links[key] = Link(path=place, iteration=step if step is not None else iteration or 0)
    sort_links(links.values())  # refuses two of one iteration before the folder is created
    folder.mkdir(parents=True, exist_ok=True)
    with lock_chain(folder):
        write_chain(folder, tuple({**links, **_list(folder)}.values()))
        return read_chain(folder)


def _list(folder: Path) -> dict[str, Link]:
    """Links of the chain in `folder` by `_identify`; none if there is no chain."""
    return {_identify(link.path): link for link in (read_chain(folder) if (folder / CHAIN).is_file() else ())}


def _identify(path: str) -> str:
    """The same text for all paths of a checkpoint, symbolic links included."""
    return path if is_url(path) else os.path.realpath(path)


@contextmanager
def lock_chain(folder: Path) -> Iterator[None]:
    """Wait for other processes that add links. Without effect on file systems that cannot lock a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_free(folder: Path) -> None:
    """Raise UsageError for a folder that is read as a checkpoint (DeepSpeed's, with `latest`): it would be as two."""
    try:
        fmt, evidence = recognise(folder)
    except SourceError:
        return
    if evidence.strength > Strength.SUFFIX and not isinstance(fmt, ChainFormat):  # written in the meantime
        raise UsageError(
            f"expected a chain in a folder of its own; {folder} is read as {fmt.name} ({evidence.reasons[0]})"
        )


def _read_link(link: Link, options: SourceOptions) -> Index:
    """Index of a link. Raises SourceError; MalformedError if its iteration is not the one that the chain lists."""
    try:
        fmt, _ = recognise(path_of(link.path), options=options)
    except UnknownFormatError as error:
        raise UnknownFormatError(
            f"link of iteration {link.iteration} of the chain: {error}\nIf it was moved or deleted, delete chain.json "
            "and list the links again (ucp chain add)"
        ) from error
    if isinstance(fmt, ChainFormat):
        raise MalformedError(f"expected checkpoints in a chain; {link.path} is a chain itself: list its links instead")
    index = fmt.read(path_of(link.path))
    if index.step is not None and index.step != link.iteration:
        raise MalformedError(
            f"expected iteration {link.iteration} in {link.path}, as the chain lists it; it now holds iteration "
            f"{index.step}: it was saved again. Delete chain.json and list the links again (ucp chain add)"
        )
    return index
