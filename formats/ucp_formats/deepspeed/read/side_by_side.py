"""Many files read in several processes at once: an index of thousands of files is bound by the processor.

Processes are forked, and only where that is safe (no other thread, no torch in this process) and worth it. What they
read comes back as values of our own, in the order of the files; whatever a process cannot send is read here instead,
so that an error is the same with and without them.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO, TypeVar

__all__ = ["read_side_by_side"]

LEAST = 256
"""Files from which on processes are started."""
_BATCH = 16
"""Files whose values are sent at once."""

_T = TypeVar("_T")
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
