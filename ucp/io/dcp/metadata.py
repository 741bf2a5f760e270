"""Reads the `.metadata` of a distributed checkpoint: tensors, their chunks, and the places of items.

`.metadata` is a pickle of torch.distributed.checkpoint.metadata.Metadata (torch 2.1 to 2.14). `ucp.io.pickle.unpickle`
reads it as data. Classes are recognised by their names alone, because their modules differ between frameworks and
versions of torch. The plans of the writer (`all_local_plans`) are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from ucp.core.tensor import DType
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.files import open_source
from ucp.io.pickle.fields import describe_value, format_value
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.pickle.values import GlobalName, Stub, TorchSize

METADATA = ".metadata"
"""Name of the file. torch writes it last: its presence means that the checkpoint is complete."""
_DTYPES = {GlobalName("torch", dtype.value): dtype for dtype in DType}


class ItemPlace(NamedTuple):
    """Place of one item."""

    file: str
    """File, relative to the folder of the checkpoint."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""


class Chunk(NamedTuple):
    """A stored box of a tensor."""

    offsets: tuple[int, ...]
    """First element, per dim."""
    sizes: tuple[int, ...]
    """Elements, per dim."""
    place: ItemPlace
    """Place of its item."""


class SavedTensor(NamedTuple):
    """A tensor that was saved in chunks."""

    key: str
    """Name it was saved under."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    chunks: tuple[Chunk, ...]
    """Its chunks that hold elements, in the order of the metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """The content of a `.metadata` that readers need."""

    tensors: Mapping[str, SavedTensor]
    """Key to tensor, in the order of the metadata."""
    objects: Mapping[str, ItemPlace]
    """Key to the place of an object that is not a tensor, in the order of the metadata."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Key to the path in the nested dict that was saved (`planner_data`), where it was recorded: joined with dots, a
    path is its key."""
    facts: Mapping[str, object]
    """Every other attribute of the metadata except the plans (`version`, `storage_meta`, `mcore_data`, ...)."""

    def places(self) -> Iterator[ItemPlace]:
        """Places of all items, chunks first."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield chunk.place
        yield from self.objects.values()


def read_metadata(path: str) -> DcpMetadata:
    """Read the `.metadata` at `path`.

    Raises
    ------
    MissingFileError
        Nothing is there.
    MalformedError
        The file is not such a pickle, is truncated, or contradicts itself.
    UnsupportedError
        Items are transformed (compressed), or of an unknown dtype.
    """
    root = _read_root(path)
    attributes = _read_state(root)
    if isinstance(root, Stub) and root.made_by.module.partition(".")[0] == "bytecheckpoint":
        raise UnsupportedError(
            f"{path} was written by ByteCheckpoint, whose files have bare elements where torch has items; they are not "
            "read. Load it with ByteCheckpoint and save it with torch.distributed.checkpoint, or merge it by its "
            "scripts/merge_bcp.py"
        )
    saved = attributes.get("state_dict_metadata")
    if not isinstance(root, Stub) or root.made_by.qualname.rpartition(".")[2] not in _ROOTS or type(saved) is not dict:
        raise MalformedError(
            f"{path}: expected the metadata of torch.distributed.checkpoint; got {describe_value(root)}. "
            "Check that the folder was written by torch.distributed.checkpoint"
        )
    reader = _MetadataReader(path, _read_storage(attributes.get("storage_data"), path), saved)
    for key in tuple(saved):  # each is dropped when it is read
        reader.take(key, saved.pop(key))
    paths = reader.read_paths(attributes)
    reader.raise_any()
    return DcpMetadata(
        tensors=reader.tensors,
        objects=reader.objects,
        paths=paths,
        facts={str(key): value for key, value in attributes.items() if key not in _OWN_FIELDS},
    )


def _read_root(path: str) -> object:
    """Unpickle `path`, if possible without the plans of the writer.

    megatron-core saves the plans as the last attribute, and they are as long as all the rest. So the pickle is cut
    before them and closed: SETITEMS and BUILD end the object, STOP the pickle. If that gives no complete object, the
    full pickle is read.
    """
    with open_source(path) as file:
        data = file.read(0, file.nbytes)
    at = data.rfind(b"\x8c\x0fall_local_plans")
    if at > 0 and data.endswith(b"."):
        with suppress(MalformedError):
            parsed = parse_pickle(data[:at] + b"ub." + data[at + 3 :], where=path)  # length kept for frames
            is_object = parsed.end == at + 3 and type(parsed.value) is Stub
            if is_object and {"state_dict_metadata", "storage_data"} <= _read_state(parsed.value).keys():
                return parsed.value
    parsed = parse_pickle(data, where=path)
    if parsed.end != len(data):
        raise MalformedError(f"{path}: expected {parsed.end} bytes; got {len(data)}. Copy the file again")
    return parsed.value


_ROOTS = ("Metadata", "MCoreMetadata")
"""Class of the pickled object; megatron-core 0.15 subclasses torch's."""
_OWN_FIELDS = ("state_dict_metadata", "storage_data", "planner_data", "all_local_plans")
_Places = dict[tuple[str, tuple[int, ...] | None], ItemPlace]


class _MetadataReader:
    """Joins entries of `state_dict_metadata` with the places of their items, and collects all problems."""

    def __init__(self, path: str, storage: _Places, saved: Collection[object]) -> None:
        self._path = path
        self._storage = storage
        self._unknown: list[str] = []
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, ItemPlace] = {}
        undescribed = dict.fromkeys(key for key, _ in storage if key not in saved)
        self._wrong = [f"{key}: its place is recorded, but not what it is" for key in undescribed]

    def read_paths(self, attributes: Mapping[object, object]) -> dict[str, tuple[str | int, ...]]:
        """Read the path of each key. torch makes a key by joining its path with dots.

        `.metadata` records both, so that damage to one of them shows. Planners of frameworks may leave other data, or
        None.
        """
        if "planner_data" not in attributes:
            self._wrong.append("the attribute planner_data (the paths of the keys) is missing")
        planner = attributes.get("planner_data")
        if type(planner) is not dict or not any(type(path) is tuple for path in planner.values()):
            return {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for key, path in planner.items():
            is_path = type(path) is tuple and path and all(type(step) in (str, int) for step in path)
            if is_path and ".".join(map(str, path)) == key:
                paths[key] = path
            else:
                self._wrong.append(f"the key {describe_value(key)} has the path {format_value(path)}")
        missing = [key for key in (*self.tensors, *self.objects) if key not in planner]
        self._wrong += [f"{key}: no path is recorded for it, as there is for others" for key in missing]
        return paths

    def take(self, key: object, entry: object) -> None:
        """Read one entry."""
        if type(key) is not str or type(entry) is not Stub:
            self._wrong.append(f"the entry {describe_value(key)} is {describe_value(entry)}")
            return
        kind = entry.made_by.qualname
        if kind == "BytesStorageMetadata":
            place = self._storage.get((key, None))
            if place is None:
                self._wrong.append(f"{key}: no place is recorded for it")
            else:
                self.objects[key] = place
        elif kind == "TensorStorageMetadata":
            self._take_tensor(key, _read_state(entry))
        else:
            self._wrong.append(f"{key}: expected the metadata of a tensor or of bytes; got {describe_value(entry)}")

    def _take_tensor(self, key: str, state: Mapping[object, object]) -> None:
        shape, saved, properties = _parse_shape(state.get("size")), state.get("chunks"), state.get("properties")
        if shape is None or type(saved) is not list or type(properties) is not Stub:
            self._wrong.append(
                f"{key}: expected its size, chunks and properties; got {describe_value(state.get('size'))}"
            )
            return
        # in torch 2.1 to 2.14 the state of TensorProperties is a tuple; frameworks pickle plain attributes
        values = properties.state
        name = values[0] if type(values) is tuple and values else _read_state(properties).get("dtype")
        dtype = _DTYPES.get(name) if type(name) is GlobalName else None
        if dtype is None:
            self._unknown.append(f"{key}: elements of {describe_value(name)}")
            return
        chunks = []
        for entry in saved:
            chunk_state = _read_state(entry)
            offsets, sizes = _parse_shape(chunk_state.get("offsets")), _parse_shape(chunk_state.get("sizes"))
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                self._wrong.append(
                    f"{key}: a chunk has the offsets {describe_value(chunk_state.get('offsets'))} and the sizes "
                    f"{describe_value(chunk_state.get('sizes'))}"
                )
                return
            place = self._storage.get((key, offsets))
            if 0 in sizes:
                continue
            if place is None:
                self._wrong.append(f"{key}: no place is recorded for its chunk at {list(offsets)}")
                continue
            chunks.append(Chunk(offsets, sizes, place))
        self.tensors[key] = SavedTensor(key, dtype, shape, tuple(chunks))

    def raise_any(self) -> None:
        """Raise one error with all problems, if there are any."""
        if self._wrong:
            raise MalformedError(
                f"{self._path} contradicts itself in "
                f"{format_count(len(self._wrong), 'place')}:\n{format_list(self._wrong)}\nCopy it again from where it "
                "was saved"
            )
        if self._unknown:
            raise UnsupportedError(
                f"{self._path}: {format_count(len(self._unknown), 'tensor')} of an element type that is not read "
                f"here:\n{format_list(self._unknown)}"
            )


def _read_storage(saved: object, path: str) -> _Places:
    """Places by key and offsets (None for objects)."""
    if type(saved) is not dict:
        raise MalformedError(f"{path}: expected storage_data, a dict; got {describe_value(saved)}")
    places: _Places = {}
    files: dict[str, str] = {}
    transformed = []
    for index in tuple(saved):  # each is dropped when it is read
        info = saved.pop(index)
        where, stored = _read_state(index), _read_state(info)
        key, at = where.get("fqn"), where.get("offset")
        offsets = None if at is None else _parse_shape(at)
        file, offset, nbytes = stored.get("relative_path"), stored.get("offset"), stored.get("length")
        if type(key) is not str or (at is not None and offsets is None):
            raise MalformedError(f"{path}: expected a key and offsets in storage_data; got {describe_value(index)}")
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise MalformedError(f"{path}: expected file, offset and length of {key!r}; got {describe_value(info)}")
        if stored.get("transform_descriptors"):
            transformed.append(f"{key}: {format_value(stored['transform_descriptors'])}")
        parts = () if file in files else PurePosixPath(file).parts
        if file not in files and (not parts or file.startswith("/") or ".." in parts or "\0" in file):
            raise MalformedError(f"{path}: expected the name of a file beside it; got {file!r}: damaged, or hostile")
        name = files.setdefault(file, file)
        places[key, offsets] = ItemPlace(name, offset, nbytes)
    if transformed:
        raise UnsupportedError(
            f"{path}: {format_count(len(transformed), 'item is', 'items are')} "
            f"transformed (compressed or encrypted), which is not read here:\n"
            f"{format_list(transformed)}\nLoad the checkpoint with torch and save it without extensions"
        )
    return places


def _read_state(value: object) -> Mapping[object, object]:
    """Attributes of an unpickled object."""
    if type(value) is not Stub:
        return {}
    state = value.state
    if type(state) is dict:
        return state
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        return {**(state[0] or {}), **state[1]}
    return {}


def _parse_shape(value: object) -> tuple[int, ...] | None:
    """Sizes or offsets; None for anything else."""
    if type(value) is TorchSize:
        return _intern_shape(value)
    if isinstance(value, tuple | list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


@lru_cache(maxsize=1 << 12)
def _intern_shape(size: TorchSize) -> tuple[int, ...] | None:
    """The plain tuple: one object for all tensors of a shape."""
    return tuple(size) if min(size, default=0) >= 0 else None
