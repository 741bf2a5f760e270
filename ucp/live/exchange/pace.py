"""Whether exchanging pays: the members of a set tell each other what they measured, and so decide alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.live.exchange.stages import Stage

if TYPE_CHECKING:
    import torch

__all__ = ["is_direct_faster", "tell"]

_WORD = 8
"""Bytes of a number."""


def tell(status: torch.Tensor, stage: Stage, *, is_stopped: bool) -> None:
    """Fill in the bytes after a part: whether this rank has failed, and the shortest times of its windows."""
    import torch

    status.zero_()
    status[0] = int(is_stopped)
    if stage.measured:
        least = [min(column) for column in zip(*stage.measured, strict=True)]
        status[_WORD : 3 * _WORD].view(torch.float64).copy_(torch.tensor(least, dtype=torch.float64))


def is_direct_faster(heard: torch.Tensor) -> bool:
    """Whether the members would be done sooner if each read all: so many parts, at the pace that they all read at.

    `heard`: the bytes after their parts [members, bytes]. Reading goes on while parts are gathered and put in place.
    """
    import torch

    read, moved = heard[:, _WORD : 3 * _WORD].contiguous().view(torch.float64).amax(dim=0).tolist()
    return bool(len(heard) * read < max(read, moved))
