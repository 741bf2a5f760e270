"""Load items from a checkpoint into the tensors of all ranks; each byte that several ranks hold is read once.

1. `plan_stages` finds, with the other ranks, the sets of ranks that hold the same slices: one stage per set;
2. a stage is read window by window, a part by each rank of the set, while the window before is gathered and stored;
3. checksums are compared, and with `verify` everything is read again;
4. all ranks succeed, or all raise the same error.

A rank that fails says so in the status of the next part that it sends to each of its sets. The members of the set stop
at that window, and tell their other sets in the same way. So all ranks reach the end, where the errors are raised. If a
process dies, torch raises an error on the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ucp.contract.protocols import Observer
from ucp.core.tensor import Record
from ucp.live.exchange.checksums import check_records, verify
from ucp.live.exchange.read_shares import Window
from ucp.live.exchange.reads import THREAD_NBYTES, LandingTensors, PendingRead, start_reading
from ucp.live.exchange.stages import STATUS, Exchange, Stage, WindowSize, plan_stages
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, run_together
from ucp.transfer.gather import ThreadedReader

if TYPE_CHECKING:
    import torch

    _WindowRead: TypeAlias = tuple[Stage, Window, torch.Tensor, PendingRead | None]

T = TypeVar("T")

_THREADS = 4
"""Threads that read, per rank, at most."""
_WORD = 8
"""Bytes of a number in the status of a part."""
_SAMPLES = 2
"""Windows that are exchanged before ranks decide whether to continue exchanging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOptions:
    """How to load items; the same on all ranks."""

    exchange: Exchange = Exchange.AUTO
    """Whether ranks that hold the same slices each read a share of them."""
    memory: int = 1 << 30
    """Bytes of host memory for buffers."""
    verify: bool = False
    """Whether to read everything again at the end, and compare."""
    records: Sequence[Record] = ()
    """Ranges of files with their checksums, which are compared."""
    observer: Observer | None = None
    """Is notified of the bytes that have arrived on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What was read and exchanged, and the memory it took."""

    nbytes: tuple[int, ...]
    """Bytes that each rank read from files."""
    rank: int
    """Number of this rank."""
    wanted_nbytes: int
    """Bytes of files that all ranks needed; what they read also includes short gaps, and bytes for checksums."""
    exchanged_nbytes: int
    """Bytes that this rank received from others."""
    landed_nbytes: int
    """Bytes that were stored on this rank."""
    peak_nbytes: int
    """Most host memory that windows took on this rank."""
    memory_nbytes: int = 0
    """Bytes that were stored on this rank from the memory of ranks (`carry_with_memory`)."""
    is_verified: bool = False
    """Whether everything that was stored was read again and compared."""
    checked: frozenset[str] = frozenset()
    """Files whose read ranges have all been compared with their checksums."""


def carry(items: Sequence[LoadItem], into: Sequence[torch.Tensor], ranks: Ranks, options: CarryOptions) -> Traffic:
    """Fill the landing tensors `into`, one for each of this rank's items. Collective: ranks may hold different items.

    A landing tensor has the dtype and the local shape of its slice; for a flat range of a local tensor it is 1-D, with
    as many elements.

    Raises
    ------
    SourceError, CoverError, CorruptError, LoadError
        The same on all ranks; the tensors may be partly filled.
    """
    shapes = (item.slice.local_shape if item.slice.is_whole else None for item in items)
    tensors = run_together(
        ranks,
        lambda: [
            tensor if shape is None else tensor.detach().view(shape) for shape, tensor in zip(shapes, into, strict=True)
        ],
    )
    threads = max(1, min(_THREADS, options.memory // 4 // THREAD_NBYTES))
    memory = max(options.memory - threads * THREAD_NBYTES, options.memory // 2)
    stages = plan_stages(items, ranks, exchange=options.exchange, memory=memory)
    with ThreadedReader(threads, tracked=frozenset(record.path for record in options.records)) as reader:
        transfer = run_together(
            ranks, lambda: _Transfer(stages, tensors, reader=reader, ranks=ranks, options=options, memory=memory)
        )
        run_together(ranks, transfer.run)
        checked = check_records(options.records, reader, ranks) if options.records else frozenset()
        if options.verify:
            verify(items, tensors, ranks, memory=memory)
        totals = ranks.share((reader.nbytes, transfer.wanted_nbytes))
    return Traffic(
        nbytes=tuple(nbytes for nbytes, _ in totals),
        rank=ranks.rank,
        wanted_nbytes=sum(wanted for _, wanted in totals),
        exchanged_nbytes=transfer.received_nbytes,
        landed_nbytes=sum(item.slice.nbytes for item in items),
        peak_nbytes=transfer.peak_nbytes,
        is_verified=options.verify,
        checked=checked,
    )


class _Transfer:
    """The work of this rank, and its counters."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tensors: Sequence[torch.Tensor],
        *,
        reader: ThreadedReader,
        ranks: Ranks,
        options: CarryOptions,
        memory: int,
    ) -> None:
        self._stages, self._reader, self._ranks, self._memory = stages, reader, ranks, memory
        self._exchange, self._observer = options.exchange, options.observer
        self._tensors = LandingTensors(tensors)
        self._failure: Exception | None = None
        self._is_stopped = False
        self._buffers = _Buffers(stages, tensors, ranks, memory=memory)
        self.peak_nbytes = self._buffers.nbytes
        self.received_nbytes = 0
        self.wanted_nbytes = 0

    def run(self) -> None:
        """Work through all stages. Raises what this rank failed with; call it through `run_together`."""
        observer = self._observer
        if observer is not None:
            nbytes = sum(item.slice.nbytes for stage in self._stages for item in stage.items)
            self._try(lambda: observer.begin(title="load", nbytes=nbytes))
        for window_read in self._read_ahead():
            self._finish(*window_read)
        if observer is not None:
            self._try(observer.end)
        if self._failure is not None:
            raise self._failure

    def _try(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if it fails, which other ranks learn from the status of the next part."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # raised at the end of `run`, when all ranks have stopped
            self._failure = self._failure or error
            self._is_stopped = True
            return None

    def _read_ahead(self) -> Iterator[_WindowRead]:
        """Every window of this rank with the pending read of its part; the next read has then begun too."""
        pending: list[_WindowRead] = []
        for number, (stage, window) in enumerate(self._windows()):
            buffer = self._buffers.parts[number % 2]
            pending.append((stage, window, buffer, self._try(partial(self._start, stage, window, buffer))))
            if number:
                yield pending.pop(0)
        yield from pending

    def _windows(self) -> Iterator[tuple[Stage, Window]]:
        """Windows in reading order: first those that ranks exchange, then those that this rank reads for itself."""
        *shared, alone = self._stages
        yield from ((stage, window) for stage in shared for window in stage.windows())
        for stage in (*(stage for stage in shared if stage.is_dissolved), alone):
            for is_direct in (True, False):
                selected = [(self._tensors.memory(item) is not None) is is_direct for item in stage.items]
                rest = stage.remainder(self._ranks.rank, self._memory, selected)
                for window in rest.windows():
                    if self._is_stopped:
                        return
                    yield rest, window

    def _start(self, stage: Stage, window: Window, buffer: torch.Tensor) -> PendingRead:
        reader = stage.members.index(self._ranks.rank)
        segments, views = [], []
        for number in range(window.rounds):
            low = number * (window.round_nbytes + STATUS)
            part = buffer[low : low + window.round_nbytes].numpy().data
            for segment in window.read_by(reader, number):
                item = stage.items[segment.slice_number]
                view = part[segment.offset : segment.offset + segment.nbytes]
                memory = self._tensors.memory(item) if len(stage.members) == 1 else None
                if memory is not None:
                    offset = (segment.start - item.slice.start) * segment.itemsize
                    view = memory[offset : offset + segment.nbytes]
                segments.append(segment)
                views.append(view)
        return start_reading(self._reader, stage.items, segments, views)

    def _finish(self, stage: Stage, window: Window, buffer: torch.Tensor, pending: PendingRead | None) -> None:
        """Gather and store a window, as soon as this rank's part of it is read."""
        result = None if pending is None else self._try(pending)
        self.wanted_nbytes += 0 if result is None else result.wanted_nbytes
        if stage.has_failed or (self._is_stopped and len(stage.members) == 1):
            return
        began = time.perf_counter()
        for number in range(window.rounds):
            low = number * (window.round_nbytes + STATUS)
            part = buffer[low : low + window.round_nbytes + STATUS]
            parts = [part] if len(stage.members) == 1 else self._gather(stage, window, part)
            if stage.has_failed:
                return
            self._try(partial(self._store, stage, window, number, parts))
        stage.timings.append((0.0 if result is None else result.seconds, time.perf_counter() - began))

    def _gather(self, stage: Stage, window: Window, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of all members. Marks the stage as failed if a member has failed."""
        import torch

        status = part[window.round_nbytes :].zero_()
        status[0] = int(self._is_stopped)
        if stage.timings:  # the shortest times of its windows
            shortest = [min(column) for column in zip(*stage.timings, strict=True)]
            status[_WORD : 3 * _WORD].view(torch.float64).copy_(torch.tensor(shortest, dtype=torch.float64))
        gathered = self._buffers.gather_buffer(len(stage.members), part.numel())
        self._ranks.gather(self._buffers.to_device(part), gathered, stage.members)
        self.received_nbytes += (len(stage.members) - 1) * part.numel()
        statuses = gathered[:, window.round_nbytes :].cpu()
        if bool(statuses[:, 0].any()):
            stage.has_failed = self._is_stopped = True
        elif self._exchange is Exchange.AUTO and len(stage.timings) == _SAMPLES:
            # would reading every part be faster for each member than an exchange, in which the next window is read
            # while this one is gathered and stored?
            timings = statuses[:, _WORD : 3 * _WORD].contiguous().view(torch.float64)
            reading, storing = timings.amax(dim=0).tolist()
            stage.is_dissolved = bool(len(statuses) * reading < max(reading, storing))
        return gathered.unbind(0)

    def _store(self, stage: Stage, window: Window, number: int, parts: Sequence[torch.Tensor]) -> None:
        nbytes = 0
        for reader, part in enumerate(parts):
            for segment in window.read_by(reader, number):
                nbytes += segment.nbytes
                item = stage.items[segment.slice_number]
                if len(parts) == 1 and self._tensors.memory(item) is not None:
                    continue  # it was read straight into the tensor
                values = part[segment.offset : segment.offset + segment.nbytes]
                for target, piece in self._tensors.pieces(item, segment, values):
                    target.copy_(piece)
        if self._observer is not None:
            self._observer.advance(nbytes)


class _Buffers:
    """Memory for the windows of all stages, one after another; pinned where data moves to or from a device."""

    def __init__(self, stages: Sequence[Stage], tensors: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
        import torch

        shared = stages[:-1]
        tensors_of_items = LandingTensors(tensors)
        sizes = [stage.largest_window() for stage in shared]
        gathers = (len(stage.members) * (size.round_nbytes + STATUS) for stage, size in zip(shared, sizes, strict=True))
        gathered = max(gathers, default=0)
        solo = [item for stage in stages for item in stage.items if tensors_of_items.memory(item) is None]
        if solo:  # including what the members of a dissolved set read for themselves
            stage = Stage(members=(ranks.rank,), items=solo, size=WindowSize.within(memory, 1))
            sizes.append(stage.largest_window())
        parts = (-(-size.part_nbytes // size.round_nbytes) * (size.round_nbytes + STATUS) for size in sizes)
        part = max(parts, default=0)
        is_pinned = any(tensor.is_cuda for tensor in tensors)
        self.parts = [torch.empty(part, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        on_host = ranks.device.type == "cpu"
        self._gathered = torch.empty(gathered, dtype=torch.uint8, device=ranks.device, pin_memory=is_pinned and on_host)
        longest = max((size.round_nbytes + STATUS for size in sizes), default=0)
        self._on_device = None if on_host else torch.empty(longest, dtype=torch.uint8, device=ranks.device)
        self.nbytes = 2 * part + (gathered if on_host else 0)

    def gather_buffer(self, members: int, nbytes: int) -> torch.Tensor:
        """Memory for the parts of all members, [members, bytes]."""
        return self._gathered[: members * nbytes].view(members, nbytes)

    def to_device(self, part: torch.Tensor) -> torch.Tensor:
        """A part on the device that it is gathered from."""
        return part if self._on_device is None else self._on_device[: part.numel()].copy_(part, non_blocking=True)
