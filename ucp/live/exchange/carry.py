"""Carry items from a checkpoint into the tensors of all ranks: each byte is read once where several of them hold it.

1. `plan_stages` finds out, with the other ranks, who holds the same;
2. every window is read, a part by each holder, while the one before it is gathered and put in place;
3. checksums are compared, and with `verify` everything is read again;
4. all ranks succeed, or all raise the same error.

A rank that fails says so with its next part in every set it is in; the members leave the set at that window, and say so
in turn. So all come to the end, where the errors are told. A rank that dies ends the others by torch's own error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ucp.live.exchange.checksums import check_records, verify
from ucp.live.exchange.loads import Places
from ucp.live.exchange.read_shares import Window
from ucp.live.exchange.reading import THREAD_NBYTES, Reading, start_reading
from ucp.live.exchange.stages import STATUS, Room, Stage, plan_stages
from ucp.live.exchange.traffic import CarryOptions, Exchange, Traffic
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, together
from ucp.transfer.gather import Reader

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_THREADS = 4
"""Threads that read, per rank, at most."""

_WORD = 8
"""Bytes of a number that is told with a part."""

_SAMPLES = 2
"""Windows that are exchanged before it is decided whether to go on so."""


def carry(items: Sequence[LoadItem], into: Sequence[torch.Tensor], ranks: Ranks, options: CarryOptions) -> Traffic:
    """Fill the landing tensors `into`, one for each of this rank's items. Collective: ranks may hold different items.

    A landing tensor has the type of its slice and its local shape; or, where the slice is a flat range of a local
    tensor, as many elements, one after another.

    Raises
    ------
    SourceError, CoverError, CorruptError, LoadError
        On all ranks the same; the tensors may be partly filled.
    """
    started = time.perf_counter()
    shapes = (own.slice.local_shape if own.slice.is_whole else None for own in items)
    shaped = together(
        ranks, lambda: [own if to is None else own.detach().view(to) for to, own in zip(shapes, into, strict=True)]
    )
    threads = max(1, min(_THREADS, options.memory // 4 // THREAD_NBYTES))
    memory = max(options.memory - threads * THREAD_NBYTES, options.memory // 2)
    stages = plan_stages(items, ranks, exchange=options.exchange, memory=memory)
    with Reader(threads, tracked=frozenset(record.path for record in options.records)) as reader:
        work = together(
            ranks, lambda: _Work(stages, shaped, reader=reader, ranks=ranks, options=options, memory=memory)
        )
        together(ranks, work.run)
        checked = check_records(options.records, reader, ranks) if options.records else frozenset()
        if options.verify:
            verify(items, shaped, ranks, memory=memory)
        told = ranks.share((reader.nbytes, work.wanted))
    return Traffic(
        nbytes=tuple(nbytes for nbytes, _ in told),
        rank=ranks.rank,
        wanted_nbytes=sum(wanted for _, wanted in told),
        exchanged_nbytes=work.received,
        landed_nbytes=sum(item.slice.nbytes for item in items),
        peak_nbytes=work.peak_nbytes,
        seconds=time.perf_counter() - started,
        is_verified=options.verify,
        checked=checked,
    )


class _Work:
    """What this rank does, and what has become of it."""

    def __init__(
        self,
        stages: Sequence[Stage],
        into: Sequence[torch.Tensor],
        *,
        reader: Reader,
        ranks: Ranks,
        options: CarryOptions,
        memory: int,
    ) -> None:
        self._stages = stages
        self._places = Places(into)
        self._reader = reader
        self._ranks = ranks
        self._options = options
        self._memory = memory
        self._failure: Exception | None = None
        self._is_stopped = False
        self._buffers = _Buffers(stages, into, ranks, memory=memory)
        self.peak_nbytes = self._buffers.nbytes
        self.received = 0
        self.wanted = 0

    def run(self) -> None:
        """Go through all stages. Raises what this rank failed with; call it through `together`."""
        observer = self._options.observer
        if observer is not None:
            nbytes = sum(load.slice.nbytes for stage in self._stages for load in stage.loads)
            self._try(lambda: observer.begin(title="load", nbytes=nbytes))
        for stage, window, buffer, reading in self._read_ahead():
            self._finish(stage, window, buffer, reading)
        if observer is not None:
            self._try(observer.end)
        if self._failure is not None:
            raise self._failure

    def _try(self, work: Callable[[], T]) -> T | None:
        """What `work` gives; None where it fails, which is told to the other ranks with the next part."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # raised at the end of `run`, when all ranks have stopped
            self._failure = self._failure or error
            self._is_stopped = True
            return None

    def _read_ahead(self) -> Iterator[tuple[Stage, Window, torch.Tensor, Reading | None]]:
        """Every window of this rank and the reading of its part; that of the next has begun too."""
        begun: list[tuple[Stage, Window, torch.Tensor, Reading | None]] = []
        for number, (stage, window) in enumerate(self._windows()):
            buffer = self._buffers.parts[number % 2]
            begun.append((stage, window, buffer, self._try(partial(self._start, stage, window, buffer))))
            if number:
                yield begun.pop(0)
        yield from begun

    def _windows(self) -> Iterator[tuple[Stage, Window]]:
        """What is exchanged, then what is left for this rank alone; first what is read straight to where it lands."""
        *shared, alone = self._stages
        yield from ((stage, window) for stage in shared for window in stage.windows())
        for stage in (*(stage for stage in shared if stage.is_left), alone):
            for is_direct in (True, False):
                places = [(self._places.memory(load) is not None) is is_direct for load in stage.loads]
                rest = stage.rest(self._ranks.rank, self._memory, places)
                for window in rest.windows():
                    if self._is_stopped:
                        return
                    yield rest, window

    def _start(self, stage: Stage, window: Window, buffer: torch.Tensor) -> Reading:
        mine = stage.members.index(self._ranks.rank)
        segments, views = [], []
        for number in range(window.rounds):
            low = number * (window.round_nbytes + STATUS)
            memory = buffer[low : low + window.round_nbytes].numpy().data
            for segment in window.segments(mine, number):
                load, view = stage.loads[segment.load], memory[segment.offset : segment.offset + segment.nbytes]
                place = self._places.memory(load) if len(stage.members) == 1 else None
                if place is not None:
                    at = (segment.start - load.slice.start) * segment.itemsize
                    view = place[at : at + segment.nbytes]
                segments.append(segment)
                views.append(view)
        return start_reading(self._reader, stage.loads, segments, views)

    def _finish(self, stage: Stage, window: Window, buffer: torch.Tensor, reading: Reading | None) -> None:
        """Bring a window to its place, as soon as this rank's part of it is read."""
        done = None if reading is None else self._try(reading.finish)
        self.wanted += 0 if done is None else done.wanted
        if stage.is_over or (self._is_stopped and len(stage.members) == 1):
            return
        began = time.perf_counter()
        for number in range(window.rounds):
            low = number * (window.round_nbytes + STATUS)
            part = buffer[low : low + window.round_nbytes + STATUS]
            parts = [part] if len(stage.members) == 1 else self._gathered(stage, window, part)
            if stage.is_over:
                return
            self._try(partial(self._put, stage, window, number, parts))
        stage.measured.append((0.0 if done is None else done.seconds, time.perf_counter() - began))

    def _gathered(self, stage: Stage, window: Window, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of all members, unless one of them has failed: then the stage is over."""
        import torch

        status = part[window.round_nbytes :].zero_()
        status[0] = int(self._is_stopped)
        if stage.measured:  # the shortest times of its windows
            least = [min(column) for column in zip(*stage.measured, strict=True)]
            status[_WORD : 3 * _WORD].view(torch.float64).copy_(torch.tensor(least, dtype=torch.float64))
        whole = self._buffers.gathered(len(stage.members), part.numel())
        self._ranks.gather(self._buffers.sent(part), whole, stage.members)
        self.received += (len(stage.members) - 1) * part.numel()
        heard = whole[:, window.round_nbytes :].cpu()
        if bool(heard[:, 0].any()):
            stage.is_over = self._is_stopped = True
        elif self._options.exchange is Exchange.AUTO and len(stage.measured) == _SAMPLES:
            # whether the members would be done sooner if each read all, at the pace that they all read at; reading goes
            # on while parts are gathered and put in place
            read, moved = heard[:, _WORD : 3 * _WORD].contiguous().view(torch.float64).amax(dim=0).tolist()
            stage.is_left = bool(len(heard) * read < max(read, moved))
        return whole.unbind(0)

    def _put(self, stage: Stage, window: Window, number: int, parts: Sequence[torch.Tensor]) -> None:
        nbytes = 0
        for reader, part in enumerate(parts):
            for segment in window.segments(reader, number):
                nbytes += segment.nbytes
                load = stage.loads[segment.load]
                if len(parts) == 1 and self._places.memory(load) is not None:
                    continue
                values = part[segment.offset : segment.offset + segment.nbytes]
                for spot, piece in self._places.pieces(load, segment, values):
                    spot.copy_(piece)
        if self._options.observer is not None:
            self._options.observer.advance(nbytes)


class _Buffers:
    """What all stages of a rank need, one after another; pinned where it goes to or from a device."""

    def __init__(self, stages: Sequence[Stage], into: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
        import torch

        shared = stages[:-1]
        places = Places(into)
        rooms = [stage.needed() for stage in shared]
        alone = [load for stage in stages for load in stage.loads if places.memory(load) is None]
        if alone:  # also what the members of a set may come to read for themselves
            rooms.append(Stage(members=(ranks.rank,), loads=alone, room=Room.within(memory, 1)).needed())
        part = max((-(-one.part_nbytes // one.round_nbytes) * (one.round_nbytes + STATUS) for one in rooms), default=0)
        longest = max((one.round_nbytes + STATUS for one in rooms), default=0)
        parts = (len(stage.members) * (one.round_nbytes + STATUS) for stage, one in zip(shared, rooms, strict=False))
        whole = max(parts, default=0)
        is_pinned = any(tensor.is_cuda for tensor in into)
        self.parts = [torch.empty(part, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        on_host = ranks.device.type == "cpu"
        self._whole = torch.empty(whole, dtype=torch.uint8, device=ranks.device, pin_memory=is_pinned and on_host)
        self._sent = None if on_host else torch.empty(longest, dtype=torch.uint8, device=ranks.device)
        self.nbytes = 2 * part + (whole if on_host else 0)

    def gathered(self, members: int, nbytes: int) -> torch.Tensor:
        """Memory for the parts of all [members, bytes]."""
        return self._whole[: members * nbytes].view(members, nbytes)

    def sent(self, part: torch.Tensor) -> torch.Tensor:
        """A part where it can be gathered from."""
        if self._sent is None:
            return part
        return self._sent[: part.numel()].copy_(part, non_blocking=True)
