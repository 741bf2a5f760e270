"""From a manifest to an index: every value is looked at before it is believed.

A manifest may be damaged, or written by somebody else. What it says must be of the right kind, refer to bytes that are
there, and agree with itself; the first thing that does not is a MalformedError that names its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from operator import gt
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, Kind, Loss, ParamGroup, SourceFile, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, local_flat_pairs
from ucp.core.tensor import InlineTensor, Record, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.errors import MalformedError, MissingFileError, UcpError, UnsupportedError, UsageError, counted, listed
from ucp.io.identity import size_and_time
from ucp.store.manifest import MANIFEST, VERSION, StoredExtra
from ucp.store.values import from_json

__all__ = ["ReferredFile", "files_of", "inside", "interpret"]

Json = Mapping[str, object]
T = TypeVar("T")

_MOST_COPIES = 1 << 40
"""Copies of a tensor that a manifest may number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferredFile:
    """A file that a manifest refers to."""

    file: SourceFile
    """As it is now."""
    nbytes: int | None
    """Bytes it had when the manifest was made, where recorded (virtual stores)."""
    mtime_ns: int | None
    """Time of its last change then."""
    identity: str | None
    """Digest by which it is recognised."""


def files_of(document: object, root: Path) -> tuple[ReferredFile, ...]:
    """Files that the manifest of the store at `root` refers to, as they were and as they are.

    Raises MalformedError, MissingFileError when one is not there, UnsupportedError for a newer version.
    """
    with _Place(root):
        top = _object(document)
        version = _int(top["ucp"], least=1)
        if version != VERSION:
            raise UnsupportedError(
                f"expected version {VERSION} of the atom store; got {version} at {root}. It needs a newer ucp"
            )
        described = [_object(file) for file in _list(top["files"])]
        virtual = _of(top["virtual"], bool)
        paths = [_referred(file, root) if virtual else inside(root, _text(file["path"])) for file in described]
        missing = [path for path in paths if not _is_there(path, whole=not virtual)]
        if missing:
            raise MissingFileError(
                f"expected {counted(len(missing), 'file')} "
                f"that {root / MANIFEST} refers to; nothing is there. Copy what is missing:\n"
                f"{listed(missing)}"
            )
        return tuple(_file(path, own) for path, own in zip(paths, described, strict=True))


def _referred(described: Json, root: Path) -> str:
    """Path of a file that a virtual store refers to, wherever it lies: it must say what it knows the file by."""
    path = _text(described["path"])
    if "identity" not in described:
        raise ValueError(f"no identity of {path!r}, to which a virtual store refers")
    return str(root / path)


def inside(root: Path, file: str) -> str:
    """Path of a file of the store at `root`. Raises MalformedError where it lies elsewhere, by name or by a link."""
    parts = PurePosixPath(file).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise MalformedError(
            f"expected a file inside the store {root}; got {file!r}. The manifest is damaged or forged"
        )
    path = str(root)
    for part in parts:
        path = os.path.join(path, part)
        if os.path.islink(path):
            raise MalformedError(
                f"expected the files of a store inside its folder; got a link at {path}. Put what it leads to in its "
                "place, or make the store again"
            )
    return path


def interpret(document: object, root: Path, files: Sequence[SourceFile]) -> tuple[Index, tuple[StoredExtra, ...]]:
    """The index that a manifest describes, without the values of its extras, and where these are said to be.

    `files`: those of `files_of`. Raises MalformedError naming the place.
    """
    with _Place(root):
        top = _object(document)
        source = _object(top["source"])
        states = _States(files)
        records = [states.record(_list(entry)) for entry in [*_list(top["records"]), *_headers(_list(top["files"]))]]
        atoms = {name: _atom(name, _object(own), states) for name, own in _object(top["atoms"]).items()}
        index = Index(
            path=str(root),
            format="ucp",
            evidence=(MANIFEST,),
            producer=f"{_text(top['producer'])}, from {_text(source['producer'])}",
            topology=Topology.parse(_text(source["topology"])),
            step=None if top["step"] is None else _int(top["step"]),
            skipped=_int(top.get("skipped", 0)),
            atoms=atoms,
            groups=tuple(_group(_object(group)) for group in _list(top["groups"])),
            aliases=_texts_by_name(top["aliases"]),
            files=tuple(files),
            records=(*records, *states.records),
            notes=_texts(top["notes"]),
            dropped=_texts(top["dropped"]),
            lost=dict(_lost(top.get("lost", []))),
            origin=_origin(source),
            unselected=_int(top.get("unselected", 0)),
        )
        return index, tuple(_extra(_object(own)) for own in _list(top["extras"]))


def _headers(described: list[object]) -> Iterator[list[object]]:
    """Checksums of the headers of packs, as entries of `records`."""
    for at, file in enumerate(map(_object, described)):
        if "header" in file:
            nbytes, crc32 = _list(file["header"])
            yield [at, 0, nbytes, crc32, "header"]


class _Place:
    """Where a manifest is wrong: turns what reading it may raise into MalformedError."""

    def __init__(self, root: Path) -> None:
        self._where = root / MANIFEST

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise MalformedError for what a damaged manifest leads to."""
        if isinstance(error, UcpError) and not isinstance(error, UsageError):
            return
        if isinstance(error, KeyError | TypeError | ValueError | IndexError | OverflowError | UsageError):
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)[:300]
            raise MalformedError(
                f"{self._where} is not a manifest of an atom store ({what}); it may be damaged. Copy it again"
            ) from error


def _is_there(path: str, *, whole: bool) -> bool:
    """Whether a file is there; unless it must be `whole`, in one piece or split in parts."""
    try:
        size_and_time(path)
    except OSError:
        return False
    return not whole or os.path.lexists(path)


def _file(path: str, described: Json) -> ReferredFile:
    nbytes, mtime_ns = size_and_time(path)
    role = _text(described.get("role", "pack"))
    recorded = "identity" in described
    return ReferredFile(
        file=SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role),
        nbytes=_int(described["nbytes"]) if recorded else None,
        mtime_ns=_int(described["mtime_ns"]) if recorded else None,
        identity=_text(described["identity"]) if recorded else None,
    )


def _extra(described: Json) -> StoredExtra:
    rank, is_summed = described["rank"], "crc32" in described
    return StoredExtra(
        name=_text(described["name"]),
        rank=None if rank is None else _int(rank),
        file=_text(described["file"]),
        nbytes=_int(described["nbytes"]) if is_summed else None,
        crc32=_int(described["crc32"]) if is_summed else None,
    )


def _origin(source: Json) -> str:
    """Format that the extras were read from; of a store of a store that was written before it was recorded, none."""
    found = _text(source.get("origin", source["format"]))
    return "" if found == "ucp" else found


def _group(described: Json) -> ParamGroup:
    hyper = _of(from_json(described["hyper"]), dict)
    return ParamGroup(params=_texts(described["params"]), hyper={_text(key): value for key, value in hyper.items()})


def _lost(described: object) -> Iterator[tuple[str, Loss]]:
    """Parameters that lack states, and why; a store that was written before this was recorded has none."""
    for own in map(_object, _list(described)):
        why, chosen = _text(own["why"]), _of(own["chosen"], bool)
        for name, detail in _texts_by_name(own["params"]).items():
            yield name, Loss(why=why, detail=detail, chosen=chosen)


def _atom(name: str, described: Json, states: _States) -> AtomIndex:
    model_dtype = described.get("model_dtype")
    own = _object(described["states"])
    return AtomIndex(
        name=name,
        global_shape=_ints(described["shape"]),
        kind=Kind(_text(described["kind"])),
        states={state: states.state(f"{name}/{state}", _object(place)) for state, place in own.items()},
        model_dtype=None if model_dtype is None else _dtype(_text(model_dtype)),
        origin=_texts_by_name(described.get("patterns", {})),
    )


class _States:
    """Reads states, and keeps the checksums that stand beside them."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.records: list[Record] = []

    def record(self, entry: list[object]) -> Record:
        """A checksum of a stretch of a file."""
        at, offset, nbytes, crc, name = entry
        path = self._stretch(_int(at), _int(offset), _int(nbytes))
        return Record(path=path, name=_text(name), offset=_int(offset), nbytes=_int(nbytes), crc32=_int(crc))

    def state(self, label: str, described: Json) -> StateIndex:
        """A state of whatever layout; `label`: its name, for messages."""
        whole = _whole(_dtype(_text(described["dtype"])), tuple(_list(described["shape"])))
        shape, dtype = whole.shape, whole.dtype
        overlap, step = Overlap.EXCLUSIVE, 0
        digests: tuple[str, ...] = ()
        if "pieces" in described:
            fragments = tuple(self._piece(_list(piece), shape) for piece in _list(described["pieces"]))
            overlap = Overlap(_text(described["overlap"]))
        else:
            digests, step = _digests(described, whole)
            if "codec" in described:
                fragments = tuple(self._blocks(described, shape, dtype))
            else:
                fragments = (self._stored(label, described, whole),)
        return StateIndex(
            dtype=dtype,
            global_shape=(*map(int, shape),),  # a tuple of its own: a pickle of it says which objects are one
            fragments=fragments,
            overlap=overlap,
            digests=digests,
            digest_nbytes=step,
        )

    def _stored(self, label: str, described: Json, whole: _Whole) -> Fragment:
        """One stretch of a pack."""
        at, offset = _int(described["file"]), _int(described["offset"])
        path = self._stretch(at, offset, whole.nbytes)
        if whole.nbytes:
            crc = _int(described["crc32"])
            self.records.append(Record(path=path, name=label, offset=offset, nbytes=whole.nbytes, crc32=crc))
        ref = TensorRef(path=path, offset=offset, dtype=whole.dtype, shape=whole.shape, strides=whole.strides)
        return Fragment(box=whole.box, ref=ref)

    def _blocks(self, described: Json, shape: tuple[int, ...], dtype: DType) -> Iterator[Fragment]:
        """Encoded blocks: each is a stretch of the row-major order."""
        at, codec = _int(described["file"]), _text(described["codec"])
        step, numel = _int(described["block"]) // dtype.itemsize, prod(shape)
        strides = contiguous_strides(shape)
        blocks = [_ints(block) for block in _list(described["blocks"])]
        if len(blocks) != -(-numel // step):
            raise ValueError(f"{len(blocks)} blocks of {step} elements for {numel} elements")
        for number, (offset, nbytes) in enumerate(blocks):
            path = self._stretch(at, offset, nbytes)
            for box, position in local_flat_pairs(shape, number * step, min((number + 1) * step, numel)):
                ref = TensorRef(
                    path=path,
                    offset=offset,
                    dtype=dtype,
                    shape=box.sizes,
                    strides=strides,
                    codec=codec,
                    codec_nbytes=nbytes,
                    codec_start=position * dtype.itemsize,
                )
                yield Fragment(box=box, ref=ref)

    def _piece(self, piece: list[object], shape: tuple[int, ...]) -> Fragment:
        """A piece of somebody else's file, or a tensor that stands here."""
        offsets, sizes, replica, term, dtype, *place = piece
        box = _box(_ints(offsets), _ints(sizes))
        if len(box.sizes) != len(shape) or any(map(gt, box.stops, shape)):
            raise ValueError(f"a piece at {box} of a tensor of shape {shape}")
        if len(place) == 1:
            data = bytes.fromhex(_text(place[0]))
            ref: InlineTensor | TensorRef = InlineTensor(data=data, dtype=_dtype(_text(dtype)), shape=box.sizes)
        else:
            ref = self._reference(place, box, _dtype(_text(dtype)))
        copy = _int(replica, least=-_MOST_COPIES)
        return Fragment(box=box, ref=ref, replica=abs(copy), term=_int(term), derived=copy < 0)

    def _reference(self, place: list[object], box: Box, dtype: DType) -> TensorRef:
        at, offset, strides, *codec = place
        if not codec:
            return self._ref(_int(at), offset=_int(offset), dtype=dtype, shape=box.sizes, strides=_ints(strides))
        name, nbytes, start = codec
        return TensorRef(
            path=self._stretch(_int(at), _int(offset), _int(nbytes)),
            offset=_int(offset),
            dtype=dtype,
            shape=box.sizes,
            strides=_ints(strides),
            codec=_text(name),
            codec_nbytes=_int(nbytes),
            codec_start=_int(start),
        )

    def _ref(
        self, at: int, *, offset: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TensorRef:
        ref = TensorRef(path=self._files[at].path, offset=offset, dtype=dtype, shape=shape, strides=strides)
        self._stretch(at, offset, ref.extent)
        return ref

    def _stretch(self, at: int, offset: int, nbytes: int) -> str:
        """Path of file number `at`, which must hold those bytes. Raises MalformedError where it is too short."""
        file = self._files[at]
        if nbytes and offset + nbytes > file.nbytes:
            raise MalformedError(
                f"{file.path} is truncated: expected {nbytes} bytes at {offset}; it ends at {file.nbytes}. "
                "Copy it again"
            )
        return file.path


def _digests(described: Json, whole: _Whole) -> tuple[tuple[str, ...], int]:
    """Digests of the blocks of a state, one for each, and the bytes of a block."""
    step = _int(described["block"], least=whole.dtype.itemsize)
    digests = _texts(described["xxh3"])
    if step % whole.dtype.itemsize or len(digests) != -(-whole.nbytes // step):
        raise ValueError(f"{len(digests)} digests of {step} bytes each for {whole.nbytes} bytes of {whole.dtype}")
    return digests, step


@dataclass(frozen=True, slots=True)
class _Whole:
    """What follows from a type and a shape, of which a model has few, and many tensors of each."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: Box
    nbytes: int


@lru_cache(maxsize=4096)
def _whole(dtype: DType, saved: tuple[object, ...]) -> _Whole:
    shape = tuple(map(_int, saved))
    return _Whole(dtype, shape, contiguous_strides(shape), Box.whole(shape), prod(shape) * dtype.itemsize)


_dtype = cache(DType)
"""Types by name; there are few, and many tensors of each."""
_box = lru_cache(maxsize=4096)(Box)
"""Boxes of whole tensors, of which a model has few shapes."""


def _of(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r}"[:200])
    return value


def _object(value: object) -> Json:
    return _of(value, dict)


def _list(value: object) -> list[object]:
    return _of(value, list)


def _text(value: object) -> str:
    return _of(value, str)


def _int(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise TypeError(f"expected a whole number of at least {least}, got {value!r}"[:200])
    return value


def _ints(value: object) -> tuple[int, ...]:
    return tuple(map(_int, _list(value)))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _texts_by_name(value: object) -> dict[str, str]:
    return {name: _text(item) for name, item in _object(value).items()}
