"""Progress as a bar on a terminal, as lines of a log, as JSON events, or not at all.

`Watch`, an `Observer`, starts no thread, so that worker processes may be forked at any time. Several threads may call
its `advance`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ucp.contract.protocols import WAITING
from ucp.core.text.units import nbytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 0.1
"""Seconds between two drawings or events of a stage."""

_SURE = 1.0
"""Seconds of a stage after which the remaining time is estimated."""

_LINES = 10
"""Lines of a log at equal steps of a stage; more are written only after `_PAUSE` without one."""

_PAUSE = 30.0
"""Seconds between two lines of a log, at most."""


class _Display:
    """How a stage is drawn; here not at all."""

    _title = ""
    _total = 0

    def start(self, title: str, total: int) -> None:
        self._title, self._total = title, total

    def update(self, done: int, seconds: float) -> None:
        pass

    def stop(self, done: int, seconds: float) -> None:
        pass


class Watch:
    """Observer that counts bytes, and draws them at most ten times a second."""

    def __init__(self, shown: _Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._lock = threading.Lock()
        self._start = self._drawn = 0.0
        self._done = 0

    def begin(self, *, title: str, nbytes: int) -> None:
        """Start a stage of `nbytes` bytes."""
        with self._lock:
            self._start = self._drawn = self._clock()
            self._done = 0
            self._shown.start(title, nbytes)

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if now - self._drawn >= _EVERY:
                self._drawn = now
                self._shown.update(self._done, now - self._start)

    def end(self) -> None:
        """End the stage."""
        with self._lock:
            self._shown.stop(self._done, self._clock() - self._start)


class _Events(_Display):
    """One JSON object per line on stderr."""

    def start(self, title: str, total: int) -> None:
        super().start(title, total)
        self._say("begin", 0, 0.0)

    def update(self, done: int, seconds: float) -> None:
        self._say("advance", done, seconds)

    def stop(self, done: int, seconds: float) -> None:
        self._say("end", done, seconds)

    def _say(self, event: str, done: int, seconds: float) -> None:
        event_fields = {
            "event": event,
            "title": self._title,
            "done_bytes": done,
            "total_bytes": self._total,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(done / seconds) if seconds > 0 else None,
        }
        click.echo(json.dumps(event_fields), err=True)


class _Log(_Display):
    """A line on stderr at every tenth of a stage, and at least every half minute: for files, Slurm and `tee`."""

    _tenth = 0
    _last_line = 0.0

    def start(self, title: str, total: int) -> None:
        super().start(title, total)
        self._tenth = 0
        self._say(0, 0.0)

    def update(self, done: int, seconds: float) -> None:
        tenth = _LINES * done // max(1, self._total)
        if tenth > self._tenth or seconds - self._last_line >= _PAUSE:
            self._say(done, seconds)
        self._tenth = tenth

    def stop(self, done: int, seconds: float) -> None:
        click.echo(f"{self._title}: done, {nbytes_text(done)} in {seconds_text(seconds)}", err=True)

    def _say(self, done: int, seconds: float) -> None:
        self._last_line = seconds
        columns = ", ".join(map(str.strip, _columns(done, self._total, seconds))) if self._total else ""
        click.echo(f"{self._title}: {columns}" if columns else self._title, err=True)


class _Bar(_Display):
    """A bar with bytes, rate and remaining time, on stderr; it disappears at the end of the stage."""

    _progress: Progress | None = None

    def start(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._total = total
        if not total:
            if title.startswith(WAITING):
                click.echo(title, err=True)
            return
        self._progress = Progress(
            TextColumn("{task.description:<9}", style="cyan"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=Console(file=sys.stderr, force_terminal=True, markup=False, highlight=False, emoji=False),
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._progress.add_task(title, total=total, text=self._text(0, 0.0))
        self._progress.start()

    def update(self, done: int, seconds: float) -> None:
        if self._progress is not None:
            (task,) = self._progress.task_ids
            self._progress.update(task, completed=done, text=self._text(done, seconds), refresh=True)

    def stop(self, done: int, seconds: float) -> None:
        self.update(done, seconds)
        if self._progress is not None:
            self._progress.stop()
        self._progress = None

    def _text(self, done: int, seconds: float) -> str:
        """As many columns as leave the bar some room, the first ones first."""
        room = (self._progress.console.width if self._progress else _WIDE) - _LEAST_BAR
        texts = _columns(done, self._total, seconds)
        while len(texts) > 1 and len("  ".join(texts)) > room:
            texts.pop()
        return "  ".join(texts)


_WIDE = 80
"""Columns of a terminal whose width is not known."""
_LEAST_BAR = 20
"""Columns for the title and a short bar."""


def _columns(done: int, total: int, seconds: float) -> list[str]:
    """How far a stage is, most important first; the remaining time only once it can be estimated."""
    texts = [f"{100 * done / max(1, total):3.0f}%", f"{nbytes_text(done):>8} of {nbytes_text(total)}"]
    if done and seconds >= _SURE:
        texts += [f"{rate_text(done, seconds):>10}", f"{seconds_text(seconds * (total - done) / done):>10} left"]
    return texts


_SHOWN: dict[str, Callable[[], _Display]] = {"bar": _Bar, "log": _Log, "json": _Events, "none": _Display}


def watch(progress: str, *, quiet: bool = False) -> Watch:
    """Observer for the values of --progress and --quiet; with --quiet, "auto" draws nothing."""
    auto = "bar" if sys.stderr.isatty() and not quiet else "none"
    return Watch(_SHOWN[auto if progress == "auto" else progress]())
