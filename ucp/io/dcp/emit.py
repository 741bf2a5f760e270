"""Write a distributed checkpoint of torch: `.distcp` files of independent items, and the `.metadata` that finds them.

Every item (a chunk of a tensor, or an object) is a complete file of torch.save at a recorded place. All places are
decided first; the bytes of chunks are written later. Items start at multiples of 64 bytes, so that elements are aligned
in the file as torch aligns them in an item (torch itself does not align items). No random ids are written: the same
content gives the same bytes. Layout of torch 2.13 (torch/distributed/checkpoint/filesystem.py, metadata.py), reduced to
what torch 2.3 to 2.14 reads.

>>> draft = DcpDraft()
>>> draft.add_value("note/shard_0_1", None)
>>> [own.file.path for own in draft.finish()]
['__0_0.distcp', '.metadata']
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import NamedTuple

from ucp.core.layout import Layout
from ucp.core.target import CrcField, Literal, OutputFile, Placement, RawCopy
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.io.dcp.metadata import METADATA
from ucp.io.pickle.emit import emit_pickle
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file.draft import FinishedFile, Part, collect_layouts, replace_tensors
from ucp.io.torch_file.layout import KnownBytes, TorchZip, layout_torch_zip
from ucp.io.torch_file.storage import NewStorage, NewTensor
from ucp.io.torch_file.zipdir import ALIGNMENT

FILE = 4 << 30
"""Bytes after which a new `.distcp` file begins."""
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """A box of a tensor, to be stored as one item."""

    offsets: tuple[int, ...]
    """First element, per dim."""
    sizes: tuple[int, ...]
    """Elements, per dim."""
    parts: tuple[Part, ...] = ()
    """Slices that fill it, in increasing offset."""
    data: bytes = b""
    """Its elements, if they are known already."""
    ref: TensorRef | None = None
    """Tensor of the source's extras that is copied unchanged."""
    rank: int | None = None
    """Rank whose file holds it; None if files are split by size only."""

    def __post_init__(self) -> None:
        numel = sum(part.slice.stop - part.slice.start for part in self.parts)
        if (not self.data and self.ref is None and numel != prod(self.sizes)) or len(self.offsets) != len(self.sizes):
            raise ValueError(f"a chunk of {self.sizes} at {self.offsets} is filled with {numel} elements")


class DcpDraft:
    """Collects tensors and objects, in the order in which they are stored, and lays them out.

    `folder`: of the checkpoint, relative to the destination; empty for the destination itself. `file_nbytes`: bytes
    after which a new file begins.
    """

    def __init__(self, folder: str = "", *, file_nbytes: int = FILE) -> None:
        self._folder = f"{folder}/" if folder else ""
        self._limit = file_nbytes
        self._files: list[_File] = []
        self._newest: dict[int | None, _File] = {}
        self._paths: dict[object, object] = {}
        self._saved: dict[object, object] = {}
        self._stored: dict[object, object] = {}
        self._templates: dict[tuple[DType, tuple[int, ...]], _Item] = {}
        self._properties: dict[DType, Stub] = {}
        self._sizes: dict[tuple[int, ...], TorchSize] = {}

    def add_tensor(self, key: str, dtype: DType, shape: tuple[int, ...], chunks: Iterable[NewChunk]) -> None:
        """Add a tensor of `shape`, or more chunks of one that was added. All its chunks together tile it."""
        entry = self._saved.get(key)
        if entry is None:
            state = {"properties": self._typed(dtype), "size": self._size(shape), "chunks": []}
            entry = self._saved[key] = _object("TensorStorageMetadata", state)
        assert isinstance(entry, Stub)
        listed = entry.attribute("chunks")
        assert isinstance(listed, list)
        for chunk in chunks:
            offsets, sizes = self._size(chunk.offsets), self._size(chunk.sizes)
            listed.append(_object("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes}))
            self._place(key, offsets, self._template(dtype, chunk.sizes), chunk)

    def add_value(self, key: str, value: object, *, rank: int | None = None) -> None:
        """Add an object of plain values and tensors of the source, to the file of `rank` if given."""
        self.add_values((key,), value, rank=rank)

    def add_values(self, keys: Iterable[str], value: object, *, rank: int | None = None) -> None:
        """Add the same object under each of `keys`, as separate items."""
        moved: dict[NewStorage, TensorRef] = {}
        layout = layout_torch_zip(replace_tensors(value, moved))
        item, chunk = _Item(layout, 0), NewChunk(offsets=(0,), sizes=(0,), rank=rank)
        for key in keys:
            self._saved[key] = Stub(GlobalName(_MODULE, "BytesStorageMetadata"))
            start = self._place(key, None, item, chunk)
            file = self._newest[rank]
            file.raw += [
                RawCopy(src=ref, path=file.path, offset=start + layout.storages[s]) for s, ref in moved.items()
            ]

    def set_path(self, key: str, path: tuple[object, ...]) -> None:
        """Record the path of `key` in the nested dict that a script saves and loads."""
        self._paths[key] = path

    def finish(self) -> tuple[FinishedFile, ...]:
        """Return the files: `.distcp` files, then `.metadata`."""
        root = _object(
            "Metadata",
            {
                "state_dict_metadata": self._saved,
                "planner_data": self._paths or None,
                "storage_data": self._stored,
                "storage_meta": None,
                "version": "1.0.0",
            },
        )
        data = emit_pickle(root).data
        index = OutputFile(path=f"{self._folder}{METADATA}", nbytes=len(data), literals=(Literal(0, data),))
        return (*(draft_file.finish() for draft_file in self._files), FinishedFile(index, ()))

    def _place(self, key: str, offsets: TorchSize | None, item: _Item, chunk: NewChunk) -> int:
        file = self._newest.get(chunk.rank)
        if file is None or file.nbytes >= self._limit:  # `__<rank>_<n>.distcp`
            number = 0 if chunk.rank is None or file is None else file.number + 1
            rank = len(self._files) if chunk.rank is None else chunk.rank
            file = self._newest[chunk.rank] = _File(self._folder, rank, number)
            self._files.append(file)
        start = file.append(item, chunk)
        index: dict[object, object] = {"fqn": key}
        if offsets is not None:
            index["offset"] = offsets
        where = {"relative_path": file.name, "offset": start, "length": item.layout.nbytes}
        self._stored[_object("MetadataIndex", {**index, "index": None})] = Stub(
            _STORAGE_INFO, state=where, has_state=True
        )
        return start

    def _size(self, sizes: tuple[int, ...]) -> TorchSize:
        """One object for equal sizes, so that the pickle stores it once."""
        return self._sizes.setdefault(sizes, TorchSize(sizes))

    def _template(self, dtype: DType, sizes: tuple[int, ...]) -> _Item:
        """Layout of an item, which depends on dtype and shape alone."""
        if (dtype, sizes) not in self._templates:
            storage = NewStorage(dtype, prod(sizes))
            tensor = NewTensor(storage=storage, shape=sizes, strides=contiguous_strides(sizes))
            layout = layout_torch_zip(tensor)
            self._templates[dtype, sizes] = _Item(layout, layout.storages[storage])
        return self._templates[dtype, sizes]

    def _typed(self, dtype: DType) -> Stub:
        """TensorProperties of a dtype: dtype, layout, requires_grad, memory format, pinned."""
        if dtype not in self._properties:
            layout = Stub(GlobalName("torch.serialization", "_get_layout"), ("torch.strided",), new=False)
            memory = Stub(GlobalName(_MODULE, "_MEM_FORMAT_ENCODING"), (0,), new=False)
            state = (GlobalName("torch", dtype.value), layout, False, memory, False)
            self._properties[dtype] = _object("TensorProperties", state)
        return self._properties[dtype]


def _object(name: str, state: object) -> Stub:
    return Stub(GlobalName(_MODULE, name), state=state, has_state=True)


class _Item(NamedTuple):
    """Layout of an item."""

    layout: TorchZip
    """The item as a file of torch.save."""
    elements: int
    """Byte of the first element; 0 if there is none."""


class _File:
    """A `.distcp` file that grows. Adjacent known bytes are joined."""

    def __init__(self, folder: str, rank: int, number: int) -> None:
        self.number = number
        self.name = f"__{rank}_{number}.distcp"
        self.path = f"{folder}{self.name}"
        self.nbytes = 0
        self.placements: list[Placement] = []
        self.raw: list[RawCopy] = []
        self.layouts: dict[tuple[str, str], Layout] = {}
        self._crcs: list[CrcField] = []
        self._known = KnownBytes()

    def append(self, item: _Item, chunk: NewChunk) -> int:
        """Add an item. Returns its first byte."""
        start = self.nbytes + -self.nbytes % ALIGNMENT
        self._known.add(self.nbytes, bytes(start - self.nbytes))
        literals = item.layout.literals
        if chunk.data:
            literals = tuple(sorted([*literals, Literal(item.elements, chunk.data)], key=attrgetter("offset")))
        for known in literals:
            self._known.add(start + known.offset, known.data)
        self._crcs += [
            CrcField(start=start + crc.start, stop=start + crc.stop, at=tuple(start + at for at in crc.at))
            for crc in item.layout.crcs
        ]
        self.layouts |= collect_layouts(chunk.parts)
        for part in chunk.parts:
            at = start + item.elements + part.offset * part.slice.dtype.itemsize
            self.placements.append(Placement(slice=part.slice, path=self.path, offset=at))
        if chunk.ref is not None:
            self.raw.append(RawCopy(src=chunk.ref, path=self.path, offset=start + item.elements))
        self.nbytes = start + item.layout.nbytes
        return start

    def finish(self) -> FinishedFile:
        """The file."""
        known = self._known.literals()
        file = OutputFile(path=self.path, nbytes=self.nbytes, literals=known, crcs=tuple(self._crcs))
        return FinishedFile(file, tuple(self.placements), tuple(self.raw), self.layouts)
