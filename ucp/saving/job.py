"""What a rank does for a save, and a save that goes on in the background.

A background save copies its share to host memory; a thread writes it while the program trains on. The threads of the
ranks meet in the folder of the save: rank 0 waits there for the part manifests of the others.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.core.index import Extra
from ucp.errors import DestinationError, UcpError, UsageError
from ucp.live.run.ranks import Ranks, run_together
from ucp.log import LOGGER
from ucp.saving.chain import add_link, collect_links
from ucp.saving.commit import SavedRun, commit, growing_folder
from ucp.saving.holdings import Holding, copy_to_host
from ucp.saving.part import PARTS, count_written, read_part, write_part
from ucp.saving.plan import SaveItem
from ucp.saving.report import SaveReport

_POLL_SECONDS = 0.05
"""Time between two looks for parts of other ranks."""
_IDLE_SECONDS = 300.0
"""Time in which a rank must write something, before rank 0 takes it for dead."""
_IDLE_AT_EXIT = 60.0
"""The same, once the program of rank 0 has ended: then the others end, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """What this rank does for a save."""

    folder: Path
    """The store."""
    run: SavedRun
    """The run, as all ranks describe it."""
    rank: int
    """This rank."""
    ranks: int
    """Number of ranks."""
    share: Sequence[SaveItem]
    """What this rank writes."""
    tensors: Mapping[SaveItem, Holding]
    """Each of `share` to its memory."""
    extras: Sequence[Extra]
    """Extras that this rank writes."""
    is_link: bool
    """Whether the store becomes the newest link of a chain."""
    keep: int | None
    """Number of restore points of the chain whose links stay; None for all."""

    def snapshot(self, earlier: SaveJob | None = None) -> SaveJob:
        """The job with copies of everything that the program may change, in host memory.

        `earlier`: a snapshot that is not needed any more. Its memory is used again.
        """
        mine = {item: self.tensors[item] for item in self.share}
        tensors = copy_to_host(mine, None if earlier is None else earlier.tensors)
        extras = [replace(extra, value=copy.deepcopy(extra.value)) for extra in self.extras]
        return replace(self, tensors=tensors, extras=extras)

    def write(self) -> None:
        """Write the share of this rank."""
        write_part(growing_folder(self.folder), self.rank, self.share, self.tensors, self.extras)

    def finish(self) -> None:
        """Make the store whole, once all shares are written. On rank 0."""
        commit(self.folder, self.run, self.ranks)
        LOGGER.info("save: %s, step %s", self.folder, self.run.step)
        if self.is_link:
            add_link(self.folder, self.run.step)
        if self.keep is not None:
            try:
                collect_links(self.folder.parent, self.keep)
            except (UcpError, OSError) as error:
                raise DestinationError(
                    f"{self.folder} is saved and listed, but links that are not needed any more could not be removed: "
                    f"{error}"
                ) from error

    def tell_failure(self, error: BaseException) -> None:
        """Leave the error of this rank for rank 0."""
        text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        with suppress(OSError):  # rank 0 then waits in vain
            self._failure_of(self.rank).write_bytes(text)

    def wait_for_parts(self) -> None:
        """Wait until all ranks have written their shares. Raises DestinationError if one failed, or writes no more."""
        root, missing = growing_folder(self.folder), set(range(self.ranks))
        seen: dict[int, tuple[int, float]] = {}
        """Rank to the bytes that it has written, and when it had first written them."""
        while missing:
            for rank in sorted(missing):
                if self._failure_of(rank).is_file():
                    text = self._failure_of(rank).read_text(errors="replace")
                    raise DestinationError(
                        f"rank {rank} of {self.ranks} could not write its part of {self.folder}: {text}"
                    )
            missing -= {rank for rank in missing if read_part(root, rank) is not None}
            now, has_ended = time.monotonic(), not threading.main_thread().is_alive()
            limit = min(_IDLE_AT_EXIT, _IDLE_SECONDS) if has_ended else _IDLE_SECONDS
            for rank in missing:
                nbytes = count_written(root, rank)
                if seen.setdefault(rank, (nbytes, now))[0] != nbytes:
                    seen[rank] = (nbytes, now)
            idle = [rank for rank in sorted(missing) if now - seen[rank][1] > limit]
            if idle:
                raise DestinationError(
                    f"expected the parts of all ranks in {root / PARTS}; ranks {idle} have written nothing for "
                    f"{limit:.0f} s. Look whether they have ended (call wait() before the program ends), and whether "
                    "all ranks write to one folder that they share"
                )
            if missing:
                time.sleep(_POLL_SECONDS)

    def _failure_of(self, rank: int) -> Path:
        return growing_folder(self.folder) / PARTS / f"{rank:05d}.failed"


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(self, job: SaveJob, ranks: Ranks, report: SaveReport) -> None:
        self._job, self._ranks, self._report = job, ranks, report
        self._failure: Exception | None = None
        self._error: UcpError | OSError | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._persist, name=f"ucp.save {job.folder}")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether the thread of this rank has ended; on rank 0, the store is then whole, unless it failed."""
        return not self._thread.is_alive()

    def wait(self) -> SaveReport:
        """Wait until the store is whole. Collective: all ranks must call it, or `ucp.save` again, which does.

        Raises what made the save fail, on all ranks; there is then no store.
        """
        if not self._has_ended:
            self._thread.join()
            self._has_ended = True
            try:
                run_together(self._ranks, self._raise_failure)
            except (UcpError, OSError) as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._report

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _persist(self) -> None:
        began = time.perf_counter()
        try:
            self._job.write()
            if self._job.rank == 0:
                self._job.wait_for_parts()
                self._job.finish()
        except Exception as error:  # `wait` raises it, on the thread of the program
            self._failure = error
            self._job.tell_failure(error)
            if not threading.main_thread().is_alive():  # which has ended without `wait`
                raise
        self._report = replace(self._report, seconds=time.perf_counter() - began)


_PENDING = threading.local()
"""`handle`: the last background save of a thread of the program; `free`: its job, if the next may use its memory."""


def start(job: SaveJob, ranks: Ranks, report: SaveReport, *, is_kept: bool) -> SaveHandle:
    """Write `job`, a snapshot, in the background. `is_kept`: its memory stays in use after that."""
    handle = SaveHandle(job, ranks, report)
    _PENDING.handle, _PENDING.free = handle, None if is_kept else job
    return handle


def find_running(ranks: Ranks, *, has_snapshots: bool) -> SaveHandle | None:
    """The last background save of this thread, if a rank still writes it; None without snapshots. Collective."""
    handle: SaveHandle | None = getattr(_PENDING, "handle", None)
    of_ranks = ranks.share((has_snapshots, handle is not None and not handle.is_written))
    if len({has for has, _ in of_ranks}) > 1:
        raise UsageError(
            "expected snapshots= on all ranks, or on none; a rank whose process is new passes an empty ucp.Snapshots()"
        )
    return handle if has_snapshots and any(is_running for _, is_running in of_ranks) else None


def wait_for_pending() -> SaveJob | None:
    """Wait for the last background save of this thread, as one is written at a time. Returns it if its memory is free.

    Raises what made it fail.
    """
    handle: SaveHandle | None = getattr(_PENDING, "handle", None)
    free: SaveJob | None = getattr(_PENDING, "free", None)
    _PENDING.handle = _PENDING.free = None
    if handle is not None:
        handle.wait()
    return free
