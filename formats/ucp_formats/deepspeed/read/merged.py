"""A whole run: what all its ranks hold, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucp_formats.deepspeed.read.module import ModulePart
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart

if TYPE_CHECKING:
    from ucp.core.index import Doubt
    from ucp_formats.deepspeed.tp.layout import TensorLayout

__all__ = ["Merged"]


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks as one."""

    module: ModulePart
    """The whole module."""
    optimizer: OptimizerPart
    """The whole optimizer."""
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Parameter to its layout over the tensor-parallel ranks; empty with one."""
    tied: frozenset[str] = frozenset()
    """Parameters that several stages have."""
    doubts: list[Doubt] = field(default_factory=list)
    """What speaks against the files."""
