"""DTensors (FSDP2, tensor parallelism, HSDP): the part of a parameter on this rank, by its placements.

If the local tensor does not have the shape that the placements give (a framework cut unevenly in another way), nothing
is loaded: see `LivePart.to_slice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, TypeGuard

from ucp.contract.layouts import DTensorPlacement, placements_to_axes
from ucp.core.layout import Layout
from ucp.core.topology import Topology
from ucp.errors import UnsupportedError, UsageError, format_list
from ucp.live.parts import LivePart, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

UNNAMED = "mesh_"
"""Prefix of axes of a mesh without names."""


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; its class moved between versions of torch."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    import torch

    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # the local tensor itself, not a result of autograd
        return tensor.to_local().detach()  # in this order: to detach a DTensor takes 20 times as long


def dtensor_part(tensor: DTensor, name: str) -> LivePart:
    """The part of a DTensor that this rank holds. Raises UnsupportedError for unknown placements or another mesh."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coords = mesh.get_coordinate()
    axes = mesh.mesh_dim_names or tuple(f"{UNNAMED}{dim}" for dim in range(mesh.ndim))
    if coords is None:
        raise UnsupportedError(f"{name}: expected this rank to be in the mesh of the parameter; got {mesh}")
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise UnsupportedError(
            f"{name}: expected the axes of the mesh to shard a dim in their order; got {order}. Redistribute it"
        )
    known = []
    for placement in placements:
        kind, dim = type(placement).__name__, getattr(placement, "dim", 0)
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise UnsupportedError(
                f"{name}: expected placements Shard and Replicate; got {placement}, under which a rank holds no part "
                "of the global tensor. Redistribute it before the load"
            )
        factor = getattr(placement, "split_factor", 0)
        known.append(DTensorPlacement(kind, dim % tensor.ndim if tensor.ndim else 0, factor))
    return LivePart(
        local_shape=tuple(local_of(tensor).shape),
        layout=Layout(placements_to_axes(axes, tuple(mesh.shape), known, "placements of the parameter")),
        coords=dict(zip(axes, coords, strict=True)),
        global_shape=tuple(tensor.shape),
    )


def check_axes(tensors: Sequence[LiveTensor], topology: Topology | None) -> None:
    """Raise UsageError if meshes of DTensors have other degrees than the topology; unnamed axes are not compared."""
    if topology is None:
        return
    known: dict[str, tuple[int, ...]] = {axis: (getattr(topology, axis),) for axis in ("tp", "pp", "ep", "cp")}
    known["etp"] = (topology.expert_tp,)
    if topology.is_split:  # FSDP may shard over data and context parallel ranks together
        shards = (topology.shards, topology.shards * topology.cp)
        known |= {"dp_replicate": (topology.replicas,), "dp_shard": shards, "fsdp": shards}
    differing: dict[str, str] = {}
    for tensor in tensors:
        degrees = {axis.axis: axis.parts for axis in tensor.part.layout.axes}
        data = [parts for axis, parts in degrees.items() if axis not in ("tp", "pp", "ep", "cp", "etp")]
        is_data_known = data and "ep" not in degrees and not any(axis.startswith(UNNAMED) for axis in degrees)
        if any(parts not in known.get(axis, (parts,)) for axis, parts in degrees.items()) or (
            is_data_known and prod(data) not in (topology.dp, topology.dp * topology.cp)
        ):
            differing.setdefault(" x ".join(f"{axis}={parts}" for axis, parts in degrees.items()), tensor.name)
    if differing:
        lines = format_list([f"{name}: {degrees}" for degrees, name in differing.items()])
        raise UsageError(
            f"expected parameters on meshes of the topology {topology}; got\n{lines}\nCorrect it, or leave it out"
        )
