"""Experts of a streamed model: read once the router has chosen them, kept while they are busy.

Experts are rows of stacked parameters (transformers, torchtitan), or modules with parameters of their own. In place of
stacked parameters, the module gets `Rows`, of which it can take one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from ucp.errors import UnsupportedError
from ucp.streaming.cache import Cache
from ucp.streaming.reader import Reader, ReadRange, StreamedParam, pad, take_unused
from ucp.streaming.ring import clear_parameter, set_parameter

if TYPE_CHECKING:
    import torch
    from torch import nn

_MOST_PASSING = 8
"""Buffers for experts that the cache does not keep."""

ExpertKey: TypeAlias = tuple[str, int]
"""Path of the module that has the experts, and number of the expert."""


_FreeBuffer: TypeAlias = "tuple[torch.Tensor, torch.cuda.Event | None]"
"""A buffer, and on a GPU the event at which it was copied."""


class Expert:
    """An expert in memory, or on its way."""

    def __init__(
        self,
        buffer: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        reads: Sequence[Future[int]],
        *,
        kept: bool,
        device: torch.device,
    ) -> None:
        """`kept`: whether it stays in the cache; else its buffer is for the next one as soon as it was used."""
        self.buffer, self.kept = buffer, kept
        self.copied: torch.cuda.Event | None = None
        """On a GPU, the event at which the buffer is copied to it."""
        self._tensors, self._reads, self._device = tensors, reads, device

    def wait(self) -> None:
        """Wait until it is read; begin to copy it to a GPU. Raises SourceError."""
        import torch

        for read in self._reads:
            read.result()
        self._reads = ()
        if self._device.type == "cuda" and self.copied is None:
            self._tensors = {name: t.to(self._device, non_blocking=True) for name, t in self._tensors.items()}
            self.copied = torch.cuda.current_stream(self._device).record_event()

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter of it, once it is read. Raises SourceError."""
        self.wait()
        return self._tensors[name]


class ExpertStore:
    """The experts of all layers."""

    def __init__(
        self,
        params: Mapping[ExpertKey, Sequence[tuple[StreamedParam, int | None]]],
        reader: Reader,
        *,
        nbytes: int,
        device: torch.device,
    ) -> None:
        """`params`: of each expert, with the row of a stacked one; `nbytes`: of the cache."""
        import torch

        self._params, self._reader, self._device = params, reader, device
        self.expert_nbytes = max(sum(pad(_row_nbytes(*param)) for param in of_one) for of_one in params.values())
        count = max(min(nbytes // self.expert_nbytes, len(params) + _MOST_PASSING), 2)  # more would stay empty
        pinned = device.type == "cuda"
        buffers = [torch.empty(self.expert_nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        passing = max(1, min(_MOST_PASSING, count // 3))
        self.num_buffers = count
        self._passing: list[_FreeBuffer] = [(buffer, None) for buffer in buffers[:passing]]
        self._free: list[_FreeBuffer] = [(buffer, None) for buffer in buffers[passing:]]
        self.cache: Cache[ExpertKey, Expert] = Cache(len(self._free), self._read, history=True, release=self._release)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.expert_nbytes * self.num_buffers

    def has_room(self, key: ExpertKey) -> bool:
        """Whether there is a buffer for an expert, beside those that are in use."""
        return bool(self._passing) or self.cache.keeps(key)

    def give_back(self, expert: Expert) -> None:
        """Take back the buffer of an expert that was used, unless the cache keeps it."""
        if not expert.kept:
            expert.wait()
            self._passing.append((expert.buffer, expert.copied))

    def _read(self, key: ExpertKey, kept: bool) -> Expert:  # noqa: FBT001  # the protocol of the cache
        buffer, copied = (self._free if kept else self._passing).pop(0)
        if copied is not None:
            copied.synchronize()  # or reads would overwrite what is still being copied
        buffer = take_unused(buffer)
        tensors, ranges, position = {}, [], 0
        for param, row in self._params[key]:
            shape = param.shape if row is None else param.shape[1:]
            numel = param.numel // (1 if row is None else param.shape[0])
            start = 0 if row is None else row * numel
            ranges.append(ReadRange(param, start, start + numel, position))
            tensors[param.item.name] = param.view(buffer, position, shape)
            position += pad(_row_nbytes(param, row))
        reads = self._reader.start(ranges, buffer)
        return Expert(buffer, tensors, reads, kept=kept, device=self._device)

    def _release(self, expert: Expert) -> None:
        expert.wait()
        self._free.append((expert.buffer, expert.copied))


def _row_nbytes(param: StreamedParam, row: int | None) -> int:
    return param.nbytes if row is None else param.nbytes // param.shape[0]


class Choice:
    """The experts that one call of a module needs: read in their order, as far as there are buffers, ahead of use."""

    def __init__(self, path: str, store: ExpertStore) -> None:
        self._path, self._store = path, store
        self._experts: dict[ExpertKey, Expert] = {}
        self._pending: list[ExpertKey] = []
        self._last: ExpertKey | None = None

    def begin(self, numbers: Iterable[int]) -> None:
        """Begin to read the experts with these numbers."""
        self.end()
        keys = [(self._path, number) for number in numbers]
        self._pending = sorted(keys, key=lambda key: key not in self._store.cache)
        self._store.cache.in_use = self._experts
        self._read_ahead()

    def get(self, number: int) -> Expert:
        """An expert. The one before it is not needed any more."""
        key = (self._path, number)
        if self._last is not None and self._last != key:
            self._store.give_back(self._experts.pop(self._last))
        if key not in self._experts:
            self._pending = [key, *(other for other in self._pending if other != key)]
        self._last = key
        self._read_ahead()
        if key not in self._experts:  # others took the buffers, and were not used
            self._drop_one()
            self._read_ahead()
        return self._experts[key]

    def end(self) -> None:
        """No expert is needed any more."""
        for expert in self._experts.values():
            self._store.give_back(expert)
        self._experts.clear()
        self._pending, self._last = [], None

    def _read_ahead(self) -> None:
        while self._pending and self._store.has_room(self._pending[0]):
            key = self._pending.pop(0)
            self._experts[key] = self._store.cache.get(key)

    def _drop_one(self) -> None:
        """Give back the buffer of an expert that was read ahead; it is read again when it is used."""
        key = next(key for key, expert in self._experts.items() if not expert.kept)
        self._store.give_back(self._experts.pop(key))
        self._pending.append(key)


class Rows:
    """A stacked parameter of experts, [experts, ...], of which rows are read when they are taken."""

    def __init__(self, path: str, param: StreamedParam, choice: Choice) -> None:
        import torch

        self._path, self._param, self._choice = path, param, choice
        self.shape = torch.Size(param.shape)
        self.ndim = len(param.shape)
        self.dtype = getattr(torch, param.item.slice.dtype.value)

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Elements per dim, or of one."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: torch.Tensor | int) -> torch.Tensor:
        """The row of an expert. Raises UnsupportedError for several rows at once, IndexError past the last."""
        is_mask = isinstance(index, bool | slice) or str(getattr(index, "dtype", "")) in ("torch.bool", "bool")
        try:
            row = None if is_mask else range(len(self))[index]
        except TypeError:
            row = None
        if row is None:
            raise UnsupportedError(
                f"expected {self._path} to take its experts one by one; it takes {index!r} of {self._param.name}. For "
                'transformers: model.set_experts_implementation("eager")'
            )
        value = self._choice.get(row).tensor(self._param.item.name)
        return value.reshape(*getattr(index, "shape", ()), *value.shape)  # [1] takes a row as one of several

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], *_args: object, **_kwargs: object) -> object:
        """Refuse functions of torch that would need all rows."""
        raise UnsupportedError(
            f"expected modules that take their experts one by one; this one calls {function.__name__} with those of a "
            'whole layer. For transformers: model.set_experts_implementation("eager")'
        )


def stream_stacked(path: str, module: nn.Module, params: Sequence[StreamedParam], store: ExpertStore) -> None:
    """Give a module rows in place of its stacked parameters, which are read as soon as its routing is known."""
    choice = Choice(path, store)
    for param in params:
        del param.module._parameters[param.name]  # noqa: SLF001  # torch has no other way to keep the name
        setattr(param.module, param.name, Rows(path, param, choice))
    count = params[0].shape[0]

    def choose(_module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        choice.begin(_find_routing([*args, *kwargs.values()], count))

    module.register_forward_pre_hook(choose, with_kwargs=True)
    module.register_forward_hook(lambda *_: choice.end(), always_call=True)


def _find_routing(values: Iterable[object], count: int) -> list[int]:
    """The experts that tokens are routed to: the values of an integer tensor among the arguments; none without one."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool:
            return [int(number) for number in torch.unique(value) if 0 <= number < count]
    return []


def stream_module(key: ExpertKey, module: nn.Module, params: Sequence[StreamedParam], store: ExpertStore) -> None:
    """Read an expert that is a module when it is called."""
    choice = Choice(key[0], store)

    def enter(*_: object) -> None:
        choice.begin([key[1]])
        expert = choice.get(key[1])
        for param in params:
            set_parameter(param, expert.tensor(param.item.name))

    def leave(*_: object) -> None:
        for param in params:
            clear_parameter(param)
        choice.end()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
