"""Handmade checkpoints: arrays written to files in any way that a reference can describe.

A handmade checkpoint is a folder of raw files and a virtual manifest over them, so every command reads it.

>>> import tempfile, numpy
>>> shards = Shards(Path(tempfile.mkdtemp()))
>>> weight = numpy.arange(6, dtype="float32").reshape(2, 3)
>>> index = make_index(shards.folder, {("w", "weight"): shards.whole(weight)})
>>> index.atoms["w"].global_shape, write_checkpoint(index).name
((2, 3), 'ucp.json')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlib_ng import zlib_ng

from ucp.core.index import WEIGHT, AtomIndex, Extra, Index, Kind, ParamGroup, StateIndex
from ucp.core.tensor import DType, InlineTensor, Record, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.io.provenance import source_file
from ucp.store.describe import describe
from ucp.store.manifest import MANIFEST, dump
from ucp.store.target import recogniser

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Shards:
    """Raw files in a folder, to which arrays are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(
        self, array: NDArray[Any], *, file: str = "shard.bin", order: Sequence[int] = (), gap: int = 0
    ) -> TensorRef:
        """Append `array` to `file`.

        `order`: dims from outermost to innermost in the file; empty for row-major. `gap`: the number of filler elements
        between two elements of the innermost dim, and of filler bytes before the tensor.
        """
        import numpy as np

        order = tuple(order) or tuple(range(array.ndim))
        spaced = array.transpose(order)
        if gap and array.ndim:
            filled = np.frombuffer(b"\xa5" * (spaced.nbytes * (gap + 1)), dtype=array.dtype)
            wide = filled.reshape(*spaced.shape[:-1], spaced.shape[-1] * (gap + 1)).copy()
            wide[..., :: gap + 1] = spaced
            spaced = wide
        steps = contiguous_strides(spaced.shape)
        if gap and array.ndim:
            steps = (*steps[:-1], gap + 1)
        strides = [0] * array.ndim
        for place, dim in enumerate(order):
            strides[dim] = steps[place]
        with (self.folder / file).open("ab") as shard:
            shard.write(b"\x5a" * gap)
            offset = shard.tell()
            shard.write(spaced.tobytes())
        return TensorRef(
            path=str(self.folder / file),
            offset=offset,
            dtype=DType(array.dtype.name),
            shape=array.shape,
            strides=tuple(strides),
        )

    def whole(self, array: NDArray[Any], *, file: str = "shard.bin") -> StateIndex:
        """Append `array`, and return it as a state of one piece."""
        return StateIndex.from_tensor(self.put(array, file=file))

    def record(self, ref: TensorRef) -> Record:
        """A checksum of the bytes that `ref` spans, as a writer would record it."""
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            data = file.read(ref.extent)
        name = f"{Path(ref.path).name}:{ref.offset}"
        return Record(path=ref.path, name=name, offset=ref.offset, nbytes=ref.extent, crc32=zlib_ng.crc32(data))


def inline(array: NDArray[Any]) -> InlineTensor:
    """`array` as a tensor whose bytes are in the index."""
    return InlineTensor(data=array.tobytes(), dtype=DType(array.dtype.name), shape=array.shape)


def make_index(
    root: Path,
    states: Mapping[tuple[str, str], StateIndex],
    *,
    extras: Sequence[Extra] = (),
    groups: Sequence[ParamGroup] = (),
    records: Sequence[Record] = (),
) -> Index:
    """An index of `states`, by (parameter, state), in their order; the files that they refer to must exist."""
    names = dict.fromkeys(param for param, _ in states)
    atoms = {}
    for param in names:
        states_of_param = {state: index for (name, state), index in states.items() if name == param}
        atoms[param] = AtomIndex(
            name=param,
            global_shape=states_of_param[WEIGHT].global_shape
            if WEIGHT in states_of_param
            else next(iter(states_of_param.values())).global_shape,
            kind=Kind.PARAMETER,
            states=states_of_param,
        )
    paths = dict.fromkeys(f.path for state in states.values() for f in state.fragments if f.path is not None)
    return Index(
        path=str(root.absolute()),
        format="handmade",
        evidence=("made by hand",),
        producer="ucp.testing",
        topology=Topology(),
        step=7,
        atoms=atoms,
        groups=tuple(groups),
        extras=tuple(extras),
        files=tuple(source_file(path, "shard") for path in paths),
        records=tuple(records),
    )


def write_checkpoint(index: Index) -> Path:
    """Write a virtual store of `index`, without extras, into its folder; return the path of the manifest."""
    document = describe(
        index,
        producer="ucp.testing",
        written=None,
        extras=(),
        casts=(),
        identify=recogniser(index),
        headers={},
    )
    path = Path(index.path) / MANIFEST
    path.write_bytes(dump(document))
    return path
