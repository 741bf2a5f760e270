"""Typed access to what a pickle said, where only DeepSpeed's files need it; the rest is in `ucp.io.pickle.fields`."""

from __future__ import annotations

from ucp.core.pickle_values import Stub
from ucp.io.pickle.fields import integer

__all__ = ["number_of_enum"]


def number_of_enum(value: object, where: str) -> int:
    """The number of an enum member (`ZeroStageEnum(1)`), or the number itself as older versions save it."""
    if isinstance(value, Stub) and len(value.args) == 1:
        value = value.args[0]
    return integer(value, where)
