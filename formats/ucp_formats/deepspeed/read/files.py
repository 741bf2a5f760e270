"""The files of a tag folder, each unpickled once; what cannot be read or understood is a problem, not the end.

Layouts that are recognised and not read are refused, each with what was seen and what to do: names are looked at first
(`refuse_names`), then what the files say (`read_files`).

An index of thousands of files is bound by the processor: many are read in several processes, forked only where that is
safe (no other thread, no torch in this process) and worth it. What a process cannot send is read here instead, so that
an error is the same with and without them.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from ucp.contract.problems import Problems
from ucp.contract.protocols import SourceOptions
from ucp.core.index import SourceFile
from ucp.core.tensor import Record
from ucp.errors import (
    CorruptError,
    IdleOptionError,
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    listed,
)
from ucp.io.files import split_parts
from ucp.io.folder import path_of
from ucp.io.identity import source_file
from ucp.io.pickle.fields import text
from ucp.io.torch_file.archive import read_archive
from ucp_formats.deepspeed.names import OFFLOADED, FileName, Role, TagFolder

__all__ = [
    "SavedFile",
    "parsed",
    "read_files",
    "read_side_by_side",
    "refuse_contents",
    "refuse_idle_options",
    "refuse_names",
    "source_files",
    "try_read",
]


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


LEAST = 256
"""Files from which on processes are started."""
_BATCH = 16
"""Files whose values are sent at once."""


_R = TypeVar("_R")


def read_side_by_side(read: Callable[[_T], _R], items: Sequence[_T], *, least: int = LEAST) -> Iterator[_R]:
    """`read` of every item, in order; in several processes from `least` items on."""
    workers = _workers() if len(items) >= least else 1
    if workers == 1:
        yield from map(read, items)
        return
    batches = [items[at : at + _BATCH] for at in range(0, len(items), _BATCH)]
    with ExitStack() as stack:
        sources = [_started(read, batches[nth::workers], stack) for nth in range(workers)]
        for number, batch in enumerate(batches):
            values: list[_R] | None = _received(sources[number % workers])
            yield from map(read, batch) if values is None else values


def _workers() -> int:
    """Processes to read in: one per core; 1 where forking is not safe."""
    if not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _started(read: Callable[[_T], _R], batches: Sequence[Sequence[_T]], stack: ExitStack) -> BinaryIO:
    """Where the values of `batches` come from, read by a process that ends when `stack` does."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        with (
            suppress(BaseException),
            open(sender, "wb") as sink,
        ):  # whatever goes wrong is met again by who reads it anew
            os.close(receiver)
            for batch in batches:
                pickle.dump([read(item) for item in batch], sink, pickle.HIGHEST_PROTOCOL)
                sink.flush()
        os._exit(0)
    os.close(sender)
    stack.callback(os.waitpid, child, 0)  # last of all: a process that still writes ends when its pipe is closed
    return stack.enter_context(open(receiver, "rb"))


def _received(source: BinaryIO) -> list[_R] | None:
    """The next batch; None where its process ended early."""
    try:
        values: list[_R] = pickle.load(source)  # noqa: S301  # made by our own process of our own values
    except (EOFError, pickle.UnpicklingError):
        return None
    return values


_LATER = "ucp does not read this layout yet"
_AUTOEP = f"experts fused by AutoEP; {_LATER}: train with deepspeed.moe.layer.MoE, or without expert parallelism"
_NVME = "optimizer states offloaded to NVMe are raw swap files: resume with offload_optimizer device cpu and save again"
_ELASTIC = "elastic_checkpoint drops parameter groups: set zero_optimization.elastic_checkpoint to false and save again"
_MICS = f"MiCS (only the first shard group saves); {_LATER}: resume without mics_shard_size and save again"
_OLD_STAGE_1 = "ZeRO-1 of DeepSpeed 0.3 (sub-partitions): resume in DeepSpeed 0.4 to 0.6 and save again"


def refuse_names(folder: TagFolder) -> None:
    """Raise UnsupportedError for layouts that file names give away."""
    _raise(str(folder.path), list(_by_name(folder)))


def refuse_contents(where: str, roots: Mapping[str, Mapping[object, object]]) -> None:
    """Raise UnsupportedError for layouts that files of `where` give away; `roots`: file name to what was saved."""
    found: dict[str, str] = {}
    for file, root in roots.items():
        for seen, why in _by_content(root):
            found.setdefault(why, f"{file}: {seen}: {why}")
    _raise(where, list(found.values()))


def refuse_idle_options(options: SourceOptions, tp: int, where: str) -> None:
    """Raise IdleOptionError where a model family is named and there is nothing for it to say."""
    if options != SourceOptions() and tp == 1:
        raise IdleOptionError(
            f"{where} has one tensor-parallel rank, so that every tensor is whole: drop --family and --patterns"
        )


def _raise(where: str, found: list[str]) -> None:
    if found:
        raise UnsupportedError(f"{where} was written by DeepSpeed with a layout that cannot be read:\n{listed(found)}")


def _by_name(folder: TagFolder) -> Iterator[str]:
    if OFFLOADED in folder.entries:
        yield f"{OFFLOADED}/: {_NVME}"


def _by_content(root: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """What was seen, and the reason for refusing it."""
    yield from ((key, _AUTOEP) for key in ("ds_autoep_layers", "autoep_layers", "folding") if root.get(key) is not None)
    yield from _by_optimizer(root)
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict):
        size = zero.get("mics_shard_size")
        if isinstance(size, int) and size > 0:
            yield f"mics_shard_size {size}", _MICS
        offload = zero.get("offload_optimizer")
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            yield "offload_optimizer device nvme", _NVME


def _by_optimizer(root: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    saved = root.get("optimizer_state_dict")
    if not isinstance(saved, dict):
        return
    base = saved.get("base_optimizer_state")
    if isinstance(base, list) and "single_partition_of_fp32_groups" in saved:
        yield "base_optimizer_state is a list", _ELASTIC
    if "local_sub_partitions_of_fp32_groups" in saved:
        yield "local_sub_partitions_of_fp32_groups", _OLD_STAGE_1
    if saved.get("ds_zero_partition_groups") is not None:
        yield "ds_zero_partition_groups", _AUTOEP
