"""Typed access to what a pickle said: that of `ucp.io.fields`, and what only DeepSpeed's files need."""

from __future__ import annotations

from ucp.inert import Stub
from ucp.io.fields import Shape, described, integer, mapping, sequence, shapes, tensor, text

__all__ = ["Shape", "described", "integer", "mapping", "number_of_enum", "sequence", "shapes", "tensor", "text"]


def number_of_enum(value: object, where: str) -> int:
    """The number of an enum member (`ZeroStageEnum(1)`), or the number itself as older versions save it."""
    if isinstance(value, Stub) and len(value.args) == 1:
        value = value.args[0]
    return integer(value, where)
