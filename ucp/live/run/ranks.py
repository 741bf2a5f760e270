"""The ranks that load together: they exchange values and parts of tensors, and fail as one.

`Ranks` is the interface; `SingleRank` and `ProcessGroupRanks` (torch.distributed) implement it. Whatever happens on one
rank, all take the same steps, so that none waits for another that has failed. If a process dies, torch notices.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import ucp.errors
from ucp.errors import LoadError, UcpError, UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_LET_GO_SECONDS = 1.0
"""Time for which a collective waits until gloo has let go of its tensors, at most; it takes microseconds."""


class PeerLostError(LoadError):
    """An exchange was interrupted: the ranks can no longer agree on anything."""


@runtime_checkable
class Ranks(Protocol):
    """Ranks that load together."""

    rank: int
    """Number of this rank."""
    count: int
    """Number of ranks."""
    device: torch.device
    """Device of the parts to gather."""

    def share(self, value: T) -> list[T]:
        """Send a small value to all ranks. Returns the values of all ranks, in the order of ranks."""

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Send `parts[r]` (uint64 numbers) to each rank r. Returns what each rank sent to this one."""

    def gather(self, part: torch.Tensor, gathered: torch.Tensor, members: Sequence[int]) -> None:
        """Gather `part` (equally many bytes) of all `members` into `gathered`, [members, bytes]; only members call."""


class SingleRank:
    """A single process."""

    def __init__(self) -> None:
        import torch

        self.rank = 0
        self.count = 1
        self.device = torch.device("cpu")

    def share(self, value: T) -> list[T]:
        """The value of this process."""
        return [value]

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The numbers of this process."""
        return list(parts)

    def gather(self, part: torch.Tensor, gathered: torch.Tensor, members: Sequence[int]) -> None:
        """The part of this process."""
        del members
        gathered[0] = part


class ProcessGroupRanks:
    """The ranks of a process group of torch.distributed.

    Sets of ranks have no process groups: they send point to point. If only its members made a group
    (`use_local_synchronization`), torch 2.13 would name it after the number of groups in the process, which differs
    between pipeline stages, so that they would wait for ever. If all ranks made it, every set would cost every rank a
    rendezvous.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        from torch import distributed

        self._group = group
        self.rank = distributed.get_rank(group)
        self.count = distributed.get_world_size(group)
        self.device = device
        self._into_one = self._can_gather_into_one()

    def share(self, value: T) -> list[T]:
        """Gather the lengths of pickles, and then the pickles, as `all_gather_object` does."""
        import torch

        data = pickle.dumps(value)
        length = torch.tensor([len(data)], device=self.device)
        gathered_lengths = length.new_empty(self.count, 1)
        self.gather(length, gathered_lengths, range(self.count))
        lengths = gathered_lengths.flatten().tolist()
        part = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(self.device)
        gathered = part.new_empty(self.count, len(part))
        self.gather(part, gathered, range(self.count))
        pickles = zip(gathered.cpu().numpy(), lengths, strict=True)
        return [pickle.loads(row[:length].tobytes()) for row, length in pickles]  # noqa: S301  # from processes of the same job

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """`all_to_all_single`, of the lengths and then of the numbers."""
        import numpy as np
        import torch

        sizes = np.array([len(part) for part in parts])
        ones = [1] * self.count
        received_sizes = self._all_to_all(torch.from_numpy(sizes), ones, ones).tolist()
        numbers = torch.from_numpy(np.concatenate(parts).astype(np.uint64).view(np.int64))
        received = self._all_to_all(numbers, sizes.tolist(), received_sizes).numpy().view(np.uint64)
        return np.split(received, np.cumsum(received_sizes)[:-1])

    def gather(self, part: torch.Tensor, gathered: torch.Tensor, members: Sequence[int]) -> None:
        """`all_gather`; among some of the ranks, each sends its part to each other one."""
        from torch import distributed

        with _translate_lost_peer(members):
            if len(members) < self.count:
                self._send_to_members(part, gathered, members)
            elif self._into_one:
                self._lend(lambda one, mine: _gather_into_one(one, mine, self._group), gathered.view(-1), part)
            else:
                self._lend(
                    lambda mine, *rows: distributed.all_gather(list(rows), mine, group=self._group), part, *gathered
                )

    def _lend(self, collective: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Call `collective` with `tensors`, and wait until no thread of gloo refers to what it got.

        A thread of gloo may let go of a tensor long after the result is there. If that is the last reference to the
        Python object, it needs the interpreter, and if the program ends meanwhile, C++ aborts the process: "terminate
        called without an active exception" (torch 2.13, ProcessGroupGloo::runLoop).
        """
        aliases = [tensor.detach() for tensor in tensors]
        references = [weakref.ref(alias) for alias in aliases]
        collective(*aliases)
        del aliases
        deadline = time.monotonic() + _LET_GO_SECONDS
        while self.device.type == "cpu" and any(reference() is not None for reference in references):
            if time.monotonic() > deadline:  # a debugger, say, refers to them
                return
            time.sleep(0)

    def _send_to_members(self, part: torch.Tensor, gathered: torch.Tensor, members: Sequence[int]) -> None:
        from torch import distributed

        operations = []
        for row, member in zip(gathered.unbind(0), members, strict=True):
            if member == self.rank:
                row.copy_(part)
                continue
            peer = member if self._group is None else distributed.get_global_rank(self._group, member)
            operations.append(distributed.P2POp(distributed.isend, part, peer, self._group))
            operations.append(distributed.P2POp(distributed.irecv, row, peer, self._group))
        for work in distributed.batch_isend_irecv(operations):
            work.wait()

    def _all_to_all(self, values: torch.Tensor, sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        from torch import distributed

        sent = values.to(self.device)
        received = sent.new_empty(sum(received_sizes))
        with _translate_lost_peer(range(self.count)):
            self._lend(
                lambda into, of: distributed.all_to_all_single(into, of, received_sizes, sizes, group=self._group),
                received,
                sent,
            )
        return received.cpu()

    def _can_gather_into_one(self) -> bool:
        """Whether the backend can gather into one tensor; the same on all ranks, as they use one backend."""
        import torch

        part = torch.zeros(1, dtype=torch.uint8, device=self.device)
        try:
            self._lend(lambda one, mine: _gather_into_one(one, mine, self._group), part.new_zeros(self.count), part)
        except (RuntimeError, NotImplementedError):
            return False
        return True


@contextmanager
def _translate_lost_peer(members: Sequence[int]) -> Iterator[None]:
    """Explain torch's error when a peer has ended, or did not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"expected an answer from {_format_ranks(members)}; one of them has ended, or did not answer within the "
            "timeout of the process group (init_process_group(timeout=...)): all ranks must take part. Look at "
            f"the error of the first process that ended, and start the job again. torch says: {error}"
        ) from error


def _gather_into_one(gathered: torch.Tensor, part: torch.Tensor, group: ProcessGroup | None) -> None:
    from torch import distributed

    # renamed in torch 2.13, where the old name warns
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    getattr(distributed, name)(gathered, part, group=group)


def find_ranks(group: ProcessGroup | Ranks | None, device: torch.device) -> Ranks:
    """The ranks of `group`, or of the default group if there is one. `device`: of the model."""
    import torch
    from torch import distributed

    if isinstance(group, Ranks):
        return group
    if not distributed.is_available() or not distributed.is_initialized():
        return SingleRank()
    count = distributed.get_world_size(group)
    if count < 1:
        raise UsageError("expected a group with this process in it; got another. Call load_into on its ranks only")
    if count == 1:
        return SingleRank()
    backends = distributed.get_backend_config(group)
    if "nccl" in backends and device.type == "cuda":
        return ProcessGroupRanks(group, device)
    if "cpu" in backends or "gloo" in backends:
        return ProcessGroupRanks(group, torch.device("cpu"))
    return ProcessGroupRanks(group, torch.device("cuda", torch.cuda.current_device()))


def run_together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns, unless it fails on any rank: then all ranks raise the same error. Collective.

    Raises
    ------
    UcpError
        Of the class that was raised, if all failing ranks agree, else LoadError.
    """
    failure: Exception | None = None
    try:
        result = work()
    except PeerLostError:
        raise
    except Exception as error:  # noqa: BLE001  # every rank must learn of it before it is raised
        failure = error
    failures = ranks.share(None if failure is None else _to_message(failure))
    failed = {rank: message for rank, message in enumerate(failures) if message is not None}
    if failed:
        if failure is not None and ranks.count == 1:
            raise failure
        raise _merge_failures(failed, ranks.count) from failure
    return result


def _to_message(error: Exception) -> tuple[str, str]:
    """Class in `ucp.errors` and text, as other ranks receive them."""
    if isinstance(error, UcpError) and type(error).__name__ in ucp.errors.__all__:
        return type(error).__name__, str(error)
    return LoadError.__name__, f"{type(error).__name__}: {error}"


def _merge_failures(failed: dict[int, tuple[str, str]], count: int) -> UcpError:
    kinds = {kind for kind, _ in failed.values()}
    error_class: type[UcpError] = getattr(ucp.errors, kinds.pop()) if len(kinds) == 1 else LoadError
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and len(failed) == count:
        return error_class(*ranks_of)
    return error_class("\n".join(f"{_format_ranks(ranks)} of {count}: {text}" for text, ranks in ranks_of.items()))


def _format_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
