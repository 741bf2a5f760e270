"""The ranks that load together: they exchange values and parts, and fail as one.

`Ranks` is the port; `Alone` and `Group` (torch.distributed) are what there is. Whatever happens on one rank, all take
the same steps, so that none waits for another that has failed. One that has died is noticed by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import ucp.errors
from ucp.errors import LoadError, UcpError, UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class PeerLostError(LoadError):
    """An exchange broke off: nothing more can be agreed on."""


@runtime_checkable
class Ranks(Protocol):
    """Ranks that load together."""

    rank: int
    """Which of them this is."""
    count: int
    """How many they are."""
    device: torch.device
    """Where the parts to gather must lie."""

    def share(self, value: T) -> list[T]:
        """The small values of all ranks, in their order."""

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """What every rank has for this one; `parts`: numbers (uint64) for each, in their order."""

    def gather(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        """Put the parts [bytes], equally long, of all `members` into `whole` [members, bytes]; only they call it."""


class SingleRank:
    """A single process."""

    def __init__(self) -> None:
        import torch

        self.rank = 0
        self.count = 1
        self.device = torch.device("cpu")

    def share(self, value: T) -> list[T]:
        """Its own value."""
        return [value]

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its own numbers."""
        return list(parts)

    def gather(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        """Its own part."""
        del members
        whole[0] = part


class ProcessGroupRanks:
    """The ranks of a process group of torch.distributed.

    Some of them exchange without a group of their own: one that only its members make (`use_local_synchronization`)
    is named after how many groups a process has (torch 2.13), which differs between pipeline stages, so that they would
    wait for ever; and one that all make costs every rank a rendezvous for each set.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        from torch import distributed

        self._group = group
        self.rank = distributed.get_rank(group)
        self.count = distributed.get_world_size(group)
        self.device = device
        self._into_one = self._can_gather_into_one()

    def share(self, value: T) -> list[T]:
        """`all_gather_object`."""
        from torch import distributed

        values: list[T] = [value] * self.count
        with _broken_off(range(self.count)):
            distributed.all_gather_object(values, value, group=self._group)
        return values

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """`all_to_all_single`, of the lengths and then of the numbers."""
        import numpy as np
        import torch

        sizes = np.array([len(part) for part in parts])
        ones = [1] * self.count
        got = self._all_to_all(torch.from_numpy(sizes), ones, ones).tolist()
        numbers = torch.from_numpy(np.concatenate(parts).astype(np.uint64).view(np.int64))
        told = self._all_to_all(numbers, sizes.tolist(), got).numpy().view(np.uint64)
        return np.split(told, np.cumsum(got)[:-1])

    def gather(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        """All parts into one tensor; between some ranks, every part to every other of them."""
        from torch import distributed

        with _broken_off(members):
            if len(members) < self.count:
                self._send_round(part, whole, members)
            elif self._into_one:
                _gather_into_one(whole.view(-1), part, self._group)
            else:
                distributed.all_gather(list(whole.unbind(0)), part, group=self._group)

    def _send_round(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        from torch import distributed

        sent = []
        for row, member in zip(whole.unbind(0), members, strict=True):
            if member == self.rank:
                row.copy_(part)
                continue
            peer = member if self._group is None else distributed.get_global_rank(self._group, member)
            sent.append(distributed.P2POp(distributed.isend, part, peer, self._group))
            sent.append(distributed.P2POp(distributed.irecv, row, peer, self._group))
        for work in distributed.batch_isend_irecv(sent):
            work.wait()

    def _all_to_all(self, values: torch.Tensor, sizes: list[int], got: list[int]) -> torch.Tensor:
        from torch import distributed

        own = values.to(self.device)
        told = own.new_empty(sum(got))
        with _broken_off(range(self.count)):
            distributed.all_to_all_single(told, own, got, sizes, group=self._group)
        return told.cpu()

    def _can_gather_into_one(self) -> bool:
        """Whether the backend can; all ranks run the same one, so all find the same."""
        import torch

        part = torch.zeros(1, dtype=torch.uint8, device=self.device)
        try:
            _gather_into_one(part.new_zeros(self.count), part, self._group)
        except (RuntimeError, NotImplementedError):
            return False
        return True


@contextmanager
def _broken_off(members: Sequence[int]) -> Iterator[None]:
    """Say what has happened where torch finds a peer gone, or waited for it in vain."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"expected an answer of {_named(members)}; a process of them has ended, or did not come within the timeout "
            "of its process group (init_process_group(timeout=...)): every rank has to call load_into. Look at what "
            f"the first process to end says, and start the job again. torch says: {error}"
        ) from error


def _gather_into_one(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup | None) -> None:
    from torch import distributed

    # renamed in torch 2.13, where the old name warns
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    getattr(distributed, name)(whole, part, group=group)


def find_ranks(group: ProcessGroup | Ranks | None, live: torch.device) -> Ranks:
    """The ranks of `group`, or of the default group if there is one. `live`: device of the model."""
    import torch
    from torch import distributed

    if isinstance(group, Ranks):
        return group
    if not distributed.is_available() or not distributed.is_initialized():
        return SingleRank()
    count = distributed.get_world_size(group)
    if count < 1:
        raise UsageError("expected a group that this process is in; got another. Call load_into on its ranks only")
    if count == 1:
        return SingleRank()
    backends = distributed.get_backend_config(group)
    if "nccl" in backends and live.type == "cuda":
        return ProcessGroupRanks(group, live)
    if "cpu" in backends or "gloo" in backends:
        return ProcessGroupRanks(group, torch.device("cpu"))
    return ProcessGroupRanks(group, torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error, as other ranks are told of it."""

    kind: str
    """Class in `ucp.errors`."""
    text: str
    """Message."""


def run_together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns, unless it fails on any rank: then all ranks raise the same error. Collective.

    Raises
    ------
    UcpError
        Of the class that was raised, where all failing ranks agree, else LoadError.
    """
    failure: Exception | None = None
    try:
        result = work()
    except PeerLostError:
        raise
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
    lines = [f"{_named([r for r, one in failed.items() if one.text == text])} of {count}: {text}" for text in texts]
    return kind("\n".join(lines))


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
