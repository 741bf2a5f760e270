"""Target `dcp`: a folder that `torch.distributed.checkpoint.load` reads into a model of any parallelism.

    DST/__0_0.distcp ...     items of rank 0: a chunk of every tensor, as FSDP shards it over the ranks of --topology
    DST/.metadata            which item is in which file

Keys are those of `get_state_dict`: `model.<name>`, `optimizer.state.<name>.exp_avg`, and the settings of groups by
number (`--set style=nested`, the default) or by parameter (`flattened`, for pipelines). `torchtitan` is `flattened`
without `model.`; `accelerate` has model and optimizer in folders of their own; `lightning` has other names for both;
`source` keeps the keys of a source that torch.distributed.checkpoint saved. Scripts ignore keys that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ucp.contract.optimizer import OptimizerPlan, find_missing_states
from ucp.contract.protocols import Target
from ucp.contract.registry import run_extras
from ucp.contract.run_extras import LR_SCHEDULER
from ucp.contract.sidecars import add_sidecars, list_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import (
    STEP,
    WEIGHT,
    AtomIndex,
    Extra,
    Index,
    Kind,
    OptimizerKeys,
    ParamGroup,
    StateDictKeys,
    StateIndex,
)
from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice, TargetOptions, TargetPlan
from ucp.core.tensor import DType, TensorRef
from ucp.core.topology import Topology
from ucp.errors import MisfitError, UsageError, format_count
from ucp.io.dcp.emit import DcpDraft, NewChunk
from ucp.io.dcp.metadata import METADATA
from ucp.io.torch_file.draft import FileDraft, FinishedFile, Part, make_target_plan
from ucp.transfer.probe import Prober
from ucp_formats.torch.extras import STEP_KEYS, TRAIN_STATE, extra_paths
from ucp_formats.torch.locate import MODEL, OPTIMIZER
from ucp_formats.torch.settings import (
    DECOUPLED,
    DECOUPLED_HELP,
    check_options,
    count_tensor,
    decoupled_option,
    is_adam,
    setting_notes,
    settings_of,
)
from ucp_formats.torch.sharding import TargetSharding

_SOURCE = "source"
_STYLES = ("nested", "flattened", "torchtitan", "accelerate", "lightning", _SOURCE)
_OPTIMIZER = "optimizer"

_ROOTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "torchtitan": ((), _OPTIMIZER),
    "lightning": (("state_dict",), "optimizer_0"),
}
"""Keys to the model and key of the optimizer, if they are not `model` and `optimizer`."""

_META = "meta.pt"
"""What Lightning saves beside model and optimizers (2.6, `pytorch/strategies/model_parallel.py`)."""
_LIGHTNING_SCHEDULERS = "lr_schedulers"
"""Key of Lightning's list of schedulers; the run's scheduler is written as a list of one."""
_LIGHTNING = "pytorch-lightning_version"
"""Key that every checkpoint of Lightning has."""

_OF_CLIENTS = frozenset({"trainer_state.json", "scheduler.bin"})
"""Files that the Trainer and accelerate save beside a checkpoint."""


_SETTINGS = {"style": f"keys of the state dict: {', '.join(_STYLES)}", DECOUPLED: DECOUPLED_HELP}


class DcpTarget(Target):
    """Target `dcp`."""

    name = "dcp"
    also_called = ("fsdp", "fsdp1", "fsdp2", "hsdp", "torchtitan", "accelerate", "lightning")
    settings = _SETTINGS
    resumes = True
    scheduler = LR_SCHEDULER
    keeps_extras_of = ("dcp",)
    takes_replicas = True

    def scheduler_of(self, settings: Mapping[str, str]) -> str | None:
        """The scheduler's extra; None for accelerate, which loads schedulers from files of its own."""
        return None if settings.get("style") == "accelerate" else self.scheduler

    def takes_family(self, topology: Topology | None) -> bool:
        """Whether a family is needed: only for tensor parallelism."""
        return topology is not None and topology.tp > 1

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files for the ranks of `topology`; by default those of the source. Raises UsageError, MissingStateError."""
        check_options(options, {"style": _STYLES})
        style = options.settings.get("style", _STYLES[0])
        check_weights(index)
        topology = _target_topology(index, topology)
        with Prober() as prober:
            sharding = TargetSharding(index, topology, options)
            draft = _DcpTargetDraft(index, options, style, sharding, prober)
            draft.add_model()
            draft.add_optimizer()
            draft.add_extras()
        plan = make_target_plan(index, draft.finish(), notes=draft.notes, topology=topology, axes_of=sharding.axes)
        metadata = tuple(file.path for file in plan.files if file.path.rpartition("/")[2] == METADATA)
        plan = replace(plan, last=metadata, casts=(*plan.casts, *draft.counts.casts), dropped=tuple(draft.dropped))
        return add_sidecars(index, plan)


def _target_topology(index: Index, topology: Topology | None) -> Topology:
    """Ranks that tensors are sharded over. Raises UsageError for axes that do not matter to DCP."""
    if topology is None:
        saved = index.topology
        replicate, shard = (saved.replicas, saved.shards * saved.cp) if saved.is_split else (None, None)
        return Topology(dp=saved.dp * saved.cp, dp_replicate=replicate, dp_shard=shard, tp=saved.tp, pp=saved.pp)
    idle = [axis for axis in ("ep", "cp", "vpp") if getattr(topology, axis) > 1]
    idle += [axis for axis in ("zero", "etp") if getattr(topology, axis) is not None]
    if idle:
        raise UsageError(
            "expected dp (or dp_replicate and dp_shard), tp and pp in --topology for dcp; got " + ", ".join(idle)
        )
    return topology


class _DcpTargetDraft:
    """The checkpoint while it is laid out."""

    def __init__(
        self, index: Index, options: TargetOptions, style: str, sharding: TargetSharding, prober: Prober
    ) -> None:
        self._index = index
        self._dtypes = options.dtypes
        self._style = style
        self._keys = _keys_of(index, style)
        self._decoupled = decoupled_option(index, options)
        self._sharding = sharding
        self.counts = OptimizerPlan(index, prober)
        folders = (MODEL, OPTIMIZER) if style == "accelerate" else ("",)
        self._drafts = [DcpDraft(folder) for folder in folders]
        self.notes: list[str] = [*sharding.notes]
        self.dropped: list[str] = []

    def finish(self) -> list[FinishedFile]:
        """All files."""
        files = [file for draft in self._drafts for file in draft.finish()]
        return [*files, *self._lightning_meta()] if self._style == "lightning" else files

    def _lightning_meta(self) -> list[FinishedFile]:
        """`meta.pt`, made from what Lightning's other checkpoints hold; nothing if the source has the file itself.

        Raises MisfitError if Lightning did not save the source.
        """
        if any(file.name == _META for file in list_sidecars(self._index)):
            return []
        values = _lightning_values(self._index)
        if _LIGHTNING not in values:
            raise MisfitError(
                f"Lightning cannot load a distributed checkpoint without {_META}, which holds its epochs, loops and "
                f"schedulers; {self._index.path} has neither that file nor these values ({_LIGHTNING}): Lightning did "
                "not save it, or they were left out (--companions none, drop=). Write another style, and load it in a "
                "callback of Lightning (docs/how-to/resume-in-a-client.md)"
            )
        draft = FileDraft(_META)
        return [draft.finish({name: draft.copy_extra(value) for name, value in values.items()})]

    def _draft_of(self, path: tuple[object, ...]) -> DcpDraft:
        """The checkpoint that an entry belongs to: accelerate saves the optimizer as a separate one."""
        return self._drafts[-1 if path[0] == _OPTIMIZER else 0]

    def add_model(self) -> None:
        """Add parameters and buffers, under every name they have."""
        names = {name: name for name in self._index.atoms} | dict(self._index.aliases)
        for name, first in names.items():
            self._add_state((*self._keys.model, self._keys.params.get(name, name)), self._index.atoms[first], WEIGHT)

    def add_optimizer(self) -> None:
        """Add states and groups."""
        groups = self._index.groups
        owners = {
            name: keys for keys in self._keys.optimizers for group in keys.groups for name in groups[group].params
        }
        for atom in self._index.atoms.values():
            keys = owners.get(atom.name, self._keys.optimizers[0])
            name = str(keys.params.get(atom.name, atom.name))
            for state in atom.states:
                if state != WEIGHT:
                    path = (f"state.{name}.{state}",) if keys.is_flat else ("state", name, state)
                    self._add_state((*keys.root, *path), atom, state)
        for keys in self._keys.optimizers:
            for number, group in enumerate(keys.groups):
                self._add_group(keys, number, groups[group])
        self.notes += setting_notes(self._index, self._decoupled)
        self.notes += _missing_state_notes(self._index)

    def _add_group(self, keys: OptimizerKeys, number: int, group: ParamGroup) -> None:
        settings = settings_of(group, is_decoupled=self._decoupled != "false")
        names = [keys.params.get(name, name) for name in group.params]
        if not keys.is_flat:
            for key, value in (*settings.items(), ("params", names)):
                self._add_value((*keys.root, "param_groups", number, key), value)
            return
        for name in names:
            for key, value in settings.items():
                self._add_value((*keys.root, f"param_groups.{name}.{key}"), value)

    def add_extras(self) -> None:
        """Add the extras that the style has keys for, and the step of the run."""
        index = self._index
        has_room = self._style not in ("accelerate", "lightning")  # which keep extras in files of their own
        in_meta = [extra.name for extra in _client_extras(index)] if self._style == "lightning" else []
        dropped: set[str] = set()
        names: set[object] = set()
        for extra, path in extra_paths(index, DcpTarget.keeps_extras_of, self._keys.model, has_room=has_room):
            if path is not None:
                names.add(path[0])
                self._add_nested(path, extra.value)
            elif extra.rank is not None or extra.name not in in_meta:
                is_step = extra.name.rpartition("/")[2] == STEP and extra.value == index.step
                dropped |= {extra.name} if not (has_room and is_step) else set()
        if index.step is not None and has_room and names.isdisjoint((TRAIN_STATE, *STEP_KEYS)):
            self._add_value((STEP,), index.step)
        if dropped:
            names_of_dropped = ", ".join(sorted(dropped))
            self.dropped.append(
                "extras (what the run saved beside model and optimizer) that --set "
                f"style={self._style} has no keys for: {names_of_dropped}"
            )
        clients = {file.name for file in list_sidecars(index)} & _OF_CLIENTS
        if clients and self._style != "accelerate":
            files = ", ".join(sorted(clients))
            self.notes.append(
                f"{files} in the source: to resume with the Trainer or accelerate, pass --set style=accelerate"
            )
        if self._style == "torchtitan" and TRAIN_STATE not in {extra.name for extra in index.extras}:
            self.notes.append(
                "the source has no train_state and no dataloader, which torchtitan loads by default: name both in its "
                "--checkpoint.exclude_from_loading"
            )

    def _add_nested(self, path: tuple[object, ...], value: object) -> None:
        """Add a value of a state dict: dicts, and lists with dicts or tensors, are opened as torch does it.

        Source: torch 2.13, `torch/distributed/checkpoint/_traverse.py`.
        """
        if isinstance(value, dict):
            for key, item in value.items():
                self._add_nested((*path, str(key)), item)
        elif isinstance(value, list) and any(isinstance(item, dict | list | TensorRef) for item in value):
            for number, item in enumerate(value):
                self._add_nested((*path, number), item)
        elif isinstance(value, TensorRef):
            chunk = NewChunk(offsets=(0,) * len(value.shape), sizes=value.shape, ref=value, rank=self._sharding.rank())
            self._add_tensor(path, value.dtype, value.shape, [chunk])
        else:
            self._add_value(path, value)

    def _add_value(self, path: tuple[object, ...], value: object) -> None:
        draft, key = self._draft_of(path), _key(path)
        draft.add_value(key, value, rank=0)
        draft.set_path(key, path)

    def _add_tensor(
        self, path: tuple[object, ...], dtype: DType, shape: tuple[int, ...], chunks: list[NewChunk]
    ) -> None:
        draft, key = self._draft_of(path), _key(path)
        draft.add_tensor(key, dtype, shape, chunks)
        draft.set_path(key, path)

    def _add_state(self, path: tuple[object, ...], atom: AtomIndex, name: str) -> None:
        state = atom.states[name]
        if atom.is_count(name):
            dtype, data = count_tensor(self._index, self.counts, atom.name, name)
            self._add_tensor(
                path, dtype, (), [NewChunk(offsets=(), sizes=(), data=data, rank=self._sharding.rank(atom.name))]
            )
            return
        dtype = atom.dtype_of(name, self._dtypes)
        self._add_tensor(path, dtype, state.global_shape, list(self._chunks(atom, name, state, dtype)))

    def _chunks(self, atom: AtomIndex, name: str, state: StateIndex, dtype: DType) -> Iterator[NewChunk]:
        layout = self._sharding.layout(atom, state.global_shape)
        for box, rank in self._sharding.chunks(atom, state.global_shape):
            part = Part(offset=0, slice=_slice(atom.name, name, dtype, box), layout=layout)
            yield NewChunk(offsets=box.offsets, sizes=box.sizes, parts=(part,), rank=rank)


def _keys_of(index: Index, style: str) -> StateDictKeys:
    """Keys to model and optimizers. Raises UsageError if the source has no keys that could be kept."""
    groups = tuple(range(len(index.groups)))
    if style != _SOURCE:
        model, root = _ROOTS.get(style, (("model",), _OPTIMIZER))
        keys = OptimizerKeys(root=(root,), is_flat=style in ("flattened", "torchtitan"), groups=groups)
        return StateDictKeys(model=model, optimizers=(keys,))
    if index.keys is None:
        raise UsageError(
            f"{index.path} has no keys that --set style={_SOURCE} could keep: expected one folder of "
            "torch.distributed.checkpoint, whose optimizers name parameters or number them in the order of their "
            f"groups. Choose another style: {', '.join(_STYLES[:-1])}"
        )
    if groups and groups == tuple(sorted(group for keys in index.keys.optimizers for group in keys.groups)):
        return index.keys
    return replace(index.keys, optimizers=(OptimizerKeys(root=(_OPTIMIZER,), groups=groups),))


def _client_extras(index: Index) -> list[Extra]:
    """What the training script, or a client such as Lightning, saved beside model and optimizer on all ranks."""
    name = run_extras(index).client
    extras = (extra for extra in index.extras if extra.rank is None and not extra.is_sidecar)
    return [extra for extra in extras if not name or extra.name == name]


def _lightning_values(index: Index) -> dict[object, object]:
    """Key to value of what Lightning saved beside model and optimizers."""
    client = run_extras(index).client
    extras = _client_extras(index)
    for extra in extras:
        if client and isinstance(extra.value, dict):
            return extra.value
    values: dict[object, object] = {}
    for extra in extras:
        is_scheduler = extra.name == LR_SCHEDULER
        values[_LIGHTNING_SCHEDULERS if is_scheduler else extra.name] = [extra.value] if is_scheduler else extra.value
    return values


def _slice(param: str, state: str, dtype: DType, box: Box) -> Slice:
    pair = RegionPair(box, Box.full(box.sizes))
    return Slice(param=param, state=state, dtype=dtype, pairs=(pair,), local_shape=box.sizes, start=0, stop=box.numel)


def _key(path: tuple[object, ...]) -> str:
    """The flat key of a path, as torch joins it."""
    return ".".join(map(str, path))


def _missing_state_notes(index: Index) -> Iterator[str]:
    """States that torch asks for and the source does not have."""
    in_groups = (index.atoms[name] for group in index.groups for name in group.params)
    trained = [atom for atom in in_groups if atom.kind is Kind.PARAMETER]
    of_adam = (STEP, "exp_avg", "exp_avg_sq") if any(map(is_adam, index.groups)) else ()
    bare = list(find_missing_states({atom.name: atom.states for atom in trained}, of_adam))
    if bare:
        yield (
            f"{format_count(len(bare), 'trained parameter lacks', 'trained parameters lack')} optimizer states, such "
            f"as {bare[0]}: torch.distributed.checkpoint.load fails if the optimizer expects states that are missing; "
            "load with DefaultLoadPlanner(allow_partial_load=True)"
        )
