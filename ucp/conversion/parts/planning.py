"""The plan of a part: made by the first of the parts, read by the others.

Whoever comes first locks the plan's place and makes it; who comes meanwhile waits, and reads its own piece: indexes of
a checkpoint of thousands of files are read once, and no part but the first holds more of the plan than is its own.
Where the first fails or is killed, or locks do not work between machines, each plans by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ucp.contract.protocols import Observer
from ucp.contract.registry import recognise
from ucp.conversion.destination.waiting import waiting_for
from ucp.conversion.options import OPTIONS, ConvertOptions
from ucp.conversion.parts.plan_file import read_plan, write_plan
from ucp.conversion.prepare import Prepared, prepare
from ucp.io.destination.staging import Staging
from ucp.io.identity import producer
from ucp.transfer.plan.tasks import BLOCK, TASK

__all__ = ["plan_part"]

_PATIENCE = 600.0
"""Seconds to wait for a plan that another part makes; its machine may have stopped."""


def plan_part(
    src: Path, staging: Staging, options: ConvertOptions, observer: Observer, check: Callable[[Prepared], None]
) -> Prepared:
    """Decide the part of a conversion that `options` name. `check`: of a plan that is made, before others see it.

    Raises UcpError as `prepare` and `check` do.
    """

    def made() -> Prepared:
        prepared = prepare(src, options, observer)
        check(prepared)
        return prepared

    if staging.folder.is_symlink() or (staging.dst.exists() and not staging.folder.exists()):
        return made()  # refused, or most likely complete
    key = _key(src, options)
    found = read_plan(staging.folder, key, options)
    if found is not None:
        return found
    with _turn(staging.folder, key, observer) as is_first:
        if not is_first:
            return read_plan(staging.folder, key, options) or made()
        prepared = made()
        with suppress(OSError):  # then each plans by itself
            write_plan(staging.folder, key, prepared)
    return read_plan(staging.folder, key, options) or prepared


@contextmanager
def _turn(folder: Path, key: str, observer: Observer) -> Iterator[bool]:
    """True for the first; for others False, once the first is done. False, too, where nothing can be written."""
    path = folder / f"plan-{key}.lock"
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError:
        yield False
        return
    try:
        is_first = _is_locked_first(descriptor, observer)
        yield is_first
    except BaseException:
        with suppress(OSError):  # others are there, or have begun
            path.unlink()
            folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def _is_locked_first(descriptor: int, observer: Observer) -> bool:
    """Whether nobody had the lock; else it is waited for, as long as a plan may take."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        deadline = time.monotonic() + _PATIENCE
        with waiting_for(observer, "another part, which makes the plan"):
            while not _is_free(descriptor) and time.monotonic() < deadline:
                time.sleep(0.1)
        return False
    return True


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _key(src: Path, options: ConvertOptions) -> str:
    """Digest of all that a plan is made of but the files of the source, which the plan lists.

    Files of the user's own, rules and shapes, are told by size and time. Raises SourceError where nothing can be read.
    """
    shared = {option.name: getattr(options, option.name) for option in OPTIONS.values() if not option.is_per_part}
    paths = [value for value in shared.values() if isinstance(value, Path) and value.exists()]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    root = recognise(src)[1].root.absolute()
    said = [producer(), str(src.absolute()), str(root), shared, stats, BLOCK, TASK]
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, default=_plain).encode())


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)
