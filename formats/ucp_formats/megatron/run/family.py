"""Which model family a checkpoint of Megatron is of: the one the user names, else the one all evidence is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.families.family import Family

__all__ = ["ChooseFamily", "chooser"]

ChooseFamily = Callable[
    [Mapping[str, tuple[int, ...]], Mapping[str, object], Mapping[str, int]], tuple[Family, tuple[str, ...]]
]
"""From shapes by name, recorded arguments and the degrees by which the shapes are cut: the family, and why."""


def chooser(options: SourceOptions) -> ChooseFamily:
    """A choice that heeds `options`. It raises UnknownFamilyError and UsageError."""

    def choose(
        shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], axes: Mapping[str, int]
    ) -> tuple[Family, tuple[str, ...]]:
        return choose_family(names=list(shapes), shapes=shapes, arguments=arguments, axes=axes, options=options)

    return choose
