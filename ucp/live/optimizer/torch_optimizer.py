"""A live optimizer: its groups by the names of their parameters, the form of its states, and putting states into it.

Which states an optimizer keeps, and as what (a tensor of which type, on which device, a Python number), is asked of
the optimizer itself: one step of a copy of it on a one-element parameter shows it for the classes of `torch.optim`,
in whatever version is installed. For other classes it is what the optimizer already holds, if anything.

An optimizer may step masters of the parameters in another precision: they are brought, and the weights cast from them.
Which is whose is what the user says (`masters=`), or what nobody can doubt: masters in the order of the parameters,
with their shapes, whose values are those of the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ucp.core.index import WEIGHT
from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError, UsageError, counted, listed
from ucp.live.adapters import LiveModel, State
from ucp.live.match.groups import LiveGroup
from ucp.live.model.dtensor import is_dtensor, local_of
from ucp.live.model.module import dtype_of
from ucp.live.parts import LiveParam

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer

_WRAPPERS = ("AcceleratedOptimizer", "DeepSpeedOptimizerWrapper", "LightningOptimizer")
"""Classes of accelerate and Lightning that hand everything to the optimizer in their attribute `optimizer`."""

Forms: TypeAlias = Mapping[str, State]
"""State name to a value of the same form: type and device count, the value does not."""
_Kind: TypeAlias = "tuple[int, torch.dtype, torch.device]"
"""What the form of a state follows from: dims of the parameter, type, device."""


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
    new_states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Parameter and state to the tensor that `landing` gave memory of."""
    device: torch.device | None = None
    """Where parameters without memory are going to be made."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        import torch

        def plain(value: object) -> object:
            return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

        return [
            LiveGroup(params=names, hyper={key: plain(value) for key, value in group.items() if key != "params"})
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
        wanted: torch.dtype = getattr(torch, dtype.value)
        if counts:
            return torch.empty(shape, dtype=wanted)
        param, held = self.live[name], self.current_states(name).get(state)
        local = local_of(param)
        if (
            not isinstance(held, torch.Tensor)
            or (local_of(held).dtype, local_of(held).device, local_of(held).shape) != (wanted, local.device, shape)
            or _mesh_of(held) != _mesh_of(param)
        ):  # a new one: cut over the ranks as the parameter is where it has its shape, else whole on each
            held = torch.empty_like(param, dtype=wanted, requires_grad=False) if local.shape == shape else None
            held = param.new_empty(shape, dtype=wanted, requires_grad=False) if held is None else held
        self.new_states[name, state] = held
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
                    else self.new_states.pop((name, state), value)
                    for state, value in kept.items()
                }
            elif param.numel():
                self.handle.state.pop(param, None)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group, in this optimizer and in one that wraps it; a tensor in place."""
        import torch

        for groups in (self.handle.param_groups, *([self.wrapper] if self.wrapper else [])):
            for group, restored in zip(groups, hyper, strict=True):
                for key, value in restored.items():
                    if isinstance(group.get(key), torch.Tensor) and isinstance(value, int | float):
                        group[key].fill_(value)
                    else:
                        group[key] = value

    def cast_weights(self) -> None:
        """Make the weights from their masters."""
        for name, weight in self.weights.items():
            local_of(weight).detach().copy_(local_of(self.live[name]).detach())

    def current_states(self, name: str) -> Mapping[str, State]:
        """What the optimizer holds for a parameter now."""
        held: Mapping[str, State] = self.handle.state.get(self.live[name], {})
        return held

    def _types(self, name: str) -> dict[str, DType | None] | None:
        """The states that are kept of a parameter, with their types; None where that is not known."""
        import torch

        forms = self.forms.get(name)
        if forms is None and name in self.weights:
            raise LoadError(
                f"{name}: nothing says which states {type(self.handle).__name__} keeps beside masters. Let it step "
                "once before load_into"
            )
        types: dict[str, DType | None] = {WEIGHT: dtype_of(local_of(self.live[name]))} if name in self.weights else {}
        for state, value in (forms or {}).items():
            types[state] = dtype_of(value) if isinstance(value, torch.Tensor) else None
        return types if types or forms is not None else None


def _mesh_of(tensor: torch.Tensor) -> object:
    """How a tensor lies over the ranks; None for one that they do not share."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer that steps, beneath the wrappers of clients."""
    while type(optimizer).__name__ in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # which these classes have
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
    return TorchOptimizer(handle=optimizer, names=names, live=live, memory=model.handles, forms={}, device=model.device)


def _forms_of(live: TorchOptimizer, hyper: Sequence[Mapping[str, object]]) -> dict[str, Forms]:
    """The states that the optimizer keeps of each parameter, where that can be known.

    `hyper`: what each group is going to be given; a momentum may make a state.
    """
    modules = (base for base in type(live.handle).__mro__ if base.__module__ != "torch.optim.optimizer")
    base = next((own for own in modules if own.__module__.startswith("torch.optim.")), None)
    known: dict[str, Forms] = {}
    for number, names in enumerate(live.names):
        group = {**live.handle.param_groups[number], **hyper[number]}
        held = next((state for name in names if (state := live.current_states(name))), None)
        probed: dict[_Kind, Forms | None] = {}
        for name in names:
            like = live.memory.get(name, live.live[name])
            device = live.device if like.is_meta and live.device else like.device
            kind = live.live[name].ndim, like.dtype, device
            if kind not in probed:
                probed[kind] = None if base is None else _probed(live.handle, base, group, kind)
            forms = probed[kind]
            forms = forms if forms is not None else live.current_states(name) or held
            if forms is not None:
                known[name] = forms
    return known


def _probed(optimizer: Optimizer, base: type[Optimizer], group: Mapping[str, object], kind: _Kind) -> Forms | None:
    """What one step makes of a parameter with one element, of the same dims; None for a class that cannot do that.

    The copy is made as unpickling makes one (`Optimizer.__setstate__`); the optimizer itself is not touched.
    """
    import torch

    ndim, dtype, device = kind
    tiny = torch.zeros((1,) * ndim, dtype=dtype, device=device, requires_grad=True)
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


def _formed(value: torch.Tensor, form: State) -> State:
    """A count in the form that the optimizer keeps it in; as it is, where that is not known."""
    import torch

    match form:
        case torch.Tensor():
            return value.to(dtype=form.dtype, device=form.device).reshape(form.shape)
        case bool() | int() | float():
            return type(form)(value.item())
    return value


def describe_masters(
    optimizer: Optimizer, model: LiveModel, modules: Sequence[nn.Module], masters: Mapping[str, torch.Tensor] | None
) -> tuple[LiveModel, TorchOptimizer]:
    """The optimizer by names, and the model without the weights that are cast from masters.

    Raises LoadError for parameters of the optimizer that are neither the model's nor surely masters, UsageError for
    `masters` that are of no such optimizer.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in params if id(param) not in model.owners]
    if not strangers and not masters:
        return model, describe_optimizer(optimizer, model)
    own = {name: param for module in modules for param in module.parameters() if (name := model.owners.get(id(param)))}
    found = _match_in_order(strangers, own, params) if masters is None else _check_masters(masters, own, strangers)
    whose = {id(master): name for name, master in found.items()}
    live = describe_optimizer(optimizer, replace(model, owners={**model.owners, **whose}))
    memory = {**live.memory, **{name: local_of(master) for name, master in found.items()}}
    weights = {name: own[name] for name in found}
    note = f"{counted(len(found), 'weight is', 'weights are')} cast from masters that the optimizer steps"
    doubts = _note_equal_weights(weights) if masters is None else ()
    model = replace(model, derived=model.derived | found.keys(), notes=(*model.notes, note, *doubts))
    return model, replace(live, memory=memory, weights=weights)


def _match_in_order(
    strangers: Sequence[torch.Tensor], own: Mapping[str, torch.Tensor], params: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Masters by name where order, shapes and values agree; none where they do not all."""
    import torch

    direct = set(map(id, params))
    others = {name: param for name, param in own.items() if param.requires_grad and id(param) not in direct}
    if len(others) != len(strangers):
        return {}
    for weight, master in zip(others.values(), strangers, strict=True):
        if weight.shape != master.shape or weight.is_meta or master.is_meta:
            return {}
        values, wanted = local_of(weight).detach(), local_of(master).detach()
        if values.shape != wanted.shape or not torch.equal(values, wanted.to(values.dtype).to(values.device)):
            return {}
    return dict(zip(others, strangers, strict=True))


def _note_equal_weights(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A note where weights are equal, so that their values do not say whose a master is."""
    import torch

    alike: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        values = local_of(weight).detach()
        alike.setdefault((tuple(weight.shape), float(values.sum(dtype=torch.float64))), []).append(name)
    names = [name for own in alike.values() if len(own) > 1 for name in own]
    if names:
        few = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        yield (
            f"{len(names)} of these masters were told apart by order alone, as their weights are equal ({few}): pass "
            "masters={name of the parameter: master} if the optimizer has them in another order than the model"
        )


def _check_masters(
    masters: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], strangers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    stepped = set(map(id, strangers))
    wrong = [f"{name}: the model has no such parameter" for name in masters if name not in own]
    for name in masters.keys() & own.keys():
        master, weight = masters[name], own[name]
        if id(master) not in stepped:
            wrong.append(f"{name}: the optimizer does not step it, or it is the model's own")
        elif master.shape != weight.shape or local_of(master).shape != local_of(weight).shape:
            wrong.append(f"{name}: has shape {list(master.shape)}, and its weight {list(weight.shape)}")
    if wrong:
        raise UsageError(
            f"expected masters by the names of parameters, as the optimizer steps them; got\n{listed(wrong)}"
        )
    return dict(masters)
