"""Format `dcp`: checkpoints of torch.distributed.checkpoint, written by scripts, torchtitan, accelerate or Lightning.

1. Find the folder (`locate`); read `.metadata` and where every item lies (`ucp.io.dcp`).
2. Tell model, optimizer and the rest apart by their saved paths (`state_dict`).
3. Find how ranks sharded the tensors (`mesh`); make atoms of the chunks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ucp.contract.locating import Evidence, Located, SaveFolder
from ucp.contract.protocols import Format, ParamOrder, SourceOptions
from ucp.contract.run_extras import MODULE_STATE, RunExtras
from ucp.contract.sidecars import attach_sidecars
from ucp.core.index import WEIGHT, AtomIndex, Extra, Index, Kind, SourceFile, StateDictKeys, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box
from ucp.core.tensor import Record
from ucp.core.union import state_of_boxes
from ucp.errors import UnsupportedError, format_count, format_list
from ucp.io.dcp.checkpoint import Dcp, StoredObject, StoredTensor, parse_rank, read_dcp
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import names_in, path_of, to_absolute
from ucp.io.pickle.values import find_differing_values
from ucp.io.provenance import source_file
from ucp_formats.torch.extras import find_step
from ucp_formats.torch.locate import check_folder, is_of_the_format, locate, step_in
from ucp_formats.torch.mesh import Boxes, MeshLayouts, mesh_of
from ucp_formats.torch.state_dict.entries import StateDict, StateEntry
from ucp_formats.torch.state_dict.keys import find_keys, kind_of, number_state_of, untrained_notes
from ucp_formats.torch.state_dict.model_dict import FLAT
from ucp_formats.torch.state_dict.numbered import read_order
from ucp_formats.torch.state_dict.sort import sort_entries


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
        located = check_folder(locate(path), path)
        index = _DcpIndexer(located, read_order(self._options.param_order)).index(self.name)
        return attach_sidecars(index, SaveFolder(path_of(index.path)), is_own=is_of_the_format)


@dataclass(frozen=True, slots=True)
class _DcpFolder:
    """One folder with a `.metadata`."""

    dcp: Dcp
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]

    @classmethod
    def read(cls, folder: str) -> _DcpFolder:
        dcp = read_dcp(folder)
        return cls(dcp, dcp.tensors(dcp.metadata.tensors), dcp.objects(dcp.metadata.objects))

    @property
    def is_in_order(self) -> bool:
        """Whether `entries` are in the order of the script's state dict."""
        return self.tensors.keys() <= self.dcp.metadata.paths.keys()

    def entries(self) -> Iterator[StateEntry]:
        """Entries in the order of the state dict, as far as `planner_data` records it.

        The tensors of `.metadata` are in the order in which ranks wrote them, and torch spreads those that all ranks
        hold over the ranks (torch 2.13, `planner_helpers.py`, `dedup_save_plans`).
        """
        paths = self.dcp.metadata.paths
        known = [key for key in paths if key in self.tensors]
        for key in dict.fromkeys((*known, *self.tensors)):
            tensor = self.tensors[key]
            shape = tensor.saved.shape
            form = shape, tuple((chunk.offsets, chunk.sizes) for chunk in tensor.saved.chunks)
            yield StateEntry(paths.get(key, (key,)), shape, tensor, form, _content(tensor))
        for key, stored in self.objects.items():
            yield StateEntry(paths.get(key, (key,)), None, stored.value)

    def records(self) -> Iterator[Record]:
        """Checksums of all items."""
        for tensor in self.tensors.values():
            yield from tensor.records
        for stored in self.objects.values():
            yield from stored.records

    def files(self) -> Iterator[SourceFile]:
        """All files that were read or are referred to."""
        for name in (*self.dcp.parts, *self.dcp.files):
            path = self.dcp.path(name)
            yield source_file(path, "index of items" if name in self.dcp.parts else f"items of rank {parse_rank(name)}")

    def differing_keys(self) -> Iterator[str]:
        """Keys of objects that every rank saved for itself, with differing values."""
        for part in list(self.dcp.parts.values())[1:]:
            for key, stored in self.dcp.objects(part.objects).items():
                if any(True for _ in find_differing_values(self.objects[key].value, stored.value)):
                    yield key

    def unreferenced_files(self) -> dict[str, int]:
        """Files of items that `.metadata` does not refer to, with their bytes: 0 for a rank with nothing to save."""
        folder = path_of(self.dcp.folder)
        names = (name for name in names_in(folder) if parse_rank(name) is not None and name not in self.dcp.files)
        return {name: (folder / name).stat().st_size for name in sorted(names)}

    def ranks(self) -> Iterator[int]:
        """Ranks that saved a file."""
        empty = [name for name, nbytes in self.unreferenced_files().items() if not nbytes]
        yield from (rank for name in (*self.dcp.files, *empty) if (rank := parse_rank(name)) is not None)


class _DcpIndexer:
    """Makes the index of a checkpoint."""

    def __init__(self, located: Located[tuple[str, ...]], order: ParamOrder | None) -> None:
        self._located = located
        self._root = to_absolute(located.root)
        names = (os.path.join(self._root, name) if name else self._root for name in located.content)
        self._folders = [_DcpFolder.read(name) for name in names]
        entries = (entry for folder in self._folders for entry in folder.entries())
        in_order = all(folder.is_in_order for folder in self._folders)
        self._saved: StateDict = sort_entries(entries, self._root, in_order=in_order, order=order)
        _check_not_flat(self._saved.model, self._root)
        ranks = [rank for folder in self._folders for rank in folder.ranks()]
        boxes = {name: _boxes_of(entry) for name, entry in self._saved.model.items()}
        holders = {name: self._holders(name, entry) for name, entry in self._saved.model.items()}
        self._mesh: MeshLayouts = mesh_of(boxes, holders, ranks=max(ranks, default=0) + 1)

    def _holders(self, name: str, weight: StateEntry) -> set[int]:
        """Ranks whose files have chunks of a parameter: of its weight, and of states of the same shape."""
        states = (entry for entry in self._saved.states.get(name, {}).values() if entry.shape == weight.shape)
        chunks = (chunk for entry in (weight, *states) for chunk in _tensor_of(entry).saved.chunks)
        return {parse_rank(chunk.place.file) or 0 for chunk in chunks}

    def index(self, name: str) -> Index:
        """The index."""
        saved = self._saved
        atoms = {param: self._atom(param, entry) for param, entry in saved.model.items() if param not in saved.tied}
        modules = {f"{MODULE_STATE}{module}": value for module, value in saved.modules.items()}
        sharded: list[str] = []
        extras = [
            Extra(name=str(key), value=_extra_value(value, str(key), sharded))
            for key, value in {**saved.others, **modules}.items()
        ]
        versions = (version for folder in self._folders if (version := folder.dcp.metadata.facts.get("version")))
        version = next(versions, None)
        return Index(
            path=self._root,
            format=name,
            evidence=self._located.reasons,
            producer="torch.distributed.checkpoint" + (f", metadata {version}" if isinstance(version, str) else ""),
            topology=self._mesh.topology,
            step=self._step(),
            atoms=atoms,
            groups=saved.groups,
            lost=saved.lost,
            unnamed=saved.unnamed,
            is_numbered=saved.is_numbered,
            aliases=saved.tied,
            extras=tuple(extras),
            files=tuple(file for folder in self._folders for file in folder.files()),
            records=tuple(record for folder in self._folders for record in folder.records()),
            notes=(*saved.notes, *self._notes(atoms)),
            keys=self._keys(),
            recorded_in={"every axis": ".metadata, which has boxes of global tensors"},
            dropped=tuple(self._dropped(sharded)),
        )

    def _keys(self) -> StateDictKeys | None:
        """Keys of the state dict; None if model and optimizer lie in folders of their own."""
        if len(self._folders) > 1:
            return None
        folder = self._folders[0]
        paths = folder.dcp.metadata.paths
        return find_keys([paths.get(key, (key,)) for key in (*folder.tensors, *folder.objects)], self._saved)

    def _atom(self, name: str, entry: StateEntry) -> AtomIndex:
        weight = _state_of(entry)
        states = {key: _state_of(state) for key, state in sorted(self._saved.states.get(name, {}).items())}
        return AtomIndex(
            name=name,
            global_shape=weight.global_shape,
            kind=kind_of(name, self._saved) or self._untrained_kind(weight),
            states={WEIGHT: weight, **states},
            layout=self._mesh.layouts.get(name, Layout()),
        )

    def _untrained_kind(self, weight: StateIndex) -> Kind:
        """Kind of a tensor that is in no group of the optimizer: FSDP shards parameters, not buffers or scalars."""
        if not weight.global_shape:
            return Kind.BUFFER
        is_whole = sum(not piece.replica for piece in weight.fragments) == 1 and weight.global_shape[0] > 1
        return Kind.BUFFER if (self._is_sharded and is_whole) or not weight.dtype.is_floating else Kind.FROZEN

    @property
    def _is_sharded(self) -> bool:
        return any(axis.axis == "dp_shard" for layout in self._mesh.layouts.values() for axis in layout.axes)

    def _step(self) -> int | None:
        def get(path: tuple[object, ...]) -> object:
            value: object = self._saved.others
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            return value

        step = find_step(get, self._saved.root[:-1])
        return step_in(Path(self._root).name) if step is None else step

    def _dropped(self, sharded: list[str]) -> Iterator[str]:
        """What is not read. `sharded`: tensors in several chunks, which an extra cannot hold."""
        if sharded:
            yield f"sharded tensors beside model and optimizer:\n{format_list(sharded)}"
        keys = sorted({key for folder in self._folders for key in folder.differing_keys()})
        if keys:
            yield f"values that other ranks saved, where they differ from those of the first rank:\n{format_list(keys)}"
        lost = self._saved.lost
        for why in dict.fromkeys(loss.reason for loss in lost.values()):
            yield f"{why}:\n{format_list(name for name, loss in lost.items() if loss.reason == why)}"

    def _notes(self, atoms: Mapping[str, AtomIndex]) -> Iterator[str]:
        unplaced = [
            name
            for name, atom in atoms.items()
            if name not in self._mesh.layouts and len(atom.states[WEIGHT].fragments) > 1
        ]
        if unplaced:
            names = format_list(unplaced)
            count = format_count(len(unplaced), "tensor")
            yield f"{count} sharded by no known pattern, read by recorded boxes:\n{names}"
        if not self._is_sharded:
            yield from untrained_notes(atoms, self._saved)
        if self._saved.tied:
            pairs = format_list(f"{alias} = {name}" for alias, name in self._saved.tied.items())
            yield f"taken for tied, because all elements are equal:\n{pairs}"
        files = [name for folder in self._folders for name, nbytes in folder.unreferenced_files().items() if nbytes]
        if files:
            names = format_list(files)
            yield f"files that {METADATA} does not refer to, not read (of an earlier save into this folder?):\n{names}"


def _tensor_of(entry: StateEntry) -> StoredTensor:
    assert isinstance(entry.value, StoredTensor)
    return entry.value


def _boxes_of(entry: StateEntry) -> Boxes:
    saved = _tensor_of(entry).saved
    return saved.shape, list(dict.fromkeys(Box(chunk.offsets, chunk.sizes) for chunk in saved.chunks))


def _state_of(entry: StateEntry) -> StateIndex:
    if entry.shape is None:
        return number_state_of(entry)
    tensor = _tensor_of(entry)
    boxes = ((Box(chunk.offsets, chunk.sizes), chunk.ref) for chunk in tensor.chunks)
    return state_of_boxes(tensor.saved.dtype, tensor.saved.shape, boxes)


def _check_not_flat(names: Iterable[str], where: str) -> None:
    """Raise UnsupportedError for flat parameters: DCP keeps only rank 0's parts of the parameters in them."""
    flat = [name for name in names if name.rpartition(".")[2] == FLAT]
    if flat:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT, whose flat parameters have neither names nor shapes:\n"
            f"{format_list(flat)}\nSave it as SHARDED_STATE_DICT (or with get_state_dict), or save a file per rank "
            "with torch.save"
        )


def _content(tensor: StoredTensor) -> Hashable:
    """What equal tensors have in common: type, boxes and checksums; None if a writer left checksums out."""
    if len(tensor.records) != len(tensor.chunks):
        return None
    boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
    checksums = [record.crc32 for record in tensor.records]
    return (tensor.saved.dtype, *sorted(zip(boxes, checksums, strict=True)))


def _extra_value(value: object, where: str, sharded: list[str]) -> object:
    """The value with tensors as references, and lists put together; adds names of tensors in chunks to `sharded`.

    torch saves the items of a list one by one if they have entries of their own, under the numbers of their positions;
    keys of dicts are strings. The recursion is as deep as a path of the state dict: a few keys.
    """
    if isinstance(value, StoredTensor):
        if len(value.chunks) == 1:
            return value.chunks[0].ref
        sharded.append(where)
        return None
    if isinstance(value, dict):
        items = {key: _extra_value(item, f"{where}/{key}", sharded) for key, item in value.items()}
        is_list = items.keys() == set(range(len(items))) and bool(items)
        return [items[position] for position in range(len(items))] if is_list else items
    return value
