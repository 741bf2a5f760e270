"""Finds files of different ranks that are copies of one another although the ranks hold different shards.

Often only a file's name tells which rank wrote it. A file that was copied over another rank's then passes for that
rank's, and its bytes are intact. Such a pair agrees in all recorded checksums. But so do the files of replicas, and of
ranks whose shards have equal values:

* constants: moments of zero, norm weights of one, padding;
* parameters that were initialised equally and not yet trained, such as experts copied from a dense layer.

Shards of one tensor are not initialised equally, and trained parameters do not stay equal. So a pair is reported if it
has a tensor that is not constant, and that is either another shard of the same tensor, or belongs to another parameter
whose moments are not constant. Files with a single tensor are never reported: they belong to no rank, and parameters
with always equal gradients have equal moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import relpath

from ucp.core.index import AtomIndex, Doubt, DoubtKind, Fragment, Index
from ucp.core.tensor import Record, Tensor, TensorRef
from ucp.source.moments import iter_moments
from ucp.transfer.probe import Prober

_WINDOW = 64
"""Elements of a window; three are read per tensor, at both ends and in the middle."""


@dataclass(frozen=True, slots=True)
class _StoredFragment:
    """A fragment with its parameter and state."""

    atom: AtomIndex
    """Parameter."""
    state: str
    """Name of the state."""
    fragment: Fragment
    """The fragment."""

    def __str__(self) -> str:
        return f"{self.atom.name}/{self.state} {self.fragment.box}"


def find_copied_ranks(index: Index) -> tuple[Doubt, ...]:
    """A doubt for every two files that are copies of one another and should not be. Samples only such files."""
    twins = list(_find_equal_files(index.records))
    if not twins:
        return ()
    pieces = _list_fragments(index, {path for group in twins for path in group})
    root = index.path
    copies = []
    with Prober() as prober:
        for paths in twins:
            first = pieces.get(paths[0], {})
            for path in paths[1:]:
                pair = _find_contradiction(first, pieces.get(path, {}), prober)
                if pair is not None:
                    text = (
                        "expected the files of two ranks to differ, as they hold different parts of the model; "
                        f"{relpath(paths[0], root)} and {relpath(path, root)} hold the same bytes, {pair[0]} in the "
                        f"one and {pair[1]} in the other. One is a copy of the other: copy both again from where they "
                        "were saved"
                    )
                    copies.append(Doubt(kind=DoubtKind.EQUAL_RANKS, text=text))
    return tuple(copies)


def _find_equal_files(records: Iterable[Record]) -> Iterator[list[str]]:
    """Files with several storages that agree in the place and checksum of each."""
    files: dict[str, list[Record]] = {}
    for record in records:
        files.setdefault(record.path, []).append(record)
    similar: dict[tuple[int, int, int], list[str]] = {}
    for path, path_records in files.items():
        if len(path_records) > 1:
            similar.setdefault((len(path_records), path_records[-1].offset, path_records[-1].crc32), []).append(path)
    for paths in similar.values():
        if len(paths) > 1:
            alike: dict[tuple[tuple[int, int, int], ...], list[str]] = {}
            for path in paths:
                places = tuple((record.offset, record.nbytes, record.crc32) for record in files[path])
                alike.setdefault(places, []).append(path)
            yield from (path_records for path_records in alike.values() if len(path_records) > 1)


def _list_fragments(index: Index, paths: set[str]) -> dict[str, dict[int, list[_StoredFragment]]]:
    """Fragments in some files: path to offset to fragments."""
    by_path: dict[str, dict[int, list[_StoredFragment]]] = {}
    for atom, name, state in index.states():
        for fragment in state.fragments:
            ref = fragment.ref
            if isinstance(ref, TensorRef) and ref.path in paths and ref.numel:
                by_path.setdefault(ref.path, {}).setdefault(ref.offset, []).append(
                    _StoredFragment(atom, name, fragment)
                )
    return by_path


def _find_contradiction(
    a: dict[int, list[_StoredFragment]], b: dict[int, list[_StoredFragment]], prober: Prober
) -> tuple[_StoredFragment, _StoredFragment] | None:
    """Two pieces of the same bytes that should differ; None if there are none."""
    for offset, pieces in a.items():
        for piece_a in pieces:
            others = b.get(offset, ())
            is_copy = any(  # a replica, or a count that parameters share
                piece_a.atom is piece_b.atom
                and piece_a.state == piece_b.state
                and piece_a.fragment.box == piece_b.fragment.box
                for piece_b in others
            )
            if is_copy or not _varies(piece_a.fragment.ref, prober):
                continue
            for piece_b in others:
                trained = (piece.ref for _, state in iter_moments(piece_a.atom) for piece in state.fragments)
                if piece_a.atom is piece_b.atom or any(_varies(ref, prober) for ref in trained):
                    return piece_a, piece_b
    return None


def _varies(ref: Tensor, prober: Prober) -> bool:
    """Whether windows at both ends and in the middle show that a tensor is not constant."""
    first = prober.window(ref, 0, min(1, ref.numel))
    last = max(ref.numel - _WINDOW, 0)
    for start in sorted({0, last // 2, last}):
        data = prober.window(ref, start, min(start + _WINDOW, ref.numel))
        if data != first * (len(data) // ref.dtype.itemsize):
            return True
    return False
