"""Target `dcp`: a folder that `torch.distributed.checkpoint.load` reads into a model of any parallelism.

    DST/__0_0.distcp ...     items of rank 0: a chunk of every tensor, as FSDP cuts it over the ranks of --topology
    DST/.metadata            where they lie

Keys are those of `get_state_dict`: `model.<name>`, `optimizer.state.<name>.exp_avg`, and the groups either by number
(`--set style=nested`, the default) or by parameter (`flattened`, for pipelines; `torchtitan` has no `model.` before
names besides); `accelerate` has model and optimizer in folders of their own, and `lightning` other names for both;
`source` keeps the keys of a source that torch.distributed.checkpoint saved. A script asks for the keys that it knows;
what else is there does no harm.

torch asks for every setting that its optimizer has, so that those which another framework lacks are written as torch
has them by default (torch 2.13, `torch/optim/adamw.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ucp.contract.optimizer import OptimizerPlan, find_missing_states
from ucp.contract.protocols import Target
from ucp.contract.registry import run_extras
from ucp.contract.run_extras import LR_SCHEDULER, MODULE_STATE
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
from ucp.errors import MisfitError, UsageError, counted
from ucp.io.dcp.emit import DcpDraft, NewChunk
from ucp.io.dcp.metadata import METADATA
from ucp.io.torch_file.draft import Drafted, FileDraft, Part, target_plan
from ucp.transfer.probe import Prober
from ucp_formats.torch.cuts import Cuts
from ucp_formats.torch.locate import MODEL, OPTIMIZER, STEP_KEYS, TRAIN_STATE
from ucp_formats.torch.settings import (
    DECOUPLED,
    DECOUPLED_MEANING,
    check_options,
    checked_decoupled,
    count_tensor,
    decay_notes,
    is_adam,
    rate_notes,
    settings_of,
)

_SOURCE = "source"
_STYLES = ("nested", "flattened", "torchtitan", "accelerate", "lightning", _SOURCE)
_OPTIMIZER = "optimizer"

_ROOTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "torchtitan": ((), _OPTIMIZER),
    "lightning": (("state_dict",), "optimizer_0"),
}
"""Keys to the model and key of the optimizer, where they are not `model` and `optimizer`."""

_META = "meta.pt"
"""What Lightning saves beside model and optimizers (2.6, `pytorch/strategies/model_parallel.py`)."""
_LIGHTNING_SCHEDULERS = "lr_schedulers"
"""Key of Lightning's list of schedulers; a list of one was taken for the run's scheduler when the source was read."""
_LIGHTNING = "pytorch-lightning_version"
"""Key that every checkpoint of Lightning has."""

_OF_CLIENTS = frozenset({"trainer_state.json", "scheduler.bin"})
"""Files of the Trainer and of accelerate, which lie beside a checkpoint of theirs."""

_SETTINGS = {
    "style": f"keys of the state dict: {', '.join(_STYLES)}",
    DECOUPLED: DECOUPLED_MEANING,
}


class DcpTarget(Target):
    """Target `dcp`."""

    name = "dcp"
    also_called = ("fsdp", "fsdp1", "fsdp2", "hsdp", "torchtitan", "accelerate", "lightning")
    settings = _SETTINGS
    resumes = True
    scheduler = LR_SCHEDULER
    keeps_extras_of = ("dcp",)
    takes_replicas = True

    def takes_family(self, topology: Topology | None) -> bool:
        """For the cuts of tensor parallelism."""
        return topology is not None and topology.tp > 1

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files for the ranks of `topology`; by default those of the source. Raises UsageError, MissingStateError."""
        style = _checked_style(options)
        check_weights(index)
        wanted = _checked_topology(index, topology)
        with Prober() as prober:
            cuts = Cuts(index, wanted, options)
            draft = _Drafting(index, options, style, cuts, prober)
            draft.model()
            draft.optimizer()
            draft.others()
        plan = target_plan(index, draft.finish(), notes=draft.notes, topology=wanted, axes_of=cuts.axes)
        metadata = tuple(own.path for own in plan.files if own.path.rpartition("/")[2] == METADATA)
        plan = replace(plan, last=metadata, casts=(*plan.casts, *draft.counts.casts), dropped=tuple(draft.dropped))
        return add_sidecars(index, plan)


def _checked_topology(index: Index, topology: Topology | None) -> Topology:
    """Ranks that tensors are cut over. Raises UsageError for axes that mean nothing here."""
    if topology is None:
        saved = index.topology
        split = {"dp_replicate": saved.replicas, "dp_shard": saved.shards * saved.cp} if saved.is_split else {}
        return Topology(**(split or {"dp": saved.dp * saved.cp}), tp=saved.tp, pp=saved.pp)
    idle = [own for own in ("ep", "cp", "vpp") if getattr(topology, own) > 1]
    idle += [own for own in ("zero", "etp") if getattr(topology, own) is not None]
    if idle:
        raise UsageError(
            "expected dp (or dp_replicate and dp_shard), tp and pp in --topology for dcp; got " + ", ".join(idle)
        )
    return topology


def _checked_style(options: TargetOptions) -> str:
    check_options(options, {"style": _STYLES})
    return options.settings.get("style", _STYLES[0])


class _Drafting:
    """A checkpoint in the making."""

    def __init__(self, index: Index, options: TargetOptions, style: str, cuts: Cuts, prober: Prober) -> None:
        self._index = index
        self._dtypes = options.dtypes
        self._style = style
        self._keys = _keys_of(index, style)
        self._decoupled = checked_decoupled(index, options)
        self._cuts = cuts
        self.counts = OptimizerPlan(index, prober)
        folders = (MODEL, OPTIMIZER) if style == "accelerate" else ("",)
        self._drafts = [DcpDraft(folder) for folder in folders]
        self.notes: list[str] = [*cuts.notes]
        self.dropped: list[str] = []

    def finish(self) -> list[Drafted]:
        """All files."""
        files = [own for draft in self._drafts for own in draft.finish()]
        return [*files, *self._lightning_meta()] if self._style == "lightning" else files

    def _lightning_meta(self) -> list[Drafted]:
        """`meta.pt`, out of the extras that Lightning saved elsewhere; none where the source has the file itself.

        Raises MisfitError where Lightning did not save the source.
        """
        if any(own.name == _META for own in list_sidecars(self._index)):
            return []
        values = _lightning_values(self._index)
        if _LIGHTNING not in values:
            raise MisfitError(
                f"Lightning loads no distributed checkpoint without {_META}, which holds its epochs, loops and "
                f"schedulers; {self._index.path} has neither that file nor these values ({_LIGHTNING}): Lightning did "
                "not save it, or they were left out (--companions none, drop=). Write another style, and bring it into "
                "the run by a callback of Lightning (docs/how-to/resume-in-a-client.md)"
            )
        draft = FileDraft(_META)
        return [draft.finish({name: draft.carried(value) for name, value in values.items()})]

    def _out(self, path: tuple[object, ...]) -> DcpDraft:
        """The checkpoint that an entry is of: accelerate has the optimizer in one of its own."""
        return self._drafts[-1 if path[0] == _OPTIMIZER else 0]

    def model(self) -> None:
        """Parameters and buffers, under every name they have."""
        names = {name: name for name in self._index.atoms} | dict(self._index.aliases)
        for name, first in names.items():
            self._state((*self._keys.model, self._keys.params.get(name, name)), self._index.atoms[first], WEIGHT)

    def optimizer(self) -> None:
        """States and groups."""
        owners = {
            name: own for own in self._keys.optimizers for at in own.groups for name in self._index.groups[at].params
        }
        for atom in self._index.atoms.values():
            keys = owners.get(atom.name, self._keys.optimizers[0])
            name = str(keys.params.get(atom.name, atom.name))
            for state in atom.states:
                if state != WEIGHT:
                    path = (f"state.{name}.{state}",) if keys.is_flat else ("state", name, state)
                    self._state((*keys.root, *path), atom, state)
        for keys in self._keys.optimizers:
            for number, at in enumerate(keys.groups):
                self._group(keys, number, self._index.groups[at])
        self.notes += _group_notes(self._index)
        self.notes += decay_notes(self._index, self._decoupled)

    def _group(self, keys: OptimizerKeys, number: int, group: ParamGroup) -> None:
        settings = settings_of(group, is_decoupled=self._decoupled != "false")
        names = [keys.params.get(name, name) for name in group.params]
        if not keys.is_flat:
            for key, value in (*settings.items(), ("params", names)):
                self._value((*keys.root, "param_groups", number, key), value)
            return
        for name in names:
            for key, value in settings.items():
                self._value((*keys.root, f"param_groups.{name}.{key}"), value)

    def others(self) -> None:
        """What is neither, as far as it is no other framework's."""
        is_ours = (self._index.origin or self._index.format) in DcpTarget.keeps_extras_of
        has_room = self._style not in ("accelerate", "lightning")  # which keep all of them in files of their own
        in_meta = [own.name for own in _client_extras(self._index)] if self._style == "lightning" else []
        left = []
        for extra in (own for own in self._index.extras if not own.is_sidecar):
            is_scheduler = extra.name == LR_SCHEDULER and isinstance(extra.value, dict)
            if extra.rank is None and extra.name.startswith(MODULE_STATE):
                self._nested((*self._keys.model, extra.name.removeprefix(MODULE_STATE)), extra.value)
            elif extra.rank is None and has_room and (is_ours or is_scheduler):
                self._nested((extra.name,), extra.value)
            elif (extra.rank is not None or extra.name not in in_meta) and not (has_room and self._is_the_step(extra)):
                left.append(extra.name)
        has_step = is_ours and any(extra.name in (TRAIN_STATE, *STEP_KEYS) for extra in self._index.extras)
        if self._index.step is not None and not has_step and has_room:
            self._value((STEP,), self._index.step)
        if left:
            names = ", ".join(sorted(set(left)))
            self.dropped.append(f"extras that the style {self._style} has no keys for: {names}")
        clients = {own.name for own in list_sidecars(self._index)} & _OF_CLIENTS
        if clients and self._style != "accelerate":
            names = ", ".join(sorted(clients))
            self.notes.append(f"{names} beside: the Trainer and accelerate load what --set style=accelerate writes")
        if self._style == "torchtitan" and "train_state" not in {own.name for own in self._index.extras}:
            self.notes.append(
                "no train_state and dataloader in the source: a run of torchtitan asks for them; name them in "
                "--checkpoint.exclude_from_loading"
            )

    def _is_the_step(self, extra: Extra) -> bool:
        """Whether an extra is the step of the run, which is written as such."""
        return extra.name.rpartition("/")[2] == STEP and extra.value == self._index.step

    def _nested(self, path: tuple[object, ...], value: object) -> None:
        """A value of a state dict: dicts, and lists with dicts or tensors, are taken apart as torch does it.

        Source: torch 2.13, `torch/distributed/checkpoint/_traverse.py`.
        """
        if isinstance(value, dict):
            for key, own in value.items():
                self._nested((*path, str(key)), own)
        elif isinstance(value, list) and any(isinstance(own, dict | list | TensorRef) for own in value):
            for number, own in enumerate(value):
                self._nested((*path, number), own)
        elif isinstance(value, TensorRef):
            chunk = NewChunk(offsets=(0,) * len(value.shape), sizes=value.shape, ref=value, rank=self._cuts.rank())
            self._put(path, value.dtype, value.shape, [chunk])
        else:
            self._value(path, value)

    def _value(self, path: tuple[object, ...], value: object) -> None:
        self._out(path).value(_key(path), value, rank=0)
        self._out(path).path(_key(path), path)

    def _put(self, path: tuple[object, ...], dtype: DType, shape: tuple[int, ...], chunks: list[NewChunk]) -> None:
        self._out(path).tensor(_key(path), dtype, shape, chunks)
        self._out(path).path(_key(path), path)

    def _state(self, path: tuple[object, ...], atom: AtomIndex, name: str) -> None:
        state = atom.states[name]
        if atom.is_count(name):
            dtype, data = count_tensor(self._index, self.counts, atom.name, name)
            self._put(path, dtype, (), [NewChunk(offsets=(), sizes=(), data=data, rank=self._cuts.rank(atom.name))])
            return
        dtype = atom.dtype_of(name, self._dtypes)
        self._put(path, dtype, state.global_shape, list(self._chunks(atom, name, state, dtype)))

    def _chunks(self, atom: AtomIndex, name: str, state: StateIndex, dtype: DType) -> Iterator[NewChunk]:
        layout = self._cuts.layout(atom, state.global_shape)
        for box, rank in self._cuts.chunks(atom, state.global_shape):
            part = Part(offset=0, slice=_slice(atom.name, name, dtype, box), layout=layout)
            yield NewChunk(offsets=box.offsets, sizes=box.sizes, parts=(part,), rank=rank)


def _keys_of(index: Index, style: str) -> StateDictKeys:
    """Where model and optimizers go. Raises UsageError where the source has no keys that could be kept."""
    every = tuple(range(len(index.groups)))
    if style != _SOURCE:
        model, root = _ROOTS.get(style, (("model",), _OPTIMIZER))
        keys = OptimizerKeys(root=(root,), is_flat=style in ("flattened", "torchtitan"), groups=every)
        return StateDictKeys(model=model, optimizers=(keys,))
    if index.keys is None:
        raise UsageError(
            f"{index.path} has no keys that --set style={_SOURCE} could keep: expected one folder of "
            "torch.distributed.checkpoint, whose optimizers name parameters or number them in the order of their "
            f"groups. Choose another style: {', '.join(_STYLES[:-1])}"
        )
    kept = sorted(at for own in index.keys.optimizers for at in own.groups)
    if tuple(kept) == every and kept:
        return index.keys
    return replace(index.keys, optimizers=(OptimizerKeys(root=(_OPTIMIZER,), groups=every),))


def _client_extras(index: Index) -> list[Extra]:
    """What the training script, or a client such as Lightning, saved beside model and optimizer on all ranks."""
    name = run_extras(index).client
    extras = (own for own in index.extras if own.rank is None and not own.is_sidecar)
    return [own for own in extras if not name or own.name == name]


def _lightning_values(index: Index) -> dict[object, object]:
    """Key to value of what Lightning saved beside model and optimizers."""
    client = run_extras(index).client
    extras = _client_extras(index)
    values = [own.value for own in extras if client and isinstance(own.value, dict)]
    if values:
        return values[0]
    names = {LR_SCHEDULER: _LIGHTNING_SCHEDULERS}
    return {names.get(own.name, own.name): [own.value] if own.name in names else own.value for own in extras}


def _slice(param: str, state: str, dtype: DType, box: Box) -> Slice:
    pair = RegionPair(box, Box.full(box.sizes))
    return Slice(param=param, state=state, dtype=dtype, pairs=(pair,), local_shape=box.sizes, start=0, stop=box.numel)


def _key(path: tuple[object, ...]) -> str:
    """The flat key of a path, as torch joins it."""
    return ".".join(map(str, path))


def _group_notes(index: Index) -> Iterator[str]:
    """What torch asks for and the source does not have."""
    yield from rate_notes(index)
    in_groups = (index.atoms[name] for group in index.groups for name in group.params)
    trained = [atom for atom in in_groups if atom.kind is Kind.PARAMETER]
    of_adam = (STEP, "exp_avg", "exp_avg_sq") if any(map(is_adam, index.groups)) else ()
    bare = list(find_missing_states({atom.name: atom.states for atom in trained}, of_adam))
    if bare:
        yield (
            f"{counted(len(bare), 'trained parameter', 'trained parameters')} without all optimizer states, such as "
            f"{bare[0]}: "
            "torch.distributed.checkpoint.load stops at a state that it asks for and does not find; load with "
            "DefaultLoadPlanner(allow_partial_load=True)"
        )
