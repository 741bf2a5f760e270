"""Makes a save whole: the manifest, from the facts and part manifests of all ranks, and the name of the store.

A save grows in a folder beside its place (`.ucp-partial`). `ucp.json` is the last file in it; then the folder is
renamed. A save that fails, or is killed, leaves that folder, which is no store; the next save to the place removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from ucp.contract.plugins import producer
from ucp.core.gaps import check_cover, check_names
from ucp.core.index import STEP, WEIGHT, AtomIndex, Fragment, Index, LostStates, ParamGroup, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box
from ucp.core.tensor import InlineTensor, Record, TensorRef
from ucp.core.topology import Topology
from ucp.errors import BusyError, DestinationError, MissingFileError, ReplicaError, format_list
from ucp.io.elements import viewed
from ucp.io.folder import JOURNAL, PARTIAL
from ucp.io.writing import replace_file, sync
from ucp.saving.holdings import COMPUTED, AtomFacts, RankFacts, StateFacts
from ucp.saving.part import PARTS, PartManifest, read_part
from ucp.saving.plan import SaveItem
from ucp.store.describe import describe
from ucp.store.manifest import EXTRAS, MANIFEST, Manifest, Piece, StoredExtra, dump, parse, read_text

_FORMAT = "run"
"""Source of the states, in the manifest: no checkpoint, but a live run."""
_PRODUCER = "ucp.save"
_CAST = LostStates(
    reason="these parameters are saved as the model computes with them, because they are in a later slot of a sparse "
    "window: read the whole chain (--optimizer zero takes the weights alone)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The run, as all ranks describe it together."""

    atoms: dict[str, AtomFacts]
    """Every parameter and buffer, with all states that any rank keeps."""
    groups: tuple[ParamGroup, ...]
    """Parameter groups, with the parameters of all ranks."""
    topology: Topology
    """Layout of the run."""
    step: int | None
    """Training step."""
    origin: str
    """Format whose extras those of the run are like."""

    def narrow(self, unsaved: Collection[str], cast: Collection[str] = ()) -> SavedRun:
        """The run without the parameters `unsaved`; of the parameters `cast` only what the model computes with."""
        groups = (
            replace(group, params=tuple(name for name in group.params if name not in unsaved)) for group in self.groups
        )
        atoms = {name: atom.narrow(is_cast=name in cast) for name, atom in self.atoms.items() if name not in unsaved}
        return replace(self, atoms=atoms, groups=tuple(groups))

    def holds(self, item: SaveItem, facts: RankFacts) -> bool:
        """Whether a state is saved, and the part of a rank with these facts is one of those that make it up."""
        states = self.atoms[item.param].states if item.param in self.atoms else {}
        return item.state in states and states[item.state].layout == facts.atoms[item.param].states[item.state].layout


def merge_facts(facts: Sequence[RankFacts], *, topology: Topology, step: int | None, origin: str) -> SavedRun:
    """The run that all ranks describe together. Raises ReplicaError if ranks contradict one another.

    `step`: training step; None to take the count that the optimizer keeps, if it is one for all parameters.
    """
    atoms: dict[str, AtomFacts] = {}
    problems: dict[str, None] = {
        f"plan= of rank {rank}": None for rank, rank_facts in enumerate(facts) if rank_facts.plan != facts[0].plan
    }
    for rank, rank_facts in enumerate(facts):
        for name, atom in rank_facts.atoms.items():
            known = atoms.setdefault(name, atom)
            states = {**atom.states, **known.states}
            differing = [state for state, value in atom.states.items() if not value.fits(states[state])]
            for what in ("shape", "kind", "model_dtype"):
                if getattr(known, what) != getattr(atom, what):
                    differing.append(what)
            problems |= {f"{name}: {what} of rank {rank}": None for what in differing}
            aliases = tuple(dict.fromkeys((*known.aliases, *atom.aliases)))
            atoms[name] = AtomFacts(
                kind=known.kind, shape=known.shape, aliases=aliases, model_dtype=known.model_dtype, states=states
            )
    if problems:
        raise ReplicaError(
            "expected ranks that hold parts of one model; these differ from those of other ranks:\n"
            f"{format_list(problems)}\nPass the topology of the run if ranks hold different layers or experts"
        )
    groups = tuple(_merge_groups([rank_facts.groups for rank_facts in facts]))
    step = _find_step(atoms) if step is None else step
    return SavedRun(atoms=atoms, groups=groups, topology=topology, step=step, origin=origin)


def _merge_groups(groups_by_rank: Sequence[Sequence[ParamGroup]]) -> Iterator[ParamGroup]:
    """Parameter groups with the parameters of all ranks: by their numbers, or by their hyper-parameters.

    A pipeline stage may lack a group, if it has no parameter for it. Raises ReplicaError.
    """
    have_equal_numbers = len({len(groups) for groups in groups_by_rank}) == 1
    members: dict[object, list[ParamGroup]] = {}
    for rank, groups in enumerate(groups_by_rank):
        seen: Counter[str] = Counter()
        for number, group in enumerate(groups):
            text = repr(dict(group.hyper))
            same = members.setdefault(number if have_equal_numbers else (text, seen[text]), [])
            seen[text] += 1
            if same and repr(dict(same[0].hyper)) != text:
                raise ReplicaError(
                    f"expected the same hyper-parameters in group {number} of every rank; rank {rank} has {text}, and "
                    f"rank 0 {dict(same[0].hyper)!r}"
                )
            same.append(group)
    for same in members.values():
        params = dict.fromkeys(name for group in same for name in group.params)
        yield ParamGroup(params=tuple(params), hyper=same[0].hyper)


def _find_step(atoms: dict[str, AtomFacts]) -> int | None:
    """The count of steps that all parameters have; None if there is none."""
    values = {atom.states[STEP].value for atom in atoms.values() if STEP in atom.states}
    counts = {
        float(viewed(memoryview(value.data), value.dtype)[0].item())
        for value in values
        if isinstance(value, InlineTensor)
    }
    return int(counts.pop()) if len(counts) == 1 else None


def begin(path: Path, *, replaced: bool = False) -> Path:
    """Make the folder in which a save to `path` grows, without what an unfinished save left there. On one rank.

    `replaced`: a store at `path` is replaced. Raises DestinationError if there is something else, BusyError if another
    process saves there.
    """
    folder = growing_folder(path)
    if os.path.isdir(folder):
        _lock(folder)
    if replaced and (path / MANIFEST).is_file():
        remove_store(path)
    check_free(path)
    _remove_unfinished(folder)
    for name in ("", PARTS, "packs", EXTRAS):
        (folder / name).mkdir(parents=not name)
    _lock(folder)
    return folder


_LOCKS: dict[Path, int] = {}
"""Folder in which a save grows to its descriptor, which has a lock until the save, or this process, ends."""


def _lock(folder: Path) -> None:
    """Keep other processes from saving to `folder`. Raises BusyError. Without effect where files cannot be locked."""
    _unlock(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(f"expected no other save to {folder}; another process writes it. Save elsewhere") from error
    except OSError:
        os.close(descriptor)
    else:
        _LOCKS[folder] = descriptor


def _unlock(folder: Path) -> None:
    descriptor = _LOCKS.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _remove_unfinished(folder: Path) -> None:
    """Remove what an unfinished save left, if it did. Raises DestinationError for anything else.

    A folder is one if it has `PARTS`, which is removed last, or a manifest, or nothing.
    """
    if not os.path.lexists(folder):
        return
    names = set(os.listdir(folder))
    if (names and not names & {PARTS, MANIFEST}) or JOURNAL in names:
        raise DestinationError(f"expected nothing at {folder}, or an unfinished save; remove it, or save elsewhere")
    (folder / PARTS).mkdir(exist_ok=True)
    for name in names - {PARTS}:
        entry = folder / name
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(folder)


def remove_store(path: Path) -> None:
    """Remove a store that a save wrote; if that is interrupted, what is left is no store."""
    folder = growing_folder(path)
    _remove_unfinished(folder)
    (path / PARTS).mkdir(exist_ok=True)
    path.rename(folder)
    _remove_unfinished(folder)


def was_saved(path: Path) -> bool:
    """Whether a save wrote the store at `path`."""
    manifest = str(path / MANIFEST)
    return os.path.isfile(manifest) and parse(read_text(manifest), manifest).source.producer == _PRODUCER


def check_free(path: Path) -> None:
    """Raise DestinationError if there is something at `path`."""
    if os.path.lexists(path):
        raise DestinationError(
            f"expected nothing at {path}, where the checkpoint is to be; remove it, or save elsewhere"
        )


def growing_folder(path: Path) -> Path:
    """The folder in which a save to `path` grows."""
    return path.with_name(path.name + PARTIAL)


def commit(path: Path, run: SavedRun, ranks: int) -> int:
    """Make a save whole, once every rank has written its part. On one rank. Returns the bytes of all packs.

    Raises MissingFileError if a part is not there, CoverError if parts do not tile a tensor.
    """
    folder = growing_folder(path)
    parts = [read_part(folder, rank) for rank in range(ranks)]
    missing = [str(rank) for rank, part in enumerate(parts) if part is None]
    if missing:
        raise MissingFileError(
            f"expected the parts of {ranks} ranks in {folder / PARTS}; those of rank {', '.join(missing)} are not "
            "there. All ranks must write to one folder that they share"
        )
    complete = [part for part in parts if part is not None]
    index = make_index(path, run, *_list_contents(complete))
    check_names(index)
    check_cover(index)
    extras = [extra for part in complete for extra in part.extras]
    text = dump(_make_manifest(index, extras, complete))
    if not extras:
        (folder / EXTRAS).rmdir()
    replace_file(folder / MANIFEST, text)
    shutil.rmtree(folder / PARTS)
    check_free(path)
    folder.rename(path)
    _unlock(folder)
    sync(path.parent)
    return sum(shard.nbytes for part in complete for shard in part.shards)


def _list_contents(parts: Sequence[PartManifest]) -> tuple[dict[tuple[str, str], list[Fragment]], list[Record]]:
    """The pieces of every state that ranks wrote, and the checksums."""
    fragments: dict[tuple[str, str], list[Fragment]] = {}
    records: list[Record] = []
    for part in parts:
        for shard in part.shards:
            assert part.pack is not None
            fragments.setdefault((shard.param, shard.state), []).extend(_list_fragments(shard.pieces, part.pack.path))
            label = f"{shard.param}/{shard.state}"
            records.append(
                Record(path=part.pack.path, name=label, offset=shard.offset, nbytes=shard.nbytes, crc32=shard.crc32)
            )
    return fragments, records


def make_index(
    path: Path, run: SavedRun, fragments: Mapping[tuple[str, str], Sequence[Fragment]], records: Sequence[Record] = ()
) -> Index:
    """The index of a run. `fragments`: (parameter, state) to where ranks have its elements."""
    atoms = {}
    for name, atom in run.atoms.items():
        states = {
            WEIGHT if state == COMPUTED else state: _make_state(facts, fragments.get((name, state), ()))
            for state, facts in atom.states.items()
        }
        layouts = (facts.layout for facts in atom.states.values() if facts.layout.all_axes)
        atoms[name] = AtomIndex(
            name=name,
            global_shape=atom.shape,
            kind=atom.kind,
            states=states,
            model_dtype=atom.model_dtype,
            is_cast=atom.is_cast,
            layout=next(layouts, Layout()),
        )
    return Index(
        path=str(path.absolute()),
        format=_FORMAT,
        evidence=(),
        producer=_PRODUCER,
        topology=run.topology,
        step=run.step,
        atoms=atoms,
        groups=run.groups,
        aliases={alias: name for name, atom in run.atoms.items() for alias in atom.aliases},
        records=tuple(records),
        lost={name: _CAST for name, atom in run.atoms.items() if atom.is_cast},
        origin=run.origin,
    )


def _list_fragments(pieces: Iterable[Piece], path: str) -> Iterator[Fragment]:
    for piece in pieces:
        ref = TensorRef(path=path, offset=piece.offset, dtype=piece.dtype, shape=piece.sizes, strides=piece.strides)
        yield Fragment(box=Box(piece.offsets, piece.sizes), ref=ref)


def _make_state(facts: StateFacts, fragments: Sequence[Fragment]) -> StateIndex:
    if facts.value is not None:
        return StateIndex.from_tensor(facts.value)
    return StateIndex(dtype=facts.dtype, global_shape=facts.shape, fragments=tuple(fragments))


def _make_manifest(index: Index, extras: Sequence[StoredExtra], parts: Sequence[PartManifest]) -> Manifest:
    packs = {part.pack.path: part.pack for part in parts if part.pack is not None}
    manifest = describe(
        index, producer=producer(), written=None, extras=extras, casts=(), identify=packs.__getitem__, headers={}
    )
    return structs.replace(manifest, virtual=False)  # references lead to packs of the store itself
