"""Format `torch`: what scripts, trainers and ranks save by plain `torch.save`.

1. Find the files (`locate`), and what each says (`ucp.io.torch_file`): nothing is executed.
2. Tell model, optimizer and the rest (`leaves`, `ucp_formats.torch.state_dict`), all ranks side by side; put together
   what ranks hold in parts (`joined`) or in flat parts (`flat`).
3. Make atoms of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from ucp.contract.locating import Evidence, Located
from ucp.contract.model import find_tied_output, sort_in_model_order
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.ranks import Checksums
from ucp.contract.sidecars import SaveFolder, attach_sidecars
from ucp.core.index import WEIGHT, AtomIndex, Extra, Index, Kind, SourceFile
from ucp.core.tensor import Record
from ucp.core.topology import Topology
from ucp.errors import MalformedError, listed
from ucp.io.folder import absolute, path_of
from ucp.io.identity import source_file
from ucp.io.torch_file.archive import read_archive
from ucp_formats.torch.files.flat.lengths import Shapes
from ucp_formats.torch.files.flat.model import with_parameters
from ucp_formats.torch.files.flat.optimizer import states_by_name
from ucp_formats.torch.files.joined import Joined
from ucp_formats.torch.files.leaves import Tree, leaves_of, pickled_objects
from ucp_formats.torch.files.locate import Item, SavedFiles, is_of_the_format, item_of_rank, locate, the_files
from ucp_formats.torch.files.weights import Weights, read_weights, shapes_from
from ucp_formats.torch.keys import kind_of, number_of, untrained_notes
from ucp_formats.torch.locate import STEP_KEYS, step_in
from ucp_formats.torch.model_dict import Path as TreePath
from ucp_formats.torch.model_dict import aside_text
from ucp_formats.torch.numbered import UnnamedError, order_of
from ucp_formats.torch.state_dict import Leaf, Parts, sorted_out, unnamed_states

_PATHS: Mapping[Item, TreePath] = {"model": ("model",), "optimizer": ("optimizer",), "others": (), "all": ()}
"""Where the value of a file stands in the state dict of the whole checkpoint."""


class TorchFormat(Format):
    """Format `torch`."""

    name = "torch"
    takes_shapes = True
    takes_order = True

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> TorchFormat:
        """The same format, with shapes and an order that the user points to."""
        if options.family is not None or options.patterns is not None:
            return cast("TorchFormat", super().configured(options))  # which raises
        return TorchFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, such files."""
        located = locate(path)
        return None if located is None else located.evidence

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        located = the_files(locate(path), path)
        index = _Reading(located, self._options).index(self.name)
        folder = SaveFolder(located.root) if located.root.is_dir() else None
        names = {os.path.basename(file.path) for file in index.files}
        is_one_file = "all" in located.content.files

        def is_own(path: Path) -> bool:
            return path.name in names or (not is_one_file and is_of_the_format(path))

        return attach_sidecars(index, folder, is_own=is_own)


class _Reading:
    """A checkpoint while its index is made."""

    def __init__(self, located: Located[SavedFiles], options: SourceOptions) -> None:
        self._located = located
        self._order = order_of(options.param_order)
        self._folder = absolute(located.root if located.root.is_dir() else located.root.parent)
        self._shapes_path = options.shapes_from
        self._shapes: Shapes | None = None if options.shapes_from is None else shapes_from(options.shapes_from)
        self._in_order = True
        self._config: Mapping[str, object] = {}
        self._records: list[Record] = []
        self._files: list[SourceFile] = []
        values = {
            item: {rank: self._read(item, rank, name) for rank, name in files.items()}
            for item, files in located.content.files.items()
        }
        self._checksums = Checksums(self._records)
        tree = leaves_of({_PATHS[item]: own for item, own in values.items()}, self._checksums, str(located.root))
        if not tree.model:
            raise self._no_model()
        is_ordered_by_it = self._shapes is not None and "safetensors" in located.content.files.get("model", {}).get(
            0, ""
        )
        self._tree: Tree = with_parameters(tree, None if is_ordered_by_it else self._shapes, str(located.root))
        self._saved: Parts = self._sorted_out(str(located.root))
        self._is_shared = any(Joined.of(own).is_shared for own in self._saved.model.values())
        tied = find_tied_output(self._saved.model, self._config)
        if tied is not None and tied[0] not in self._saved.model:
            self._saved.tied[tied[0]] = tied[1]

    def _sorted_out(self, where: str) -> Parts:
        order, unnamed = self._order, None
        optimizer: Sequence[Leaf] = ()
        try:
            optimizer = states_by_name(self._tree, order)
            order = order if optimizer is self._tree.optimizer else None  # which has been taken
        except UnnamedError as error:
            states = (str(leaf.path[-1]) for leaf in self._tree.optimizer if leaf.path[-3:-2] == ("state",))
            unnamed = unnamed_states(where, states, error)
        return sorted_out((*self._tree.model, *optimizer), where, in_order=self._in_order, order=order, unnamed=unnamed)

    def _read(self, item: Item, rank: int, name: str) -> object:
        path = os.path.join(self._folder, name)
        if item == "model" and "safetensors" in name:
            weights = self._ordered(read_weights(self._folder, name))
            self._in_order = weights.is_in_order
            self._config = weights.config
            self._files += [source_file(own, "weights") for own in weights.files]
            return weights.tensors
        archive = read_archive(path)
        _check_rank(archive.saved_as, path)
        self._records += archive.records
        of_rank = f" of rank {rank}" if self._located.content.ranks > 1 else ""
        self._files.append(source_file(path, f"{'checkpoint' if item == 'all' else item}{of_rank}"))
        return archive.root

    def _ordered(self, weights: Weights) -> Weights:
        """Weights in the order of the model: that of what the user points to, or of a model that is known."""
        if self._shapes is not None:
            return weights.in_order_of([*self._shapes])
        return weights.in_order_of(sort_in_model_order(weights.tensors, weights.config.get("model_type")))

    def index(self, name: str) -> Index:
        """The index."""
        saved = self._saved
        if not saved.model:
            raise self._no_model()
        atoms = {own: self._atom(own, leaf) for own, leaf in saved.model.items() if own not in saved.tied}
        return Index(
            path=absolute(self._located.root),
            format=name,
            evidence=self._located.reasons,
            producer=self._producer(),
            topology=_topology(atoms, self._located.content.ranks),
            step=self._step(),
            atoms=atoms,
            groups=saved.groups,
            unnamed=saved.unnamed,
            is_numbered=saved.is_numbered,
            aliases=saved.tied,
            unordered=not self._in_order,
            extras=(*self._tree.extras, *(Extra(name=str(key), value=own) for key, own in saved.others.items())),
            files=tuple(self._files),
            records=tuple(self._records),
            notes=(*saved.notes, *self._notes(atoms)),
            dropped=tuple(self._unread_optimizers()),
        )

    def _no_model(self) -> MalformedError:
        return MalformedError(
            f"expected tensors of a model in {self._located.root}; there is no model in it, as no tensors are under "
            f"names in {', '.join(os.path.basename(own.path) for own in self._files)}. Pass a file that holds a state "
            "dict, or the folder with it beside the optimizer"
        )

    def _atom(self, name: str, leaf: Leaf) -> AtomIndex:
        weight = Joined.of(leaf)
        saved = dict(sorted(self._saved.states.get(name, {}).items()))
        flat = (own.layout for leaf in saved.values() if isinstance(own := leaf.value, Joined) and own.layout.flat)
        layout = next(flat, weight.layout)  # FSDP1 keeps parameters flat, and cuts them by rows only to save them
        states = {
            key: number_of(own) if own.shape is None else Joined.of(own).state(layout) for key, own in saved.items()
        }
        return AtomIndex(
            name=name,
            global_shape=weight.shape,
            kind=kind_of(name, self._saved) or self._untrained(weight),
            states={WEIGHT: weight.state(layout), **states},
            layout=layout,
        )

    def _untrained(self, weight: Joined) -> Kind:
        """Kind of a tensor that is in no group of the optimizer: ranks share parameters, and no buffers."""
        is_whole = not weight.shape or (self._is_shared and not weight.is_shared)
        return Kind.BUFFER if is_whole or not weight.dtype.is_floating else Kind.FROZEN

    def _producer(self) -> str:
        extras = {own.name: own.value for own in self._tree.extras}
        lightning = extras.get("pytorch-lightning_version")
        return f"Lightning {lightning}" if isinstance(lightning, str) else "torch.save"

    def _step(self) -> int | None:
        extras = {own.name: own.value for own in self._tree.extras}
        around = self._saved.root[:-1]  # dicts that the model lies in
        for depth in range(len(around) + 1):
            for key in STEP_KEYS:
                found = extras.get("/".join(map(str, (*around[:depth], key))))
                if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
                    return found
        named = [path_of(self._folder)] if self._located.root.is_dir() else [Path(self._located.root.stem)]
        named += [path_of(self._folder).parent] if self._located.content.ranks > 1 else []
        return next((step for own in named if (step := step_in(own.name)) is not None), None)

    def _unread_optimizers(self) -> Iterator[str]:
        for extra in self._tree.extras:
            for path, own in pickled_objects(extra.value, (extra.name,), ("state", "param_groups")):
                place = "/".join(map(str, path))
                yield f"optimizer states: {place} is an object of {own.made_by}; save its state_dict() instead"

    def _notes(self, atoms: Mapping[str, AtomIndex]) -> Iterator[str]:
        if not self._is_shared:
            yield from untrained_notes(atoms, self._saved)
        if self._saved.tied:
            shown = listed(f"{alias} = {name}" for alias, name in self._saved.tied.items())
            yield f"taken for tied, as they are stored once, or as config.json says:\n{shown}"
        if self._tree.aside:
            yield aside_text(self._tree.aside)
        if self._tree.is_order_assumed and self._shapes:
            names = list(self._shapes)
            yield (
                f"_flat_param records neither names nor order: it is read in the order of {self._shapes_path} "
                f"({names[0]}, ..., {names[-1]}); if that is not the order of model.named_parameters(), every value is "
                "wrong"
            )


def _check_rank(saved_as: str, path: str) -> None:
    """Raise MalformedError for a file of one rank that lies under the name of another's, as its zip records it."""
    name, suffix = os.path.splitext(os.path.basename(path))
    saved, found = item_of_rank(saved_as + suffix), item_of_rank(name + suffix)
    if saved is not None and found is not None and saved != found:
        raise MalformedError(
            f"expected the file that was saved as {name}{suffix}; {path} was saved as {saved_as}{suffix}: it was "
            "copied or renamed. Copy the files of all ranks again"
        )


def _topology(atoms: Mapping[str, AtomIndex], ranks: int) -> Topology:
    """Degrees of the run, by the names of the axes of its mesh."""
    layouts = [atom.layout for atom in atoms.values()]
    tp = max((axis.parts for own in layouts for axis in own.axes if axis.axis == "tp"), default=1)
    return Topology(dp=ranks // tp, tp=tp) if ranks % tp == 0 else Topology(dp=ranks)
