"""Makes the manifest of an index. It lists files and the axes of layouts once, and refers to them by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from msgspec import structs
from zlib_ng import zlib_ng

from ucp.contract.plugins import describe_pattern
from ucp.core.index import AtomIndex, Fragment, Index, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.target import Receipt
from ucp.core.tensor import InlineTensor
from ucp.io.elements import codec_name
from ucp.store.manifest import (
    VERSION,
    Checksum,
    Manifest,
    Origin,
    Piece,
    StoredAtom,
    StoredAxis,
    StoredExtra,
    StoredFile,
    StoredGroup,
    StoredLoss,
    StoredState,
)
from ucp.store.values import to_json
from ucp.transfer.plan.tasks import BLOCK


def describe(
    index: Index,
    *,
    producer: str,
    written: Mapping[tuple[str, str], Receipt] | None,
    extras: Sequence[StoredExtra],
    casts: Sequence[str],
    identify: Callable[[str], StoredFile],
    headers: Mapping[str, bytes],
) -> Manifest:
    """The manifest of `index`.

    `written`: (parameter, state) to where it was written; None for a virtual store, which refers to the source's files.
    `identify`: a source file to what it is recognised by later (virtual only). `headers`: pack to its header, if any.
    """
    states = _States(written)
    atoms = {atom.name: states.atom(atom) for atom in index.atoms.values()}
    records = [
        Checksum(
            file=states.file(record.path),
            offset=record.offset,
            nbytes=record.nbytes,
            crc32=record.crc32,
            name=record.name,
        )
        for record in (index.records if written is None else ())
    ]

    def describe_file(path: str) -> StoredFile:
        if written is None:
            return identify(path)
        header = headers.get(path)
        return StoredFile(path=path, header=(len(header), zlib_ng.crc32(header)) if header else None)

    losses: dict[tuple[str, bool], dict[str, str]] = {}  # each reason once, with the stored parameters that it is about
    for name, loss in index.lost.items():
        if name in index.atoms:
            losses.setdefault((loss.reason, loss.is_chosen), {})[name] = loss.detail
    return Manifest(
        ucp=VERSION,
        producer=producer,
        virtual=written is None,
        source=Origin(
            path=index.path,
            format=index.format,
            origin=index.origin or index.format,
            producer=index.producer,
            topology=str(index.topology),
        ),
        step=index.step,
        skipped=index.skipped,
        files=tuple(map(describe_file, states.files)),
        records=tuple(records),
        axes=tuple(states.axes),
        atoms=atoms,
        groups=tuple(StoredGroup(params=group.params, hyper=to_json(dict(group.hyper))) for group in index.groups),
        aliases=dict(index.aliases),
        extras=tuple(extras),
        casts=tuple(casts),
        notes=index.notes,
        dropped=index.dropped,
        lost=tuple(StoredLoss(why=why, chosen=chosen, params=details) for (why, chosen), details in losses.items()),
        unselected=index.unselected,
        unordered=index.unordered,
    )


def is_inline(state: StateIndex) -> bool:
    """Whether the index holds the value of a state, which is then written into the manifest."""
    return bool(state.fragments) and all(isinstance(fragment.ref, InlineTensor) for fragment in state.fragments)


class _States:
    """Converts states to manifest entries, and collects the files and axes that they refer to."""

    def __init__(self, written: Mapping[tuple[str, str], Receipt] | None) -> None:
        self.files: dict[str, int] = {}
        self.axes: list[StoredAxis] = []
        self._written = written
        self._known: dict[tuple[AxisLayout, str, bool], int | None] = {}

    def file(self, path: str) -> int:
        """Number of a file in the manifest; a new file gets the next one."""
        return self.files.setdefault(path, len(self.files))

    def atom(self, atom: AtomIndex) -> StoredAtom:
        """The manifest entry of an atom, with its states."""
        states = {}
        for name, state in atom.states.items():
            receipt = None if self._written is None else self._written.get((atom.name, name))
            if receipt is None:
                pieces = [self._piece(fragment) for fragment in state.fragments]
                stored = StoredState(
                    shape=state.global_shape,
                    dtype=state.dtype,
                    overlap=state.overlap,
                    pieces=cast("tuple[Piece, ...]", tuple(pieces)),  # lists, as a Piece would write all its fields
                )
            else:
                dtype = receipt.placement.slice.dtype
                stored = StoredState(
                    shape=state.global_shape,
                    dtype=dtype,
                    file=self.file(receipt.placement.path),
                    offset=receipt.placement.offset,
                    crc32=receipt.crc32,
                    xxh3=receipt.digests,
                    block=BLOCK,
                    codec=codec_name(dtype.itemsize) if receipt.blocks else None,
                    blocks=receipt.blocks or None,
                )
            if state.layout is not None:
                stored = structs.replace(stored, layout=self._numbers(state.layout))
            states[name] = stored
        return StoredAtom(
            shape=atom.global_shape,
            kind=atom.kind,
            model_dtype=atom.model_dtype,
            iteration=atom.iteration,
            cast=atom.is_cast,
            layout=self._numbers(atom.layout),
            made_of={name: self._numbers(layout) for name, layout in atom.made_of.items()},
            states=states,
        )

    def _numbers(self, layout: Layout) -> tuple[int, ...]:
        """Numbers of the axes of a layout; empty if the pattern of one of them is not registered."""
        numbers = []
        every = (*((axis, False) for axis in layout.axes), *((axis, True) for axis in layout.flat))
        for axis, is_flat in ((axis, is_flat) for axis, is_flat in every if axis.parts > 1):
            key = axis, axis.known_from, is_flat
            if key not in self._known:
                described = describe_pattern(axis.pattern)
                self._known[key] = None if described is None else len(self.axes)
                if described is not None:
                    self.axes.append(StoredAxis(axis.axis, axis.parts, *described, is_flat, axis.known_from))
            numbers.append(self._known[key])
        return tuple([number for number in numbers if number is not None]) if None not in numbers else ()

    def _piece(self, fragment: Fragment) -> list[object]:
        ref = fragment.ref
        replica = -fragment.replica if fragment.derived else fragment.replica
        start: list[object] = [fragment.box.offsets, fragment.box.sizes, replica, fragment.term, ref.dtype]
        if isinstance(ref, InlineTensor):
            return [*start, ref.data.hex()]
        start += [self.file(ref.path), ref.offset, ref.strides]
        start += [ref.codec, ref.codec_nbytes, ref.codec_start] if ref.codec else []
        return [*start, ref.patched_nbytes] if ref.patched_nbytes else start
