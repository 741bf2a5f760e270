"""The ring: K slots in memory for the layers of a model, which are filled in turn (MoESys, ring of slots).

Slots 0 to K-1 are filled first. When a layer is done, its slot is free, and the layer that is K behind it is read into
it, in the background. A pass of L layers with compute time c and load time l each takes max(L c, 2 c + (L - K) l) the
first time, and L max(c, l) from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

from ucp.live.run.ranks import Ranks
from ucp.streaming.reader import Reader, StreamedParam, take_unused
from ucp.streaming.share import gather, plan_layers

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
    arrival: Future[torch.cuda.Event | None] | None = None
    """Is done once the layer is read; gives the event on the GPU at which it is copied to `memory`."""


class Ring:
    """Keeps some layers in memory; the next ones are being read."""

    def __init__(
        self,
        layers: Sequence[Sequence[StreamedParam]],
        reader: Reader,
        ranks: Ranks,
        *,
        slots: int,
        device: torch.device,
    ) -> None:
        """`ranks`: those that each read a part of what they hold alike. Collective."""
        import torch

        self._layers, self._reader, self._ranks = layers, reader, ranks
        self._lock = RLock()
        self._plans = plan_layers(layers, ranks)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ucp.stream arrivals")  # layers arrive in their order
        largest = max(plan.nbytes for plan in self._plans)
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
        for param, offset in zip(self._layers[layer], self._plans[layer].offsets, strict=True):
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

        computed = None
        if self._stream is not None:
            if slot.arrival is not None and (copied := slot.arrival.result()) is not None:
                copied.synchronize()  # or the reads would overwrite what is still being copied
            computed = torch.cuda.current_stream(slot.memory.device).record_event()  # the layer before in this slot
        else:
            slot.host = slot.memory = take_unused(slot.host)
        slot.layer = layer
        reads = self._reader.start(self._plans[layer].reads, slot.host)
        slot.arrival = self._thread.submit(self._complete, layer, slot, reads, computed)

    def _complete(
        self, layer: int, slot: LayerSlot, reads: Sequence[Future[int]], computed: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Wait until a layer is read, gather what other ranks read, copy it to the GPU. In the background."""
        import torch

        failures = [failure for failure in (read.exception() for read in reads) if isinstance(failure, Exception)]
        gather(layer, self._plans[layer], slot.host, self._ranks, failures[0] if failures else None)
        if self._stream is None or computed is None:
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            slot.memory.copy_(slot.host, non_blocking=True)
            copied: torch.cuda.Event = self._stream.record_event()
            return copied

    def _finish(self, slot: LayerSlot) -> None:
        """Wait until a slot is read, and the GPU until it is copied. Raises SourceError."""
        import torch

        if slot.arrival is not None and (copied := slot.arrival.result()) is not None:
            torch.cuda.current_stream(slot.memory.device).wait_event(copied)

    def close(self) -> None:
        """Wait for all layers that are on their way."""
        self._thread.shutdown()


def set_parameter(param: StreamedParam, value: torch.Tensor) -> None:
    """Make `value` the parameter of its module."""
    from torch import nn

    param.module._parameters[param.name] = nn.Parameter(value, requires_grad=False)  # noqa: SLF001  # torch has no other way without a copy


def clear_parameter(param: StreamedParam) -> None:
    """Make the parameter one without memory: what uses it, or saves it, outside of its turn fails."""
    import torch

    dtype = getattr(torch, param.item.slice.dtype.value)
    set_parameter(param, torch.empty(param.shape, dtype=dtype, device="meta"))
