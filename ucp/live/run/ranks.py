"""The ranks that load together: they exchange small values and equal parts, and fail as one.

`Ranks` is the port; `Alone` and `Group` (torch.distributed) are what there is. Whatever happens on one rank, all take
the same steps, so that none waits for another that has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import ucp.errors
from ucp.errors import LoadError, UcpError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Alone", "Group", "Ranks", "ranks_of", "together"]

T = TypeVar("T")


@runtime_checkable
class Ranks(Protocol):
    """Ranks that hold the same slices."""

    rank: int
    """Which of them this is."""
    count: int
    """How many they are."""
    device: torch.device
    """Where the parts to gather must lie."""

    def share(self, value: T) -> list[T]:
        """The small values of all ranks, in their order."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts [bytes], equally long, of all ranks as [ranks, bytes]; overwritten by the next call."""


class Alone:
    """A single process."""

    def __init__(self) -> None:
        import torch

        self.rank = 0
        self.count = 1
        self.device = torch.device("cpu")

    def share(self, value: T) -> list[T]:
        """Its own value."""
        return [value]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Its own part, not copied."""
        return part.unsqueeze(0)


class Group:
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        import torch
        from torch import distributed

        self._group = group
        self.rank = distributed.get_rank(group)
        self.count = distributed.get_world_size(group)
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._into_one = self._can_gather_into_one()

    def share(self, value: T) -> list[T]:
        """`all_gather_object`."""
        from torch import distributed

        values: list[T] = [value] * self.count
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All parts in one tensor, or `all_gather` into views of it where the backend cannot."""
        from torch import distributed

        if self._buffer.numel() < self.count * part.numel():
            self._buffer = part.new_empty(self.count * part.numel(), device=self.device)
        whole = self._buffer[: self.count * part.numel()]
        own = part.to(self.device)
        if self._into_one:
            _gather_into_one(whole, own, self._group)
        else:
            distributed.all_gather(list(whole.chunk(self.count)), own, group=self._group)
        return whole.view(self.count, part.numel())

    def _can_gather_into_one(self) -> bool:
        """Whether the backend can; all ranks run the same one, so all find the same."""
        part = self._buffer.new_zeros(1)
        try:
            _gather_into_one(part.new_zeros(self.count), part, self._group)
        except (RuntimeError, NotImplementedError):
            return False
        return True


def _gather_into_one(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup | None) -> None:
    from torch import distributed

    # renamed in torch 2.13, where the old name warns
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    getattr(distributed, name)(whole, part, group=group)


def ranks_of(group: ProcessGroup | Ranks | None, live: torch.device) -> Ranks:
    """The ranks of `group`, or of the default group if there is one. `live`: device of the model."""
    import torch
    from torch import distributed

    if isinstance(group, Ranks):
        return group
    if not distributed.is_available() or not distributed.is_initialized():
        return Alone()
    count = distributed.get_world_size(group)
    if count < 1:
        raise UsageError("expected a group that this process is in; got another. Call load_into on its ranks only")
    if count == 1:
        return Alone()
    backends = distributed.get_backend_config(group)
    if "nccl" in backends and live.type == "cuda":
        return Group(group, live)
    if "cpu" in backends or "gloo" in backends:
        return Group(group, torch.device("cpu"))
    return Group(group, torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error, as other ranks are told of it."""

    kind: str
    """Class in `ucp.errors`."""
    text: str
    """Message."""


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns, unless it fails on any rank: then all ranks raise the same error. Collective.

    Raises
    ------
    UcpError
        Of the class that was raised, where all failing ranks agree, else LoadError.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # every rank must hear of it before it is raised
        failure = error
    told = ranks.share(None if failure is None else _told(failure))
    failed = {rank: one for rank, one in enumerate(told) if one is not None}
    if failed:
        if failure is not None and ranks.count == 1:
            raise failure
        raise _common(failed, ranks.count) from failure
    return result


def _told(error: Exception) -> _Failure:
    if isinstance(error, UcpError) and type(error).__name__ in ucp.errors.__all__:
        return _Failure(type(error).__name__, str(error))
    return _Failure(LoadError.__name__, f"{type(error).__name__}: {error}")


def _common(failed: dict[int, _Failure], count: int) -> UcpError:
    kinds = {one.kind for one in failed.values()}
    kind: type[UcpError] = getattr(ucp.errors, kinds.pop()) if len(kinds) == 1 else LoadError
    texts = dict.fromkeys(one.text for one in failed.values())
    if len(texts) == 1 and len(failed) == count:
        return kind(*texts)
    lines = [f"{_named([r for r, one in failed.items() if one.text == text], count)}: {text}" for text in texts]
    return kind("\n".join(lines))


def _named(ranks: Sequence[int], count: int) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} of {count}"
