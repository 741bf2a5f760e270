"""The ring: K slots in memory for the layers of a model, which are filled in turn (MoESys, ring of slots).

Slots 0 to K-1 are filled first. When a layer is done, its slot is free, and the layer that is K behind it is read into
it, in the background. A pass of L layers with compute time c and load time l each takes max(L c, 2 c + (L - K) l) the
first time, and L max(c, l) from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any

from ucp.streaming.reader import Reader, ReadRange, StreamedParam, pad, take_unused

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class LayerSlot:
    """Memory for one layer."""

    host: torch.Tensor
    """Bytes in host memory; pinned, if the model is on a GPU."""
    memory: torch.Tensor
    """Bytes on the device of the model; `host`, if that is the CPU."""
    layer: int | None = None
    """The layer that is in it, or that is being read."""
    reads: list[Future[int]] = field(default_factory=list)
    """Reads that go on."""
    copy: Future[Any] | None = None
    """Gives the event on the GPU at which the copy to `memory` is done."""


class Ring:
    """Keeps some layers in memory; the next ones are being read."""

    def __init__(
        self, layers: Sequence[Sequence[StreamedParam]], reader: Reader, *, slots: int, device: torch.device
    ) -> None:
        import torch

        self._layers, self._reader = layers, reader
        self._lock = RLock()
        self._offsets = [_place(layer) for layer in layers]
        largest = max(_count_nbytes(layer) for layer in layers)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]  # torch's own
        self._slots = []
        for _ in range(min(slots, len(layers))):
            host = torch.empty(largest, dtype=torch.uint8, pin_memory=on_gpu)
            self._slots.append(
                LayerSlot(host, torch.empty(largest, dtype=torch.uint8, device=device) if on_gpu else host)
            )
        for layer, slot in enumerate(self._slots):
            self._start(layer, slot)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.host.numel() for slot in self._slots)

    def enter(self, layer: int) -> None:
        """Give the parameters of a layer their elements; wait until they are read. Other threads wait for `leave`."""
        self._lock.acquire()
        slot = next((slot for slot in self._slots if slot.layer == layer), None)
        if slot is None:  # called out of turn
            slot = self._slots[layer % len(self._slots)]
            self._finish(slot)
            self._start(layer, slot)
        self._finish(slot)
        for param, offset in zip(self._layers[layer], self._offsets[layer], strict=True):
            set_parameter(param, param.view(slot.memory, offset, param.shape))

    def leave(self, layer: int) -> None:
        """Take a layer's elements away, and begin to read the layer that follows into its slot."""
        try:
            for param in self._layers[layer]:
                clear_parameter(param)
            slot = next((slot for slot in self._slots if slot.layer == layer), None)
            if slot is not None and len(self._slots) < len(self._layers):
                self._start((layer + len(self._slots)) % len(self._layers), slot)
        finally:
            self._lock.release()

    def _start(self, layer: int, slot: LayerSlot) -> None:
        import torch

        ranges = [
            ReadRange(param, 0, param.numel, offset)
            for param, offset in zip(self._layers[layer], self._offsets[layer], strict=True)
        ]
        done = None
        if self._stream is not None:
            if slot.copy is not None:
                slot.copy.result().synchronize()  # or the reads would overwrite what is still being copied
            done = torch.cuda.current_stream(slot.memory.device).record_event()  # of the layer before in this slot
        else:
            slot.host = slot.memory = take_unused(slot.host)
        slot.layer = layer
        slot.reads = self._reader.start(ranges, slot.host)
        slot.copy = None if done is None else self._reader.run(self._copy, slot, slot.reads, done)

    def _copy(self, slot: LayerSlot, reads: Sequence[Future[int]], done: torch.cuda.Event) -> torch.cuda.Event:
        """Copy a slot to the GPU, once it is read and the layer before in it is computed. In the background."""
        import torch

        for read in reads:
            read.result()
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(done)
            slot.memory.copy_(slot.host, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def _finish(self, slot: LayerSlot) -> None:
        """Wait until a slot is read, and the GPU until it is copied. Raises SourceError."""
        import torch

        reads, slot.reads = slot.reads, []
        for read in reads:
            read.result()
        if slot.copy is not None:
            torch.cuda.current_stream(slot.memory.device).wait_event(slot.copy.result())

    def wait(self) -> None:
        """Wait for all reads."""
        for slot in self._slots:
            for read in slot.reads:
                read.exception()


def set_parameter(param: StreamedParam, value: torch.Tensor) -> None:
    """Make `value` the parameter of its module."""
    from torch import nn

    param.module._parameters[param.name] = nn.Parameter(value, requires_grad=param.trained)  # noqa: SLF001  # torch has no other way without a copy


def clear_parameter(param: StreamedParam) -> None:
    """Make the parameter one without memory: what uses it, or saves it, outside of its turn fails."""
    import torch

    dtype = getattr(torch, param.item.slice.dtype.value)
    set_parameter(param, torch.empty(param.shape, dtype=dtype, device="meta"))


def _place(params: Iterable[StreamedParam]) -> list[int]:
    """First byte of each parameter in a buffer."""
    offsets, position = [], 0
    for param in params:
        offsets.append(position)
        position += pad(param.nbytes)
    return offsets


def _count_nbytes(params: Iterable[StreamedParam]) -> int:
    return sum(pad(param.nbytes) for param in params)
