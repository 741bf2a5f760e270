"""The files of a tag folder, each unpickled once; what cannot be read or understood is a problem, not the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ucp.contract.problems import Problems
from ucp.core.index import SourceFile
from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.files import split_parts
from ucp.io.folder import path_of
from ucp.io.identity import source_file
from ucp.io.pickle.fields import text
from ucp.io.torch_file.archive import read_archive
from ucp_formats.deepspeed.locate import TagFolder
from ucp_formats.deepspeed.names import FileName, Role
from ucp_formats.deepspeed.read.side_by_side import read_side_by_side
from ucp_formats.deepspeed.refusals import refuse_contents

__all__ = ["SavedFile", "parsed", "read_files", "source_files", "try_read"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of torch.save."""

    name: FileName
    """Its name, understood."""
    path: str
    """Absolute path."""
    root: Mapping[object, object]
    """What was saved."""
    records: tuple[Record, ...]
    """Checksums of its storages."""

    @property
    def version(self) -> str | None:
        """Version of DeepSpeed that wrote it; it may have blanks around it in the file."""
        version = self.root.get("ds_version")
        return None if version is None else text(version, f"ds_version of {self.path}").strip()


def read_files(folder: TagFolder, problems: Problems) -> list[SavedFile]:
    """Every file of the grammar that can be read. Raises UnsupportedError for layouts that are not read."""
    files = []
    for read, found in read_side_by_side(partial(_try_apart, folder.path), list(folder.files)):
        problems.add(found)
        if read is not None:
            files.append(read)
    refuse_contents(str(folder.path), {file.name.name: file.root for file in files})
    return files


def _try_apart(folder: Path, name: FileName) -> tuple[SavedFile | None, Problems]:
    """The file of that name, or None, and what is wrong with it."""
    problems = Problems()
    return try_read(folder, name, problems), problems


def try_read(folder: Path, name: FileName, problems: Problems) -> SavedFile | None:
    """The file of that name in `folder`, or None and a problem."""
    try:
        archive = read_archive(str(folder / name.name))
        if not isinstance(archive.root, dict):
            raise UnsupportedError(f"expected a dict at the top; got a {type(archive.root).__name__}")
        if name.role in (Role.MODEL, Role.SHARDED_MODEL) and "module" not in archive.root:
            held = ", ".join(map(repr, list(archive.root)[:8])) or "nothing"
            raise MalformedError(f"expected 'module' among the keys, as {name.label} have it; got {held}")
    except MissingFileError:
        problems.missing.append(name.name)
    except (SourceError, CorruptError) as error:
        _note(name, str(error).replace(f"{folder / name.name}: ", "").replace(f"{folder}/", ""), error, problems)
    else:
        return SavedFile(name=name, path=str(folder / name.name), root=archive.root, records=archive.records)
    return None


def parsed(files: Iterable[SavedFile], parse: Callable[[SavedFile], _T], problems: Problems) -> list[_T]:
    """What `parse` makes of each file; files that are not what it expects go to `problems`."""
    found = []
    for file in files:
        try:
            found.append(parse(file))
        except SourceError as error:
            _note(file.name, str(error), error, problems)
    return found


def _note(name: FileName, text: str, error: Exception, problems: Problems) -> None:
    lines = problems.unsupported if isinstance(error, UnsupportedError) else problems.wrong
    lines.append(f"{name.name} ({name.label}): {text}")


def source_files(paths: Iterable[tuple[str, str]]) -> Iterator[SourceFile]:
    """Identity of each file given as (path, role); of its parts, where it is split."""
    for path, role in paths:
        for part in (path,) if path_of(path).exists() else split_parts(path):
            yield source_file(part, role)
