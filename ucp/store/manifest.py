"""`ucp.json`, the manifest: what an atom store holds, and where. Version 1; see docs/reference/atom-store.md.

In a packed store, a state is one range of a pack; in a virtual store, a state is pieces of the source's files. A plain
number that the source keeps outside its tensors is in the manifest itself. The structures below define the document;
`ucp.store.describe` makes it, `ucp.store.interpret` reads it.
"""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ucp.core.index import Kind
from ucp.core.layout import Overlap
from ucp.core.tensor import DType
from ucp.errors import DestinationError, MalformedError, UnsupportedError
from ucp.io.files import open_source
from ucp.io.json_text import Natural, NotJson, decode, has_digest, has_wrong_digest, with_digest

MANIFEST = "ucp.json"
EXTRAS = "extra"
"""Folder of a store that holds the extras."""
VERSION = 1

LONGEST = 1 << 30
"""Bytes of the longest JSON document in a store: about ten million pieces; reading takes ten times as much memory."""

Crc32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Shape = tuple[Natural, ...]


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that a store was made from."""

    path: str
    """Absolute path of the checkpoint."""
    format: str
    """Name of its format."""
    origin: str
    """Format that the extras come from: `format`, or the origin of the source if that is a store itself."""
    producer: str
    """Program that wrote the checkpoint."""
    topology: str
    """Topology of the run that saved it, in the form that `Topology.parse` reads."""


class StoredFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file that states refer to by its number."""

    path: str
    """Path relative to the store; in a virtual store an absolute path, or a URL."""
    header: tuple[Natural, Crc32] | None = None
    """For a safetensors file: the number of bytes before the tensors, and their CRC-32."""
    nbytes: Natural | None = None
    """Virtual store, `ucp.save`: number of bytes; of all parts together, if the file is split."""
    mtime_ns: Natural | None = None
    """Virtual store: modification time, in nanoseconds since 1970."""
    identity: str | None = None
    """Virtual store: digest of the file's length and of its first and last bytes."""
    role: str | None = None
    """Virtual store: what the file holds."""


class Checksum(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of a file whose checksum the source recorded."""

    file: Natural
    """Number of the file."""
    offset: Natural
    """First byte."""
    nbytes: Natural
    """Number of bytes."""
    crc32: Crc32
    """CRC-32 of the bytes."""
    name: str
    """Label for messages."""


class Piece(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A piece of a state: a reference to a file, or the value itself. Fields from `offset` on may be missing."""

    offsets: Shape
    """First element per dim."""
    sizes: Shape
    """Elements per dim."""
    replica: int
    """Number of the copy: copy 0 is read; negative if the piece was computed from another piece."""
    term: Natural
    """Which term of a mean the piece belongs to."""
    dtype: DType
    """Dtype as stored."""
    place: Natural | str
    """Number of the file; or the elements as hex digits (a single one, if all are equal)."""
    offset: Natural = 0
    """First byte in the file."""
    strides: Shape = ()
    """Strides in elements, per dim."""
    codec: str = ""
    """Codec of the bytes at `offset`; empty if they are not encoded."""
    codec_nbytes: Natural = 0
    """Number of encoded bytes."""
    codec_start: Natural = 0
    """Byte of the decoded block where the piece begins."""
    patched_nbytes: Natural = 0
    """Bytes of the tensor that the block is a patch of; 0 if it is no patch."""


class StoredState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A state: one range of a pack, or `pieces`."""

    shape: Shape
    """Elements per dim."""
    dtype: DType
    """Dtype as stored."""
    overlap: Overlap | None = None
    """How overlapping pieces are combined."""
    pieces: tuple[Piece, ...] | None = None
    """Its pieces, in a virtual store, or if it is a plain number."""
    file: Natural | None = None
    """Number of the pack."""
    offset: Natural | None = None
    """First byte."""
    crc32: Crc32 | None = None
    """CRC-32 of all uncompressed bytes."""
    xxh3: tuple[str, ...] | None = None
    """xxh3-64 of each block of uncompressed bytes."""
    block: Natural | None = None
    """Bytes of a block; the last one may be shorter."""
    codec: str | None = None
    """Codec of the blocks, in a compressed store."""
    blocks: tuple[tuple[Natural, Natural], ...] | None = None
    """File offset and number of encoded bytes of each block."""
    layout: tuple[Natural, ...] | None = None
    """Its layout in the run that saved it, if it differs from its parameter's: numbers of `Manifest.axes`."""


class StoredAtom(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parameter or a buffer."""

    shape: Shape
    """Elements per dim."""
    kind: Kind
    """Trained, frozen or a buffer."""
    model_dtype: DType | None = None
    """Dtype of the model's weight, if the stored weight is a master of higher precision."""
    iteration: Natural | None = None
    """Training step of its states, if it differs from the store's."""
    cast: bool = False
    """Whether it is only the weight with which the model computes: another link of a window has its full states."""
    layout: tuple[Natural, ...] = ()
    """Its layout in the run that saved it: numbers of `Manifest.axes`, outermost first."""
    made_of: dict[str, tuple[Natural, ...]] = {}
    """Layouts of the stored tensors that it was joined, split or transposed from."""
    states: dict[str, StoredState]
    """State name to the state."""


class StoredAxis(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pattern over one mesh axis of the run that saved the checkpoint."""

    axis: str
    """Mesh axis."""
    parts: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Number of ranks along the axis."""
    pattern: str
    """Registered name of the pattern."""
    fields: dict[str, object]
    """Fields of the pattern, without those that have their default value."""
    is_flat: bool
    """Whether the pattern splits the flattened shard that remains after the axes that split dims."""
    known_from: str
    """What this layout is known from."""


class StoredGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter group of the optimizer."""

    params: tuple[str, ...]
    """Names of the parameters, in the order of the optimizer."""
    hyper: object
    """Hyper-parameters, as `ucp.store.values` encodes them."""


class StoredExtra(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an extra is in a store."""

    name: str
    """Name of the extra."""
    rank: Natural | None
    """Rank whose value it is; None if it is the value of all ranks."""
    file: str
    """File that holds it, relative to the store."""
    nbytes: Natural
    """Bytes of the file."""
    crc32: Crc32
    """CRC-32 of the whole file."""


class StoredLoss(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that lost states."""

    why: str
    """The reason, and what to do."""
    chosen: bool
    """Whether the user left the states out."""
    params: dict[str, str]
    """Parameter to a detail for human readers."""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document."""

    ucp: int
    """Version of the store."""
    producer: str
    """Program and version that wrote the store."""
    virtual: bool
    """Whether states are in the source's files."""
    source: Origin
    """The checkpoint that it was made from."""
    step: Natural | None
    """Training step."""
    skipped: Natural = 0
    """Steps that were skipped, for example after an overflow."""
    files: tuple[StoredFile, ...]
    """Files that states refer to."""
    records: tuple[Checksum, ...]
    """Checksums that the source recorded (virtual store only)."""
    axes: tuple[StoredAxis, ...] = ()
    """Patterns that atoms refer to by number."""
    atoms: dict[str, StoredAtom]
    """Name to atom, in the order of the model."""
    groups: tuple[StoredGroup, ...]
    """Parameter groups of the optimizer."""
    aliases: dict[str, str]
    """Tied name to the name it is stored under."""
    extras: tuple[StoredExtra, ...]
    """Everything else."""
    casts: tuple[str, ...]
    """Changes of dtype, for human readers."""
    notes: tuple[str, ...]
    """Notes on assumptions."""
    dropped: tuple[str, ...]
    """What was left out, and why."""
    lost: tuple[StoredLoss, ...] = ()
    """Parameters that lack states, and why."""
    unselected: Natural = 0
    """Number of parameters that a selection left out completely."""
    unordered: bool = False
    """Whether the order in which the model registers its parameters is unknown."""
    xxh3: str | UnsetType = UNSET
    """Digest of all bytes before this field, which `dump` adds."""


class _Version(Struct):
    ucp: int
    producer: str = ""


def dump(manifest: Manifest) -> bytes:
    """The manifest as text, followed by its digest. Raises DestinationError if it is too long to be read again."""
    text = json.dumps(msgspec.to_builtins(manifest), separators=(",", ":"), allow_nan=False).encode()
    if len(text) > LONGEST - 64:
        raise DestinationError(
            f"expected a manifest of at most {LONGEST:,} bytes; got {len(text):,}: the source has too many pieces for "
            "one virtual store. Write a store with copies (drop --virtual), or select fewer parameters (--include)"
        )
    return with_digest(text)


def read_text(path: str) -> bytes:
    """The JSON document at `path`, as text. Raises MalformedError if it is longer than any that ucp writes."""
    with open_source(path) as file:
        if file.nbytes > LONGEST:
            raise MalformedError(
                f"expected a document of at most {LONGEST:,} bytes in {path}; got {file.nbytes:,}. It is damaged; "
                "copy it again"
            )
        return file.read(0, file.nbytes)


def parse(text: bytes, where: str) -> Manifest:
    """The manifest that `dump` wrote. Raises MalformedError if it is damaged, UnsupportedError for another version.

    A manifest without a digest (edited by hand) is accepted.
    """
    if has_wrong_digest(text):
        raise MalformedError(f"{where} was changed after it was written: its digest differs. Copy it again")
    try:
        head = decode(text, _Version)
        if head.ucp == VERSION:
            return _decode_manifest(text, head.producer, where)
    except NotJson as error:
        raise MalformedError(
            f"expected the manifest of an atom store in {where}; {error}. The file is damaged: copy it again"
        ) from error
    raise UnsupportedError(
        f"expected version {VERSION} of the atom store; got {head.ucp} in {where}. It needs a newer ucp"
    )


def _decode_manifest(text: bytes, producer: str, where: str) -> Manifest:
    """The manifest. Raises NotJson; UnsupportedError if it has a digest, so that it is as `producer` wrote it."""
    try:
        return decode(text, Manifest)
    except NotJson as error:
        if not has_digest(text):
            raise
        raise UnsupportedError(
            f"expected a manifest in the form of ucp 0.2.0; got that of {producer} in {where}: {error}. It is "
            "undamaged, but of a version whose stores are not read: make the store again from its source"
        ) from error
