"""DTensors: what FSDP2, tensor parallelism and HSDP leave of a parameter on this rank, by its own placements.

The rank's elements lie in the local tensor, and go there. Where the placements and the memory differ (uneven cuts that
a framework makes in an order of its own) nothing is loaded: see `LivePart.slice_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from ucp.contract.model.placements import Placement, axes_of
from ucp.core.layout import Layout
from ucp.errors import UnsupportedError
from ucp.live.parts import LivePart

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

__all__ = ["dtensor_part", "is_dtensor", "local_of"]


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one of those that ranks share; its class moved between versions of torch."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part of a tensor: all of it, unless it is a DTensor."""
    import torch

    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # where a local tensor is that of the DTensor itself, not a function of it
        shared: DTensor = tensor.detach()  # type: ignore[assignment]  # detaching keeps the class
        return shared.to_local()


def dtensor_part(tensor: DTensor, name: str) -> LivePart:
    """What of a DTensor this rank holds. Raises UnsupportedError for placements whose parts do not make up a whole."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coords = mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"mesh_{at}" for at in range(mesh.ndim))
    if coords is None:
        raise UnsupportedError(f"{name}: expected this rank to be in the mesh of its parameters; got {mesh}")
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise UnsupportedError(
            f"{name}: expected a dim that the axes of the mesh cut in their own order; got {order}. Redistribute it"
        )
    known = [_placement(own, tensor.ndim, name) for own in placements]
    return LivePart(
        local_shape=tuple(local_of(tensor).shape),
        layout=Layout(axes_of(names, tuple(mesh.shape), known, "placements of the parameter")),
        coords=dict(zip(names, coords, strict=True)),
        global_shape=tuple(tensor.shape),
    )


def _placement(placement: Any, ndim: int, name: str) -> Placement:
    kind = type(placement).__name__
    if kind not in ("Shard", "_StridedShard", "Replicate"):
        raise UnsupportedError(
            f"{name}: expected placements Shard and Replicate; got {placement}, of which a rank holds no part of the "
            "whole. Redistribute it before it is loaded into"
        )
    dim = getattr(placement, "dim", 0)
    return Placement(kind, dim % ndim if ndim else 0, getattr(placement, "split_factor", 0))
