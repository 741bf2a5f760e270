"""Format `delta`: a version of a model as the last full version and the patches since, each tensor patched when read.

1. From the folder of the wanted version back to the first that is no delta: `weight_v000007` is a patch of the version
   that its index names, in the folder of that name beside it.
2. The full version is read by its own format. Every patch becomes a further term of a state (rule PATCHED).

>>> from ucp.chain.delta.document import name_folder
>>> name_folder("7")
'weight_v000007'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from ucp.chain.delta.document import (
    INDEX,
    Delta,
    TensorEntry,
    digest_tensors,
    is_delta,
    name_folder,
    read_delta,
    version_of_folder,
)
from ucp.contract.locating import Evidence
from ucp.contract.model import CONFIG_EXTRA
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.registry import recognise
from ucp.core.index import WEIGHT, Fragment, Index, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.tensor import Record, TensorRef, contiguous_strides
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, UsageError, format_count, format_list
from ucp.io.folder import names_in, path_of, resolve_from, to_absolute
from ucp.io.provenance import source_file


@dataclass(frozen=True, slots=True)
class DeltaFormat(Format):
    """Reads deltas."""

    options: SourceOptions = field(default_factory=SourceOptions)
    """What the user says of the full version, and which version is wanted."""

    name = "delta"
    takes_shapes = True
    takes_order = True
    takes_time = True

    def detect(self, path: Path) -> Evidence | None:
        """Detect a folder with a delta, its index, or a folder of versions of which one is a delta."""
        root = path.parent if path.name == INDEX else path
        if is_delta(root):
            return Evidence(root, (INDEX,))
        versions = _list_versions(path)
        return Evidence(path, (versions[-1].name,)) if any(map(is_delta, versions)) else None

    def configured(self, options: SourceOptions) -> DeltaFormat:
        """The same format at a version; the other options are for the full version."""
        return DeltaFormat(options)

    def read(self, path: Path) -> Index:
        """Index of the newest version, or of the wanted one. Raises SourceError, UsageError."""
        root = path_of(to_absolute(path.parent if path.name == INDEX else path))
        at = None if self.options.at is None else str(self.options.at)
        folders = {version_of_folder(folder.name): folder for folder in _list_versions(root)}
        folder = root if is_delta(root) else folders.get(at, [*folders.values()][-1])  # which may lead to it
        deltas, full = read_links(folder)
        versions = [version_of_folder(full.name) or deltas[0].base_version, *(delta.version for delta in deltas)]
        if at not in (None, *versions):
            raise UsageError(f"expected --at to be one of the versions {', '.join(versions)} of {folder}; got {at}")
        deltas = deltas[: len(versions) - 1 if at is None else versions.index(at)]
        fmt, _ = recognise(full, options=replace(self.options, at=None))
        base = fmt.read(full)
        return patch_index(base, deltas) if deltas else base


def _list_versions(root: Path) -> list[Path]:
    """The folders of versions in `root` that are complete, the newest last."""
    versions = {name: int(text) for name in names_in(root) if (text := version_of_folder(name)) is not None}
    folders = [root / name for name in sorted(versions, key=lambda name: versions[name])]
    return [folder for folder in folders if any(name.endswith((INDEX, ".safetensors")) for name in names_in(folder))]


def read_links(folder: Path) -> tuple[list[Delta], Path]:
    """The deltas that lead to the version in `folder`, the oldest first, and the full version they begin with.

    Raises MissingFileError for a version that is not there, MalformedError for deltas in a circle or of other bases.
    """
    deltas: list[Delta] = []
    while is_delta(folder):
        delta = read_delta(folder)
        if any(delta.version == other.version for other in deltas):
            names = " <- ".join(other.version for other in (*deltas, delta))
            raise MalformedError(
                f"expected a full version before {deltas[0].folder}; its bases go in a circle: {names}"
            )
        if deltas:
            _check_base(deltas[-1], delta)
        deltas.append(delta)
        folder = _find_base(delta)
    return deltas[::-1], folder


def _find_base(delta: Delta) -> Path:
    """The folder that a delta is a patch of. Raises MissingFileError."""
    folder = delta.folder.parent / name_folder(delta.base_version)
    stated = path_of(to_absolute(resolve_from(delta.folder, delta.base))) if delta.base else folder
    for place in (stated, folder):
        if place.exists():
            return place
    raise MissingFileError(
        f"expected version {delta.base_version}, which {delta.folder} is a patch of, at {stated}; nothing is "
        f"there. Copy it, or link the full version of that number (a run begins at 0 with its first model) to {folder}"
    )


def _check_base(delta: Delta, base: Delta) -> None:
    """Raise MalformedError if `base` is not the version that `delta` was made from."""
    found = base.version, "" if base.listed is None else digest_tensors(base.listed.tensors)
    if found[0] != delta.base_version or (delta.base_digest and found[1] and found[1] != delta.base_digest):
        raise MalformedError(
            f"expected {base.folder} to be version {delta.base_version} as {delta.folder} was made from it; it is "
            f"{f'version {found[0]}' if found[0] != delta.base_version else 'another one of that number'}. Make the "
            "delta again, or copy the right base"
        )


def patch_index(base: Index, deltas: Sequence[Delta]) -> Index:
    """The version that `deltas`, oldest first, make of `base`. Raises MalformedError, UnsupportedError."""
    newest = deltas[-1]
    states = {(atom.name, name): state for atom, name, state in base.states()}
    patches: dict[tuple[str, str], list[tuple[Delta, str]]] = {}
    unknown: list[str] = []
    for delta in deltas:
        for label in delta.patches:
            key = _find_state(label, base, states)
            if key is None:
                unknown.append(f"{label}, of {delta.folder.name}")
            elif not _is_repeated(label, key, delta):
                patches.setdefault(key, []).append((delta, label))
    if unknown:
        raise MalformedError(
            f"expected patches of tensors of {base.path}; it does not have\n{format_list(unknown)}\nIt is another "
            "model, or another base"
        )
    listed = {} if newest.listed is None else _match_list(newest.listed.tensors, base, states, newest)
    patched = {
        key: replace(
            _patch_state(key, state, patches.get(key, ())),
            checksum=f"xxh3-128:{listed[key].checksum}"
            if key in listed
            else next((delta.patches[label].checksum for delta, label in reversed(patches.get(key, ()))), ""),
        )
        for key, state in states.items()
    }
    atoms = {
        name: replace(atom, states={state: patched[name, state] for state in atom.states})
        for name, atom in base.atoms.items()
    }
    unchecked = tuple(_list_unchecked(patched))
    kept = tuple(extra for extra in base.extras if extra.is_sidecar or extra.name == CONFIG_EXTRA)
    left = len(base.extras) - len(kept)
    return replace(
        base,
        path=to_absolute(newest.folder),
        format="delta",
        evidence=(f"version {newest.version}: {format_count(len(deltas), 'delta')} onto {base.path}",),
        step=None if newest.listed is None else newest.listed.step,
        atoms=atoms,
        extras=kept,
        files=(
            *base.files,
            *(
                source_file(to_absolute(delta.folder / name), f"delta, version {delta.version}")
                for delta in deltas
                for name in delta.files
            ),
        ),
        records=(*base.records, *_list_records(base, deltas, states)),
        notes=(*base.notes, *unchecked, *(["hyper-parameters are those of the full version"] if base.groups else [])),
        dropped=(*base.dropped, *([f"{left} other entries of the full version: a delta has none"] if left else [])),
        unchecked=(*base.unchecked, *unchecked),
        origin=base.origin or base.format,
        keys=None,
    )


def _find_state(label: str, base: Index, states: Mapping[tuple[str, str], StateIndex]) -> tuple[str, str] | None:
    """Parameter and state that a label of a delta means; None if there is none."""
    name = base.aliases.get(label, label)
    if (name, WEIGHT) in states:
        return name, WEIGHT
    name, _, state = label.rpartition("/")
    return (name, state) if (name, state) in states else None


def _is_repeated(label: str, key: tuple[str, str], delta: Delta) -> bool:
    """Whether a label is the second name of a tensor that has a patch too. Raises MalformedError if these differ."""
    if label == key[0] or key[1] != WEIGHT or key[0] not in delta.patches:
        return False
    if delta.patches[label].checksum != delta.patches[key[0]].checksum:
        raise MalformedError(f"expected one tensor in {delta.folder}, as they are tied: {label} and {key[0]} differ")
    return True


def _match_list(
    tensors: Sequence[TensorEntry], base: Index, states: Mapping[tuple[str, str], StateIndex], delta: Delta
) -> dict[tuple[str, str], TensorEntry]:
    """What a delta lists of every state of its base. Raises MalformedError where they differ."""
    entries = {_find_state(entry.name, base, states): entry for entry in tensors}
    wrong = [entry.name for key, entry in entries.items() if key is None]
    wrong += [
        f"{'/'.join(key)}: {state.dtype} {list(state.global_shape)}"
        for key, state in states.items()
        if key not in entries or (entries[key].dtype, entries[key].shape) != (state.dtype, state.global_shape)
    ]
    if wrong:
        raise MalformedError(
            f"expected the tensors that {delta.folder} lists in its base {base.path}; these differ:\n"
            f"{format_list(wrong)}\nIt is another base"
        )
    return {key: entry for key, entry in entries.items() if key is not None}


def _patch_state(key: tuple[str, str], state: StateIndex, patches: Sequence[tuple[Delta, str]]) -> StateIndex:
    """A state with its patches. Raises UnsupportedError for a mean, and for an empty tensor."""
    if not patches:
        return replace(state, overlap=Overlap.PATCHED) if state.overlap is Overlap.EXCLUSIVE else state
    if state.overlap is Overlap.MEAN or not state.nbytes:
        raise UnsupportedError(
            f"{'/'.join(key)}: expected a tensor that a patch can change; the full version has "
            f"{'a mean of several ranks' if state.nbytes else 'an empty one'}. Convert it first, and use that"
        )
    strides = contiguous_strides(state.global_shape)
    terms = (
        Fragment(
            box=Box.full(state.global_shape),
            ref=TensorRef(
                path=frame.path,
                offset=frame.offset,
                dtype=state.dtype,
                shape=state.global_shape,
                strides=strides,
                codec=delta.codec,
                codec_nbytes=frame.nbytes,
                patched_nbytes=state.nbytes,
            ),
            term=term,
        )
        for term, (delta, label) in enumerate(patches, 1)
        for frame in (delta.patches[label].frame,)
    )
    kept = (fragment for fragment in state.fragments if not fragment.replica)
    return replace(state, fragments=(*kept, *terms), overlap=Overlap.PATCHED, digests=(), digest_nbytes=0)


def _list_unchecked(states: Mapping[tuple[str, str], StateIndex]) -> Iterator[str]:
    """Notes on what no checksum proves."""
    absent = sum(not state.checksum and not state.digests for state in states.values())
    if absent:
        yield f"no delta records a checksum of the {format_count(absent, 'tensor')} that it does not change"
    blake3 = sum(state.checksum.startswith("blake3:") for state in states.values())
    if blake3 and find_spec("blake3") is None:
        yield f"checksums of {format_count(blake3, 'tensor')} are blake3: install the library blake3 to check them"


def _list_records(
    base: Index, deltas: Sequence[Delta], states: Mapping[tuple[str, str], StateIndex]
) -> Iterator[Record]:
    """The checksums that `ucp delta` recorded of frames, and of tensors of the full version that are stored whole.

    Raises MalformedError if the full version records others.
    """
    for delta in deltas:
        crcs = {} if delta.listed is None else delta.listed.frames
        for label, patch in delta.patches.items():
            if label in crcs:
                yield _record(label, patch.frame, crcs[label])
    crcs = {} if deltas[0].listed is None else deltas[0].listed.base
    recorded = {(record.path, record.offset, record.nbytes): record.crc32 for record in base.records if crcs}
    summed = {path for path, _, _ in recorded}
    wrong = []
    for label, crc in crcs.items():
        key = _find_state(label, base, states)
        taken = [piece.ref for piece in states[key].fragments if not piece.replica] if key else []
        for ref in taken if len(taken) == 1 else ():
            if not isinstance(ref, TensorRef) or not ref.nbytes or not ref.is_contiguous or ref.codec:
                continue
            if ref.path not in summed:
                yield _record(f"{label} of the version that {deltas[0].folder.name} was made from", ref, crc)
            elif recorded.get((ref.path, ref.offset, ref.nbytes), crc) != crc:
                wrong.append(label)
    if wrong:
        raise MalformedError(
            f"expected {base.path} to be the version that {deltas[0].folder} was made from; its checksums of these "
            f"tensors differ:\n{format_list(wrong)}\nMake the delta again, or copy the right base"
        )


def _record(name: str, ref: TensorRef, crc: int) -> Record:
    return Record(path=ref.path, name=name, offset=ref.offset, nbytes=ref.nbytes, crc32=crc)
