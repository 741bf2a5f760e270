"""Parses model-states files and locates the tensors of the module: trained and frozen parameters, buffers, tied names.

ZeRO up to stage 2 saves full tensors in one file. ZeRO-3 saves a file per rank, where `module` has the buffers and an
empty placeholder for each parameter; of each frozen parameter, every rank saves a chunk.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod

from ucp.contract.layouts import Chunks, chunk_axis
from ucp.contract.ranks import Checksums, make_rank_extras
from ucp.contract.run_extras import MODULE_STATE, is_module_state
from ucp.core.index import Extra, Kind
from ucp.core.layout import Layout
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.union import ShardedTensor, ShardSet, StoredShard
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, format_list
from ucp.io.pickle.fields import (
    Shape,
    describe_value,
    require_integer,
    require_mapping,
    require_sequence,
    require_shapes,
    require_tensor,
    text,
)
from ucp_formats.deepspeed.config import RunConfig
from ucp_formats.deepspeed.names import FileName
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.optimizer.saved import UnshardedOptimizer
from ucp_formats.deepspeed.read.stacks import LAYERS, ExpertStacks

EMPTY_SHAPES = "empty_param_shapes"
"""Key that only ucp writes: the shapes of parameters without elements, which DeepSpeed's stage 3 does not record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModule:
    """A state_dict of a model, of a layer of it, or of experts."""

    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    """Name to tensor, in the order of the model."""
    others: Mapping[str, object] = field(default_factory=dict)
    """Entries that are not tensors."""
    versions: Mapping[object, object] | None = None
    """Versions of the modules, which torch keeps as an attribute of a state_dict."""

    @classmethod
    def of(cls, saved: object, where: str) -> SavedModule:
        """The state_dict `saved`. Raises UnsupportedError if it contains nested dicts."""
        tensors: dict[str, TensorRef] = {}
        others: dict[str, object] = {}
        for key, value in require_mapping(saved, where).items():
            name = text(key, f"a name in {where}")
            if isinstance(value, dict) and not is_module_state(name):
                raise UnsupportedError(
                    f"expected a flat dict of tensors by name in {where}; {name!r} is a nested dict. The training "
                    "script built this state_dict, and only it knows the names of the parameters"
                )
            if isinstance(value, TensorRef) and not is_module_state(name):
                tensors[name] = value
            else:
                others[name] = value
        return cls(tensors=tensors, others=others, versions=getattr(saved, "_metadata", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """A model-states file; names and shapes are those of one model-parallel rank."""

    file: SavedFile
    """The file itself; other values of it become extras."""
    module: SavedModule | None
    """The module; None for a pipeline stage, whose layers are in other files."""
    param_shapes: tuple[Mapping[str, Shape], ...] | None
    """Parameter to shape for every optimizer group (ZeRO-3: sub-group), in its order; None where not recorded."""
    frozen: Mapping[str, Shape]
    """Shapes of frozen parameters, where they are recorded."""
    fragments: Mapping[str, TensorRef]
    """Frozen parameters: under ZeRO-3 the chunk of this rank, flat; else copies of the module's tensors."""
    stacks: ExpertStacks
    """Experts that AutoEP stacked."""
    empty: Mapping[str, Shape]
    """Shapes of parameters without elements, as ucp writes them."""
    shared: Mapping[str, str]
    """Tied name to stored name; only rank 0 records it."""
    buffers: tuple[str, ...] | None
    """Names of buffers; None if that is not recorded."""
    optimizer: UnshardedOptimizer | None
    """The optimizer of a run without ZeRO."""
    config: RunConfig
    """Configuration of the run; empty if there is none."""
    degrees: tuple[int, int] | None
    """Tensor-parallel degree and pipeline stages, recorded since 2026."""

    @classmethod
    def of(cls, file: SavedFile) -> ModelStates:
        """Parse the file. Raises SourceError if a value is not what DeepSpeed writes."""
        root = file.root
        recorded = shapes_by_group(root.get("param_shapes"))
        module, optimizer, buffers = root.get("module"), root.get("optimizer"), root.get("buffer_names")
        if isinstance(optimizer, dict) and "base_optimizer_state" in optimizer:
            optimizer = None  # BF16_Optimizer without ZeRO: the optimizer files hold the same
        config, degrees = root.get("ds_config"), root.get("checkpoint_parallel_dimensions")
        fragments, shared = (
            {text(name, f"a name in {key}"): value for name, value in require_mapping(root[key], key).items()}
            if root.get(key) is not None
            else {}
            for key in ("frozen_param_fragments", "shared_params")
        )
        tensors = module if isinstance(module, dict) else {}
        stacks = ExpertStacks.of(root, file.path)
        shared = {**stacks.router_copies(tensors), **shared}
        return cls(
            file=file,
            module=None if module is None else SavedModule.of(module, "module"),
            param_shapes=recorded,
            frozen=_shapes(root, "frozen_param_shapes"),
            fragments={
                name: require_tensor(ref, f"{name} in frozen_param_fragments") for name, ref in fragments.items()
            },
            stacks=stacks,
            empty=_shapes(root, EMPTY_SHAPES),
            shared={alias: text(name, f"{alias} in shared_params") for alias, name in shared.items()},
            buffers=tuple(map(str, buffers)) if isinstance(buffers, list) else None,
            optimizer=None if optimizer is None else UnshardedOptimizer.of(optimizer, file.name.name, recorded or ()),
            config=RunConfig(config if isinstance(config, dict) else {}),
            degrees=(
                require_integer(degrees.get("tp_degree"), "tp_degree"),
                require_integer(degrees.get("pp_degree"), "pp_degree"),
            )
            if isinstance(degrees, dict)
            else None,
        )

    @property
    def name(self) -> FileName:
        """Name of the file."""
        return self.file.name

    @property
    def groups(self) -> tuple[Mapping[str, Shape], ...]:
        """`param_shapes`; empty if it is not recorded."""
        return self.param_shapes or ()

    @property
    def trained(self) -> dict[str, Shape]:
        """Parameters of all groups."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def untrained(self) -> dict[str, Shape | None]:
        """Buffers and frozen parameters that the file names, with their shapes where they are recorded."""
        return {**dict.fromkeys(self.buffers or ()), **self.frozen}

    @property
    def ranks(self) -> int | None:
        """Data-parallel ranks."""
        return self.count("dp_world_size") or None

    def saved(self, key: str) -> object:
        """What the file records under `key`, as far as it is the same on all ranks."""
        if key == "param_shapes" and self.stacks.by_rank:  # ranks have stacks of different numbers of experts
            shapes = self.stacks.local_shape
            return [{name: shapes(name, shape, 0) for name, shape in group.items()} for group in self.groups]
        return self.stacks if key == LAYERS else self.file.root.get(key)

    def count(self, key: str) -> int | None:
        """The count under `key`, for example of steps or ranks; None if it is not recorded."""
        value = self.file.root.get(key)
        return value if type(value) is int and value >= 0 else None


def shapes_by_group(saved: object) -> tuple[dict[str, Shape], ...] | None:
    """`param_shapes`; a bare dict, as in very old files, is one group."""
    where = "param_shapes"
    if saved is None:
        return None
    groups = [saved] if isinstance(saved, dict) else require_sequence(saved, where)
    return tuple(require_shapes(group, where) for group in groups)


def _shapes(root: Mapping[object, object], key: str) -> dict[str, Shape]:
    saved = root.get(key)
    return {} if saved is None else require_shapes(saved, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """One tensor of the module."""

    kind: Kind
    """Parameter, frozen parameter or buffer."""
    shape: Shape
    """Shape: that of one model-parallel rank's shard before the ranks are merged, the global one after."""
    dtype: DType
    """Dtype of the tensor in the model."""
    tensor: ShardedTensor | None
    """Where its elements are in the model-states files; None if they hold only a placeholder."""


@dataclass(slots=True, kw_only=True)
class ModulePart:
    """Everything that was read from the module."""

    entries: dict[str, ModuleEntry] = field(default_factory=dict)
    """Name to entry, in the order of the model; tied names once."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied name to the name it is stored under."""
    extras: list[Extra] = field(default_factory=list)
    """Values that are not tensors of the model."""
    notes: list[str] = field(default_factory=list)
    """Notes to the user, mostly on assumptions."""
    dropped: list[str] = field(default_factory=list)
    """Names for which the files hold no data, each with the reason."""


def module_of(model: ModelStates) -> SavedModule:
    """The module in a model-states file. Raises MalformedError if the file has none, as for a pipeline stage."""
    if model.module is None:
        raise MalformedError(f"expected a dict for module of {model.file.path}; got None")
    return model.module


def read_module(
    models: Mapping[int, ModelStates],
    trained: Mapping[str, Shape] | None,
    checksums: Checksums,
    *,
    sharded: bool,
    cut: Container[str] = (),
) -> ModulePart:
    """The module of one model-parallel rank; `models`: rank to model-states file, `sharded`: whether ZeRO-3 split it.

    `trained`: shapes of the optimizer's parameters; None while they are unknown, so that every parameter counts as
    frozen. `cut`: parameters of which the module has the part of data-parallel rank 0 alone.
    """
    part = ModulePart()
    model = models[0]
    versions = module_of(model).versions
    if versions is not None:
        part.extras.append(Extra(name="module_metadata", value=versions))
    others = {rank: module_of(file).others for rank, file in models.items()}
    for key in dict.fromkeys(key for values in others.values() for key in values):
        values = {rank: values[key] for rank, values in others.items() if key in values}
        part.extras += make_rank_extras(f"{MODULE_STATE}{key}", values, checksums)
    if model.buffers is None:
        part.notes.append("the checkpoint does not record which tensors are buffers: they count as frozen parameters")
    if sharded:
        _add_sharded(models, trained or {}, checksums, part)
    else:
        _add_unsharded(model, trained or {}, part, cut)
    # stages 2 and 3 record frozen parameters unless the run excludes them
    if model.config.zero_stage in (2, 3) and model.file.root.get("frozen_param_shapes", "absent") is None:
        part.notes.append(
            "this checkpoint has no frozen parameters: the model had none, or they were excluded "
            "(exclude_frozen_parameters)"
        )
    return part


def add_stacks(part: ModulePart, stacks: Mapping[str, ShardedTensor], trained: Container[str]) -> None:
    """Add the experts that AutoEP stacked; all are frozen unless they are `trained`."""
    for name, tensor in stacks.items():
        kind = Kind.PARAMETER if name in trained else Kind.FROZEN
        part.entries[name] = ModuleEntry(kind=kind, shape=tensor.shape, dtype=tensor.dtype, tensor=tensor)


def _add_unsharded(model: ModelStates, trained: Mapping[str, Shape], part: ModulePart, cut: Container[str]) -> None:
    """Add the tensors of stages 0 to 2."""
    tensors = module_of(model).tensors
    _find_ties(tensors, model.shared, trained, part)
    copies: dict[str, list[TensorRef]] = {}
    for alias, name in part.aliases.items():
        if alias in tensors:
            copies.setdefault(name, []).append(tensors[alias])
    buffers = frozenset(model.buffers or ())
    for name, ref in tensors.items():
        if name in part.aliases:
            continue
        kind = Kind.PARAMETER if name in trained else Kind.BUFFER if name in buffers else Kind.FROZEN
        if name in cut:  # the optimizer files of all ranks have the masters
            part.entries[name] = ModuleEntry(kind=kind, shape=trained[name], dtype=ref.dtype, tensor=None)
            continue
        if trained.get(name, ref.shape) != ref.shape:
            raise MalformedError(
                f"expected {name} with shape {list(trained[name])}, as in param_shapes, in module of "
                f"{model.file.path}; got {describe_value(ref)}"
            )
        fragment = model.fragments.get(name)
        if fragment is not None and fragment.shape == ref.shape and fragment.numel:
            copies.setdefault(name, []).insert(0, fragment)
        others = (copy for copy in copies.get(name, ()) if (copy.path, copy.offset) != (ref.path, ref.offset))
        tensor = ShardedTensor.unsharded(ref, *others)
        part.entries[name] = ModuleEntry(kind=kind, shape=ref.shape, dtype=ref.dtype, tensor=tensor)


def _add_sharded(
    models: Mapping[int, ModelStates], trained: Mapping[str, Shape], checksums: Checksums, part: ModulePart
) -> None:
    """Add the tensors of stage 3."""
    model = models[0]
    recorded = {**model.frozen, **trained}
    ties = {alias: name for alias, name in model.shared.items() if alias not in recorded}
    part.aliases = {alias: name for alias, name in ties.items() if name in recorded}
    buffers = frozenset(model.buffers or ())
    for name, ref in module_of(model).tensors.items():
        if name in part.aliases:
            continue
        kind = Kind.PARAMETER if name in trained else Kind.BUFFER if name in buffers else Kind.FROZEN
        shape = recorded.get(name, ref.shape)
        tensor = ShardedTensor.unsharded(ref) if ref.shape == shape and ref.numel else None
        if name in model.frozen and name not in trained:
            kind, tensor = Kind.FROZEN, _frozen(name, models, ref.dtype)
        elif name not in recorded and prod(model.empty.get(name, (1,))) == 0 == ref.numel:
            kind, shape = Kind.FROZEN, model.empty[name]
            tensor = ShardedTensor.unsharded(ref.strided(0, shape, contiguous_strides(shape)))
        elif name not in recorded:
            if not ref.numel and kind is not Kind.BUFFER:
                part.dropped.append(f"{name}: the checkpoint holds only its name (a placeholder of ZeRO-3), no data")
                continue
            tensor = ShardedTensor.unsharded(ref)
            _keep_other_buffers(name, ref, models, checksums, part)
        part.entries[name] = ModuleEntry(kind=kind, shape=shape, dtype=ref.dtype, tensor=tensor)


def _keep_other_buffers(
    name: str, ref: TensorRef, models: Mapping[int, ModelStates], checksums: Checksums, part: ModulePart
) -> None:
    """Keep the copies of a buffer that differ from rank 0's, such as running statistics, as extras."""
    copies = ((rank, module_of(model).tensors.get(name)) for rank, model in models.items() if rank)
    differing = {rank: value for rank, value in copies if not checksums.is_same(ref, value)}
    part.extras += [Extra(name=f"buffer/{name}", value=value, rank=rank) for rank, value in differing.items()]
    if differing:
        ranks = ", ".join(map(str, list(differing)[:8])) + (", ..." if len(differing) > 8 else "")
        part.notes.append(
            f"buffer {name} of rank {ranks} differs from rank 0's: rank 0's is used, the others are kept as extras"
        )


def _find_ties(
    tensors: Mapping[str, TensorRef], shared: Mapping[str, str], trained: Mapping[str, Shape], part: ModulePart
) -> None:
    """Fill in `part.aliases`: names whose tensors share their bytes in the file, and the names in `shared_params`."""
    by_bytes: dict[tuple[object, ...], list[str]] = {}
    for name, ref in tensors.items():
        if ref.numel:
            by_bytes.setdefault((ref.path, ref.offset, ref.dtype, ref.shape, ref.strides), []).append(name)
    for names in by_bytes.values():
        stored_names = [name for name in names if name in trained] or names[:1]
        part.aliases |= {name: stored_names[0] for name in names if name not in stored_names}
    for alias, name in shared.items():
        stored = part.aliases.get(name, name)
        if alias in part.aliases or alias in trained or not (stored in trained or stored in tensors):
            continue
        shape = trained[stored] if stored in trained else tensors[stored].shape
        if alias not in tensors or tensors[alias].shape == shape:
            part.aliases[alias] = stored
        else:
            part.notes.append(f"shared_params ties {alias} to {name}, but their shapes differ: they are not tied")


def _frozen(name: str, models: Mapping[int, ModelStates], dtype: DType) -> ShardedTensor:
    """A frozen parameter under ZeRO-3: every rank has a chunk of it."""
    ranks = models[0].ranks or max(models) + 1
    shape = models[0].frozen[name]
    numel = prod(shape)
    chunks = Chunks({name: numel}, ranks)
    length = chunks.lengths(0).start
    stored: list[StoredShard] = []
    missing: list[str] = []
    for rank in range(ranks):
        if rank and name not in chunks.spans(rank):
            break
        if rank not in models:
            file = f"zero_pp_rank_{rank}_mp_rank_{models[0].name.mp:02d}_model_states.pt"
            first = rank * length
            missing.append(f"{file}: elements {first}:{min(first + length, numel)} of {name}")
            continue
        where, flat = f"frozen_param_fragments of {models[rank].file.path}", models[rank].fragments.get(name)
        if flat is not None and not flat.dtype.is_floating and dtype.is_floating:
            raise UnsupportedError(
                f"{name} is quantised to {flat.dtype} in {where} (zero_quantized_nontrainable_weights), and DeepSpeed "
                "does not save its scale: its values are lost. Save again without that option"
            )
        if flat is None or flat.shape != (length,) or not flat.is_contiguous:
            raise MalformedError(f"expected {length} elements of {name} in {where}; got {describe_value(flat)}")
        stored.append(StoredShard({"dp": rank}, flat))
    if missing:
        raise MissingFileError(
            f"every rank has a chunk of a frozen parameter, and {len(missing)} model-states files are missing:\n"
            f"{format_list(missing)}\nCopy them from where they were saved"
        )
    shards = ShardSet(Layout(flat=(chunk_axis(ranks),)), tuple(stored))
    return ShardedTensor(dtype=stored[0].ref.dtype, shape=shape, shard_sets=(shards,))
