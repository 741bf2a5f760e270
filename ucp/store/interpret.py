"""From a manifest to an index: every value is looked at before it is believed.

A manifest may be damaged, or written by somebody else. What it says must be of the right kind, refer to bytes that are
there, and agree with itself; the first thing that does not is a MalformedError that names its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from operator import gt
from pathlib import Path, PurePosixPath

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, Kind, Loss, ParamGroup, SourceFile, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, local_flat_pairs
from ucp.core.tensor import InlineTensor, Record, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.errors import MalformedError, MissingFileError, UcpError, UnsupportedError, UsageError, counted, listed
from ucp.io.folder import is_there, is_url, see_afresh, seen_from
from ucp.io.identity import size_and_time, source_file
from ucp.store.checked import (
    Json,
    as_int,
    as_ints,
    as_list,
    as_object,
    as_text,
    as_texts,
    as_texts_by_name,
    of_kind,
)
from ucp.store.manifest import MANIFEST, VERSION, StoredExtra
from ucp.store.values import from_json

__all__ = ["ReferredFile", "files_of", "inside", "interpret"]

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
        top = as_object(document)
        version = as_int(top["ucp"], least=1)
        if version != VERSION:
            raise UnsupportedError(
                f"expected version {VERSION} of the atom store; got {version} at {root}. It needs a newer ucp"
            )
        described = [as_object(file) for file in as_list(top["files"])]
        virtual = of_kind(top["virtual"], bool)
        paths = [_referred(file, root) if virtual else inside(root, as_text(file["path"])) for file in described]
        if virtual:
            see_afresh(paths)
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
    path = as_text(described["path"])
    if "identity" not in described:
        raise ValueError(f"no identity of {path!r}, to which a virtual store refers")
    return str(seen_from(root, path))


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
        if not is_url(path) and os.path.islink(path):
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
        top = as_object(document)
        source = as_object(top["source"])
        states = _States(files)
        records = [
            states.record(as_list(entry)) for entry in [*as_list(top["records"]), *_headers(as_list(top["files"]))]
        ]
        atoms = {name: _atom(name, as_object(own), states) for name, own in as_object(top["atoms"]).items()}
        index = Index(
            path=str(root),
            format="ucp",
            evidence=(MANIFEST,),
            producer=f"{as_text(top['producer'])}, from {as_text(source['producer'])}",
            topology=Topology.parse(as_text(source["topology"])),
            step=None if top["step"] is None else as_int(top["step"]),
            skipped=as_int(top.get("skipped", 0)),
            atoms=atoms,
            groups=tuple(_group(as_object(group)) for group in as_list(top["groups"])),
            aliases=as_texts_by_name(top["aliases"]),
            files=tuple(files),
            records=(*records, *states.records),
            notes=as_texts(top["notes"]),
            dropped=as_texts(top["dropped"]),
            lost=dict(_lost(top.get("lost", []))),
            origin=_origin(source),
            unselected=as_int(top.get("unselected", 0)),
            unordered=top.get("unordered") is True,
        )
        return index, tuple(_extra(as_object(own)) for own in as_list(top["extras"]))


def _headers(described: list[object]) -> Iterator[list[object]]:
    """Checksums of the headers of packs, as entries of `records`."""
    for at, file in enumerate(map(as_object, described)):
        if "header" in file:
            nbytes, crc32 = as_list(file["header"])
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
    return not whole or is_there(path)


def _file(path: str, described: Json) -> ReferredFile:
    role = as_text(described.get("role", "pack"))
    recorded = "identity" in described
    return ReferredFile(
        file=source_file(path, role),
        nbytes=as_int(described["nbytes"]) if recorded else None,
        mtime_ns=as_int(described["mtime_ns"]) if recorded else None,
        identity=as_text(described["identity"]) if recorded else None,
    )


def _extra(described: Json) -> StoredExtra:
    rank, is_summed = described["rank"], "crc32" in described
    return StoredExtra(
        name=as_text(described["name"]),
        rank=None if rank is None else as_int(rank),
        file=as_text(described["file"]),
        nbytes=as_int(described["nbytes"]) if is_summed else None,
        crc32=as_int(described["crc32"]) if is_summed else None,
    )


def _origin(source: Json) -> str:
    """Format that the extras were read from; of a store of a store that was written before it was recorded, none."""
    found = as_text(source.get("origin", source["format"]))
    return "" if found == "ucp" else found


def _group(described: Json) -> ParamGroup:
    hyper = of_kind(from_json(described["hyper"]), dict)
    return ParamGroup(params=as_texts(described["params"]), hyper={as_text(key): value for key, value in hyper.items()})


def _lost(described: object) -> Iterator[tuple[str, Loss]]:
    """Parameters that lack states, and why; a store that was written before this was recorded has none."""
    for own in map(as_object, as_list(described)):
        why, chosen = as_text(own["why"]), of_kind(own["chosen"], bool)
        for name, detail in as_texts_by_name(own["params"]).items():
            yield name, Loss(why=why, detail=detail, chosen=chosen)


def _atom(name: str, described: Json, states: _States) -> AtomIndex:
    model_dtype = described.get("model_dtype")
    own = as_object(described["states"])
    return AtomIndex(
        name=name,
        global_shape=as_ints(described["shape"]),
        kind=Kind(as_text(described["kind"])),
        states={state: states.state(f"{name}/{state}", as_object(place)) for state, place in own.items()},
        model_dtype=None if model_dtype is None else _dtype(as_text(model_dtype)),
        origin=as_texts_by_name(described.get("patterns", {})),
    )


class _States:
    """Reads states, and keeps the checksums that stand beside them."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.records: list[Record] = []

    def record(self, entry: list[object]) -> Record:
        """A checksum of a stretch of a file."""
        at, offset, nbytes, crc, name = entry
        path = self._stretch(as_int(at), as_int(offset), as_int(nbytes))
        return Record(path=path, name=as_text(name), offset=as_int(offset), nbytes=as_int(nbytes), crc32=as_int(crc))

    def state(self, label: str, described: Json) -> StateIndex:
        """A state of whatever layout; `label`: its name, for messages."""
        whole = _whole(_dtype(as_text(described["dtype"])), tuple(as_list(described["shape"])))
        shape, dtype = whole.shape, whole.dtype
        overlap, step = Overlap.EXCLUSIVE, 0
        digests: tuple[str, ...] = ()
        if "pieces" in described:
            fragments = tuple(self._piece(as_list(piece), shape) for piece in as_list(described["pieces"]))
            overlap = Overlap(as_text(described["overlap"]))
        else:
            digests, step = _digests(described, whole)
            if "codec" in described:
                fragments = tuple(self._blocks(described, shape, dtype))
            else:
                fragments = (self._stored(label, described, whole),)
        return StateIndex(
            dtype=dtype,
            global_shape=(*shape,),  # a tuple of its own: a pickle of it says which objects are one
            fragments=fragments,
            overlap=overlap,
            digests=digests,
            digest_nbytes=step,
        )

    def _stored(self, label: str, described: Json, whole: _Whole) -> Fragment:
        """One stretch of a pack."""
        place = at, offset = described["file"], described["offset"]
        if type(at) is not int or type(offset) is not int or at < 0 or offset < 0:
            raise TypeError(f"expected a file and an offset, got {place!r}"[:200])
        path = self._stretch(at, offset, whole.nbytes)
        if whole.nbytes:
            crc = as_int(described["crc32"])
            self.records.append(Record(path=path, name=label, offset=offset, nbytes=whole.nbytes, crc32=crc))
        ref = TensorRef(path=path, offset=offset, dtype=whole.dtype, shape=whole.shape, strides=whole.strides)
        return Fragment(box=whole.box, ref=ref)

    def _blocks(self, described: Json, shape: tuple[int, ...], dtype: DType) -> Iterator[Fragment]:
        """Encoded blocks: each is a stretch of the row-major order."""
        at, codec = as_int(described["file"]), as_text(described["codec"])
        step, numel = as_int(described["block"]) // dtype.itemsize, prod(shape)
        strides = contiguous_strides(shape)
        blocks = [as_ints(block) for block in as_list(described["blocks"])]
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
        box = _box(as_ints(offsets), as_ints(sizes))
        if len(box.sizes) != len(shape) or any(map(gt, box.stops, shape)):
            raise ValueError(f"a piece at {box} of a tensor of shape {shape}")
        if len(place) == 1:
            data, own = bytes.fromhex(as_text(place[0])), _dtype(as_text(dtype))
            repeats = box.numel != 1 and len(data) == own.itemsize
            ref: InlineTensor | TensorRef = InlineTensor(data=data, dtype=own, shape=box.sizes, repeats=repeats)
        else:
            ref = self._reference(place, box, _dtype(as_text(dtype)))
        copy = as_int(replica, least=-_MOST_COPIES)
        return Fragment(box=box, ref=ref, replica=abs(copy), term=as_int(term), derived=copy < 0)

    def _reference(self, place: list[object], box: Box, dtype: DType) -> TensorRef:
        at, offset, strides, *codec = place
        if not codec:
            return self._ref(as_int(at), offset=as_int(offset), dtype=dtype, shape=box.sizes, strides=as_ints(strides))
        name, nbytes, start = codec
        return TensorRef(
            path=self._stretch(as_int(at), as_int(offset), as_int(nbytes)),
            offset=as_int(offset),
            dtype=dtype,
            shape=box.sizes,
            strides=as_ints(strides),
            codec=as_text(name),
            codec_nbytes=as_int(nbytes),
            codec_start=as_int(start),
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
    step = as_int(described["block"], least=whole.dtype.itemsize)
    digests = as_texts(described["xxh3"])
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
    shape = tuple(map(as_int, saved))
    return _Whole(dtype, shape, contiguous_strides(shape), Box.whole(shape), prod(shape) * dtype.itemsize)


_dtype = cache(DType)
"""Types by name; there are few, and many tensors of each."""
_box = lru_cache(maxsize=4096)(Box)
"""Boxes of whole tensors, of which a model has few shapes."""
