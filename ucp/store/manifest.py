"""`ucp.json`: what an atom store holds and where. Version 1; see docs/reference/atom-store.md.

A packed store and a virtual one differ only in where their states lie: one stretch of a pack, or pieces of somebody
else's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ucp.atom import AtomIndex, Index, Kind, ParamGroup, SourceFile, StateIndex
from ucp.dtypes import DType
from ucp.errors import MalformedError, UnsupportedError
from ucp.fragment import Fragment
from ucp.identity import size_and_time
from ucp.layout import Overlap
from ucp.region import Box, local_flat_pairs
from ucp.store.values import from_json, to_json
from ucp.tensor import InlineTensor, Record, TensorRef, contiguous_strides
from ucp.topology import Topology

__all__ = ["MANIFEST", "Stored", "describe", "dump", "interpret"]

MANIFEST = "ucp.json"
VERSION = 1

Json = dict[str, object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where one state lies in a pack."""

    path: str
    """Pack, relative to the store."""
    offset: int
    """First byte."""
    dtype: DType
    """Type as stored."""
    crc32: int
    """CRC-32 of all bytes, uncompressed."""
    digests: tuple[str, ...]
    """xxh3-64 per block of the bytes, uncompressed."""
    block_nbytes: int
    """Bytes of a block; the last may be shorter."""
    codec: str = ""
    """Codec of the blocks, or empty."""
    blocks: tuple[tuple[int, int], ...] = ()
    """File offset and encoded bytes per block, when encoded."""


def describe(
    index: Index,
    *,
    producer: str,
    stored: Mapping[tuple[str, str], Stored] | None,
    extras: Sequence[tuple[str, int | None, str]],
    casts: Sequence[str],
    identities: Mapping[str, str],
) -> Json:
    """The manifest of `index` as JSON.

    `stored`: place of every (parameter, state), or None for a virtual store, which keeps the source's own places.
    `extras`: name, rank and file of each. `identities`: digest by which a source file is recognised (virtual only).
    """
    files = _Numbering()
    atoms = {atom.name: _atom(atom, stored, files) for atom in index.atoms.values()}
    own = {file.path: file for file in index.files}
    records = [] if stored is not None else _records(index, files)
    return {
        "ucp": VERSION,
        "producer": producer,
        "virtual": stored is None,
        "source": {
            "path": index.path,
            "format": index.format,
            "producer": index.producer,
            "topology": str(index.topology),
        },
        "step": index.step,
        "files": [_file(path, own.get(path), identities) for path in files.paths],
        "records": records,
        "atoms": atoms,
        "groups": [{"params": list(g.params), "hyper": to_json(dict(g.hyper))} for g in index.groups],
        "aliases": dict(index.aliases),
        "extras": [{"name": name, "rank": rank, "file": file} for name, rank, file in extras],
        "casts": list(casts),
        "notes": list(index.notes),
        "dropped": list(index.dropped),
    }


class _Numbering:
    """Numbers paths in the order they are first named."""

    def __init__(self) -> None:
        self.paths: dict[str, int] = {}

    def __call__(self, path: str) -> int:
        return self.paths.setdefault(path, len(self.paths))


def _file(path: str, file: SourceFile | None, identities: Mapping[str, str]) -> Json:
    described: Json = {"path": path}
    if path in identities and file is not None:
        described |= {"nbytes": file.nbytes, "mtime_ns": file.mtime_ns, "identity": identities[path], "role": file.role}
    return described


def _records(index: Index, files: _Numbering) -> list[object]:
    return [[files(r.path), r.offset, r.nbytes, r.crc32, r.name] for r in index.records]


def _atom(atom: AtomIndex, stored: Mapping[tuple[str, str], Stored] | None, files: _Numbering) -> Json:
    described: Json = {"shape": list(atom.global_shape), "kind": atom.kind.value}
    if atom.model_dtype is not None:
        described["model_dtype"] = atom.model_dtype.value
    if atom.patterns:
        described["patterns"] = dict(atom.patterns)
    described["states"] = {
        name: _state(atom.name, name, state, stored=stored, files=files) for name, state in atom.states.items()
    }
    return described


def _state(
    param: str, name: str, state: StateIndex, *, stored: Mapping[tuple[str, str], Stored] | None, files: _Numbering
) -> Json:
    described: Json = {"shape": list(state.global_shape)}
    if stored is None:
        described |= {"dtype": state.dtype.value, "overlap": state.overlap.value}
        described["pieces"] = [_piece(fragment, files) for fragment in state.fragments]
        return described
    place = stored[param, name]
    described |= {
        "dtype": place.dtype.value,
        "file": files(place.path),
        "offset": place.offset,
        "crc32": place.crc32,
        "xxh3": list(place.digests),
        "block": place.block_nbytes,
    }
    if place.codec:
        described |= {"codec": place.codec, "blocks": [list(block) for block in place.blocks]}
    return described


def _piece(fragment: Fragment, files: _Numbering) -> list[object]:
    ref = fragment.ref
    head: list[object] = [list(fragment.box.offsets), list(fragment.box.sizes), fragment.replica, fragment.term]
    if isinstance(ref, InlineTensor):
        return [*head, ref.dtype.value, ref.data.hex()]
    place: list[object] = [*head, ref.dtype.value, files(ref.path), ref.offset, list(ref.strides)]
    return [*place, ref.codec, ref.codec_nbytes, ref.codec_start] if ref.codec else place


def interpret(document: object, root: Path) -> tuple[Index, list[tuple[str, int | None, str]], list[Json]]:
    """The index a manifest describes, its extras (name, rank, file) and what it says of each file.

    Raises MalformedError naming the place, UnsupportedError for a manifest of a newer version.
    """
    try:
        return _interpret(document, root)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise MalformedError(
            f"{root / MANIFEST} is not a manifest of an atom store ({what}); it may be damaged"
        ) from error


def _interpret(document: object, root: Path) -> tuple[Index, list[tuple[str, int | None, str]], list[Json]]:
    top = _as(document, dict)
    if top["ucp"] != VERSION:
        raise UnsupportedError(
            f"expected version {VERSION} of the atom store; got {top['ucp']!r}. It needs a newer ucp"
        )
    files: list[Json] = [_as(file, dict) for file in _as(top["files"], list)]
    paths = [str(root / _as(file["path"], str)) for file in files]
    records: list[Record] = [
        Record(path=paths[at], offset=offset, nbytes=nbytes, crc32=crc, name=name)
        for at, offset, nbytes, crc, name in top["records"]
    ]
    atoms = {}
    for name, described in _as(top["atoms"], dict).items():
        atoms[name] = _read_atom(name, described, paths, records)
    index = Index(
        path=str(root),
        format="ucp",
        evidence=(MANIFEST,),
        producer=f"{top['producer']}, from {top['source']['producer']}",
        topology=Topology.parse(top["source"]["topology"]),
        step=top["step"],
        atoms=atoms,
        groups=tuple(_group(group) for group in top["groups"]),
        aliases=_as(top["aliases"], dict),
        files=_source_files(root, files, paths),
        records=tuple(records),
        notes=tuple(top["notes"]),
        dropped=tuple(top["dropped"]),
    )
    return index, [(e["name"], e["rank"], e["file"]) for e in top["extras"]], files


def _as(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _group(described: Json) -> ParamGroup:
    hyper = from_json(described["hyper"])
    params = _as(described["params"], list)
    return ParamGroup(params=tuple(params), hyper=_as(hyper, dict))


def _source_files(root: Path, files: Sequence[Json], paths: Sequence[str]) -> tuple[SourceFile, ...]:
    found = []
    for path, described in zip(paths, files, strict=True):
        try:
            nbytes, mtime_ns = size_and_time(path)
        except OSError as error:
            raise MalformedError(f"{path} is referred to by {root / MANIFEST} and is not there") from error
        role = str(described.get("role", "pack"))
        found.append(SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role))
    return tuple(found)


def _read_atom(name: str, described: Json, paths: Sequence[str], records: list[Record]) -> AtomIndex:
    states = {}
    for state_name, state in _as(described["states"], dict).items():
        states[state_name] = _read_state(f"{name}/{state_name}", state, paths, records)
    model_dtype = described.get("model_dtype")
    return AtomIndex(
        name=name,
        global_shape=_ints(described["shape"]),
        kind=Kind(_as(described["kind"], str)),
        states=states,
        model_dtype=None if model_dtype is None else DType(_as(model_dtype, str)),
        patterns=_as(described.get("patterns", {}), dict),
    )


def _ints(value: object) -> tuple[int, ...]:
    items = _as(value, list)
    if any(type(item) is not int for item in items):
        raise TypeError(f"expected whole numbers, got {items!r}")
    return tuple(items)


def _read_state(label: str, described: Json, paths: Sequence[str], records: list[Record]) -> StateIndex:
    shape = _ints(described["shape"])
    dtype = DType(_as(described["dtype"], str))
    if "pieces" in described:
        pieces = [_read_piece(piece, paths) for piece in _as(described["pieces"], list)]
        overlap = Overlap(_as(described["overlap"], str))
        return StateIndex(dtype=dtype, global_shape=shape, fragments=tuple(pieces), overlap=overlap)
    path = paths[_as(described["file"], int)]
    if "codec" in described:
        return _read_blocks(described, path, dtype, shape)
    offset = _as(described["offset"], int)
    ref = TensorRef(path=path, offset=offset, dtype=dtype, shape=shape, strides=contiguous_strides(shape))
    if ref.nbytes:
        crc = _as(described["crc32"], int)
        records.append(Record(path=path, name=label, offset=offset, nbytes=ref.nbytes, crc32=crc))
    return StateIndex(
        dtype=dtype,
        global_shape=shape,
        fragments=(Fragment(box=Box.whole(shape), ref=ref),),
        digests=tuple(_as(described["xxh3"], list)),
        digest_nbytes=_as(described["block"], int),
    )


def _read_blocks(described: Json, path: str, dtype: DType, shape: tuple[int, ...]) -> StateIndex:
    """Encoded blocks: each is a stretch of the row-major order."""
    step = _as(described["block"], int) // dtype.itemsize
    numel = Box.whole(shape).numel
    fragments = []
    for number, (offset, nbytes) in enumerate(_as(described["blocks"], list)):
        low, high = number * step, min((number + 1) * step, numel)
        for box, position in local_flat_pairs(shape, low, high):
            ref = TensorRef(
                path=path,
                offset=offset,
                dtype=dtype,
                shape=box.sizes,
                strides=contiguous_strides(shape),
                codec=_as(described["codec"], str),
                codec_nbytes=nbytes,
                codec_start=position * dtype.itemsize,
            )
            fragments.append(Fragment(box=box, ref=ref))
    if not numel:
        empty = TensorRef(path=path, offset=0, dtype=dtype, shape=shape, strides=contiguous_strides(shape))
        fragments.append(Fragment(box=Box.whole(shape), ref=empty))
    return StateIndex(
        dtype=dtype,
        global_shape=shape,
        fragments=tuple(fragments),
        digests=tuple(_as(described["xxh3"], list)),
        digest_nbytes=_as(described["block"], int),
    )


def _read_piece(piece: object, paths: Sequence[str]) -> Fragment:
    offsets, sizes, replica, term, dtype, *place = _as(piece, list)
    box = Box(_ints(offsets), _ints(sizes))
    if len(place) == 1:
        inline = InlineTensor(data=bytes.fromhex(place[0]), dtype=DType(dtype), shape=box.sizes)
        return Fragment(box=box, ref=inline, replica=replica, term=term)
    file, offset, strides, *codec = place
    name, nbytes, start = codec or ("", 0, 0)
    ref = TensorRef(
        path=paths[file],
        offset=offset,
        dtype=DType(dtype),
        shape=box.sizes,
        strides=_ints(strides),
        codec=name,
        codec_nbytes=nbytes,
        codec_start=start,
    )
    return Fragment(box=box, ref=ref, replica=replica, term=term)


def dump(document: Json) -> bytes:
    """The manifest as text."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
