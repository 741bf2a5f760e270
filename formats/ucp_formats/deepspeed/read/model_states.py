"""A model-states file, understood once: what else reads of it are these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ucp.contract.run_extras import is_module_state
from ucp.core.tensor import TensorRef
from ucp.errors import UnsupportedError
from ucp.io.pickle.fields import Shape, integer, mapping, sequence, shapes, tensor, text
from ucp_formats.deepspeed.config import RunConfig
from ucp_formats.deepspeed.names import FileName
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.optimizer.saved import UnshardedOptimizer

EMPTY_SHAPES = "empty_param_shapes"
"""Key of ucp's own, ignored by DeepSpeed: shapes of parameters without elements, where stage 3 records them nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModule:
    """A state_dict of a model, of a layer of it, or of experts."""

    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    """Name to tensor, in the order of the model."""
    others: Mapping[str, object] = field(default_factory=dict)
    """Entries that are no tensors."""
    versions: Mapping[object, object] | None = None
    """Versions of the modules, which torch keeps as an attribute of a state_dict."""

    @classmethod
    def of(cls, saved: object, where: str) -> SavedModule:
        """The state_dict `saved`. Raises UnsupportedError for one of nested dicts."""
        tensors: dict[str, TensorRef] = {}
        others: dict[str, object] = {}
        for key, value in mapping(saved, where).items():
            name = text(key, f"a name in {where}")
            if isinstance(value, dict) and not is_module_state(name):
                raise UnsupportedError(
                    f"expected tensors by name in {where}; {name!r} is a dict of its own. Such a state_dict is built "
                    "by the training script, and only it knows the names of the parameters"
                )
            if isinstance(value, TensorRef) and not is_module_state(name):
                tensors[name] = value
            else:
                others[name] = value
        return cls(tensors=tensors, others=others, versions=getattr(saved, "_metadata", None))

    def has(self, name: str) -> bool:
        """Whether there is an entry of that name."""
        return name in self.tensors or name in self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """A model-states file; names and shapes are those of one model-parallel rank."""

    file: SavedFile
    """Where it was read; its root is for extras only."""
    module: SavedModule | None
    """The model; None for a stage of a pipeline, whose layers are in files of their own."""
    param_shapes: tuple[Mapping[str, Shape], ...] | None
    """Parameter to shape for every optimizer group (ZeRO-3: sub-group), in its order; None where not recorded."""
    frozen: Mapping[str, Shape]
    """Shapes of frozen parameters, where they are recorded."""
    fragments: Mapping[str, TensorRef]
    """Frozen parameters: under ZeRO-3 the chunk of this rank, flat; else copies of the module's tensors."""
    empty: Mapping[str, Shape]
    """Shapes of parameters without elements, as ucp writes them."""
    shared: Mapping[str, str]
    """Tied name to stored name; only rank 0 records it."""
    buffers: tuple[str, ...] | None
    """Names of buffers; None where that is not recorded."""
    optimizer: UnshardedOptimizer | None
    """The optimizer of a run without ZeRO."""
    config: RunConfig
    """Configuration of the run; empty where there is none."""
    degrees: tuple[int, int] | None
    """Tensor-parallel degree and pipeline stages, recorded since 2026."""

    @classmethod
    def of(cls, file: SavedFile) -> ModelStates:
        """The file, understood. Raises SourceError where a value is not what DeepSpeed writes."""
        root = file.root
        recorded = shapes_by_group(root.get("param_shapes"))
        module, optimizer, buffers = root.get("module"), root.get("optimizer"), root.get("buffer_names")
        if isinstance(optimizer, dict) and "base_optimizer_state" in optimizer:
            optimizer = None  # BF16_Optimizer without ZeRO: its optimizer files have the same
        config, degrees = root.get("ds_config"), root.get("checkpoint_parallel_dimensions")
        fragments, shared = (
            {text(name, f"a name in {key}"): own for name, own in mapping(root[key], key).items()}
            if root.get(key) is not None
            else {}
            for key in ("frozen_param_fragments", "shared_params")
        )
        return cls(
            file=file,
            module=None if module is None else SavedModule.of(module, "module"),
            param_shapes=recorded,
            frozen=_shapes(root, "frozen_param_shapes"),
            fragments={name: tensor(ref, f"{name} in frozen_param_fragments") for name, ref in fragments.items()},
            empty=_shapes(root, EMPTY_SHAPES),
            shared={name: text(own, f"{name} in shared_params") for name, own in shared.items()},
            buffers=tuple(map(str, buffers)) if isinstance(buffers, list) else None,
            optimizer=None if optimizer is None else UnshardedOptimizer.of(optimizer, file.name.name, recorded or ()),
            config=RunConfig(config if isinstance(config, dict) else {}),
            degrees=(integer(degrees.get("tp_degree"), "tp_degree"), integer(degrees.get("pp_degree"), "pp_degree"))
            if isinstance(degrees, dict)
            else None,
        )

    @property
    def name(self) -> FileName:
        """Name of the file."""
        return self.file.name

    @property
    def groups(self) -> tuple[Mapping[str, Shape], ...]:
        """`param_shapes`; none where it is not recorded."""
        return self.param_shapes or ()

    @property
    def trained(self) -> dict[str, Shape]:
        """Parameters of all groups."""
        return {name: shape for own in self.groups for name, shape in own.items()}

    @property
    def untrained(self) -> dict[str, Shape | None]:
        """Buffers and frozen parameters that are named, with their shapes where they are known."""
        return {**dict.fromkeys(self.buffers or ()), **self.frozen}

    @property
    def may_exclude_frozen(self) -> bool:
        """Whether frozen parameters may have been left out; stages 2 and 3 record them unless they are."""
        return self.config.zero_stage in (2, 3) and self.file.root.get("frozen_param_shapes", "absent") is None

    @property
    def ranks(self) -> int | None:
        """Data-parallel ranks."""
        return self.count("dp_world_size") or None

    def count(self, key: str) -> int | None:
        """A number of steps or ranks; None where there is none."""
        found = self.file.root.get(key)
        return found if type(found) is int and found >= 0 else None


def shapes_by_group(saved: object) -> tuple[dict[str, Shape], ...] | None:
    """`param_shapes`: very old files have one dict for all."""
    where = "param_shapes"
    if saved is None:
        return None
    groups = [saved] if isinstance(saved, dict) else sequence(saved, where)
    return tuple(shapes(group, where) for group in groups)


def _shapes(root: Mapping[object, object], key: str) -> dict[str, Shape]:
    saved = root.get(key)
    return {} if saved is None else shapes(saved, key)
