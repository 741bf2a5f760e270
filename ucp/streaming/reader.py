"""Reads parameters of a checkpoint into one buffer, by several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING

from ucp.core.index import SourceFile
from ucp.core.slices import Locator, resolve
from ucp.errors import UsageError
from ucp.io.files import Sources
from ucp.io.provenance import check_local
from ucp.live.parts import LoadItem
from ucp.transfer.gather import Gatherer

if TYPE_CHECKING:
    import torch
    from torch import nn

ALIGNMENT = 64
"""Bytes; every parameter in a buffer begins at a multiple of them."""
_BLOCK = 16 << 20
"""Bytes that a thread reads at a time, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedParam:
    """A parameter of a module, and where its elements are."""

    module: nn.Module
    """The module that has it."""
    name: str
    """Its name there."""
    item: LoadItem
    """What is read."""
    locator: Locator
    """Finds the fragments of the state."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim, on this rank."""
        return self.item.slice.local_shape

    @property
    def numel(self) -> int:
        """Elements, on this rank."""
        return self.item.slice.stop - self.item.slice.start

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.item.slice.dtype.itemsize

    def view(self, buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in a buffer of bytes that begins at `offset`."""
        import torch

        dtype = self.item.slice.dtype
        data = buffer[offset : offset + prod(shape) * dtype.itemsize]
        return data.view(getattr(torch, dtype.value)).view(tuple(shape))


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Elements of a parameter, and where they go."""

    param: StreamedParam
    """The parameter."""
    start: int
    """First element of it on this rank."""
    stop: int
    """One past the last."""
    offset: int
    """First byte in the buffer."""


def pad(nbytes: int) -> int:
    """Bytes up to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def take_unused(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, or new memory if tensors of the model still have its own: backward, or a list of weights."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001  # torch has no public one
    if count is not None and _count_users(buffer, count) <= _count_users(torch.empty(1), count):
        return buffer
    return torch.empty_like(buffer, pin_memory=buffer.is_pinned())


def _count_users(tensor: torch.Tensor, count: Callable[[int], int]) -> int:
    return count(tensor.untyped_storage()._cdata)  # noqa: SLF001  # as above


class Reader:
    """Reads ranges of parameters in the background."""

    def __init__(self, files: Iterable[SourceFile], threads: int) -> None:
        self._files = {file.path: file for file in files}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ucp.stream")
        self._is_closed = False
        self._lock = Lock()
        self.nbytes_read = 0

    def start(self, ranges: Iterable[ReadRange], buffer: torch.Tensor) -> list[Future[int]]:
        """Begin to read ranges into a buffer of bytes in host memory. The futures give the bytes read.

        Raises UsageError once it is closed.
        """
        if self._is_closed:
            raise UsageError("expected a stream that is open; it was closed: stream a new model")
        data = buffer.numpy()
        return [self._pool.submit(self._read, blocks, memoryview(data)) for blocks in _group(_cut(ranges))]  # type: ignore[arg-type]  # an array has the buffer protocol

    def _read(self, ranges: Sequence[ReadRange], data: memoryview) -> int:
        gatherer = Gatherer(sources=Sources(self._files.values()))
        requests = []
        for read in ranges:
            target = read.param.item.slice
            nbytes = (read.stop - read.start) * target.dtype.itemsize
            pieces = resolve(target, read.param.locator, read.start, read.stop)
            requests.append((data[read.offset : read.offset + nbytes], target.dtype, pieces))
        try:
            gatherer.fill_many(requests)
        finally:  # what failed may have done so because a file changed
            data.release()  # the pool keeps it a moment longer than the result, in which the buffer is seen as in use
            check_local(self._files[path] for path in gatherer.sources.paths if path in self._files)
            gatherer.sources.close()
        with self._lock:
            self.nbytes_read += gatherer.nbytes_read
        return gatherer.nbytes_read

    def close(self) -> None:
        """Stop the threads."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def _cut(ranges: Iterable[ReadRange]) -> Iterator[ReadRange]:
    """The same ranges, none larger than a block."""
    for read in ranges:
        itemsize = read.param.item.slice.dtype.itemsize
        step = max(_BLOCK // itemsize, 1)
        for start in range(read.start, read.stop, step):
            stop = min(start + step, read.stop)
            yield ReadRange(read.param, start, stop, read.offset + (start - read.start) * itemsize)


def _group(ranges: Iterable[ReadRange]) -> Iterator[list[ReadRange]]:
    """Ranges in groups of about a block."""
    group: list[ReadRange] = []
    nbytes = 0
    for read in ranges:
        group.append(read)
        nbytes += (read.stop - read.start) * read.param.item.slice.dtype.itemsize
        if nbytes >= _BLOCK:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
