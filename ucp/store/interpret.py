"""Makes an index from a manifest, and checks that it is consistent and that the bytes it refers to exist.

Decoding has already checked the types. But a manifest can have been edited or forged: the first inconsistency raises a
MalformedError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import attrgetter, gt
from pathlib import Path, PurePosixPath

from ucp.contract.plugins import pattern_factory
from ucp.core.index import WEIGHT, AtomIndex, Fragment, Index, LostStates, ParamGroup, SourceFile, StateIndex
from ucp.core.layout import AxisLayout, Layout, Overlap
from ucp.core.region import Box, locate_flat_range
from ucp.core.tensor import InlineTensor, Record, TensorRef, contiguous_strides
from ucp.core.text.typed import convert
from ucp.core.topology import Topology
from ucp.errors import MalformedError, MissingFileError, UsageError, format_count, format_list
from ucp.io.folder import exists, is_url, refresh, resolve_from
from ucp.io.provenance import source_file
from ucp.store.manifest import MANIFEST, Checksum, Manifest, Piece, StoredAtom, StoredAxis, StoredState
from ucp.store.values import from_json


def find_files(manifest: Manifest, root: Path) -> tuple[SourceFile, ...]:
    """Files that the manifest of the store at `root` refers to, in order, as they are now.

    Raises MalformedError, or MissingFileError if files are missing.
    """
    paths = []
    for file in manifest.files:
        if "\0" in file.path:
            raise _wrong(root, f"a path without NUL is expected, not {file.path!r}")
        if manifest.virtual and (not file.identity or file.nbytes is None or file.mtime_ns is None):
            raise _wrong(root, f"a virtual store refers to {file.path!r} but does not record its identity")
        paths.append(str(resolve_from(root, file.path)) if manifest.virtual else inside(root, file.path))
    refresh(paths if manifest.virtual else ())
    files, missing = [], []
    for path, file in zip(paths, manifest.files, strict=True):
        try:
            files.append(source_file(path, file.role or "pack"))
        except OSError:
            missing.append(path)
            continue
        if not manifest.virtual and not exists(path):  # only a virtual store may refer to a file that is split
            missing.append(path)
        elif not manifest.virtual and file.nbytes not in (None, files[-1].nbytes):
            raise MalformedError(f"expected {file.nbytes} bytes in {path}; it has {files[-1].nbytes}. Copy it again")
    if missing:
        raise MissingFileError(
            f"expected {format_count(len(missing), 'file')} "
            f"that {root / MANIFEST} refers to; nothing is there. Copy what is missing:\n"
            f"{format_list(missing)}"
        )
    return tuple(files)


def _wrong(root: Path, what: object) -> MalformedError:
    return MalformedError(
        f"{root / MANIFEST} is not a manifest of an atom store ({str(what)[:300]}); it may be damaged. Copy it again"
    )


def inside(root: Path, file: str) -> str:
    """Path of a file of the store at `root`. Raises MalformedError if its name leads outside, or through a link."""
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
                f"expected the files of a store inside its folder; got a link at {path}. Replace the link by the file "
                "that it leads to, or make the store again"
            )
    return path


def interpret(manifest: Manifest, root: Path, files: Sequence[SourceFile]) -> Index:
    """The index that a manifest describes, without its extras. `files`: those of `find_files`.

    Raises MalformedError.
    """
    headers = [
        Checksum(file=number, offset=0, nbytes=file.header[0], crc32=file.header[1], name="header")
        for number, file in enumerate(manifest.files)
        if file.header is not None
    ]
    try:
        states = _States(files)
        records = [states.record(checksum) for checksum in (*manifest.records, *headers)]
        axes = [_axis(axis) for axis in manifest.axes]
        atoms = {name: _atom(name, atom, states, axes) for name, atom in manifest.atoms.items()}
        if not manifest.virtual:
            _check_apart([*records, *states.records])
        topology = Topology.parse(manifest.source.topology)
        hypers = [from_json(group.hyper) for group in manifest.groups]
        groups = [
            ParamGroup(params=group.params, hyper=convert(hyper, dict[str, object]))
            for group, hyper in zip(manifest.groups, hypers, strict=True)
        ]
    except (ValueError, UsageError) as error:
        raise _wrong(root, error) from error
    return Index(
        path=str(root),
        format="ucp",
        evidence=(MANIFEST,),
        producer=f"{manifest.producer}, from {manifest.source.producer}",
        topology=topology,
        step=manifest.step,
        skipped=manifest.skipped,
        atoms=atoms,
        groups=tuple(groups),
        aliases=manifest.aliases,
        files=tuple(files),
        records=(*records, *states.records),
        notes=(
            *manifest.notes,
            *(
                f"the layout over {axis.axis} is not shown: no pattern {axis.pattern!r} is installed here"
                for axis, layout in zip(manifest.axes, axes, strict=True)
                if layout is None
            ),
        ),
        recorded_in={"every axis": f"{MANIFEST}: it stores global tensors, and records the layouts of the source"},
        dropped=manifest.dropped,
        lost={
            name: LostStates(reason=loss.why, detail=detail, is_chosen=loss.chosen)
            for loss in manifest.lost
            for name, detail in loss.params.items()
        },
        origin=manifest.source.origin,
        unselected=manifest.unselected,
        unordered=manifest.unordered,
    )


def _check_apart(records: Sequence[Record]) -> None:
    """Raise ValueError if two ranges of a file overlap, which a store never writes."""
    by_file: dict[str, list[Record]] = {}
    for record in records:
        by_file.setdefault(record.path, []).append(record)
    for ordered in by_file.values():
        ordered.sort(key=attrgetter("offset"))  # one sort per file: integers compare faster than paths
        for before, after in pairwise(ordered):
            if after.offset < before.offset + before.nbytes:
                raise ValueError(
                    f"{after.name} at byte {after.offset} of {after.path} overlaps {before.name}, {before.nbytes} "
                    f"bytes at {before.offset}"
                )


def _axis(axis: StoredAxis) -> tuple[AxisLayout, bool] | None:
    """An axis, and whether it is flat; None if its pattern is not installed. Raises ValueError."""
    with suppress(UsageError):
        pattern = convert(axis.fields, pattern_factory(axis.pattern))
        return AxisLayout(axis.axis, axis.parts, pattern, axis.known_from), axis.is_flat
    return None


def _layout(numbers: Sequence[int], axes: Sequence[tuple[AxisLayout, bool] | None]) -> Layout:
    """The layout of these axes; an empty one if a pattern is not installed. Raises ValueError."""
    if not numbers:
        return Layout()
    if any(number >= len(axes) for number in numbers):
        raise ValueError(f"expected numbers of {len(axes)} axes, got {list(numbers)}")
    every = [axis for number in numbers if (axis := axes[number]) is not None]
    if len(every) < len(numbers):
        return Layout()
    return Layout(
        tuple(axis for axis, is_flat in every if not is_flat), tuple(axis for axis, is_flat in every if is_flat)
    )


def _atom(name: str, atom: StoredAtom, states: _States, axes: Sequence[tuple[AxisLayout, bool] | None]) -> AtomIndex:
    states_by_name = {key: states.state(f"{name}/{key}", state) for key, state in atom.states.items()}
    if WEIGHT in states_by_name and states_by_name[WEIGHT].global_shape != atom.shape:
        shape = [*states_by_name[WEIGHT].global_shape]
        raise ValueError(f"{name}: expected a weight of the parameter's shape {[*atom.shape]}; got {shape}")
    for key, state in atom.states.items():
        if state.layout is not None:
            states_by_name[key] = replace(states_by_name[key], layout=_layout(state.layout, axes))
    return AtomIndex(
        name=name,
        global_shape=atom.shape,
        kind=atom.kind,
        states=states_by_name,
        model_dtype=atom.model_dtype,
        iteration=atom.iteration,
        is_cast=atom.cast,
        layout=_layout(atom.layout, axes),
        made_of={source: _layout(numbers, axes) for source, numbers in atom.made_of.items()},
    )


class _States:
    """Makes states from manifest entries, and collects the checksums recorded with them. Methods raise ValueError."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.records: list[Record] = []

    def record(self, checksum: Checksum) -> Record:
        """A checksum of a range of a file."""
        return Record(
            path=self._locate(checksum.file, checksum.offset, checksum.nbytes),
            name=checksum.name,
            offset=checksum.offset,
            nbytes=checksum.nbytes,
            crc32=checksum.crc32,
        )

    def state(self, label: str, state: StoredState) -> StateIndex:
        """A state, stored as pieces or as one range; `label`: its name, for messages."""
        try:
            if state.pieces is not None:
                return StateIndex(
                    dtype=state.dtype,
                    global_shape=state.shape,
                    fragments=tuple(self._piece(piece, state.shape) for piece in state.pieces),
                    overlap=state.overlap or Overlap.EXCLUSIVE,
                )
            return self._range(label, state)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error

    def _range(self, label: str, state: StoredState) -> StateIndex:
        """A state in one range of a pack, or in encoded blocks of a pack."""
        nbytes, itemsize = prod(state.shape) * state.dtype.itemsize, state.dtype.itemsize
        if state.file is None or state.offset is None or state.xxh3 is None or state.block is None:
            raise ValueError("expected pieces, or else file, offset, xxh3 and block")
        if state.block < itemsize or state.block % itemsize:
            raise ValueError(f"blocks of {state.block} bytes for elements of {state.dtype}")
        if len(state.xxh3) != -(-nbytes // state.block):
            raise ValueError(f"{len(state.xxh3)} digests of {state.block} bytes each for {nbytes} of {state.dtype}")
        if state.codec is not None:
            fragments = tuple(self._blocks(state, state.file, state.codec, state.block // itemsize))
        else:
            box = Box.full([*state.shape])  # a new tuple: a pickle of the index depends on which objects are shared
            ref = TensorRef(
                path=self._locate(state.file, state.offset, nbytes),
                offset=state.offset,
                dtype=state.dtype,
                shape=box.sizes,
                strides=contiguous_strides(box.sizes),
            )
            fragments = (Fragment(box=box, ref=ref),)
            if nbytes and state.crc32 is None:
                raise ValueError("expected a CRC-32")
            if nbytes:
                record = Record(path=ref.path, name=label, offset=ref.offset, nbytes=nbytes, crc32=state.crc32 or 0)
                self.records.append(record)
        return StateIndex(
            dtype=state.dtype,
            global_shape=state.shape,
            fragments=fragments,
            digests=state.xxh3,
            digest_nbytes=state.block,
        )

    def _blocks(self, state: StoredState, file: int, codec: str, step: int) -> Iterator[Fragment]:
        """The encoded blocks of a state; each holds `step` elements of the row-major order."""
        blocks, shape, numel = state.blocks or (), state.shape, prod(state.shape)
        strides = contiguous_strides(shape)
        if len(blocks) != -(-numel // step):
            raise ValueError(f"{len(blocks)} blocks of {step} elements for {numel} elements")
        for number, (offset, nbytes) in enumerate(blocks):
            path = self._locate(file, offset, nbytes)
            for box, position in locate_flat_range(shape, number * step, min((number + 1) * step, numel)):
                ref = TensorRef(
                    path=path,
                    offset=offset,
                    dtype=state.dtype,
                    shape=box.sizes,
                    strides=strides,
                    codec=codec,
                    codec_nbytes=nbytes,
                    codec_start=position * state.dtype.itemsize,
                )
                yield Fragment(box=box, ref=ref)

    def _piece(self, piece: Piece, shape: tuple[int, ...]) -> Fragment:
        """A piece in a source file, or with its value in the manifest."""
        box = _box(piece.offsets, piece.sizes)
        is_full = box.sizes == shape and not any(box.offsets)
        if not is_full and (len(box.sizes) != len(shape) or any(map(gt, box.stops, shape))):
            raise ValueError(f"a piece at {box} of a tensor of shape {shape}")
        ref: InlineTensor | TensorRef
        if isinstance(piece.place, str):
            data = bytes.fromhex(piece.place)
            repeats = box.numel != 1 and len(data) == piece.dtype.itemsize
            ref = InlineTensor(data=data, dtype=piece.dtype, shape=box.sizes, repeats=repeats)
        else:
            ref = TensorRef(
                path=self._files[piece.place].path if piece.place < len(self._files) else "",
                offset=piece.offset,
                dtype=piece.dtype,
                shape=box.sizes,
                strides=piece.strides,
                codec=piece.codec,
                codec_nbytes=piece.codec_nbytes,
                codec_start=piece.codec_start,
                patched_nbytes=piece.patched_nbytes,
            )
            self._locate(piece.place, piece.offset, piece.codec_nbytes if piece.codec else ref.extent)
        return Fragment(box=box, ref=ref, replica=abs(piece.replica), term=piece.term, derived=piece.replica < 0)

    def _locate(self, number: int, offset: int, nbytes: int) -> str:
        """Path of file `number`, which must contain the given bytes. Raises MalformedError if it is too short."""
        if number >= len(self._files):
            raise ValueError(f"there is no file {number}")
        file = self._files[number]
        if nbytes and offset + nbytes > file.nbytes:
            raise MalformedError(
                f"{file.path} is truncated: expected {nbytes} bytes at {offset}; it ends at {file.nbytes}. "
                "Copy it again"
            )
        return file.path


_box = lru_cache(maxsize=4096)(Box)
"""Cached, because most pieces are whole tensors and a model has few different shapes."""
