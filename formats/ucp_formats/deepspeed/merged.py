"""A whole run: what all its ranks hold, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucp_formats.deepspeed.module_part import ModulePart
from ucp_formats.deepspeed.optimizer_part import OptimizerPart

if TYPE_CHECKING:
    from ucp.atom import Doubt
    from ucp_formats.deepspeed.tensor_layout import TensorLayout

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
