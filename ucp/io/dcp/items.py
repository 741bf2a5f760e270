"""Locates the elements of a distributed checkpoint's items, without reading them.

1. Check that every file that `.metadata` refers to is there and long enough; one error names all that are not.
2. Read both ends of each item, which hold its structure; items next to each other in a file share a read.
3. Compare the item with templates (`ucp.io.dcp.template`); if none matches, parse it and make a template of it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from ucp.errors import (
    MalformedError,
    MissingFileError,
    SourceError,
    UcpError,
    UnsupportedError,
    format_count,
    format_list,
)
from ucp.io.dcp.metadata import ItemPlace
from ucp.io.dcp.template import ITEM_END, Item, Template, make_template
from ucp.io.files import SourceFile, join_ranges, open_source
from ucp.io.folder import path_of
from ucp.io.torch_file.archive import read_embedded
from ucp.io.torch_file.zipdir import Window

_SPAN = 4 << 20
"""Most bytes of one read."""
_END_RECORD = 22
"""Bytes of the end record of a zip archive."""
_MOST_TEMPLATES = 64
"""Most templates of one kind; further items that match none are parsed one by one."""


def check_files(folder: str, places: Iterable[ItemPlace]) -> dict[str, int]:
    """Sizes in bytes of the files that `places` refer to, by relative name.

    Raises
    ------
    MissingFileError
        Files are missing; all are named.
    MalformedError
        Files are truncated; all are named.
    """
    stops: dict[str, int] = {}
    for file, offset, nbytes in places:
        if stops.get(file, -1) < offset + nbytes:
            stops[file] = offset + nbytes
    missing, sizes = [], {}
    for file in sorted(stops):
        try:
            sizes[file] = path_of(os.path.join(folder, file)).stat().st_size
        except FileNotFoundError:
            missing.append(file)
            continue
        except OSError as error:
            raise SourceError(f"cannot read {folder}/{file}: {error.strerror}") from error
        except ValueError as error:  # the metadata may name anything
            raise MalformedError(
                f"{folder}/.metadata: expected the name of a file; got {file!r}. It is damaged: copy it again"
            ) from error
    if missing:
        raise MissingFileError(
            f"{len(missing)} of {format_count(len(stops), 'file')} "
            f"that .metadata refers to not found in {folder}; copy what is missing:\n"
            f"{format_list(missing, most=100)}"
        )
    short = {file: stop for file, stop in stops.items() if sizes[file] < stop}
    if short and all(_is_whole(os.path.join(folder, file)) for file in short):
        other = {file: f"{sizes[file]} bytes; .metadata refers to {n}" for file, n in stops.items() if sizes[file] != n}
        raise mixed_saves_error(folder, other)
    if short:
        lines = (f"{file}: {sizes[file]} bytes; the metadata refers to {stop}" for file, stop in sorted(short.items()))
        raise MalformedError(
            f"{format_count(len(short), 'truncated file', 'truncated files')} in {folder}; copy again:\n"
            f"{format_list(lines, most=100)}"
        )
    return sizes


def _is_whole(path: str) -> bool:
    """Whether a file of items begins and ends as a complete one does."""
    with open_source(path) as file:
        return (
            file.nbytes > _END_RECORD
            and file.read(0, 4) == b"PK\x03\x04"
            and file.read(file.nbytes - _END_RECORD, 4) == b"PK\x05\x06"
        )


def mixed_saves_error(folder: str, files: Mapping[str, str]) -> MalformedError:
    """The error for intact files that `.metadata` does not describe. `files`: name to what is wrong."""
    lines = (f"{file}: {what}" for file, what in sorted(files.items()))
    return MalformedError(
        f"{folder}: .metadata and {format_count(len(files), 'file is', 'files are')} of different saves, or files have "
        f"one another's names:\n{format_list(lines, most=8)}\nEach file is intact: copy .metadata and all files of "
        "one save"
    )


def read_items(folder: str, places: Sequence[ItemPlace], announced: Sequence[object] = ()) -> list[Item]:
    """Read the items at `places`, in that order. Raises MalformedError naming all that cannot be read.

    `announced`: dtype and shape of each in the metadata, so that only templates of the same kind are tried.
    """
    items: list[Item | None] = [None] * len(places)
    wrong: list[str] = []
    foreign: dict[str, str] = {}
    templates: dict[tuple[int, object], list[Template]] = {}  # by bytes and `announced`
    by_file: dict[str, list[int]] = {}
    for i, place in enumerate(places):
        by_file.setdefault(place[0], []).append(i)
    for name, numbers in sorted(by_file.items()):
        numbers.sort(key=lambda i: places[i][1:])
        with open_source(os.path.join(folder, name)) as file:
            ends = _Ends(file, [places[i][1:] for i in numbers])
            failed = []
            for i in numbers:
                _, offset, nbytes = places[i]
                known = templates.setdefault((nbytes, announced[i] if announced else None), [])
                try:
                    items[i] = _read_item(known, ends, file, offset, nbytes)
                except UcpError as error:
                    if file.nbytes > 10 and file.read(8, 2) == b'{"':  # torch 2.13 to 2.14: every item is at byte 0
                        raise UnsupportedError(
                            f"{folder}: the items are safetensors (SerializationFormat.SAFETENSORS); .metadata does "
                            "not say where they lie, and torch cannot load them either. Save with the default of "
                            "FileSystemWriter, or with HuggingFaceStorageWriter"
                        ) from error
                    wrong.append(str(error))
                    failed.append(offset)
            # neither the head of an item nor zeros, as damage leaves them
            are_inside = any(file.read(offset, 4) not in (b"PK\x03\x04", bytes(4)) for offset in failed)
            if are_inside and _is_whole(file.path):
                foreign[name] = f"{len(failed)} of {format_count(len(numbers), 'item')} not where .metadata says"
    if foreign:
        raise mixed_saves_error(folder, foreign)
    if wrong:
        raise MalformedError(
            f"{format_count(len(wrong), 'item')} in {folder} cannot be read:\n{format_list(wrong)}\nCopy the files "
            "again"
        )
    return [item for item in items if item is not None]


def _read_item(known: list[Template], ends: _Ends, file: SourceFile, start: int, nbytes: int) -> Item:
    """Read the item in the bytes `start` to `start + nbytes`. The template that matched is tried first next time."""
    for number, template in enumerate(known):
        item = template.match(file.path, start, nbytes, ends.find)
        if item is not None:
            if number:
                known.insert(0, known.pop(number))
            return item
    archive = read_embedded(file, start=start, nbytes=nbytes)
    template_of_item = make_template(Window(file, start, nbytes), archive) if len(known) < _MOST_TEMPLATES else None
    if template_of_item is not None:
        known.insert(0, template_of_item)
    return Item(archive.root, archive.records)


class _Ends:
    """Both ends of the items of one file, fetched with few reads; callers ask for them in order."""

    def __init__(self, file: SourceFile, items: Sequence[tuple[int, int]]) -> None:
        """`items`: (offset, bytes), in increasing offset."""
        self._file = file
        ranges = []
        for offset, nbytes in items:
            ends = [(offset, offset + nbytes)]
            if nbytes > 2 * ITEM_END:
                ends = [(offset, offset + ITEM_END), (offset + nbytes - ITEM_END, offset + nbytes)]
            ranges += ends
        self._spans = [(low, high) for low, high, _ in join_ranges(sorted(ranges), gap=file.gap, limit=_SPAN)]
        file.prefetch(self._spans)
        self._starts = [start for start, _ in self._spans]
        self._read: OrderedDict[int, bytes] = OrderedDict()
        self._last = (0, 0, b"")

    def find(self, offset: int) -> tuple[bytes, int]:
        """Return a buffer that contains byte `offset` of the file, and the position of that byte in it."""
        start, stop, buffer = self._last
        if start <= offset < stop:
            return buffer, offset - start
        number = bisect_right(self._starts, offset) - 1
        start, stop = self._spans[number]
        if number not in self._read:
            self._read[number] = self._file.read(start, stop - start)
            if len(self._read) > 2:
                self._read.popitem(last=False)
        self._last = (start, stop, self._read[number])
        return self._read[number], offset - start
