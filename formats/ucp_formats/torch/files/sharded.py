"""What one rank saved of a tensor that ranks share: a DTensor or a ShardedTensor, read from its pickle.

A DTensor records the global shape, the mesh, the rank's place in it, and a placement for each axis of the mesh. Its
classes moved between modules from torch 2.1 to 2.13: they are recognised by name alone. `ucp.contract.layouts` turns
placements into patterns.

Sources: torch 2.13, `torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py`, `device_mesh.py`,
`_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from ucp.contract.layouts import DTensorPlacement, placements_to_axes
from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.values import GlobalName, Stub


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]
    """Elements of the global tensor, per dim."""
    ref: TensorRef | None
    """The rank's elements; None if it has none."""
    layout: Layout
    """How the tensor is laid out over the axes of the mesh."""
    coords: Mapping[str, int]
    """Place of the rank in the mesh."""
    root_coords: Mapping[str, int] = field(default_factory=dict)
    """Place of the rank on further axes of the root mesh, along which shards are copies."""
    rank: int | None = None
    """Rank that the mesh records."""
    box: Box | None = None
    """Box that a ShardedTensor records."""


def parse_shard(value: object, where: str) -> RankShard | None:
    """`value` as a shard; None if it is something else.

    Raises MalformedError for a damaged shard, UnsupportedError for one that cannot be joined with others.
    """
    while isinstance(value, Stub) and value.made_by.qualname in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        value = value.args[0]
    match value:
        case Stub(
            made_by=GlobalName(qualname="_rebuild_from_type_v2"),
            args=(GlobalName(qualname="_rebuild_wrapper_subclass"), GlobalName(qualname=kind), tuple(args), state),
        ) if len(args) > 2:
            if kind == "DTensor":
                return _parse_dtensor(args, state, where)
            if kind == "ShardedTensor":
                return _parse_sharded(args, state, where)
    return None


def _parse_dtensor(args: tuple[object, ...], state: object, where: str) -> RankShard:
    attributes = Stub(GlobalName("", "DTensor"), state=state)
    spec, local = attributes.attribute("_spec"), attributes.attribute("_local_tensor")
    if not isinstance(spec, Stub) or not isinstance(local, TensorRef):
        raise MalformedError(f"{where}: expected a DTensor with its local tensor and its spec; got one without")
    mesh, placements = spec.attribute("mesh"), spec.attribute("placements")
    if not isinstance(mesh, Stub) or not isinstance(placements, tuple):
        raise MalformedError(f"{where}: expected a DTensor with its mesh and its placements; got one without")
    axes = _Mesh.parse(mesh, where)
    if len(axes.coords) != len(placements):
        raise UnsupportedError(
            f"{where}: expected a placement for each of {len(axes.coords)} axes of the mesh; got {len(placements)}"
        )
    root = mesh.attribute("_root_mesh")
    root_axes = _Mesh.parse(root, where) if isinstance(root, Stub) else axes
    rank = mesh.attribute("_rank")
    parsed = [_parse_placement(placement, where) for placement in placements]
    return RankShard(
        shape=_parse_shape(args[2], where),
        ref=local,
        layout=Layout(placements_to_axes(axes.names, axes.sizes, parsed, "placements of DTensors")),
        coords=dict(zip(axes.names, axes.coords, strict=True)),
        root_coords={
            name: coord
            for name, coord, size in zip(root_axes.names, root_axes.coords, root_axes.sizes, strict=True)
            if size > 1 and name not in axes.names
        },
        rank=rank if isinstance(rank, int) else None,
    )


_NOT_DATA = ("pp", "tp", "ep", "cp")
"""Names of axes that are not of data parallelism."""


@dataclass(frozen=True, slots=True)
class _Mesh:
    names: list[str]
    """Name of each axis; those of data parallelism are `dp_shard` and `dp_replicate`."""
    sizes: tuple[int, ...]
    """Ranks along each."""
    coords: list[int]
    """Place of the rank along each."""

    @classmethod
    def parse(cls, mesh: Stub, where: str) -> _Mesh:
        sizes, coords = _mesh_shape(mesh, where), mesh.attribute("_coordinate_on_dim")
        if not isinstance(coords, list | tuple) or len(coords) != len(sizes):
            raise UnsupportedError(
                f"{where}: expected the place of the rank on each of {len(sizes)} axes of the mesh; got {coords!r}. "
                "Save it with torch.distributed.checkpoint"
            )
        recorded = mesh.attribute("_mesh_dim_names") or mesh.attribute("mesh_dim_names")
        names = [str(name) for name in recorded] if isinstance(recorded, tuple | list) else []
        names = names if len(names) == len(sizes) else [f"mesh_{number}" for number in range(len(sizes))]
        data = [name for name, size in zip(names, sizes, strict=True) if size > 1 and name not in _NOT_DATA]
        known = dict(zip(data[::-1], ("dp_shard", "dp_replicate"), strict=False)) if len(data) <= 2 else {}
        return cls([known.get(name, name) for name in names], sizes, [int(coord) for coord in coords])


def _mesh_shape(mesh: Stub, where: str) -> tuple[int, ...]:
    """Ranks along each axis: from the mesh's layout or, in older versions of torch, its tensor of ranks."""
    for name in ("mesh", "_mesh"):
        if isinstance(ranks := mesh.attribute(name), TensorRef):
            return ranks.shape
    layout = mesh.attribute("_layout")
    axes = layout.attribute("axes") if isinstance(layout, Stub) else None
    if isinstance(axes, tuple | list):
        return tuple(_parse_count(axis.attribute("shape") if isinstance(axis, Stub) else None, where) for axis in axes)
    shape = layout.attribute("shape") if isinstance(layout, Stub) else None
    if not isinstance(shape, tuple):
        raise UnsupportedError(f"{where}: expected a DeviceMesh as torch 2.1 to 2.13 saves it; got another one")
    return tuple(_parse_count(size, where) for size in shape)


def _parse_count(shape: object, where: str) -> int:
    """Ranks of one axis; a flattened axis has a tuple of them."""
    if isinstance(shape, int):
        return shape
    if not isinstance(shape, tuple):
        raise MalformedError(f"{where}: expected ranks along an axis of the mesh; got {shape!r}")
    return prod(_parse_count(size, where) for size in shape)


def _parse_placement(value: object, where: str) -> DTensorPlacement:
    if not isinstance(value, Stub):
        raise MalformedError(f"{where}: expected a placement; got {value!r}")
    kind, dim, factor = value.made_by.qualname, value.attribute("dim", 0), value.attribute("split_factor", 0)
    if value.args and kind in ("Shard", "_StridedShard"):
        dim = value.args[0]
    if kind in ("Partial", "_Partial") and value.attribute("reduce_op", "sum") == "avg":
        return DTensorPlacement("Partial")
    if kind not in ("Shard", "_StridedShard", "Replicate") or not isinstance(dim, int) or not isinstance(factor, int):
        raise UnsupportedError(
            f"{where}: a tensor with the placement {kind} cannot be put together from its shards. Redistribute it to "
            "Shard or Replicate before it is saved"
        )
    return DTensorPlacement(kind, dim, factor)


def _parse_sharded(args: tuple[object, ...], state: object, where: str) -> RankShard:
    """A ShardedTensor of FSDP1, which shards dim 0 as `torch.chunk` does."""
    match state:
        case (list(shards), Stub(), Stub() as group, *_) if len(shards) <= 1:
            rank, ranks = group.attribute("local_rank"), group.attribute("local_world_size")
            global_rank = group.attribute("global_rank")
        case _:
            raise UnsupportedError(f"{where}: expected a ShardedTensor with one shard on each rank, as FSDP1 has them")
    shape = _parse_shape(args[2], where)
    if not isinstance(rank, int) or not isinstance(ranks, int) or not 0 <= rank < ranks:
        raise MalformedError(f"{where}: expected the rank of a ShardedTensor in its group; got {rank!r} of {ranks!r}")
    ref, box = _parse_one(shards[0], where) if shards else (None, None)
    axis = AxisLayout("dp_shard", ranks, pattern("chunk", dim=0), "ShardedTensors of FSDP1")
    return RankShard(
        shape=shape,
        ref=ref,
        layout=Layout((axis,)),
        coords={"dp_shard": rank},
        rank=global_rank if isinstance(global_rank, int) else None,
        box=box,
    )


def _parse_one(shard: object, where: str) -> tuple[TensorRef, Box]:
    metadata = shard.attribute("metadata") if isinstance(shard, Stub) else None
    ref = shard.attribute("tensor") if isinstance(shard, Stub) else None
    if not isinstance(metadata, Stub) or not isinstance(ref, TensorRef):
        raise MalformedError(f"{where}: expected the tensor and the metadata of a shard")
    offsets = _parse_shape(metadata.attribute("shard_offsets"), where)
    return ref, Box(offsets, _parse_shape(metadata.attribute("shard_sizes"), where))


def _parse_shape(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(size, int) and size >= 0 for size in value):
        raise MalformedError(f"{where}: expected sizes of a tensor; got {value!r}")
    return tuple(value)
