"""Run a command and measure it from outside: wall and CPU time, and the memory of it and all its children."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PERIOD = 0.02
"""Seconds between two looks at memory."""

_SHARE = 0.02
"""Of the time, at most, that is spent on shares of memory: counting holds up a process, the longer the more it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one command."""

    seconds: float
    """Wall time of the whole process, its start included."""
    cpu_seconds: float
    """User and system time of it and its children, which a busy machine disturbs less."""
    peak_bytes: int
    """Largest sum that was seen of proportional set sizes (memory of its own, plus a share of what is shared) over the
    tree; no less than the most that any one process had."""


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, watch: bool = True) -> Sample:
    """Time `command`; raise CalledProcessError when it fails. `watch`: sample its memory (costs a little time)."""
    began, busy = time.perf_counter(), _cpu_of_children()
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak), daemon=True)
    if watch:
        watcher.start()
    _, talk = process.communicate()
    seconds = time.perf_counter() - began
    if watch:
        watcher.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=talk.decode(errors="replace"))
    return Sample(seconds=seconds, cpu_seconds=_cpu_of_children() - busy, peak_bytes=peak[0])


def _cpu_of_children() -> float:
    """Seconds that children took which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watch(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    again = time.perf_counter()
    while process.poll() is None:
        tree, now = _tree(process.pid), time.perf_counter()
        seen = [_kilobytes(pid, "status", "VmHWM:") for pid in tree]
        if now >= again:
            seen.append(sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in tree))
            ended = time.perf_counter()
            again = ended + (ended - now) / _SHARE
        peak[0] = max(peak[0], *seen)
        time.sleep(_PERIOD)


def _tree(root: int) -> list[int]:
    """`root` and all that descend from it."""
    found = [root]
    for pid in found:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        found.extend(int(child) for child in children)
    return found


def _kilobytes(pid: int, page: str, entry: str) -> int:
    """Bytes that a line of a page below /proc gives in kB; 0 where the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/{page}").read_text().splitlines():
            if line.startswith(entry):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
