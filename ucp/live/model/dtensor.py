"""DTensors: what FSDP2, tensor parallelism and HSDP leave of a parameter on this rank, by its own placements.

The rank's elements lie in the local tensor, and go there. Where the placements and the memory differ (uneven cuts that
a framework makes in an order of its own) nothing is loaded: see `LivePart.slice_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeGuard

from ucp.contract.layouts import DTensorPlacement, placements_to_axes
from ucp.core.layout import Layout
from ucp.core.topology import Topology
from ucp.errors import UnsupportedError, UsageError, listed
from ucp.live.parts import LivePart, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

UNNAMED = "mesh_"
"""What begins the names of axes that have none."""


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
    names = mesh.mesh_dim_names or tuple(f"{UNNAMED}{at}" for at in range(mesh.ndim))
    if coords is None:
        raise UnsupportedError(f"{name}: expected this rank to be in the mesh of its parameters; got {mesh}")
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise UnsupportedError(
            f"{name}: expected a dim that the axes of the mesh cut in their own order; got {order}. Redistribute it"
        )
    known = []
    for placement in placements:
        kind, dim = type(placement).__name__, getattr(placement, "dim", 0)
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise UnsupportedError(
                f"{name}: expected placements Shard and Replicate; got {placement}, of which a rank holds no part of "
                "the whole. Redistribute it before it is loaded into"
            )
        factor = getattr(placement, "split_factor", 0)
        known.append(DTensorPlacement(kind, dim % tensor.ndim if tensor.ndim else 0, factor))
    return LivePart(
        local_shape=tuple(local_of(tensor).shape),
        layout=Layout(placements_to_axes(names, tuple(mesh.shape), known, "placements of the parameter")),
        coords=dict(zip(names, coords, strict=True)),
        global_shape=tuple(tensor.shape),
    )


def check_axes(tensors: Sequence[LiveTensor], topology: Topology | None) -> None:
    """Raise UsageError where DTensors lie over other degrees than the topology says; axes without names say nothing."""
    if topology is None:
        return
    odd: dict[str, str] = {}
    for own in tensors:
        degrees = {axis.axis: axis.parts for axis in own.part.layout.axes}
        if any(_is_other(degrees, topology)):
            odd.setdefault(" x ".join(f"{axis}={parts}" for axis, parts in degrees.items()), own.name)
    if odd:
        lines = listed([f"{name}: {degrees}" for degrees, name in odd.items()])
        raise UsageError(f"expected parameters that lie over the ranks as {topology} says; got\n{lines}\nLeave it out")


def _is_other(degrees: Mapping[str, int], topology: Topology) -> Iterator[bool]:
    """Whether a degree is not that of the topology; FSDP may shard over data and context parallel ranks together."""
    known: dict[str, tuple[int, ...]] = {axis: (getattr(topology, axis),) for axis in ("tp", "pp", "ep", "cp")}
    known["etp"] = (topology.expert_tp,)
    if topology.is_split:
        shards = (topology.shards, topology.shards * topology.cp)
        known |= {"dp_replicate": (topology.replicas,), "dp_shard": shards, "fsdp": shards}
    yield from (parts not in known.get(axis, (parts,)) for axis, parts in degrees.items())
    data = [parts for axis, parts in degrees.items() if axis not in ("tp", "pp", "ep", "cp", "etp")]
    if data and "ep" not in degrees and not any(axis.startswith(UNNAMED) for axis in degrees):
        yield prod(data) not in (topology.dp, topology.dp * topology.cp)
