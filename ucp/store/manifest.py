"""`ucp.json`: what an atom store holds and where. Version 1; see docs/reference/atom-store.md.

A packed store and a virtual one differ only in where their states lie: one stretch of a pack, or pieces of somebody
else's files. A plain number that the source keeps outside its tensors stands in the manifest itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from zlib_ng import zlib_ng

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.tensor import InlineTensor
from ucp.errors import DestinationError, MalformedError
from ucp.io.files import open_source
from ucp.io.json_text import NotJson, has_wrong_digest, parsed, with_digest
from ucp.store.values import to_json

__all__ = [
    "LONGEST",
    "MANIFEST",
    "VERSION",
    "SourceIdentity",
    "Stored",
    "StoredExtra",
    "describe",
    "dump",
    "is_inline",
    "parse",
    "read_text",
]

MANIFEST = "ucp.json"
VERSION = 1

LONGEST = 1 << 30
"""Bytes of the longest JSON document of a store: some ten million pieces, and ten times as much memory."""

Json = dict[str, object]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """What a virtual store recognises a file of its source by."""

    nbytes: int
    """Bytes, of all parts where it is split."""
    mtime_ns: int
    """Time of its last change, nanoseconds since 1970."""
    identity: str
    """Digest of its length and both ends."""
    role: str
    """What it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExtra:
    """Where an extra lies in a store."""

    name: str
    """What it is."""
    rank: int | None
    """Rank whose own value it is; None for all."""
    file: str
    """File that holds it, relative to the store."""
    nbytes: int | None
    """Bytes of the file; None in a store that was written before they were recorded."""
    crc32: int | None
    """CRC-32 of the whole file; None as before."""


def describe(
    index: Index,
    *,
    producer: str,
    stored: Mapping[tuple[str, str], Stored] | None,
    extras: Sequence[StoredExtra],
    casts: Sequence[str],
    identify: Callable[[str], SourceIdentity],
    headers: Mapping[str, bytes],
) -> Json:
    """The manifest of `index` as JSON.

    `stored`: place of every (parameter, state), or None for a virtual store, which keeps the source's own places.
    `identify`: what a file of the source is recognised by (virtual only). `headers`: of packs that begin with one.
    """
    files = _Numbering()
    atoms = {atom.name: _atom(atom, stored, files) for atom in index.atoms.values()}
    records = [] if stored is not None else _records(index, files)
    return {
        "ucp": VERSION,
        "producer": producer,
        "virtual": stored is None,
        "source": {
            "path": index.path,
            "format": index.format,
            "origin": index.origin or index.format,
            "producer": index.producer,
            "topology": str(index.topology),
        },
        "step": index.step,
        "skipped": index.skipped,
        "files": [
            {"path": path} | (asdict(identify(path)) if stored is None else _header(headers.get(path, b"")))
            for path in files.paths
        ],
        "records": records,
        "atoms": atoms,
        "groups": [{"params": list(g.params), "hyper": to_json(dict(g.hyper))} for g in index.groups],
        "aliases": dict(index.aliases),
        "extras": [asdict(extra) for extra in extras],
        "casts": list(casts),
        "notes": list(index.notes),
        "dropped": list(index.dropped),
        "lost": _lost(index),
        "unselected": index.unselected,
        "unordered": index.unordered,
    }


def _header(header: bytes) -> Json:
    return {"header": [len(header), zlib_ng.crc32(header)]} if header else {}


def _lost(index: Index) -> list[object]:
    """`Index.lost` with each reason once, for the parameters there are."""
    params: dict[tuple[str, bool], dict[str, str]] = {}
    for name, loss in index.lost.items():
        if name in index.atoms:
            params.setdefault((loss.why, loss.chosen), {})[name] = loss.detail
    return [{"why": why, "chosen": chosen, "params": own} for (why, chosen), own in params.items()]


def is_inline(state: StateIndex) -> bool:
    """Whether a state stands in the source's index itself, and so in the manifest."""
    return bool(state.fragments) and all(isinstance(fragment.ref, InlineTensor) for fragment in state.fragments)


class _Numbering:
    """Numbers paths in the order they are first named."""

    def __init__(self) -> None:
        self.paths: dict[str, int] = {}

    def __call__(self, path: str) -> int:
        return self.paths.setdefault(path, len(self.paths))


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
    if stored is None or ((param, name) not in stored and is_inline(state)):
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
    replica = -fragment.replica if fragment.derived else fragment.replica
    head: list[object] = [list(fragment.box.offsets), list(fragment.box.sizes), replica, fragment.term]
    if isinstance(ref, InlineTensor):
        return [*head, ref.dtype.value, ref.data.hex()]
    place: list[object] = [*head, ref.dtype.value, files(ref.path), ref.offset, list(ref.strides)]
    return [*place, ref.codec, ref.codec_nbytes, ref.codec_start] if ref.codec else place


def dump(document: Json) -> bytes:
    """The manifest as text, sealed by a digest of itself. Raises DestinationError for one too long to be read again."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > LONGEST - 64:
        raise DestinationError(
            f"expected a manifest of at most {LONGEST:,} bytes; got {len(text):,}: too many pieces for one virtual "
            "store. Copy them (drop --virtual), or take fewer parameters (--include)"
        )
    return with_digest(text)


def read_text(path: str) -> bytes:
    """The JSON document at `path`, as text. Raises MalformedError for one longer than any that is written."""
    with open_source(path) as file:
        if file.nbytes > LONGEST:
            raise MalformedError(
                f"expected a document of at most {LONGEST:,} bytes in {path}; got {file.nbytes:,}. It is damaged; "
                "copy it again"
            )
        return file.read(0, file.nbytes)


def parse(text: bytes, where: str) -> object:
    """What `dump` wrote, not yet interpreted. Raises MalformedError when it is damaged.

    A manifest without a seal (edited by hand) is taken as it is.
    """
    if has_wrong_digest(text):
        raise MalformedError(f"{where} is not what was written (its digest differs); it is damaged. Copy it again")
    try:
        return parsed(text)
    except NotJson as error:
        raise MalformedError(f"expected JSON in {where}; {error}. The file is damaged: copy it again") from error
