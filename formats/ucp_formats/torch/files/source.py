"""Format `torch`: what scripts, trainers and ranks save by plain `torch.save`.

1. Find the files (`locate`), and read the pickle of each (`ucp.io.torch_file`): nothing is executed.
2. Tell model, optimizer and the rest apart (`entries`, `ucp_formats.torch.state_dict`), for all ranks side by side;
   join what ranks saved as shards (`global_tensor`) or in flat parameters (`flat`).
3. Make atoms of the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ucp.contract.locating import Evidence, Located, SaveFolder
from ucp.contract.model import find_tied_output, sort_in_model_order
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.ranks import Checksums
from ucp.contract.registry import data_parallel_cuts, has_data_parallel_rules
from ucp.contract.sidecars import attach_sidecars
from ucp.core.index import WEIGHT, AtomIndex, Extra, Index, Kind, SourceFile
from ucp.core.tensor import Record
from ucp.core.topology import Topology
from ucp.errors import IdleOptionError, MalformedError, format_list
from ucp.io.folder import path_of, to_absolute
from ucp.io.provenance import source_file
from ucp.io.torch_file.archive import read_archive
from ucp_formats.torch.extras import find_step
from ucp_formats.torch.files.entries import SavedEntries, collect_entries, pickled_objects
from ucp_formats.torch.files.flat.lengths import Shapes
from ucp_formats.torch.files.flat.model import split_flat_params
from ucp_formats.torch.files.flat.optimizer import states_by_name
from ucp_formats.torch.files.global_tensor import GlobalTensor
from ucp_formats.torch.files.locate import Item, SavedFiles, check_files, is_of_the_format, locate, parse_rank_file
from ucp_formats.torch.files.weights import read_weights, shapes_from
from ucp_formats.torch.locate import step_in
from ucp_formats.torch.state_dict.entries import StateDict, StateEntry, show_path, unnamed_states
from ucp_formats.torch.state_dict.keys import kind_of, number_state_of, untrained_notes
from ucp_formats.torch.state_dict.model_dict import Path as TreePath
from ucp_formats.torch.state_dict.model_dict import aside_text
from ucp_formats.torch.state_dict.numbered import UnnamedError, read_order
from ucp_formats.torch.state_dict.sort import sort_entries

_PATHS: Mapping[Item, TreePath] = {"model": ("model",), "optimizer": ("optimizer",), "others": (), "all": ()}
"""Path of a file's value in the state dict of the whole checkpoint."""


class TorchFormat(Format):
    """Format `torch`."""

    name = "torch"
    takes_shapes = True
    takes_order = True

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> TorchFormat:
        """The same format, with shapes, an order and rules for dp that the user points to."""
        if options.family is not None or not (options.patterns is None or has_data_parallel_rules(options.patterns)):
            return cast("TorchFormat", super().configured(options))  # which raises
        return TorchFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, such files."""
        located = locate(path)
        return None if located is None else located.evidence

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        located = check_files(locate(path), path)
        index = _TorchIndexer(located, self._options).index(self.name)
        folder = SaveFolder(located.root) if located.root.is_dir() else None
        names = {os.path.basename(file.path) for file in index.files}
        is_one_file = "all" in located.content.files and located.content.ranks == 1

        def is_own(path: Path) -> bool:
            return path.name in names or (not is_one_file and is_of_the_format(path))

        return attach_sidecars(index, folder, is_own=is_own)


class _TorchIndexer:
    """Makes the index of a checkpoint."""

    def __init__(self, located: Located[SavedFiles], options: SourceOptions) -> None:
        self._located = located
        self._where = str(located.root)
        self._order = read_order(options.param_order)
        self._folder = to_absolute(located.root if located.root.is_dir() else located.root.parent)
        self._shapes_path = options.shapes_from
        self._shapes: Shapes | None = None if options.shapes_from is None else shapes_from(options.shapes_from)
        self._in_order = True
        self._config: Mapping[str, object] = {}
        self._records: list[Record] = []
        self._files: list[SourceFile] = []
        values = {
            _PATHS[item]: {rank: self._read(item, rank, name) for rank, name in files.items()}
            for item, files in located.content.files.items()
        }
        entries = collect_entries(values, Checksums(self._records), self._where)
        if not entries.model:
            raise self._no_model()
        # beside safetensors the user's shapes give only the order of the weights
        is_safetensors = "safetensors" in located.content.files.get("model", {}).get(0, "")
        flat_shapes = None if is_safetensors else self._shapes
        self._entries: SavedEntries = split_flat_params(entries, flat_shapes, self._where)
        self._saved: StateDict = self._sort()
        self._join_parts(options)
        self._is_shared = any(GlobalTensor.of(entry).is_shared for entry in self._saved.model.values())
        tied = find_tied_output(self._saved.model, self._config)
        if tied is not None and tied[0] not in self._saved.model:
            self._saved.tied[tied[0]] = tied[1]

    def _join_parts(self, options: SourceOptions) -> None:
        """Join the parameters of which every rank saved a part, by the user's rules."""
        ranks, model = self._located.content.ranks, self._saved.model
        if options.patterns is not None and ranks == 1:
            raise IdleOptionError(
                f"{self._where} has files of one rank, not parts: drop --patterns, or pass the folder of all ranks"
            )
        for name, cut in data_parallel_cuts(model, options.patterns).items():
            shape, states = model[name].shape, self._saved.states.get(name, {})
            for entries, key in ((model, name), *((states, state) for state in states)):
                if entries[key].shape == shape:
                    tensor = GlobalTensor.of(entries[key]).joined(cut)
                    entries[key] = replace(entries[key], shape=tensor.shape, value=tensor)

    def _sort(self) -> StateDict:
        order, unnamed = self._order, None
        optimizer: Sequence[StateEntry] = ()
        try:
            optimizer = states_by_name(self._entries, order)
            order = order if optimizer is self._entries.optimizer else None  # else states_by_name has applied it
        except UnnamedError as error:
            states = (str(entry.path[-1]) for entry in self._entries.optimizer if entry.path[-3:-2] == ("state",))
            unnamed = unnamed_states(self._where, states, error)
        entries = (*self._entries.model, *optimizer)
        return sort_entries(entries, self._where, in_order=self._in_order, order=order, unnamed=unnamed)

    def _read(self, item: Item, rank: int, name: str) -> object:
        if item == "model" and "safetensors" in name:
            weights = read_weights(self._folder, name)
            # in the order of --shapes-from, or of a model whose order is known
            in_shapes = None if self._shapes is None else [*self._shapes]
            weights = weights.in_order_of(
                in_shapes or sort_in_model_order(weights.tensors, weights.config.get("model_type"))
            )
            self._in_order = weights.is_in_order
            self._config = weights.config
            self._files += [source_file(file, "weights") for file in weights.files]
            return weights.tensors
        path = os.path.join(self._folder, name)
        archive = read_archive(path)
        _check_rank(archive.saved_as, path)
        self._records += archive.records
        of_rank = f" of rank {rank}" if self._located.content.ranks > 1 else ""
        self._files.append(source_file(path, f"{'checkpoint' if item == 'all' else item}{of_rank}"))
        return archive.root

    def index(self, name: str) -> Index:
        """The index."""
        saved = self._saved
        if not saved.model:
            raise self._no_model()
        atoms = {param: self._atom(param, entry) for param, entry in saved.model.items() if param not in saved.tied}
        extras = {extra.name: extra.value for extra in self._entries.extras}
        lightning = extras.get("pytorch-lightning_version")
        return Index(
            path=to_absolute(self._located.root),
            format=name,
            evidence=self._located.reasons,
            producer=f"Lightning {lightning}" if isinstance(lightning, str) else "torch.save",
            topology=_topology(atoms, self._located.content.ranks),
            step=self._step(extras),
            atoms=atoms,
            groups=saved.groups,
            unnamed=saved.unnamed,
            is_numbered=saved.is_numbered,
            aliases=saved.tied,
            unordered=not self._in_order,
            extras=(*self._entries.extras, *(Extra(name=str(key), value=value) for key, value in saved.others.items())),
            files=tuple(self._files),
            records=tuple(self._records),
            notes=(*saved.notes, *self._notes(atoms)),
            dropped=tuple(self._unread_optimizers()),
        )

    def _no_model(self) -> MalformedError:
        return MalformedError(
            f"expected a model in {self._where}; got no dict of named tensors in "
            f"{', '.join(os.path.basename(file.path) for file in self._files)}. Pass a file that holds the "
            "state dict of the model, or the folder that has it beside the optimizer"
        )

    def _atom(self, name: str, entry: StateEntry) -> AtomIndex:
        weight = GlobalTensor.of(entry)
        entries = dict(sorted(self._saved.states.get(name, {}).items()))
        tensors = [state.value for state in entries.values() if isinstance(state.value, GlobalTensor)]
        # FSDP1 trains flat parameters, as the states show, and shards by rows only when it saves the model
        layout = next((tensor.layout for tensor in tensors if tensor.layout.flat), weight.layout)
        states = {
            key: number_state_of(state) if state.shape is None else GlobalTensor.of(state).state_in(layout)
            for key, state in entries.items()
        }
        return AtomIndex(
            name=name,
            global_shape=weight.shape,
            kind=kind_of(name, self._saved) or self._untrained_kind(weight),
            states={WEIGHT: weight.state_in(layout), **states},
            layout=layout,
        )

    def _untrained_kind(self, weight: GlobalTensor) -> Kind:
        """Kind of a tensor that is in no group of the optimizer: in a sharded model, plain tensors are buffers."""
        is_whole = not weight.shape or (self._is_shared and not weight.is_shared)
        return Kind.BUFFER if is_whole or not weight.state.dtype.is_floating else Kind.FROZEN

    def _step(self, extras: Mapping[str, object]) -> int | None:
        step = find_step(lambda path: extras.get(show_path(path)), self._saved.root[:-1])
        if step is not None:
            return step
        names = [path_of(self._folder).name if self._located.root.is_dir() else self._located.root.stem]
        names += [path_of(self._folder).parent.name] if self._located.content.ranks > 1 else []
        return next((step for name in names if (step := step_in(name)) is not None), None)

    def _unread_optimizers(self) -> Iterator[str]:
        for extra in self._entries.extras:
            for path, stub in pickled_objects(extra.value, (extra.name,), ("state", "param_groups")):
                place = show_path(path)
                yield f"optimizer states: {place} is an object of {stub.made_by}; save its state_dict() instead"

    def _notes(self, atoms: Mapping[str, AtomIndex]) -> Iterator[str]:
        if not self._is_shared:
            yield from untrained_notes(atoms, self._saved)
        if self._saved.tied:
            pairs = format_list(f"{alias} = {name}" for alias, name in self._saved.tied.items())
            yield f"taken for tied, because they are stored once or config.json says so:\n{pairs}"
        if self._entries.aside:
            yield aside_text(self._entries.aside)
        if self._entries.is_order_assumed and self._shapes:
            names = list(self._shapes)
            yield (
                f"_flat_param records neither names nor order: it is read in the order of {self._shapes_path} "
                f"({names[0]}, ..., {names[-1]}); if that is not the order of model.named_parameters(), every value is "
                "wrong"
            )


def _check_rank(saved_as: str, path: str) -> None:
    """Raise MalformedError for a rank's file under the name of another's; its zip records the name it was saved as."""
    name, suffix = os.path.splitext(os.path.basename(path))
    recorded, actual = parse_rank_file(saved_as + suffix), parse_rank_file(name + suffix)
    if recorded is not None and actual is not None and recorded != actual:
        raise MalformedError(
            f"expected the file that was saved as {name}{suffix}; {path} was saved as {saved_as}{suffix}: it was "
            "copied or renamed. Copy the files of all ranks again"
        )


def _topology(atoms: Mapping[str, AtomIndex], ranks: int) -> Topology:
    """Degrees of the run, from the axes of its mesh."""
    axes = (axis for atom in atoms.values() for axis in atom.layout.axes)
    tp = max((axis.parts for axis in axes if axis.axis == "tp"), default=1)
    return Topology(dp=ranks // tp, tp=tp) if ranks % tp == 0 else Topology(dp=ranks)
