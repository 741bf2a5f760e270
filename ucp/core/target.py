"""What a destination will look like, decided before a byte moves.

A destination is described exactly as a source is: fragments whose references point into files. Around them stand
literal bytes (headers, pickles, small text files) and checksum fields that are filled in once the bytes are known.
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
    """A CRC-32 of part of the file, to be stored little-endian in four bytes at each place."""

    start: int
    """First byte that is summed."""
    stop: int
    """One past the last byte that is summed."""
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
    """Whether it names the checkpoint to load, so that the framework overwrites it when it saves there again."""

    def __post_init__(self) -> None:
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"an output path stays below the destination: {self.path!r}")
        if any(part.offset + len(part.data) > self.nbytes for part in self.literals):
            raise ValueError(f"a literal of {self.path!r} lies past its end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of the row-major local tensor of one part of a target."""

    param: str
    """Parameter name in the source."""
    state: str
    """State name in the source."""
    dtype: DType
    """Type to store."""
    pairs: tuple[RegionPair, ...]
    """Which boxes of the whole make up the local tensor."""
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
    """A tensor of an extra, copied as it is (row-major in the destination)."""

    src: TensorRef
    """Where it lies in the source."""
    path: str
    """Output file."""
    offset: int
    """Byte in it of the first element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """A whole destination, decided."""

    files: tuple[OutputFile, ...]
    """Files to create, in the order they are best written."""
    placements: Sequence[Placement]
    """Slices that fill them, each file's in increasing offset."""
    raw: Sequence[RawCopy] = ()
    """Tensors of extras that fill them."""
    last: tuple[str, ...] = ()
    """Paths of `files` without tensors by which the framework knows a checkpoint: where files come one by one, these do
    after all others."""
    notes: tuple[str, ...] = ()
    """What the target cannot hold or restore, for the user."""
    casts: tuple[str, ...] = ()
    """Every change of dtype, one line per kind."""
    dropped: tuple[str, ...] = ()
    """What of the source's tensors the target does not hold, with the reasons, for the user."""
    lost: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Parameter to its states that are not held at all: what is written is not compared with these."""
    zeros: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Parameter to states that the source lacks and the target has nonetheless: they are not compared with it."""
    compress: bool = False
    """Placements are written as encoded blocks, one pack per file, whose sizes are known only afterwards."""
    topology: Topology | None = None
    """Layout of the run that loads the files; None where they fit any."""
    written: Index | None = None
    """The source as far as it is written, and under the names that it is written under; None: all of it, as it is."""
    layouts: Mapping[tuple[str, str], Layout] = field(default_factory=dict)
    """(parameter, state) to how the target lays it out over the ranks; without those that every file has whole."""
    regrouped: bool = False
    """Parameter groups are written in other terms than the source's, and not compared with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What the user asked of the destination, beside its topology."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """State name to the name of the dtype to store it in."""
    layout: str = ""
    """Variant of the target's own layout, e.g. "per-parameter" for the atom store; empty for its default."""
    compress: bool = False
    """Compress tensor bytes, where the target can."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What the source does not record and the target needs, by the target's own name for it, as text."""
    family: str = ""
    """Model family whose rules the target goes by, where the user named one."""
    patterns: str = ""
    """File with a family of the user's own, where there is one."""
    tag: str = ""
    """Name to save under, where the user chose one and the target's framework leaves it to the script."""
    keeps_zeros: bool = False
    """Moments that were lost may be zero (--zero-moments keep)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was written for one placement, known once the bytes are."""

    placement: Placement
    """What it was."""
    digests: tuple[str, ...]
    """xxh3-64 of each block of its stored, uncompressed bytes, 16 hex digits."""
    crc32: int
    """CRC-32 of its stored, uncompressed bytes."""
    blocks: tuple[tuple[int, int], ...] = ()
    """File offset and encoded bytes per block, when compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """What was written, known once the bytes are."""

    placements: tuple[Receipt, ...]
    """One per placement, in the order of the plan."""
    files: Mapping[str, int]
    """Path to the CRC-32 of the whole file, of every planned file that holds no placement."""


def describe_casts(index: Index, slices: Iterable[Slice], *, names_rounded: bool = False) -> tuple[str, ...]:
    """One line per state and change of dtype, with the number of parameters concerned.

    Model weights written beside their masters are rounded copies, which lose nothing: they count only with
    `names_rounded`. A master made of a narrower weight counts.
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
