"""A global tensor put together from what ranks saved: the pieces lie where patterns place them.

Shards of a DTensor are placed by the layout that it records, and must have exactly the shapes that the layout gives.
Ranks that hold the same shard (HSDP, data parallelism around tensor parallelism) hold copies. Plain tensors in the
files of several ranks are copies of each other too: they are never joined row by row.

>>> from ucp.core.tensor import DType
>>> ref = TensorRef(path="rank0", offset=0, dtype=DType.FLOAT32, shape=(2,), strides=(1,))
>>> tensor = join_ranks({0: ref, 1: ref}, "w")
>>> [(str(piece.box), piece.replica) for piece in tensor.state.fragments], tensor.layout.patterns
([('[0:2]', 0), ('[0:2]', 1)], {'dp_replicate': 'replicate'})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import prod

from ucp.contract.plugins import pattern
from ucp.contract.registry import BY_RULE
from ucp.core.index import StateIndex
from ucp.core.layout import AxisLayout, Layout, Pattern, compute_local_shape, place
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import ShardedTensor, ShardSet, StoredShard, Union
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.torch.files.sharded import RankShard, parse_shard
from ucp_formats.torch.state_dict.entries import StateEntry

COPIES = "dp_replicate"
"""Axis along which ranks hold the same elements."""
_TORCH = ("torch._utils", "torch._tensor")
"""Modules whose functions rebuild tensors."""


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor, put together from pieces."""

    state: StateIndex
    """Its pieces."""
    layout: Layout
    """How ranks hold it."""
    is_shared: bool = False
    """Whether ranks share it (a DTensor, ShardedTensor or flat parameter), sharded or not; False for plain tensors."""

    @classmethod
    def place(
        cls,
        dtype: DType,
        shape: tuple[int, ...],
        layout: Layout,
        stored: tuple[StoredShard, ...],
        *,
        is_shared: bool = True,
    ) -> GlobalTensor:
        """The tensor whose parts are `stored`: at least one part, even for a tensor without elements."""
        tensor = ShardedTensor(dtype=dtype, shape=shape, shard_sets=(ShardSet(layout, stored),))
        return cls(Union().build_state(tensor), layout, is_shared)

    @classmethod
    def of(cls, entry: StateEntry) -> GlobalTensor:
        """The value of an entry that is a tensor."""
        assert isinstance(entry.value, cls)
        return entry.value

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim."""
        return self.state.global_shape

    @property
    def form(self) -> Hashable:
        """Shape and shards, which a parameter and its states have in common."""
        return self.shape, tuple((piece.box.offsets, piece.box.sizes) for piece in self.state.fragments)

    @property
    def storage(self) -> Hashable:
        """Where its elements lie: the same for a parameter that was saved under a second name."""
        pieces = (
            (piece.box, piece.ref.path, piece.ref.offset, piece.ref.strides)
            for piece in self.state.fragments
            if isinstance(piece.ref, TensorRef) and not piece.replica
        )
        return (self.state.dtype, self.shape, *pieces)

    def joined(self, cut: Pattern) -> GlobalTensor:
        """The tensor of which the plain tensors in the files of all ranks, taken for copies so far, are parts.

        Raises MalformedError if no tensor has such parts.
        """
        refs = [piece.ref for piece in self.state.fragments if isinstance(piece.ref, TensorRef)]
        try:
            shape = cut.whole_shape([self.shape] * len(refs))
        except ValueError as error:
            raise MalformedError(
                f"expected parts that {cut.name} makes of one tensor, as the rule says: {error}"
            ) from None
        axis = AxisLayout("dp", len(refs), cut, BY_RULE)
        stored = tuple(StoredShard({"dp": rank}, ref) for rank, ref in enumerate(refs))
        return GlobalTensor.place(self.state.dtype, shape, Layout((axis,)), stored, is_shared=False)

    def state_in(self, layout: Layout) -> StateIndex:
        """The state, for an atom of `layout`: it has a layout of its own if that is another one."""
        return self.state if self.layout == layout else replace(self.state, layout=self.layout)


def tensor_entry(path: tuple[object, ...], tensor: GlobalTensor) -> StateEntry:
    """The entry of a tensor in the model or the optimizer."""
    return StateEntry(path, tensor.shape, tensor, tensor.form, tensor.storage, is_storage=True)


def is_tensor(value: object) -> bool:
    """Whether a value of a rank's file is a tensor, whole or sharded."""
    return isinstance(value, TensorRef) or parse_shard(value, "") is not None


def unread_class(value: object) -> str | None:
    """Class of a tensor whose elements are not read (quantised, sparse, conjugate, a subclass); None for all else."""
    if not isinstance(value, Stub) or value.made_by.module not in _TORCH or is_tensor(value):
        return None
    inner = next((arg for arg in value.args if isinstance(arg, Stub)), None)
    if value.made_by.qualname.startswith("_rebuild_parameter") and inner is not None:
        return unread_class(inner)
    classes = [str(arg) for arg in value.args[1:2] if isinstance(arg, GlobalName)]
    return (classes or [str(value.made_by)])[0] if value.made_by.qualname.startswith("_rebuild") else None


def global_shape(value: object) -> tuple[int, ...]:
    """Global shape of a tensor in a rank's file."""
    tensor = value if isinstance(value, TensorRef) else parse_shard(value, "")
    assert tensor is not None
    return tensor.shape


def join_ranks(values: Mapping[int, object], name: str) -> GlobalTensor:
    """The tensor `name`, from what each rank saved.

    Raises MalformedError if shards do not make up one tensor, UnsupportedError if no pattern places them.
    """
    refs = {rank: value for rank, value in sorted(values.items()) if isinstance(value, TensorRef)}
    if len(refs) == len(values):
        return _join_copies(refs, name)
    named = ((rank, parse_shard(value, f"{name} of rank {rank}")) for rank, value in sorted(values.items()))
    shards = {rank: shard for rank, shard in named if shard is not None}
    if len(shards) != len(values):
        raise MalformedError(
            f"expected {name} sharded on all ranks, or whole on all; got shards on ranks {sorted(shards)} and whole "
            f"tensors on ranks {sorted(values.keys() - shards.keys())}. The files are from different runs"
        )
    return _join_shards(shards, name)


def _join_copies(refs: Mapping[int, TensorRef], name: str) -> GlobalTensor:
    kinds = {(ref.dtype, ref.shape): rank for rank, ref in refs.items()}
    if len(kinds) > 1:
        shown = "; ".join(f"rank {rank} has {dtype} {list(shape)}" for (dtype, shape), rank in kinds.items())
        raise MalformedError(
            f"expected the same plain tensor {name} in the files of all ranks; got {shown}. The files are from "
            "different runs, or saved in a way that ucp does not know"
        )
    ((dtype, shape),) = kinds
    copies = AxisLayout(COPIES, len(refs), pattern("replicate"), "a plain tensor in the file of every rank")
    stored = tuple(StoredShard({COPIES: number}, ref) for number, ref in enumerate(refs.values()))
    return GlobalTensor.place(dtype, shape, Layout((copies,) if len(refs) > 1 else ()), stored, is_shared=False)


def _join_shards(shards: Mapping[int, RankShard], name: str) -> GlobalTensor:
    first_rank, first = next(iter(shards.items()))
    for rank, shard in shards.items():
        if shard.rank is not None and shard.rank != rank:
            raise MalformedError(
                f"expected the shard of rank {rank} of {name} in its file; got that of rank {shard.rank}. Files were "
                "exchanged, or renamed: give them the names that they were saved under"
            )
        if (shard.shape, shard.layout) != (first.shape, first.layout):
            raise MalformedError(
                f"{name}: rank {rank} has a shard of {list(shard.shape)}, laid out as {_show(shard.layout)}, rank "
                f"{first_rank} one of {list(first.shape)}, laid out as {_show(first.layout)}. The files are from "
                "different runs"
            )
    layout, coords = _with_copies(first.layout, shards, name)
    for rank, shard in shards.items():
        _check_placed(shard, layout, coords[rank], name)
    refs = {rank: shard.ref for rank, shard in shards.items() if shard.ref is not None}
    dtypes = {ref.dtype for ref in refs.values()}
    if len(dtypes) != 1:
        raise MalformedError(
            f"expected shards of {name} of one type; got {', '.join(map(str, dtypes)) or 'no elements on any rank'}"
        )
    stored = tuple(StoredShard(coords[rank], ref) for rank, ref in refs.items() if ref.numel or 0 in first.shape)
    return GlobalTensor.place(dtypes.pop(), first.shape, layout, stored)


def _show(layout: Layout) -> str:
    return " x ".join(f"{axis.axis}={axis.parts}: {axis.pattern.name}" for axis in layout.axes) or "nothing"


def _with_copies(
    layout: Layout, shards: Mapping[int, RankShard], name: str
) -> tuple[Layout, dict[int, Mapping[str, int]]]:
    """The layout, with an axis for ranks at the same coordinates, and the coordinates of every rank in it."""
    copies: Counter[tuple[tuple[str, int], ...]] = Counter()
    numbers: dict[int, int] = {}
    for rank, shard in shards.items():
        coords = tuple(sorted(shard.coords.items()))
        numbers[rank] = copies[coords]
        copies[coords] += 1
    expected = prod(axis.parts for axis in layout.axes)
    if len(copies) != expected or len(set(copies.values())) != 1:
        raise MalformedError(
            f"expected shards of {name} from every place in a mesh of {_show(layout)}; got {len(copies)} of {expected} "
            f"places, from ranks {sorted(shards)}. Files of ranks are missing, or are from another run"
        )
    degree = len(shards) // expected
    if degree == 1:
        return layout, {rank: shard.coords for rank, shard in shards.items()}
    copy_axis = _varying_axis(shards)
    if any(axis.axis == copy_axis for axis in layout.axes):
        raise UnsupportedError(
            f"{name}: expected one rank at each place of its mesh, {_show(layout)}; got {degree}, "
            "and no file records along which axis these are copies"
        )
    replicated = AxisLayout(copy_axis, degree, pattern("replicate"), "ranks at the same place of the mesh")
    return Layout((replicated, *layout.axes)), {
        rank: {copy_axis: numbers[rank], **shard.coords} for rank, shard in shards.items()
    }


def _varying_axis(shards: Mapping[int, RankShard]) -> str:
    """The axis of the root mesh along which shards are copies; `COPIES` if there are several, or none is known."""
    axes = {axis for shard in shards.values() for axis in shard.root_coords}
    varying = [axis for axis in axes if len({shard.root_coords.get(axis) for shard in shards.values()}) > 1]
    return varying[0] if len(varying) == 1 else COPIES


def _check_placed(shard: RankShard, layout: Layout, coords: Mapping[str, int], name: str) -> None:
    """Raise MalformedError unless a rank's shard has the shape, and the box, that the layout gives it."""
    try:
        expected = compute_local_shape(layout, shard.shape, coords)
        boxes = [placed.box for placed in place(layout, shard.shape, coords=coords) if placed.box.numel]
    except ValueError as error:
        raise MalformedError(f"{name} of {list(shard.shape)}, laid out as {_show(layout)}: {error}") from error
    shape = shard.ref.shape if shard.ref is not None else (0,) * len(expected)
    if shape != expected and prod(shape) + prod(expected) > 0:
        raise MalformedError(
            f"{name} of {list(shard.shape)}, laid out as {_show(layout)}: expected {list(expected)} elements at "
            f"{dict(coords)}; got {list(shape)}. The file is from another run, or sharded in a way unknown to ucp"
        )
    if shard.ref is not None and shard.box is not None and boxes and boxes != [shard.box]:
        raise MalformedError(f"{name}: expected the shard {boxes[0]} at {dict(coords)}; got {shard.box}")
