"""Reads the files of a tag folder, each once, and collects what is wrong with them as problems.

Layouts that are known but that ucp does not read are refused, by file names (`refuse_names`) or by contents
(`read_files`); the error says what to do instead.

Parsing thousands of files is CPU-bound, so several processes share it. They are forked, and only where that is safe (no
other thread, no torch in this process). If a worker process fails, this process reads the remaining files and raises
the same errors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Problems
from ucp.core.index import SourceFile
from ucp.core.tensor import Record
from ucp.errors import (
    CorruptError,
    IdleOptionError,
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    format_list,
)
from ucp.io.files import split_parts
from ucp.io.folder import path_of
from ucp.io.pickle.fields import text
from ucp.io.provenance import source_file
from ucp.io.torch_file.archive import read_archive
from ucp_formats.deepspeed.names import OFFLOADED, FileName, Role, TagFolder

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file that torch.save wrote."""

    name: FileName
    """Its parsed name."""
    path: str
    """Absolute path."""
    root: Mapping[object, object]
    """The saved dict."""
    records: tuple[Record, ...]
    """Checksums of its storages."""

    @property
    def version(self) -> str | None:
        """Version of DeepSpeed that wrote the file; some files have blanks around it, which are removed."""
        version = self.root.get("ds_version")
        return None if version is None else text(version, f"ds_version of {self.path}").strip()


def read_files(folder: TagFolder, problems: Problems) -> list[SavedFile]:
    """Every file with a known name that can be read. Raises UnsupportedError for layouts that ucp does not read."""
    files = []
    for file, wrong in read_side_by_side(partial(try_read, folder.path), list(folder.files)):
        problems.extend(wrong)
        files += [file] if file is not None else []
    refused: dict[str, str] = {}
    for file in files:
        for evidence, why in _find_unsupported(file.root):
            refused.setdefault(why, f"{file.name.name}: {evidence}: {why}")
    if refused:
        raise UnsupportedError(_REFUSED.format(folder.path, format_list(list(refused.values()))))
    return files


def try_read(folder: Path, name: FileName) -> tuple[SavedFile | None, Problems]:
    """The file of that name in `folder`, or None, and its problems."""
    problems = Problems()
    try:
        archive = read_archive(str(folder / name.name))
        if not isinstance(archive.root, dict):
            raise UnsupportedError(f"expected a dict at the top; got a {type(archive.root).__name__}")
        if name.role in (Role.MODEL, Role.SHARDED_MODEL) and "module" not in archive.root:
            keys = ", ".join(map(repr, list(archive.root)[:8])) or "nothing"
            raise MalformedError(f"expected the key 'module', which {name.label} always have; got the keys {keys}")
    except MissingFileError:
        problems.missing.append(name.name)
    except (SourceError, CorruptError) as error:
        _note(name, str(error).replace(f"{folder / name.name}: ", "").replace(f"{folder}/", ""), error, problems)
    else:
        path = str(folder / name.name)
        return SavedFile(name=name, path=path, root=archive.root, records=archive.records), problems
    return None, problems


def parse_files(files: Iterable[SavedFile], parse: Callable[[SavedFile], _T], problems: Problems) -> list[_T]:
    """The result of `parse` for each file; files that it refuses go to `problems`."""
    results = []
    for file in files:
        try:
            results.append(parse(file))
        except SourceError as error:
            _note(file.name, str(error), error, problems)
    return results


def _note(name: FileName, text: str, error: Exception, problems: Problems) -> None:
    lines = problems.unsupported if isinstance(error, UnsupportedError) else problems.wrong
    lines.append(f"{name.name} ({name.label}): {text}")


def source_files(paths: Iterable[tuple[str, str]]) -> Iterator[SourceFile]:
    """Identity of each file given as (path, role), or of the parts of a split file."""
    for path, role in paths:
        for part in (path,) if path_of(path).exists() else split_parts(path):
            yield source_file(part, role)


LEAST = 256
"""The least number of files for which several processes are started."""


def read_side_by_side(read: Callable[[_T], _R], items: Sequence[_T], *, least: int = LEAST) -> Iterator[_R]:
    """The result of `read` for each item, in order; `least` items or more are read by several processes."""
    workers = _workers() if len(items) >= least else 1
    done = 0
    if workers > 1:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        # whatever fails in another process is tried again here
        with suppress(Exception), ProcessPoolExecutor(workers, get_context("fork")) as pool:
            for value in pool.map(read, items, chunksize=16):
                done += 1
                yield value
    yield from map(read, items[done:])


def _workers() -> int:
    """Number of processes to read with: one per core; 1 if forking is not safe."""
    if not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_REFUSED = "{} was written by DeepSpeed with a layout that cannot be read:\n{}"
_LATER = "ucp does not read this layout yet"
_FOLDED = f"AutoEP with tensor parallelism; {_LATER}: resume with autotp_size 1 and save again"
_NVME = "optimizer states offloaded to NVMe are raw swap files: resume with offload_optimizer device cpu and save again"
_ELASTIC = "elastic_checkpoint drops parameter groups: set zero_optimization.elastic_checkpoint to false and save again"
_MICS = f"MiCS (only the first shard group saves); {_LATER}: resume without mics_shard_size and save again"
_OLD_STAGE_1 = "ZeRO-1 of DeepSpeed 0.3 (sub-partitions): resume in DeepSpeed 0.4 to 0.6 and save again"


def refuse_names(folder: TagFolder) -> None:
    """Raise UnsupportedError for layouts recognised by file names."""
    if OFFLOADED in folder.entries:
        raise UnsupportedError(_REFUSED.format(folder.path, format_list([f"{OFFLOADED}/: {_NVME}"])))


def refuse_idle_options(options: SourceOptions, tp: int, where: str) -> None:
    """Raise IdleOptionError if a model family is named and no tensor is split over tensor-parallel ranks."""
    if options != SourceOptions() and tp == 1:
        raise IdleOptionError(
            f"{where} has one tensor-parallel rank, so no tensor is split: drop --family and --patterns"
        )


def _find_unsupported(root: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """What shows that the file has a layout that ucp does not read, each with the reason and the remedy."""
    if root.get("folding") is not None:
        yield "folding", _FOLDED
    saved = root.get("optimizer_state_dict")
    if isinstance(saved, dict):
        if isinstance(saved.get("base_optimizer_state"), list) and "single_partition_of_fp32_groups" in saved:
            yield "base_optimizer_state is a list", _ELASTIC
        if "local_sub_partitions_of_fp32_groups" in saved:
            yield "local_sub_partitions_of_fp32_groups", _OLD_STAGE_1
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict):
        size, offload = zero.get("mics_shard_size"), zero.get("offload_optimizer")
        if isinstance(size, int) and size > 0:
            yield f"mics_shard_size {size}", _MICS
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            yield "offload_optimizer device nvme", _NVME
