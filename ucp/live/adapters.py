"""What a live run is made of, and how frameworks describe theirs.

The core describes a plain torch module with a torch optimizer. What a framework wraps them in (DeepSpeed's engine,
Megatron's optimizers) is described by an adapter, which alone knows the framework. Adapters are found by the entry
point group `ucp.live`.
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
    from ucp.live.match.items import Findings
    from ucp.live.run.mesh import RunMesh
    from ucp.live.run.ranks import Ranks

State: TypeAlias = "torch.Tensor | bool | int | float | None"
"""A value that an optimizer keeps for a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """Everything of a rank's module that its checkpoint holds."""

    tensors: tuple[LiveTensor, ...]
    """Parameters, then persistent buffers, in the order of the module."""
    handles: Mapping[str, torch.Tensor]
    """Name to the memory of the rank's part, in the local shape."""
    owners: Mapping[int, str]
    """`id` of every parameter and buffer, as an optimizer holds it, to its principal name."""
    derived: frozenset[str] = frozenset()
    """Tensors that are not loaded: `LiveRun.finish` makes them from masters that the optimizer keeps."""
    notes: tuple[str, ...] = ()
    """What a checkpoint does not hold."""
    device: torch.device | None = None
    """Where tensors on the meta device will get memory."""
    chunks: int = 1
    """Number of modules (chunks of a virtual pipeline); above 1 the names of tensors begin with the module's number."""
    marked_params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name to the parameter whose attributes say how ranks cut it, if that is not the tensor in `handles`."""
    layer_numbers: Mapping[str, int] = field(default_factory=dict)
    """Path of a layer's module to the number that it gives itself in the whole model, from 1."""


@runtime_checkable
class LiveOptimizer(Protocol):
    """An optimizer of this rank, whose parameters all belong to the model."""

    def groups(self) -> Sequence[LiveGroup]:
        """Its groups: names in the whole model, with hyper-parameters as plain values."""

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Sequence[LiveParam]:
        """What it keeps of each parameter, once its groups have the hyper-parameters `hyper`."""

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """Memory to load a state into: the live one if possible, else new; `shape`: elements of this rank.

        `counts`: the state is a count, which `put` receives in the type it is stored in.
        """

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take what was loaded, by name and state; no states make a parameter one that was never stepped.

        `counts`: which of the states of each parameter are counts.
        """

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A rank's model and optimizer, described."""

    model: LiveModel
    """The model."""
    optimizer: LiveOptimizer | None = None
    """The optimizer, if one is loaded into."""
    prepare: Callable[[LiveModel, Collection[str]], LiveModel] = field(default=lambda model, _: model)
    """Gives memory to tensors that have none, once everything is known to fit; receives the names that are loaded."""
    finish: Callable[[], None] = field(default=lambda: None)
    """Makes what follows from what was loaded (16-bit copies of masters). Collective."""
    resume: Callable[[Index, Findings], Mapping[str, str]] = field(default=lambda _index, _findings: {})
    """Sets what the framework keeps beside tensors (steps, schedule, loss scale) to the checkpoint's values; returns
    the extras that were used, each with what it set."""
    has_global_names: bool = True
    """Whether names are those of the whole model. If not, the core numbers layers and experts."""
    has_global_parts: bool = True
    """Whether parts are those of global tensors. If not, the core finds how tensors are cut, from their attributes and
    by rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """What the user passed."""

    model: object
    """A module, several (chunks of a virtual pipeline), or what a framework wraps them in."""
    optimizer: object | None
    """An optimizer, or what a framework wraps it in; False for none, if the model would bring one."""
    mesh: RunMesh
    """Coordinates of this rank and all others."""
    ranks: Ranks
    """All ranks of the run, for what they must agree on."""
    dtype: DType | None = None
    """Type of the floating weights of the model, in which a model without memory is made; None for the model's own."""
    masters: Mapping[str, torch.Tensor] | None = None
    """Parameter to its master in another precision, as the optimizer steps it, if the user passed them."""


class LiveAdapter(Protocol):
    """Describes the live runs of one framework."""

    name: str
    """Name, e.g. "deepspeed"."""

    def claims(self, request: LiveRequest) -> bool:
        """Whether the model or the optimizer is of this framework; without importing it."""

    def describe(self, request: LiveRequest) -> LiveRun:
        """The rank's parts. Collective if needed. Raises UnsupportedError, LoadError; changes nothing."""
