"""Memory for windows, got before anything is under way: two parts of this rank, and what is gathered at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ucp.live.exchange.places import Places
from ucp.live.exchange.read_shares import ALIGNMENT
from ucp.live.exchange.stages import STATUS, Room, Stage
from ucp.live.run.ranks import Ranks

if TYPE_CHECKING:
    import torch

__all__ = ["Buffers"]


class Buffers:
    """What all stages of a rank need, one after another; pinned where it goes to or from a device."""

    def __init__(self, stages: Sequence[Stage], into: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
        import torch

        shared = stages[:-1]
        places = Places(into)
        rooms = [_shrunk(stage) for stage in shared]
        alone = [load for stage in stages for load in stage.loads if places.memory(load) is None]
        if alone:  # also what the members of a set may come to read for themselves
            left = Stage(members=(ranks.rank,), loads=alone, room=Room.within(memory, 1))
            rooms.append(_shrunk(left))
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


def _shrunk(stage: Stage) -> Room:
    """The room that a stage takes, little where it carries little; multiples of `ALIGNMENT`, as windows are."""
    total = sum(own.slice.nbytes + ALIGNMENT for own in stage.loads)
    part = _aligned(min(stage.room.part_nbytes, -(-total // len(stage.members))))
    return Room(part_nbytes=part, round_nbytes=min(max(stage.room.round_nbytes // ALIGNMENT, 1) * ALIGNMENT, part))


def _aligned(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
