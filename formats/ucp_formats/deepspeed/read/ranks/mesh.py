"""A whole run: what all its ranks hold, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ucp.contract.axes import along
from ucp.core.fragments import Stored
from ucp.core.layout import AxisLayout, Layout
from ucp.core.union import ShardedTensor, Shards
from ucp_formats.deepspeed.read.module import ModulePart
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart

if TYPE_CHECKING:
    from ucp.core.index import Doubt
    from ucp_formats.deepspeed.tp.layout import TensorLayout

__all__ = ["Merged", "Mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the tensors of a run lie over its axes, but for what the data-parallel ranks cut of them."""

    dp: int = 1
    """Data-parallel ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    known_from: Mapping[str, str] = field(default_factory=dict)
    """Axis to where it is known from how tensors lie over it."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensor to the pipeline stages that hold it, where that is known; several for a tied one."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Parameter of an expert to the expert-parallel rank that holds it."""
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Tensor to its layout over the tensor-parallel ranks; empty with one."""

    def layout(self, name: str, own: Layout) -> Layout:
        """The layout of a tensor over all axes; `own`: as its own file says, over the ranks that cut it."""
        stages, axes = self.stages.get(name, ()), own.axes
        if name in self.owners and not axes:
            axes = along("ep", self.ep, self.known_from.get("ep", ""), (self.owners[name],))
        if stages:
            axes = (*along("pp", self.pp, self.known_from.get("pp", ""), stages), *axes)
        return self.in_stage(name, own, axes)

    def laid_out(self, name: str, tensor: ShardedTensor, *, in_stage: bool, **coords: int) -> ShardedTensor:
        """A tensor of the model-parallel rank at `coords`, over all axes; `in_stage`: but for those outside a stage."""
        shape = self.tensors[name].global_shape if name in self.tensors else tensor.shape
        base = {"dp": 0, **coords}
        parts = []
        for part in tensor.parts:
            layout = self.in_stage(name, part.layout) if in_stage else self.layout(name, part.layout)
            if layout is part.layout:
                parts.append(part)
            else:
                moved = [Stored({**base, **one.coords}, one.ref, one.start) for one in part.stored]
                parts.append(Shards(layout, tuple(moved)))
        if all(new is old for new, old in zip(parts, tensor.parts, strict=True)):
            return tensor
        return ShardedTensor(dtype=tensor.dtype, shape=shape, parts=tuple(parts))

    def in_stage(self, name: str, own: Layout, outer: tuple[AxisLayout, ...] = ()) -> Layout:
        """The layout in a pipeline stage, which has its modules in files of layers and experts, by their names."""
        if name in self.tensors:
            layout = self.tensors[name]
            outer = (*outer, AxisLayout("tp", layout.parts, layout.pattern, self.known_from.get("tp", "")))
        copies = self.dp // prod([axis.parts for axis in outer if axis.axis == "ep"])
        if copies > 1 and not own.flat:
            return Layout((*outer, *along("dp", copies, self.known_from.get("dp", ""))))
        return Layout(outer, own.flat) if outer else own


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks as one."""

    module: ModulePart
    """The whole module."""
    optimizer: OptimizerPart
    """The whole optimizer."""
    mesh: Mesh = field(default_factory=Mesh)
    """How tensors lie over ranks."""
    doubts: list[Doubt] = field(default_factory=list)
    """What speaks against the files."""

    @classmethod
    def of_one(cls, module: ModulePart, optimizer: OptimizerPart, mesh: Mesh) -> Merged:
        """What one model-parallel rank has, which is all."""
        for name, entry in module.entries.items():
            if entry.tensor is not None:
                tensor = mesh.laid_out(name, entry.tensor, in_stage=True)
                if tensor is not entry.tensor:
                    module.entries[name] = replace(entry, tensor=tensor)
        for name, own in optimizer.states.items():
            for key, state in own.items():
                if isinstance(state, ShardedTensor) and not state.layout.flat:
                    own[key] = mesh.laid_out(name, state, in_stage=True)
        return cls(module, optimizer, mesh)
