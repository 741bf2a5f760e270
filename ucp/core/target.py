"""The plan of a destination: its files, and which slice of which state is stored where.

A file consists of slices of tensors (`Placement`), literal bytes (headers, pickles, small text files) and checksum
fields, which are filled in when the other bytes are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ucp.core.index import WEIGHT, Index, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import RegionPair, full_pairs
from ucp.core.tensor import DType, TensorRef
from ucp.core.topology import Topology
from ucp.errors import format_count


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known in advance."""

    offset: int
    """First byte in the file."""
    data: bytes
    """The bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrcField:
    """A CRC-32 of a byte range of the file, stored little-endian in four bytes at each of some offsets."""

    start: int
    """First byte of the range."""
    stop: int
    """One past the last byte of the range."""
    at: tuple[int, ...]
    """Byte offsets of the fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to write. Bytes covered by neither a literal nor a fragment are zero."""

    path: str
    """Relative to the destination, with forward slashes."""
    nbytes: int
    """Bytes of the whole file."""
    literals: tuple[Literal, ...] = ()
    """Known bytes, in increasing offset."""
    crcs: tuple[CrcField, ...] = ()
    """Checksums to fill in, in increasing start."""
    is_pointer: bool = False
    """Whether it names the checkpoint to load, like `latest`: the framework overwrites it at its next save."""

    def __post_init__(self) -> None:
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"an output path stays below the destination: {self.path!r}")
        if any(part.offset + len(part.data) > self.nbytes for part in self.literals):
            raise ValueError(f"a literal of {self.path!r} lies past its end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A range of the row-major order of a local tensor of the target."""

    param: str
    """Parameter name in the source."""
    state: str
    """State name in the source."""
    dtype: DType
    """Type to store."""
    pairs: tuple[RegionPair, ...]
    """Boxes of the global tensor that make up the local tensor."""
    local_shape: tuple[int, ...]
    """Shape of the local tensor, elements."""
    start: int
    """First element of the local tensor's row-major order that is stored."""
    stop: int
    """One past the last."""

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the local tensor, not a flat range of it."""
        return self.start == 0 and self.stop == prod(self.local_shape)


def full_slice(param: str, state: str, index: StateIndex, *, dtype: DType | None = None) -> Slice:
    """The slice that is all of a state."""
    return Slice(
        param=param,
        state=state,
        dtype=dtype or index.dtype,
        pairs=full_pairs(index.global_shape),
        local_shape=index.global_shape,
        start=0,
        stop=index.numel,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a slice goes."""

    slice: Slice
    """What is stored."""
    path: str
    """Output file."""
    offset: int
    """Byte in it of the first element; the slice is stored without gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCopy:
    """A tensor of an extra, copied unchanged (row-major in the destination)."""

    src: TensorRef
    """The tensor in the source."""
    path: str
    """Output file."""
    offset: int
    """Byte in it of the first element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """The plan of all files of a destination."""

    files: tuple[OutputFile, ...]
    """Files to create, in the order they are best written."""
    placements: Sequence[Placement]
    """Slices that fill them, each file's in increasing offset."""
    raw: Sequence[RawCopy] = ()
    """Tensors of extras that fill them."""
    last: tuple[str, ...] = ()
    """Paths of those `files` without tensors by which the framework recognises a checkpoint: in a bucket, where files
    appear one by one, they are written after all others."""
    notes: tuple[str, ...] = ()
    """What the target cannot hold or restore, for the user."""
    casts: tuple[str, ...] = ()
    """Every change of dtype, one line per kind."""
    dropped: tuple[str, ...] = ()
    """Tensors of the source that the target does not hold, with the reasons, for the user."""
    lost: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Parameter to those of its states that the target does not hold; `--verify` does not compare them."""
    zeros: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Parameter to states that the target has although the source lacks them; `--verify` does not compare them."""
    compress: bool = False
    """Whether placements are written as encoded blocks, one pack per file, whose sizes are known only afterwards."""
    topology: Topology | None = None
    """Layout of the run that loads the files; None if they fit any."""
    written: Index | None = None
    """The part of the source that is written, under the names that are written; None: all of it, names unchanged."""
    layouts: Mapping[tuple[str, str], Layout] = field(default_factory=dict)
    """(parameter, state) to its layout over the ranks of the target; without states that every file holds in full."""
    regrouped: bool = False
    """Whether parameter groups are written in another form than the source's; `--verify` does not compare them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What the user asked for in the destination, besides its topology."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """State name to the name of the dtype to store it in."""
    layout: str = ""
    """Variant of the target's file layout, e.g. "per-parameter" for the atom store; empty for its default."""
    compress: bool = False
    """Compress tensor bytes, where the target can."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values that the target needs and the source does not record (--set): name to value, as text."""
    family: str = ""
    """Model family whose rules the target uses, if the user named one."""
    patterns: str = ""
    """TOML file with the user's own family, if there is one."""
    tag: str = ""
    """Tag to save under, if the user chose one; for frameworks that let the script choose it."""
    keeps_zeros: bool = False
    """Moments that were lost may be zero (--zero-moments keep)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was written for one placement, known once the bytes are."""

    placement: Placement
    """The placement."""
    digests: tuple[str, ...]
    """xxh3-64 of each block of its stored, uncompressed bytes, 16 hex digits."""
    crc32: int
    """CRC-32 of its stored, uncompressed bytes."""
    blocks: tuple[tuple[int, int], ...] = ()
    """File offset and encoded bytes per block, when compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """Checksums of what was written, which are known only afterwards."""

    placements: tuple[Receipt, ...]
    """One per placement, in the order of the plan."""
    files: Mapping[str, int]
    """Path to the CRC-32 of the whole file, of every planned file that holds no placement."""


def describe_casts(index: Index, slices: Iterable[Slice], *, names_rounded: bool = False) -> tuple[str, ...]:
    """One line per state and change of dtype, with the number of parameters concerned.

    Model weights written beside their masters are rounded copies, so nothing is lost: they are listed only with
    `names_rounded`. A master that is made from a narrower weight is listed.
    """
    slices = list(slices)
    changed: dict[str, set[str]] = {}
    weights = {(item.param, item.dtype) for item in slices if item.state == WEIGHT}
    for item in slices:
        stored = index.atoms[item.param].states[item.state].dtype
        is_narrower = item.dtype.itemsize <= stored.itemsize
        is_model_copy = item.state == WEIGHT and is_narrower and (item.param, stored) in weights
        if stored is not item.dtype and item.stop > item.start and (names_rounded or not is_model_copy):
            line = f"{item.state}: {stored} -> {item.dtype}{' beside the masters' if is_model_copy else ''}"
            changed.setdefault(line, set()).add(item.param)
    return tuple(f"{line} in {format_count(len(params), 'parameter')}" for line, params in changed.items())
