"""A live optimizer: its groups by the names of their parameters, the form of its states, and putting states into it.

Which states an optimizer keeps, and as what (a tensor of which type, on which device, a Python number), is asked of
the optimizer itself: one step of a copy of it on a one-element parameter shows it for the classes of `torch.optim`,
in whatever version is installed. For other classes it is what the optimizer already holds, if anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ucp.core.dtypes import DType
from ucp.core.names import WEIGHT
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.adapters import LiveModel, State
from ucp.live.match.groups import LiveGroup
from ucp.live.model.dtensor import is_dtensor, local_of
from ucp.live.model.module import dtype_of
from ucp.live.parts import LiveParam

if TYPE_CHECKING:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer

__all__ = ["TorchOptimizer", "describe_optimizer", "describe_zero_redundancy", "unwrap_optimizer"]

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "DeepSpeedOptimizerWrapper": "optimizer",
    "LightningOptimizer": "optimizer",
}
"""Class of an optimizer that hands everything to another one, to the attribute that holds it: of accelerate and
Lightning."""

Forms: TypeAlias = Mapping[str, State]
"""State name to a value of the same form: type and device count, the value does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer of torch whose parameters all belong to the model."""

    handle: Optimizer
    """The optimizer itself."""
    names: tuple[tuple[str, ...], ...]
    """Names of the parameters of each group, as the model calls them."""
    live: Mapping[str, torch.Tensor]
    """Name to the parameter itself."""
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name to the memory of this rank's part of it, which may still be on the meta device."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Weights of the model that are cast from masters: name to weight. The master itself is in `live`."""
    wrapper: Sequence[dict[str, Any]] = ()
    """Groups of the optimizer that wraps this one over the parameters of all ranks (ZeroRedundancyOptimizer)."""
    wrapped_names: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each group of `wrapper`."""
    forms: dict[str, Forms]
    """Parameter to the form of the states that the optimizer keeps of it, where known: see `params`."""
    made: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Parameter and state to the tensor that `landing` gave memory of."""
    place: torch.device | None = None
    """Where parameters without memory are going to be made."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        return [
            LiveGroup(params=names, hyper={key: _plain(value) for key, value in group.items() if key != "params"})
            for names, group in zip(self.wrapped_names or self.names, self.handle.param_groups, strict=True)
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """What it keeps, as names and types; a momentum in `hyper` may make a state."""
        self.forms.update(_forms_of(self, hyper))
        return [
            LiveParam(name=name, keeps=self._types(name), is_frozen=not self.live[name].requires_grad)
            for names in self.names
            for name in names
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """A master, or the state that is held where it is of that form; else a new tensor beside the parameter."""
        import torch

        if state == WEIGHT:
            return local_of(self.live[name]).detach()
        taken: torch.dtype = getattr(torch, dtype.value)
        if counts:
            return torch.empty(shape, dtype=taken)
        beside, held = self.live[name], self.held(name).get(state)
        if not isinstance(held, torch.Tensor) or not _is_alike(held, beside, taken, shape):
            held = _new(beside, taken, shape)
        self.made[name, state] = held
        return local_of(held)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Give parameters exactly these states; an empty mapping makes a parameter one that was never stepped."""
        for name, values in states.items():
            param, forms = self.live[name], self.forms.get(name, {})
            kept = {state: value for state, value in values.items() if state != WEIGHT}  # a master is in place already
            if kept:
                self.handle.state[param] = {
                    state: _formed(value, forms.get(state))
                    if state in counts.get(name, ())
                    else self.made.pop((name, state), value)
                    for state, value in kept.items()
                }
            elif param.numel():
                self.handle.state.pop(param, None)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group, in this optimizer and in one that wraps it."""
        _set_hyper(self.handle.param_groups, hyper)
        if self.wrapper:
            _set_hyper(self.wrapper, hyper)

    def cast_weights(self) -> None:
        """Make the weights from their masters."""
        for name, weight in self.weights.items():
            local_of(weight).detach().copy_(local_of(self.live[name]).detach())

    def held(self, name: str) -> Mapping[str, State]:
        """What the optimizer holds for a parameter now."""
        held: Mapping[str, State] = self.handle.state.get(self.live[name], {})
        return held

    def _types(self, name: str) -> dict[str, DType | None] | None:
        """The states that are kept of a parameter, with their types; None where that is not known."""
        forms = self.forms.get(name)
        if forms is None and name in self.weights:
            raise LoadError(
                f"{name}: nothing says which states {type(self.handle).__name__} keeps beside masters. Let it step "
                "once before load_into"
            )
        types = None if forms is None else {state: _dtype(value) for state, value in forms.items()}
        return types if name not in self.weights else {WEIGHT: dtype_of(local_of(self.live[name])), **(types or {})}


def _set_hyper(groups: Sequence[dict[str, Any]], hyper: Sequence[Mapping[str, object]]) -> None:
    """Set hyper-parameters; one that is a tensor is filled in place."""
    import torch

    for group, restored in zip(groups, hyper, strict=True):
        for key, value in restored.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, int | float):
                group[key].fill_(value)
            else:
                group[key] = value


def _is_alike(held: torch.Tensor, beside: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a state has that type and shape on this rank, and lies over the ranks as its parameter does."""
    own, near = local_of(held), local_of(beside)
    is_as_cut = (
        (held.device_mesh, held.placements) == (beside.device_mesh, beside.placements)
        if (is_dtensor(held) and is_dtensor(beside))
        else is_dtensor(held) == is_dtensor(beside)
    )
    return is_as_cut and (own.dtype, own.device, own.shape) == (dtype, near.device, shape)


def _new(beside: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory for a state: cut over the ranks as the parameter is where it has its shape, else whole on each."""
    import torch

    if local_of(beside).shape == shape:
        return torch.empty_like(beside, dtype=dtype, requires_grad=False)
    return beside.new_empty(shape, dtype=dtype, requires_grad=False)


def _plain(value: object) -> object:
    import torch

    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer that steps, beneath the wrappers of clients."""
    while type(optimizer).__name__ in _WRAPPERS:
        optimizer = getattr(optimizer, _WRAPPERS[type(optimizer).__name__])
    return optimizer


def describe_zero_redundancy(optimizer: ZeroRedundancyOptimizer, model: LiveModel) -> TorchOptimizer:
    """Torch's ZeroRedundancyOptimizer: every rank has all parameters, and the states of those that it steps.

    Raises as `describe_optimizer`, and UnsupportedError for one that overlaps with DDP.
    """
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedError(
            "expected a ZeroRedundancyOptimizer whose parameters are assigned to ranks from the start; got one with "
            "overlap_with_ddp=True, which assigns them during training. Make it with overlap_with_ddp=False"
        )
    names = tuple(tuple(model.owners[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    return replace(describe_optimizer(optimizer.optim, model), wrapper=optimizer.param_groups, wrapped_names=names)


def describe_optimizer(optimizer: Optimizer, model: LiveModel) -> TorchOptimizer:
    """The optimizer by names. Raises LoadError for parameters that are not of the model, UnsupportedError."""
    if type(optimizer).__module__.startswith(("torch.distributed", "deepspeed")):
        raise UnsupportedError(
            f"expected an optimizer of torch, or one of another library; got {type(optimizer).__name__}, which wraps "
            "one in a way that is not known. Pass the one inside (optimizer.optim)"
        )
    strangers = [
        f"parameter {at} of group {number}, of shape {list(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for at, param in enumerate(group["params"])
        if id(param) not in model.owners
    ]
    if strangers:
        raise LoadError(
            f"expected an optimizer over the parameters of the model; it has others:\n{listed(strangers)}\n"
            "make it from model.parameters(). Where they are masters of these in another precision, pass "
            "masters={name of the parameter: master}: they are taken for masters by themselves only where their order, "
            "shapes and values are those of the parameters"
        )
    names = tuple(tuple(model.owners[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    live = {model.owners[id(p)]: p for p in params}
    return TorchOptimizer(handle=optimizer, names=names, live=live, memory=model.handles, forms={}, place=model.place)


def _forms_of(live: TorchOptimizer, hyper: Sequence[Mapping[str, object]]) -> dict[str, Forms]:
    """The states that the optimizer keeps of each parameter, where that can be known.

    `hyper`: what each group is going to be given; a momentum may make a state.
    """
    base = _torch_class(live.handle)
    found: dict[str, Forms] = {}
    for number, names in enumerate(live.names):
        group = {**live.handle.param_groups[number], **hyper[number]}
        held = next((state for name in names if (state := live.held(name))), None)
        probed: dict[_Kind, Forms | None] = {}
        for name in names:
            kind = _kind(live, name)
            if kind not in probed:
                probed[kind] = None if base is None else _probed(live.handle, base, group, kind)
            forms = probed[kind]
            forms = forms if forms is not None else live.held(name) or held
            if forms is not None:
                found[name] = forms
    return found


class _Kind(NamedTuple):
    """What the form of a state follows from."""

    ndim: int
    dtype: torch.dtype
    device: torch.device


def _kind(live: TorchOptimizer, name: str) -> _Kind:
    like = live.memory.get(name, live.live[name])
    return _Kind(live.live[name].ndim, like.dtype, live.place if like.is_meta and live.place else like.device)


def _torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of `torch.optim` that the optimizer is of."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim.") and base.__module__ != "torch.optim.optimizer":
            return base
    return None


def _probed(optimizer: Optimizer, base: type[Optimizer], group: Mapping[str, object], kind: _Kind) -> Forms | None:
    """What one step makes of a parameter with one element, of the same dims; None for a class that cannot do that.

    The copy is made as unpickling makes one (`Optimizer.__setstate__`); the optimizer itself is not touched.
    """
    import torch

    tiny = torch.zeros((1,) * kind.ndim, dtype=kind.dtype, device=kind.device, requires_grad=True)
    tiny.grad = torch.zeros_like(tiny)
    probe = base.__new__(base)
    groups = [{**group, "params": [tiny]}]
    copied = {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    try:
        probe.__setstate__(copied)
        probe.step()
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None
    return dict(probe.state[tiny])


def _dtype(value: State) -> DType | None:
    import torch

    return dtype_of(value) if isinstance(value, torch.Tensor) else None


def _formed(value: torch.Tensor, form: State) -> State:
    """A count in the form that the optimizer keeps it in; as it is, where that is not known."""
    import torch

    match form:
        case torch.Tensor():
            return value.to(dtype=form.dtype, device=form.device).reshape(form.shape)
        case bool() | int() | float():
            return type(form)(value.item())
    return value
