"""A universal checkpoint of DeepSpeed as an index, whether its own converter wrote it or ucp.

1. Read the tag folder's model-states files, `zero/optimizer_state.pt` and every `zero/<parameter>/<state>.pt`.
2. Trained parameters come from `zero/`, with the module's tensor as a copy where there is one.
3. Frozen parameters and buffers come from the model-states files in their own type: what the converter of 0.19.8
   writes of them in `zero/` is cast to fp32.
4. Groups are those of `optimizer_state.pt`, with the names of `param_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ucp.contract.problems import Problems
from ucp.contract.protocols import SourceOptions
from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra, Index, Kind, ParamGroup, StateIndex
from ucp.core.names import WEIGHT
from ucp.core.tensor import TensorRef
from ucp.core.topology import Topology
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import Shape, integer, mapping, sequence
from ucp_formats.deepspeed.config import RunConfig
from ucp_formats.deepspeed.fields import number_of_enum
from ucp_formats.deepspeed.locate import Located, list_folder
from ucp_formats.deepspeed.names import UNIVERSAL, FileName, Role
from ucp_formats.deepspeed.read.extras import joined, universal_extras
from ucp_formats.deepspeed.read.index import atoms_of, folder_notes, producer_of, step_of
from ucp_formats.deepspeed.read.module import ModuleEntry, ModulePart
from ucp_formats.deepspeed.read.optimizer.flat_group import scalar_state
from ucp_formats.deepspeed.read.optimizer.group_order import dealt_back
from ucp_formats.deepspeed.read.optimizer.part import hyper_parameters
from ucp_formats.deepspeed.read.optimizer.zero3 import sub_group_params
from ucp_formats.deepspeed.read.run import SavedFile, source_files, try_read
from ucp_formats.deepspeed.read.universal.parameter_folders import ParameterFolders, read_parameter_folders
from ucp_formats.deepspeed.read.universal.paths import GLOBALS
from ucp_formats.deepspeed.read.universal.ranks import UniversalRanks, universal_ranks
from ucp_formats.deepspeed.refusals import refuse_contents, refuse_idle_options, refuse_names

__all__ = ["read_universal"]


def read_universal(located: Located, name: str, options: SourceOptions) -> Index:
    """Index, of the format called `name`, of the tag folder that was found. Raises SourceError."""
    folder = list_folder(located.root)
    refuse_names(folder)
    problems = Problems()
    read = [try_read(folder.path, own, problems) for own in folder.files]
    files = [file for file in read if file is not None]
    refuse_contents(str(folder.path), {file.name.name: file.root for file in files})
    ranks = universal_ranks(files, str(folder.path), problems, options)
    refuse_idle_options(options, ranks.tp, str(folder.path))
    found = read_parameter_folders(folder.path / UNIVERSAL, ranks.known_shapes(), problems)
    shared = try_read(folder.path / UNIVERSAL, FileName(role=Role.OPTIMIZER, name=GLOBALS), problems)
    problems.raise_any(str(folder.path), "universal")
    if shared is None:
        raise MissingFileError(f"expected {UNIVERSAL}/{GLOBALS} in {folder.path}; copy it from where it was saved")
    _check_shared(shared)
    universal = _Universal(ranks=ranks, shared=shared, found=found)
    lost = universal.without_folder()
    if lost:
        raise MissingFileError(
            f"expected a folder in {folder.path / UNIVERSAL} for every trained parameter of the model-states files; "
            f"none is there for {counted(len(lost), 'parameter')}:\n{listed(lost)}\ncopy what was saved"
        )
    return universal.index(name, located.reasons, folder_notes(folder), tuple(files))


def _check_shared(shared: SavedFile) -> None:
    """Raise MalformedError for a file that is not what an optimizer's file has beside its states.

    Converters write `param_groups`; those before they did leave `zero_stage` and what stands beside it.
    """
    if not {"param_groups", "zero_stage"} & shared.root.keys():
        held = ", ".join(map(repr, list(shared.root)[:8])) or "nothing"
        raise MalformedError(
            f"expected param_groups or zero_stage in {shared.path}, as every optimizer state has; got {held}. It is "
            "another file under this name: copy it again from where it was saved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Universal:
    """The files of one universal checkpoint."""

    ranks: UniversalRanks
    """Model-states files of all ranks."""
    shared: SavedFile
    """`optimizer_state.pt`."""
    found: ParameterFolders
    """`zero/`."""

    @property
    def model(self) -> SavedFile:
        """Model states of rank 0."""
        return self.ranks.first[0]

    @property
    def buffers(self) -> tuple[dict[str, Shape], ...]:
        """`param_shapes`, those of all pipeline stages together."""
        return self.ranks.groups

    def without_folder(self) -> list[str]:
        """Trained parameters that have elements and no folder in `zero/`."""
        shapes = {param: shape for own in self.buffers for param, shape in own.items()}
        return [param for param, shape in shapes.items() if prod(shape) and param not in self.found.states]

    def index(self, name: str, evidence: tuple[str, ...], notes: Sequence[str], files: Sequence[SavedFile]) -> Index:
        """The index."""
        every = (*files, self.shared)
        records = (*(record for file in every for record in file.records), *self.found.records)
        checksums = Checksums(records)
        trained = {param: shape for own in self.buffers for param, shape in own.items()}
        merged = self.ranks.module(checksums)
        module = self._completed(merged.module, trained)
        states, dropped = self._states(module, trained)
        strays = [f"not part of the checkpoint, left alone: zero/{stray}" for stray in self.found.strays]
        roles = [(file.path, file.name.label) for file in files]
        roles.append((self.shared.path, "what all parameters share"))
        dp = self.model.root.get("dp_world_size")
        return Index(
            path=str(Path(self.model.path).parent),
            format=name,
            evidence=evidence,
            producer=producer_of(self.model.root),
            topology=Topology(
                dp=dp if type(dp) is int and dp > 0 else 1, tp=self.ranks.tp, pp=self.ranks.pp, zero=self._stage()
            ),
            step=step_of(self.model.root),
            skipped=step_of(self.model.root, "skipped_steps") or 0,
            atoms=atoms_of(module, states, self.config),
            groups=tuple(self._groups()),
            aliases=module.aliases,
            extras=joined((*merged.optimizer.extras, *self._extras()), module.extras),
            files=tuple(source_files([*roles, *self.found.files])),
            records=records,
            notes=(*module.notes, *notes, *strays),
            dropped=(*module.dropped, *dropped),
            recorded_in={"every axis": "folders of zero/: one per parameter, with tensors that are whole"},
        )

    @property
    def config(self) -> RunConfig:
        """Configuration of the run that it was made from."""
        found = self.model.root.get("ds_config")
        return RunConfig(found if isinstance(found, dict) else {})

    def _stage(self) -> int | None:
        """ZeRO stage of the run that it was made from, where that is known."""
        saved = self.shared.root.get("zero_stage")
        section = self.config.raw.get("zero_optimization")
        configured = section.get("stage") if isinstance(section, dict) else None
        stage = configured if saved is None else number_of_enum(saved, f"zero_stage of {self.shared.path}")
        return stage if type(stage) is int and 0 <= stage <= 3 else None

    def _completed(self, part: ModulePart, trained: Mapping[str, Shape]) -> ModulePart:
        """The module as the model-states files have it, and what only `zero/` has."""
        buffers = self.model.root.get("buffer_names")
        for name, own in self.found.states.items():
            if name in part.entries or name in part.aliases or name in trained or WEIGHT not in own:
                continue
            weight = own[WEIGHT]
            kind = Kind.FROZEN if len(own) == 1 else Kind.PARAMETER
            if isinstance(buffers, list) and name in buffers:
                kind = Kind.BUFFER
            part.entries[name] = ModuleEntry(kind=kind, shape=weight.global_shape, dtype=weight.dtype, tensor=None)
        self._use_merged_shapes(part, trained)
        return part

    def _use_merged_shapes(self, part: ModulePart, trained: Mapping[str, Shape]) -> None:
        """Parameters whose merged tensor is smaller than the module's, as the padding of a vocabulary is cut off."""
        for name in trained.keys() & part.entries.keys():
            own, entry = self.found.states.get(name, {}).get(WEIGHT), part.entries[name]
            if own is not None and own.global_shape != entry.shape:
                part.entries[name] = replace(entry, shape=own.global_shape, tensor=None)
                sizes = f"{list(own.global_shape)} in zero/ and {list(entry.shape)} in the module"
                part.notes.append(f"{name} is {sizes}: its padding is cut off")

    def _states(
        self, module: ModulePart, trained: Mapping[str, Shape]
    ) -> tuple[dict[str, dict[str, StateIndex]], list[str]]:
        """States to take from `zero/`, and what of it is a lesser copy of something else."""
        states: dict[str, dict[str, StateIndex]] = {}
        dropped: list[str] = []
        for name, own in self.found.states.items():
            entry = module.entries.get(name)
            if name in module.aliases:
                dropped.append(f"zero/{name}/: a copy of {module.aliases[name]}, to which it is tied")
            elif name in trained or entry is None or entry.tensor is None:
                states[name] = own
            else:
                dropped.append(
                    f"zero/{name}/: a cast of the {entry.kind.value} tensor in {self.model.name.name}, which is taken"
                )
        counts, lost = self._counts()
        for name, extra in counts.items():
            for key, state in extra.items():
                states.get(name, {}).setdefault(key, state)
        return states, dropped + lost

    def _counts(self) -> tuple[dict[str, dict[str, StateIndex]], list[str]]:
        """Numbers per parameter that ZeRO-3's converter leaves in `optimizer_state.pt`, in the states of rank 0."""
        where = f"optimizer_state_dict of {self.shared.path}"
        inner = self.shared.root.get("optimizer_state_dict")
        if not isinstance(inner, dict):
            return {}, []
        found: dict[str, dict[str, StateIndex]] = {}
        tensors = False
        for number, own in mapping(inner.get("state", {}), where).items():
            at = integer(number, where)
            buffers = self.buffers if at == 0 and len(inner["state"]) == 1 else self.buffers[at : at + 1]
            for key, value in mapping(own, where).items():
                tensors = tensors or (isinstance(value, TensorRef) and bool(value.shape))
                state = scalar_state(value)
                if state is not None:
                    for name in (name for shapes_ in buffers for name in shapes_):
                        found.setdefault(name, {})[str(key)] = state
        lost = ["optimizer_state.pt: tensors of rank 0, which are in zero/ too"] if tensors else []
        return found, lost

    def _groups(self) -> list[ParamGroup]:
        where = f"param_groups of {self.shared.path}"
        saved = self.shared.root.get("param_groups")
        groups = sequence(saved, where) if saved is not None else ()
        if not groups:
            return []
        ranks = self._dealt_over()
        members = sub_group_params(groups, self.buffers, where)
        return [
            ParamGroup(params=dealt_back(own, ranks=ranks), hyper=hyper_parameters(group, where))
            for group, own in zip(groups, members, strict=True)
        ]

    def _dealt_over(self) -> int:
        """Ranks over which `round_robin_gradients` dealt out the names of `param_shapes`; 1 when it did not.

        DeepSpeed's converter cuts the buffers of such a run by `param_slice_mappings`, which are wrong then unless the
        parameters were aligned (0.19.8), and so swaps parameters silently: that is refused.
        """
        counts = self.shared.root.get("partition_count")
        ranks = counts[0] if isinstance(counts, list) and counts else 1
        by_deepspeed = "zero_stage" in self.shared.root and self._stage() in (1, 2)
        if not by_deepspeed or not self.config.round_robin or not isinstance(ranks, int):
            return 1
        paddings = self.shared.root.get("param_alignment_paddings")
        aligned = isinstance(paddings, list) and any(any(own) for own in paddings if isinstance(own, list))
        if not aligned and any(dealt_back(tuple(own), ranks=ranks) != tuple(own) for own in self.buffers):
            raise UnsupportedError(
                f"{self.model.path}: written with round_robin_gradients, which DeepSpeed's converter does not honour: "
                "it has given parameters the elements of others. Read the original checkpoint instead"
            )
        return ranks

    def _extras(self) -> list[Extra]:
        extras = universal_extras(self.shared.root, self.found.info)
        return [*extras, Extra(name="pipeline", value=True)] if self._is_pipeline() else extras

    def _is_pipeline(self) -> bool:
        """Whether it was made from a pipeline: its model-states files have no module, or ucp wrote that it was."""
        models = [file for files in self.ranks.models.values() for file in files.values()]
        bare = bool(models) and all(file.root.get("module", "none is said") is None for file in models)
        return bare or self.shared.root.get("pipeline") is True
