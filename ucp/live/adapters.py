"""The description of a live run (the model and optimizer of a rank in memory), and the adapters that provide it.

The core describes a plain torch module with a torch optimizer. If a framework wraps them (DeepSpeed's engine,
Megatron's optimizers), an adapter for that framework describes them; no other code knows the framework. Adapters are
found by the entry point group `ucp.live`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ucp.core.tensor import DType
from ucp.live.match.groups import LiveGroup
from ucp.live.parts import LiveParam, LiveTensor

if TYPE_CHECKING:
    import torch

    from ucp.core.index import Index
    from ucp.core.topology import Topology
    from ucp.live.match.items import Findings
    from ucp.live.run.mesh import RunMesh
    from ucp.live.run.ranks import Ranks

State: TypeAlias = "torch.Tensor | bool | int | float | None"
"""A value that an optimizer keeps for a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The parameters and buffers of a rank's module that a checkpoint holds."""

    tensors: tuple[LiveTensor, ...]
    """Parameters, then persistent buffers, in the order of the module."""
    handles: Mapping[str, torch.Tensor]
    """Name to the tensor to load into: the rank's part, in its local shape."""
    owners: Mapping[int, str]
    """`id` of every parameter and buffer that an optimizer can hold, to its principal name."""
    derived: frozenset[str] = frozenset()
    """Names of weights that are not loaded: `LiveRun.finish` casts them from the optimizer's master weights."""
    notes: tuple[str, ...] = ()
    """Notes for the report, e.g. which state of the modules is not restored."""
    device: torch.device | None = None
    """Where tensors on the meta device will get memory."""
    chunks: int = 1
    """Number of modules (chunks of a virtual pipeline); above 1 the names of tensors begin with the module's number."""
    marked_params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name to the parameter whose attributes say how ranks cut it, if that is not the tensor in `handles`."""
    layer_numbers: Mapping[str, int] = field(default_factory=dict)
    """Path of a layer's module to its attribute `layer_number` (Megatron): the number in the whole model, from 1."""


@runtime_checkable
class LiveOptimizer(Protocol):
    """An optimizer of this rank, whose parameters all belong to the model."""

    def groups(self) -> Sequence[LiveGroup]:
        """Its param groups: names as in `LiveTensor.name`, hyper-parameters as plain values."""

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Sequence[LiveParam]:
        """The states that it keeps for each parameter, once its groups have the hyper-parameters `hyper`."""

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The tensor to load a state into: the optimizer's current one if possible, else a new one.

        `shape`: local shape on this rank. `counts`: the state is a count, which `put` receives in its stored dtype.
        """

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Set the loaded states (name -> state -> tensor); without states a parameter becomes one never stepped.

        `counts`: name of each parameter to those of its states that are counts.
        """

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""


@runtime_checkable
class ReadableOptimizer(LiveOptimizer, Protocol):
    """An optimizer whose states can be saved."""

    def values(self, name: str) -> Mapping[str, State]:
        """The states that it holds for a parameter now, and `weight` if that is a master: this rank's parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkState:
    """What a framework keeps beside tensors: a save adds it to the store."""

    origin: str = "torch"
    """Format whose extras `extras` are."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Name of an extra to its value now."""
    step: int | None = None
    """Training step, if the framework counts steps."""
    topology: Topology | None = None
    """Layout of the run, if the framework knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The description of a rank's model and optimizer."""

    model: LiveModel
    """The model."""
    optimizer: LiveOptimizer | None = None
    """The optimizer to load into, if any."""
    prepare: Callable[[LiveModel, Collection[str]], LiveModel] = field(default=lambda model, _: model)
    """Allocates tensors on the meta device, once everything is known to fit; receives the names that are loaded."""
    finish: Callable[[], None] = field(default=lambda: None)
    """Computes what depends on loaded tensors (16-bit copies of master weights). Collective."""
    resume: Callable[[Index, Findings], Mapping[str, str]] = field(default=lambda _index, _findings: {})
    """Sets what the framework keeps beside tensors (steps, schedule, loss scale) to the checkpoint's values; returns
    the extras that were used, each with what it set."""
    state: Callable[[], FrameworkState] = FrameworkState
    """Reads what a save stores beside tensors: the mirror of `resume`."""
    has_global_names: bool = True
    """Whether names are those of the whole model. If not, the core renumbers layers and experts."""
    has_global_parts: bool = True
    """Whether `LiveTensor.part` is known to be a part of the global tensor. If not, the core finds out how tensors are
    cut, from attributes of the parameters and from rules of the model family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """What the user passed."""

    model: object
    """A module, several (chunks of a virtual pipeline), or what a framework wraps them in."""
    optimizer: object | None
    """An optimizer, or what a framework wraps it in; None for that of the model, if it brings one; False for none."""
    mesh: RunMesh
    """Coordinates of this rank and all others."""
    ranks: Ranks
    """All ranks of the run."""
    dtype: DType | None = None
    """Dtype of floating-point weights: a model on the meta device is allocated in it. None for the model's dtypes."""
    masters: Mapping[str, torch.Tensor] | None = None
    """Name of a parameter to its master weight, which the optimizer steps; None if the user passed no masters."""


class LiveAdapter(Protocol):
    """Describes the live runs of one framework."""

    name: str
    """Name, e.g. "deepspeed"."""

    def claims(self, request: LiveRequest) -> bool:
        """Whether the model or the optimizer is of this framework; must not import it."""

    def describe(self, request: LiveRequest) -> LiveRun:
        """The description of this rank's model and optimizer, which it does not change. May call collectives.

        Raises UnsupportedError, LoadError.
        """
