"""Both ends of objects, where their indexes stand, fetched before the objects are opened.

The index of a checkpoint is read file after file, a few small reads of each: were every one waited for, a thousand
files would take minutes. Who has read small pieces of two files reads those of the next ones too, in the order of their
names; so the ends of some of these are fetched side by side, of ever more of them as long as they are used.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from ucp.io.remote.link import link_of
from ucp.io.remote.listing import Entry, siblings

BLOCK = 256 << 10
"""Bytes that are read for a small read; those at the end of a file are one block."""

_KEPT = 256
"""Blocks that are kept: those of 128 files."""
_MOST = 32
"""Files whose ends are fetched ahead."""
_IDLE = 64
"""Blocks fetched ahead and never used, after which no more are."""

_NUMBER = re.compile(r"(\d+)")


def ends(nbytes: int) -> tuple[tuple[int, int], ...]:
    """The first and the last block of a file: first byte, one past the last.

    >>> ends(600 << 10), ends(100)
    (((0, 262144), (352256, 614400)), ((0, 100),))
    """
    last = max(0, nbytes - BLOCK)
    return ((0, min(BLOCK, last)), (last, nbytes)) if last else ((0, nbytes),)


@dataclass(slots=True)
class _Run:
    """Files of one kind that are read one after another."""

    urls: Sequence[str] = ()
    """All that there are, in the order of their names."""
    places: dict[str, int] = field(default_factory=dict)
    """Where each stands."""
    upto: int = 0
    """Place up to which ends were fetched."""
    width: int = 0
    """How many files are fetched ahead."""
    idle: int = 0
    """Blocks that were fetched and dropped unused."""


@dataclass(slots=True)
class _Block:
    """A block, or what brings it."""

    data: Future[bytes]
    run: _Run | None
    """Run that it was fetched ahead for, until it is used."""


class _Ends:
    """The blocks of this process."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Know nothing, and nobody: in a child of a fork, what was on its way will never come."""
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str, int], _Block] = OrderedDict()
        self._runs: dict[tuple[str, str], _Run] = {}

    def get(self, url: str, entry: Entry, low: int, high: int) -> bytes:
        """One block of an object; those that will be wanted next are on their way."""
        with self._lock:
            own = self._begun(url, entry, low, high, None)
            own.run = None
            self._look_ahead(url)
        return own.data.result()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._blocks.clear()
            self._runs.clear()

    def _begun(self, url: str, entry: Entry, low: int, high: int, run: _Run | None) -> _Block:
        key = (url, entry.version or str(entry.mtime_ns), low)
        own = self._blocks.get(key)
        if own is None or (own.data.done() and own.data.exception() is not None):
            link = link_of(url)
            own = self._blocks[key] = _Block(link.submit(link.fetch, url, entry, low, high), run)
            if len(self._blocks) > _KEPT:
                _, old = self._blocks.popitem(last=False)
                if old.run is not None:
                    old.run.idle += 1
        self._blocks.move_to_end(key)
        return own

    def _look_ahead(self, url: str) -> None:
        root, files = siblings(url)
        kind = os.path.splitext(url)[1]
        run = self._runs.get((root, kind))
        if run is None or url not in run.places:
            urls = sorted((own for own in files if own.endswith(kind)), key=_natural)
            run = self._runs[root, kind] = _Run(urls, {own: place for place, own in enumerate(urls)})
            run.upto = run.places.get(url, 0) + 1
            return
        place = run.places[url]
        if run.idle > _IDLE or place + run.width // 2 < run.upto:
            return
        run.width = min(_MOST, max(4, 2 * run.width))
        start = max(run.upto, place + 1)
        for ahead in islice(run.urls, start, start + run.width):
            for low, high in ends(files[ahead].nbytes):
                if low < high:
                    self._begun(ahead, files[ahead], low, high, run)
        run.upto = start + run.width


_ends = _Ends()
end_of = _ends.get
clear = _ends.clear
os.register_at_fork(after_in_child=_ends.start_anew)


def _natural(url: str) -> tuple[str | int, ...]:
    """By which names are in the order of their numbers."""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_NUMBER.split(url)))
