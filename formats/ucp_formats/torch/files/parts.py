"""What one rank saved of a tensor that ranks share: a DTensor or a ShardedTensor, as its pickle tells it.

A DTensor says the global shape, the mesh, the rank's place in it, and how each axis of the mesh cuts the tensor. Its
classes moved between versions of torch (2.1 to 2.13), so that they are told by their names alone; what they mean is
said in `ucp.contract.layouts`.

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
class Part:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]
    """Elements of the whole, per dim."""
    ref: TensorRef | None
    """The rank's elements; None where it has none"""
    layout: Layout
    """How the axes of the mesh cut the whole"""
    coords: Mapping[str, int]
    """Place of the rank in the mesh"""
    around: Mapping[str, int] = field(default_factory=dict)
    """Its place on further axes of the whole mesh, along which parts are copies"""
    rank: int | None = None
    """Rank that the mesh says it was saved by"""
    box: Box | None = None
    """Box that a ShardedTensor says it holds"""


def part_of(value: object, where: str) -> Part | None:
    """What `value` says of a tensor in parts; None for anything else.

    Raises MalformedError for one that says it in no known way, UnsupportedError for one that cannot be put together.
    """
    while isinstance(value, Stub) and value.made_by.qualname in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        value = value.args[0]
    match value:
        case Stub(
            made_by=GlobalName(qualname="_rebuild_from_type_v2"),
            args=(GlobalName(qualname="_rebuild_wrapper_subclass"), GlobalName(qualname=kind), tuple(given), state),
        ) if len(given) > 2:
            if kind == "DTensor":
                return _dtensor(given, _attributes(state), where)
            if kind == "ShardedTensor":
                return _sharded(given, state, where)
    return None


def _dtensor(given: tuple[object, ...], state: Mapping[str, object], where: str) -> Part:
    spec, local = state.get("_spec"), state.get("_local_tensor")
    if not isinstance(spec, Stub) or not isinstance(local, TensorRef):
        raise MalformedError(f"{where}: expected the local tensor and the layout of a DTensor; it has none")
    mesh, placements = spec.attribute("mesh"), spec.attribute("placements")
    if not isinstance(mesh, Stub) or not isinstance(placements, tuple):
        raise MalformedError(f"{where}: expected the mesh and the placements of a DTensor; it has none")
    own = _Mesh.of(mesh, where)
    if len(own.coords) != len(placements):
        raise UnsupportedError(
            f"{where}: expected a placement for each of {len(own.coords)} axes of the mesh; got {len(placements)}"
        )
    root = mesh.attribute("_root_mesh")
    whole = _Mesh.of(root, where) if isinstance(root, Stub) else own
    rank = mesh.attribute("_rank")
    return Part(
        shape=_shape(given[2], where),
        ref=local,
        layout=Layout(
            placements_to_axes(
                own.names, own.sizes, [_placement(axis, where) for axis in placements], "placements of DTensors"
            )
        ),
        coords=dict(zip(own.names, own.coords, strict=True)),
        around={
            name: at
            for name, at, size in zip(whole.names, whole.coords, whole.sizes, strict=True)
            if size > 1 and name not in own.names
        },
        rank=rank if isinstance(rank, int) else None,
    )


_NOT_DATA = ("pp", "tp", "ep", "cp")
"""Axes whose names say that they are none of data parallelism."""


@dataclass(frozen=True, slots=True)
class _Mesh:
    names: list[str]
    """Name of each axis: those of data parallelism as everywhere here"""
    sizes: tuple[int, ...]
    """Ranks along each"""
    coords: list[int]
    """Place of the rank along each"""

    @classmethod
    def of(cls, mesh: Stub, where: str) -> _Mesh:
        sizes, coords = _mesh_shape(mesh, where), mesh.attribute("_coordinate_on_dim")
        if not isinstance(coords, list | tuple) or len(coords) != len(sizes):
            raise UnsupportedError(
                f"{where}: expected the place of the rank on each of {len(sizes)} axes of the mesh; got {coords!r}. "
                "Save it with torch.distributed.checkpoint"
            )
        said = mesh.attribute("_mesh_dim_names") or mesh.attribute("mesh_dim_names")
        names = [str(own) for own in said] if isinstance(said, tuple | list) else []
        names = names if len(names) == len(sizes) else [f"mesh_{at}" for at in range(len(sizes))]
        data = [name for name, size in zip(names, sizes, strict=True) if size > 1 and name not in _NOT_DATA]
        known = dict(zip(data[::-1], ("dp_shard", "dp_replicate"), strict=False)) if len(data) <= 2 else {}
        return cls([known.get(name, name) for name in names], sizes, [int(own) for own in coords])


def _mesh_shape(mesh: Stub, where: str) -> tuple[int, ...]:
    """Ranks along each axis: from the layout of the mesh, or in older versions of torch from its tensor of ranks."""
    for name in ("mesh", "_mesh"):
        if isinstance(ranks := mesh.attribute(name), TensorRef):
            return ranks.shape
    layout = mesh.attribute("_layout")
    axes = layout.attribute("axes") if isinstance(layout, Stub) else None
    if isinstance(axes, tuple | list):
        return tuple(_count(own.attribute("shape") if isinstance(own, Stub) else None, where) for own in axes)
    shape = layout.attribute("shape") if isinstance(layout, Stub) else None
    if not isinstance(shape, tuple):
        raise UnsupportedError(f"{where}: expected a DeviceMesh as torch 2.1 to 2.13 saves it; got another one")
    return tuple(_count(own, where) for own in shape)


def _count(shape: object, where: str) -> int:
    """Ranks of one axis, which may be several joined to one."""
    if isinstance(shape, int):
        return shape
    if not isinstance(shape, tuple):
        raise MalformedError(f"{where}: expected ranks along an axis of the mesh; got {shape!r}")
    return prod(_count(own, where) for own in shape)


def _placement(value: object, where: str) -> DTensorPlacement:
    if not isinstance(value, Stub):
        raise MalformedError(f"{where}: expected a placement; got {value!r}")
    kind, dim, factor = value.made_by.qualname, value.attribute("dim", 0), value.attribute("split_factor", 0)
    if value.args and kind in ("Shard", "_StridedShard"):
        dim = value.args[0]
    if kind in ("Partial", "_Partial") and value.attribute("reduce_op", "sum") == "avg":
        return DTensorPlacement("Partial")
    if kind not in ("Shard", "_StridedShard", "Replicate") or not isinstance(dim, int) or not isinstance(factor, int):
        raise UnsupportedError(
            f"{where}: its placement {kind} is not one whose parts make up the whole. Redistribute it to Shard or "
            "Replicate before it is saved"
        )
    return DTensorPlacement(kind, dim, factor)


def _sharded(given: tuple[object, ...], state: object, where: str) -> Part:
    """A ShardedTensor of FSDP1, which cuts dim 0 as `torch.chunk` does."""
    match state:
        case (list(shards), Stub(), Stub() as group, *_) if len(shards) <= 1:
            rank, ranks = group.attribute("local_rank"), group.attribute("local_world_size")
            whose = group.attribute("global_rank")
        case _:
            raise UnsupportedError(f"{where}: expected a ShardedTensor with one shard on each rank, as FSDP1 has them")
    shape = _shape(given[2], where)
    if not isinstance(rank, int) or not isinstance(ranks, int) or not 0 <= rank < ranks:
        raise MalformedError(f"{where}: expected the rank of a ShardedTensor in its group; got {rank!r} of {ranks!r}")
    ref, box = _shard(shards[0], where) if shards else (None, None)
    axis = AxisLayout("dp_shard", ranks, pattern("chunk", dim=0), "ShardedTensors of FSDP1")
    return Part(
        shape=shape,
        ref=ref,
        layout=Layout((axis,)),
        coords={"dp_shard": rank},
        rank=whose if isinstance(whose, int) else None,
        box=box,
    )


def _shard(shard: object, where: str) -> tuple[TensorRef, Box]:
    metadata = shard.attribute("metadata") if isinstance(shard, Stub) else None
    ref = shard.attribute("tensor") if isinstance(shard, Stub) else None
    if not isinstance(metadata, Stub) or not isinstance(ref, TensorRef):
        raise MalformedError(f"{where}: expected the tensor and the metadata of a shard")
    offsets = _shape(metadata.attribute("shard_offsets"), where)
    return ref, Box(offsets, _shape(metadata.attribute("shard_sizes"), where))


def _shape(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(own, int) and own >= 0 for own in value):
        raise MalformedError(f"{where}: expected sizes of a tensor; got {value!r}")
    return tuple(int(own) for own in value)


def _attributes(state: object) -> Mapping[str, object]:
    """Attributes in the state of an object: a dict, or a dict and slots."""
    parts = state if isinstance(state, tuple) else (state,)
    return {str(key): own for part in parts if isinstance(part, dict) for key, own in part.items()}
