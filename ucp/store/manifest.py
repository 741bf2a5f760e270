"""`ucp.json`: what an atom store holds and where. Version 1; see docs/reference/atom-store.md.

A state of a packed store is one range of a pack; a state of a virtual store is pieces of the source's files. A plain
number that the source keeps outside its tensors is in the manifest itself. The structures below are the document;
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
from ucp.io.json_text import Natural, NotJson, decode, has_wrong_digest, with_digest

MANIFEST = "ucp.json"
EXTRAS = "extra"
"""Folder of a store that holds them."""
VERSION = 1

LONGEST = 1 << 30
"""Bytes of the longest JSON document of a store: some ten million pieces, and ten times as much memory."""

Crc32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Shape = tuple[Natural, ...]


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store was made of."""

    path: str
    """Checkpoint, absolute."""
    format: str
    """Name of its format."""
    origin: str
    """Format that the extras were read from; of a store of a store, the first one's."""
    producer: str
    """Program that wrote it."""
    topology: str
    """Layout of the run, as `Topology.parse` reads it."""


class StoredFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file that states refer to by its number."""

    path: str
    """Relative to the store; absolute, or a URL, in a virtual one."""
    header: tuple[Natural, Crc32] | None = None
    """Bytes before the tensors and their CRC-32, of a safetensors file."""
    nbytes: Natural | None = None
    """Virtual: bytes, of all parts where it is split."""
    mtime_ns: Natural | None = None
    """Virtual: time of its last change, nanoseconds since 1970."""
    identity: str | None = None
    """Virtual: digest of its length and both ends."""
    role: str | None = None
    """Virtual: what it holds."""


class Checksum(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of a file whose checksum the source recorded."""

    file: Natural
    """Number of the file."""
    offset: Natural
    """First byte."""
    nbytes: Natural
    """Bytes."""
    crc32: Crc32
    """CRC-32 of them."""
    name: str
    """Label for messages."""


class Piece(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A piece of a state: in another file, or a number that stands here. Fields from `offset` on may be missing."""

    offsets: Shape
    """First element per dim."""
    sizes: Shape
    """Elements per dim."""
    replica: int
    """Number of the copy: 0 is read; negative if the piece was computed from another."""
    term: Natural
    """Number of the term of a mean."""
    dtype: DType
    """Type as stored."""
    place: Natural | str
    """Number of the file; or the elements themselves as hex digits (one, where all are equal)."""
    offset: Natural = 0
    """First byte in the file."""
    strides: Shape = ()
    """Elements to step per dim."""
    codec: str = ""
    """Codec of the bytes there, or empty."""
    codec_nbytes: Natural = 0
    """Encoded bytes."""
    codec_start: Natural = 0
    """Byte of the decoded block where the piece begins."""


class StoredState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A state: one range of a pack, or `pieces`."""

    shape: Shape
    """Elements per dim."""
    dtype: DType
    """Type as stored."""
    overlap: Overlap | None = None
    """How pieces that overlap combine."""
    pieces: tuple[Piece, ...] | None = None
    """Where its pieces lie, of a virtual store and of a plain number."""
    file: Natural | None = None
    """Number of the pack."""
    offset: Natural | None = None
    """First byte."""
    crc32: Crc32 | None = None
    """CRC-32 of all bytes, uncompressed."""
    xxh3: tuple[str, ...] | None = None
    """xxh3-64 per block of the bytes, uncompressed."""
    block: Natural | None = None
    """Bytes of a block; the last may be shorter."""
    codec: str | None = None
    """Codec of the blocks of a compressed store."""
    blocks: tuple[tuple[Natural, Natural], ...] | None = None
    """File offset and encoded bytes per block."""
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
    """Training step of its states, if that is another than the store's."""
    layout: tuple[Natural, ...] = ()
    """Its layout in the run that saved it: numbers of `Manifest.axes`, outermost first."""
    made_of: dict[str, tuple[Natural, ...]] = {}
    """Layouts of the stored tensors that it was joined, split or transposed from."""
    states: dict[str, StoredState]
    """State name to where it lies."""


class StoredAxis(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pattern along an axis of the mesh of the run that saved the checkpoint."""

    axis: str
    """Mesh axis."""
    parts: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Ranks along it."""
    pattern: str
    """Registered name of the pattern."""
    fields: dict[str, object]
    """Its fields, without those that have their defaults."""
    is_flat: bool
    """Whether it divides the flattened tensor that remains after the axes that cut dims."""
    known_from: str
    """Source of this knowledge."""


class StoredGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter group of the optimizer."""

    params: tuple[str, ...]
    """Names, in the order of the optimizer."""
    hyper: object
    """Values, as `ucp.store.values` marks them."""


class StoredExtra(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an extra lies in a store."""

    name: str
    """What it is."""
    rank: Natural | None
    """Rank whose value it is; None for all."""
    file: str
    """File that holds it, relative to the store."""
    nbytes: Natural
    """Bytes of the file."""
    crc32: Crc32
    """CRC-32 of the whole file."""


class StoredLoss(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that lost states."""

    why: str
    """The reason and what to do."""
    chosen: bool
    """Whether the user left them out."""
    params: dict[str, str]
    """Parameter to a detail for people."""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document."""

    ucp: int
    """Version of the store."""
    producer: str
    """Program and version that wrote the store."""
    virtual: bool
    """Whether states lie in the source's files."""
    source: Origin
    """What it was made of."""
    step: Natural | None
    """Training step."""
    skipped: Natural = 0
    """Steps that were skipped, for example after an overflow."""
    files: tuple[StoredFile, ...]
    """Files that states refer to."""
    records: tuple[Checksum, ...]
    """Checksums that the source recorded (virtual)."""
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
    """Changes of type, for people."""
    notes: tuple[str, ...]
    """Assumptions."""
    dropped: tuple[str, ...]
    """What was left behind."""
    lost: tuple[StoredLoss, ...] = ()
    """Parameters that lack states, and why."""
    unselected: Natural = 0
    """Whole parameters that a selection left out."""
    unordered: bool = False
    """Whether nothing says in which order the model registers its parameters."""
    xxh3: str | UnsetType = UNSET
    """Digest of all bytes before it, added by `dump`."""


class _Version(Struct):
    ucp: int


def dump(manifest: Manifest) -> bytes:
    """The manifest as text, with a digest of itself. Raises DestinationError for one too long to be read again."""
    text = json.dumps(msgspec.to_builtins(manifest), separators=(",", ":"), allow_nan=False).encode()
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


def parse(text: bytes, where: str) -> Manifest:
    """What `dump` wrote. Raises MalformedError when it is damaged, UnsupportedError for a newer version.

    A manifest without a digest (edited by hand) is taken as it is.
    """
    if has_wrong_digest(text):
        raise MalformedError(f"{where} is not what was written (its digest differs); it is damaged. Copy it again")
    try:
        version = decode(text, _Version).ucp
        if version == VERSION:
            return decode(text, Manifest)
    except NotJson as error:
        raise MalformedError(
            f"expected the manifest of an atom store in {where}; {error}. The file is damaged: copy it again"
        ) from error
    raise UnsupportedError(
        f"expected version {VERSION} of the atom store; got {version} in {where}. It needs a newer ucp"
    )
