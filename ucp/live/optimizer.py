"""A live optimizer: its groups by the names of their parameters, the form of its states, and putting states into it.

Which states an optimizer keeps, and as what (a tensor of which type, on which device, a Python number), is asked of
the optimizer itself: one step of a copy of it on a one-element parameter shows it for the classes of `torch.optim`,
in whatever version is installed. For other classes it is what the optimizer already holds, if anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ucp.core.dtypes import DType
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.groups import LiveGroup
from ucp.live.match import LiveParam
from ucp.live.model import LiveModel, dtype_of

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = [
    "Forms",
    "LiveOptimizer",
    "State",
    "describe_optimizer",
    "formed",
    "forms_of",
    "live_params",
    "put_hyper",
    "put_states",
]

State: TypeAlias = "torch.Tensor | bool | int | float | None"
"""A value that an optimizer keeps for a parameter."""

Forms: TypeAlias = Mapping[str, State]
"""State name to a value of the same form: type and device count, the value does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer:
    """An optimizer whose parameters all belong to the model."""

    handle: Optimizer
    """The optimizer itself."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters of each group, as the model calls them."""
    params: Mapping[str, torch.Tensor]
    """Name to the parameter itself."""

    def state_of(self, name: str) -> Mapping[str, State]:
        """What the optimizer holds for a parameter now."""
        held: Mapping[str, State] = self.handle.state.get(self.params[name], {})
        return held

    def hyper(self, atoms: Mapping[str, str]) -> list[LiveGroup]:
        """Its groups with their hyper-parameters; `atoms`: name in the model to name in the checkpoint."""
        return [
            LiveGroup(
                params=tuple(atoms[name] for name in names if name in atoms),
                hyper={key: _plain(value) for key, value in group.items() if key != "params"},
            )
            for names, group in zip(self.groups, self.handle.param_groups, strict=True)
        ]


def _plain(value: object) -> object:
    import torch

    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def describe_optimizer(optimizer: Optimizer, model: LiveModel) -> LiveOptimizer:
    """The optimizer by names. Raises LoadError for parameters that are not of the model, UnsupportedError."""
    if type(optimizer).__module__.startswith(("torch.distributed", "deepspeed")):
        raise UnsupportedError(
            f"expected an optimizer with whole states on every rank; got {type(optimizer).__name__}, "
            "which shards them. Sharded targets are not loaded yet"
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
            "make it from model.parameters(). Masters in another precision are yours to make after loading"
        )
    names = tuple(tuple(model.owners[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return LiveOptimizer(handle=optimizer, groups=names, params={model.owners[id(p)]: p for p in params})


def forms_of(live: LiveOptimizer, hyper: Sequence[Mapping[str, object]]) -> dict[str, Forms]:
    """The states that the optimizer keeps of each parameter, where that can be known.

    `hyper`: what each group is going to be given; a momentum may make a state.
    """
    base = _torch_class(live.handle)
    found: dict[str, Forms] = {}
    for number, names in enumerate(live.groups):
        group = {**live.handle.param_groups[number], **hyper[number]}
        held = next((state for name in names if (state := live.state_of(name))), None)
        probed: dict[tuple[object, ...], Forms | None] = {}
        for name in names:
            param = live.params[name]
            kind = (param.ndim, param.dtype, param.device)
            if kind not in probed:
                probed[kind] = None if base is None else _probed(live.handle, base, group, param)
            forms = probed[kind]
            forms = forms if forms is not None else live.state_of(name) or held
            if forms is not None:
                found[name] = forms
    return found


def _torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of `torch.optim` that the optimizer is of."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim.") and base.__module__ != "torch.optim.optimizer":
            return base
    return None


def _probed(
    optimizer: Optimizer, base: type[Optimizer], group: Mapping[str, object], param: torch.Tensor
) -> Forms | None:
    """What one step makes of a parameter with one element, of the same dims; None for a class that cannot do that.

    The copy is made as unpickling makes one (`Optimizer.__setstate__`); the optimizer itself is not touched.
    """
    import torch

    tiny = torch.zeros((1,) * param.ndim, dtype=param.dtype, device=param.device, requires_grad=True)
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


def live_params(live: LiveOptimizer, forms: Mapping[str, Forms]) -> list[LiveParam]:
    """What the optimizer keeps, as names and types."""
    return [
        LiveParam(name=name, keeps=None if name not in forms else {k: _dtype(v) for k, v in forms[name].items()})
        for names in live.groups
        for name in names
    ]


def _dtype(value: State) -> DType | None:
    import torch

    return dtype_of(value) if isinstance(value, torch.Tensor) else None


def formed(value: torch.Tensor, form: State) -> State:
    """A count in the form that the optimizer keeps it in; as it is, where that is not known."""
    import torch

    match form:
        case torch.Tensor():
            return value.to(dtype=form.dtype, device=form.device).reshape(form.shape)
        case bool() | int() | float():
            return type(form)(value.item())
    return value


def put_states(live: LiveOptimizer, states: Mapping[str, Mapping[str, State]]) -> None:
    """Give parameters exactly these states; an empty mapping makes a parameter one that was never stepped."""
    for name, own in states.items():
        param = live.params[name]
        if own:
            live.handle.state[param] = dict(own)
        elif param.numel():
            live.handle.state.pop(param, None)


def put_hyper(live: LiveOptimizer, hyper: Sequence[Mapping[str, object]]) -> None:
    """Set hyper-parameters; one that is a tensor is filled in place."""
    import torch

    for group, restored in zip(live.handle.param_groups, hyper, strict=True):
        for key, value in restored.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, int | float):
                group[key].fill_(value)
            else:
                group[key] = value
