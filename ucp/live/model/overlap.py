"""Tensors that share memory: a load into one of them would overwrite the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["overlapping"]

Named = tuple[str, "torch.Tensor"]


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Pairs, by name, that share elements; what is cut from one memory and lies side by side or interleaved does not.

    >>> import torch
    >>> base = torch.zeros(6)
    >>> list(overlapping({"a": base[:4], "b": base[2:], "c": torch.zeros(3)}))
    ['a and b']
    """
    held = [named for named in tensors.items() if named[1].numel() and not named[1].is_meta]
    near: list[Named] = []
    end = 0
    for name, own in sorted(held, key=lambda named: (str(named[1].device), named[1].data_ptr())):
        if near and (own.device != near[0][1].device or own.data_ptr() >= end):
            yield from _shared(near)
            near, end = [], 0
        near.append((name, own))
        end = max(end, own.data_ptr() + _span(own))
    yield from _shared(near)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _shared(near: Sequence[Named]) -> Iterator[str]:
    """Pairs among tensors whose spans meet, found by marking what each has."""
    import torch

    if len(near) < 2:
        return
    starts = [own.data_ptr() - near[0][1].data_ptr() for _, own in near]
    unit = gcd(*starts, *(own.itemsize for _, own in near))  # bytes that are marked at once
    spans = [start + _span(own) for start, (_, own) in zip(starts, near, strict=True)]
    marks = torch.zeros(max(spans) // unit, dtype=torch.int32, device=near[0][1].device)
    for at, (start, (name, own)) in enumerate(zip(starts, near, strict=True), 1):
        width = own.itemsize // unit
        marked = marks.as_strided((*own.shape, width), (*(step * width for step in own.stride()), 1), start // unit)
        if before := int(marked.max()):
            yield f"{near[before - 1][0]} and {name}"
        marked.fill_(at)
