"""Format `dcp`: checkpoints of torch.distributed.checkpoint, written by scripts, torchtitan, accelerate or Lightning.

1. Find the folder (`locate`); read `.metadata` and where every item lies (`ucp.io.dcp`).
2. Tell model, optimizer and the rest by the paths that were saved (`state_dict`).
3. Find how ranks cut the tensors (`mesh`); put fragments together to atoms.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ucp.contract.locating import Evidence, Located
from ucp.contract.protocols import Format, ParamOrder, SourceOptions
from ucp.contract.run_extras import MODULE_STATE, RunExtras
from ucp.contract.sidecars import SaveFolder, attach_sidecars
from ucp.core.index import WEIGHT, AtomIndex, Extra, Fragment, Index, Kind, SourceFile, StateDictKeys, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box
from ucp.core.tensor import Record
from ucp.errors import UnsupportedError, counted, listed
from ucp.io.dcp.checkpoint import Dcp, StoredObject, StoredTensor, rank_of, read_dcp
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import absolute, names_in, path_of
from ucp.io.identity import source_file
from ucp.io.pickle.values import differing_values
from ucp_formats.torch.keys import find_keys, kind_of, number_of, untrained_notes
from ucp_formats.torch.locate import (
    STEP_KEYS,
    TRAIN_STATE,
    is_of_the_format,
    locate,
    step_in,
    the_folder,
)
from ucp_formats.torch.mesh import Boxes, MeshLayouts, mesh_of
from ucp_formats.torch.model_dict import FLAT
from ucp_formats.torch.numbered import order_of
from ucp_formats.torch.state_dict import Leaf, Parts, sorted_out


class DcpFormat(Format):
    """Format `dcp`."""

    name = "dcp"
    takes_order = True
    run = RunExtras(places=re.compile(r"(?P<name>dataloader)/dp_rank_(?P<dp>\d+)"))  # torchtitan's

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> DcpFormat:
        """The same format, with an order of the optimizer that the user gives."""
        if options.family is not None or options.patterns is not None:
            return cast("DcpFormat", super().configured(options))  # which raises
        return DcpFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, such a folder."""
        located = locate(path)
        return None if located is None else located.evidence

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        located = the_folder(locate(path), path)
        index = _Reading(located, order_of(self._options.param_order)).index(self.name)
        return attach_sidecars(index, SaveFolder(path_of(index.path)), is_own=is_of_the_format)


@dataclass(frozen=True, slots=True)
class _Part:
    """One folder with a `.metadata`."""

    dcp: Dcp
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]

    @classmethod
    def at(cls, folder: str) -> _Part:
        dcp = read_dcp(folder)
        return cls(dcp, dcp.tensors(dcp.metadata.tensors), dcp.objects(dcp.metadata.objects))

    @property
    def is_in_order(self) -> bool:
        """Whether `leaves` stand in the order in which the script had them."""
        return self.tensors.keys() <= self.dcp.metadata.paths.keys()

    def leaves(self) -> Iterator[Leaf]:
        """Entries in the order of the state dict, as far as that is recorded.

        `planner_data` has it. The tensors of `.metadata` follow one another as ranks wrote them, and torch deals those
        that all ranks hold out over the ranks (torch 2.13, `planner_helpers.py`, `dedup_save_plans`).
        """
        paths = self.dcp.metadata.paths
        known = [key for key in paths if key in self.tensors]
        for key in dict.fromkeys((*known, *self.tensors)):
            tensor = self.tensors[key]
            yield Leaf(paths.get(key, (key,)), tensor.saved.shape, tensor, _form(tensor), _content(tensor))
        for key, value in self.objects.items():
            yield Leaf(paths.get(key, (key,)), None, value.value)

    def records(self) -> Iterator[Record]:
        """Checksums of all items."""
        for tensor in self.tensors.values():
            yield from tensor.records
        for value in self.objects.values():
            yield from value.records

    def files(self) -> Iterator[SourceFile]:
        """All files that were read or are referred to."""
        for name in (*self.dcp.parts, *self.dcp.files):
            path = self.dcp.path(name)
            yield source_file(path, "index of items" if name in self.dcp.parts else f"items of rank {rank_of(name)}")

    def unequal(self) -> Iterator[str]:
        """Keys of objects that ranks saved each for itself, and that differ."""
        for part in list(self.dcp.parts.values())[1:]:
            for key, own in self.dcp.objects(part.objects).items():
                if any(True for _ in differing_values(self.objects[key].value, own.value)):
                    yield key

    def strays(self) -> dict[str, int]:
        """Files of items that are not referred to, with their bytes: 0 where a rank had nothing to save."""
        folder = path_of(self.dcp.folder)
        names = (name for name in names_in(folder) if rank_of(name) is not None and name not in self.dcp.files)
        return {name: (folder / name).stat().st_size for name in sorted(names)}

    def ranks(self) -> Iterator[int]:
        """Ranks that saved a file."""
        empty = [name for name, nbytes in self.strays().items() if not nbytes]
        yield from (rank for name in (*self.dcp.files, *empty) if (rank := rank_of(name)) is not None)


class _Reading:
    """A checkpoint while its index is made."""

    def __init__(self, located: Located[tuple[str, ...]], order: ParamOrder | None) -> None:
        self._located = located
        self._root = absolute(located.root)
        self._parts = [_Part.at(os.path.join(self._root, name) if name else self._root) for name in located.content]
        leaves = (leaf for part in self._parts for leaf in part.leaves())
        in_order = all(part.is_in_order for part in self._parts)
        self._saved: Parts = sorted_out(leaves, self._root, in_order=in_order, order=order)
        _check_not_flat(self._saved.model, self._root)
        ranks = [rank for part in self._parts for rank in part.ranks()]
        tensors = {name: _boxes(leaf) for name, leaf in self._saved.model.items()}
        holders = {name: self._holders(name, leaf) for name, leaf in self._saved.model.items()}
        self._mesh: MeshLayouts = mesh_of(tensors, holders, ranks=max(ranks, default=0) + 1)

    def _holders(self, name: str, weight: Leaf) -> set[int]:
        """Ranks whose files have parts of a parameter: of its weight, and of those states that are cut."""
        states = (leaf for leaf in self._saved.states.get(name, {}).values() if leaf.shape == weight.shape)
        return {rank_of(own.place.file) or 0 for leaf in (weight, *states) for own in _stored(leaf).saved.chunks}

    def index(self, name: str) -> Index:
        """The index."""
        saved = self._saved
        aliases = saved.tied
        atoms = {own: self._atom(own, leaf) for own, leaf in saved.model.items() if own not in aliases}
        modules = {f"{MODULE_STATE}{own}": value for own, value in saved.modules.items()}
        others, tensors_dropped = _extras({**saved.others, **modules})
        return Index(
            path=self._root,
            format=name,
            evidence=self._located.reasons,
            producer=self._producer(),
            topology=self._mesh.topology,
            step=self._step(),
            atoms=atoms,
            groups=saved.groups,
            lost=saved.lost,
            unnamed=saved.unnamed,
            is_numbered=saved.is_numbered,
            aliases=aliases,
            extras=tuple(others),
            files=tuple(own for part in self._parts for own in part.files()),
            records=tuple(own for part in self._parts for own in part.records()),
            notes=(*saved.notes, *self._notes(atoms, aliases)),
            keys=self._keys(),
            recorded_in={"every axis": ".metadata, which has boxes of whole tensors"},
            dropped=(*tensors_dropped, *self._unequal(), *self._lost()),
        )

    def _keys(self) -> StateDictKeys | None:
        """Keys of the state dict; None where model and optimizer lie in folders of their own."""
        if len(self._parts) > 1:
            return None
        part = self._parts[0]
        saved_paths = part.dcp.metadata.paths
        return find_keys([saved_paths.get(key, (key,)) for key in (*part.tensors, *part.objects)], self._saved)

    def _atom(self, name: str, leaf: Leaf) -> AtomIndex:
        weight = _state(leaf)
        saved = sorted(self._saved.states.get(name, {}).items())
        states = {key: _state(own) for key, own in saved}
        return AtomIndex(
            name=name,
            global_shape=weight.global_shape,
            kind=kind_of(name, self._saved) or self._untrained(weight),
            states={WEIGHT: weight, **states},
            layout=self._mesh.layouts.get(name, Layout()),
        )

    def _untrained(self, weight: StateIndex) -> Kind:
        """Kind of a tensor that is in no group of the optimizer: FSDP cuts parameters, and no buffers or scalars."""
        if not weight.global_shape:
            return Kind.BUFFER
        is_whole = sum(not own.replica for own in weight.fragments) == 1 and weight.global_shape[0] > 1
        return Kind.BUFFER if (self._is_cut and is_whole) or not weight.dtype.is_floating else Kind.FROZEN

    @property
    def _is_cut(self) -> bool:
        return any(axis.axis == "dp_shard" for layout in self._mesh.layouts.values() for axis in layout.axes)

    def _producer(self) -> str:
        version = next((own for part in self._parts if (own := part.dcp.metadata.facts.get("version"))), None)
        return "torch.distributed.checkpoint" + (f", metadata {version}" if isinstance(version, str) else "")

    def _step(self) -> int | None:
        others = self._saved.others
        places: list[object] = [others.get(TRAIN_STATE), others]
        for key in self._saved.root[:-1]:  # dicts that the model lies in
            around = places[-1]
            places.append(around.get(key) if isinstance(around, dict) else None)
        for where in (own for own in places if isinstance(own, dict)):
            for key in STEP_KEYS:
                if isinstance(found := where.get(key), int) and not isinstance(found, bool) and found >= 0:
                    return found
        return step_in(Path(self._root).name)

    def _unequal(self) -> Iterator[str]:
        keys = sorted({key for part in self._parts for key in part.unequal()})
        if keys:
            yield f"other values than those of the first rank, which are kept, of:\n{listed(keys)}"

    def _lost(self) -> Iterator[str]:
        for why in dict.fromkeys(own.reason for own in self._saved.lost.values()):
            yield f"{why}:\n{listed(name for name, own in self._saved.lost.items() if own.reason == why)}"

    def _notes(self, atoms: Mapping[str, AtomIndex], aliases: Mapping[str, str]) -> Iterator[str]:
        unplaced = [name for name in atoms if name not in self._mesh.layouts and len(_pieces(atoms[name])) > 1]
        if unplaced:
            names = listed(unplaced)
            yield f"{counted(len(unplaced), 'tensor')} cut by no pattern known here, read by their boxes:\n{names}"
        if not self._is_cut:
            yield from untrained_notes(atoms, self._saved)
        if aliases:
            shown = listed(f"{alias} = {name}" for alias, name in aliases.items())
            yield f"taken for tied, as all elements are equal:\n{shown}"
        strays = [name for part in self._parts for name, nbytes in part.strays().items() if nbytes]
        if strays:
            yield f"not referred to by {METADATA}, left alone (of an earlier save into this folder?):\n{listed(strays)}"


def _boxes(leaf: Leaf) -> Boxes:
    saved = _stored(leaf).saved
    return saved.shape, list(dict.fromkeys(Box(own.offsets, own.sizes) for own in saved.chunks))


def _stored(leaf: Leaf) -> StoredTensor:
    assert isinstance(leaf.value, StoredTensor)
    return leaf.value


def _state(leaf: Leaf) -> StateIndex:
    if leaf.shape is None:
        return number_of(leaf)
    tensor = _stored(leaf)
    seen: Counter[Box] = Counter()
    pieces = []
    for own in tensor.chunks:
        box = Box(own.offsets, own.sizes)
        pieces.append(Fragment(box=box, ref=own.ref, replica=seen[box]))
        seen[box] += 1
    return StateIndex(dtype=tensor.saved.dtype, global_shape=tensor.saved.shape, fragments=tuple(pieces))


def _pieces(atom: AtomIndex) -> tuple[Fragment, ...]:
    return atom.states[WEIGHT].fragments


def _form(tensor: StoredTensor) -> Hashable:
    return tensor.saved.shape, tuple((own.offsets, own.sizes) for own in tensor.saved.chunks)


def _check_not_flat(names: Iterable[str], where: str) -> None:
    """Raise UnsupportedError for flat parameters: of what ranks save beside them DCP keeps the first rank's part."""
    flat = [name for name in names if name.rpartition(".")[2] == FLAT]
    if flat:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT, whose flat parameters have neither names nor shapes:\n"
            f"{listed(flat)}\nSave it as SHARDED_STATE_DICT (or with get_state_dict), or a file per rank by torch.save"
        )


def _content(tensor: StoredTensor) -> Hashable:
    """What equal tensors have in common: type, boxes and checksums; None where a writer left checksums out."""
    if len(tensor.records) != len(tensor.chunks):
        return None
    boxes = [(own.offsets, own.sizes) for own in tensor.chunks]
    sums = [own.crc32 for own in tensor.records]
    return (tensor.saved.dtype, *sorted(zip(boxes, sums, strict=True)))


def _extras(others: Mapping[str, object]) -> tuple[list[Extra], tuple[str, ...]]:
    """Extras, and a line for tensors in many chunks, which an extra cannot hold."""
    dropped: list[str] = []
    extras = [Extra(name=str(key), value=_plain(value, str(key), dropped)) for key, value in others.items()]
    lines = (f"tensors beside model and optimizer that ranks cut:\n{listed(dropped)}",) if dropped else ()
    return extras, lines


def _plain(value: object, where: str, dropped: list[str]) -> object:
    """The value with tensors as references, and its lists whole. Paths of a state dict are a few keys long.

    torch saves the items of a list apart where they have entries of their own, under the numbers of their positions;
    keys of dicts are texts.
    """
    if isinstance(value, StoredTensor):
        if len(value.chunks) == 1:
            return value.chunks[0].ref
        dropped.append(where)
        return None
    if isinstance(value, dict):
        inner = {key: _plain(own, f"{where}/{key}", dropped) for key, own in value.items()}
        is_list = inner.keys() == set(range(len(inner))) and bool(inner)
        return [inner[at] for at in range(len(inner))] if is_list else inner
    return value
