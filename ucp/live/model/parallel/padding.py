"""Rows that a run adds to the vocabulary, so that ranks divide it: no checkpoint of another run has them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ucp.core.slices import Slice

if TYPE_CHECKING:
    import torch

__all__ = ["without_padding"]


def without_padding(memory: torch.Tensor, own: Slice) -> torch.Tensor:
    """The part of `memory` that the slice fills; what is past that becomes zeros, as Megatron makes it.

    >>> import torch
    >>> from ucp.core.dtypes import DType
    >>> rows = torch.ones(3, 2)
    >>> own = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(2, 2), start=0, stop=4)
    >>> without_padding(rows, own).shape, rows[2].tolist()
    (torch.Size([2, 2]), [0.0, 0.0])
    """
    count = own.stop - own.start
    if memory.numel() <= count:
        return memory
    flat = memory.detach().view(-1)
    flat[count:].zero_()
    return flat[:count].view(own.local_shape) if count == prod(own.local_shape) else flat[:count]
