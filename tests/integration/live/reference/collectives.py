"""Collectives that gradients flow through, for hand-written tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any


def copied(own: Tensor, group: Group) -> Tensor:
    """`own`; its gradient is the sum over the ranks, each of which makes something else of it."""
    return _Copied.apply(own, group)


def summed(own: Tensor, group: Group) -> Tensor:
    """The sum over the ranks; the gradient is that of the sum."""
    return _Summed.apply(own, group)


def joined(own: Tensor, group: Group) -> Tensor:
    """Parts of the last dim of all ranks, side by side; the gradient is this rank's part."""
    return _Joined.apply(own, group)


def gathered(own: Tensor, group: Group) -> Tensor:
    """Rows of all ranks, one after another; the gradient is the sum over the ranks of these rows."""
    return _Gathered.apply(own, group)


def scattered(own: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over the ranks; the gradient is that of all rows."""
    return _Scattered.apply(own, group)


def _all_reduce(own: Tensor, group: Group) -> Tensor:
    found = own.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


def _all_gather(own: Tensor, group: Group, dim: int) -> Tensor:
    parts = [torch.empty_like(own.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim)


def _own(whole: Tensor, group: Group, dim: int) -> Tensor:
    return whole.chunk(group.size(), dim)[group.rank()]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: Group) -> Tensor:
        context.group = group
        return own.view_as(own)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, context.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, own: Tensor, group: Group) -> Tensor:
        return _all_reduce(own, group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: Group) -> Tensor:
        context.group = group
        return _all_gather(own, group, -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own(gradient, context.group, -1), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: Group) -> Tensor:
        context.group = group
        return _all_gather(own, group, 0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own(_all_reduce(gradient, context.group), context.group, 0), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: Group) -> Tensor:
        context.group = group
        return _own(_all_reduce(own, group), group, 0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, context.group, 0), None
