"""A live torch optimizer: its groups by the names of their parameters, the form of its states, and setting states.

For classes of `torch.optim` one step of a copy, on a one-element parameter, shows which states the optimizer keeps and
in which form: a tensor (of which dtype, on which device) or a Python number. For other classes, the states that the
optimizer already holds show it, if there are any.

An optimizer may step master weights in another precision: the masters are loaded, and the weights are cast from them.
The user says which master belongs to which parameter (`masters=`). Otherwise masters are assigned in order, if all have
the shapes and values of the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ucp.core.index import WEIGHT
from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError, UsageError, format_count, format_list
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
"""Classes of accelerate and Lightning that pass everything to the optimizer in their attribute `optimizer`."""

Forms: TypeAlias = Mapping[str, State]
"""State name to a value of the same form: its dtype and device matter, its elements do not."""
_Kind: TypeAlias = "tuple[int, torch.dtype, torch.device]"
"""What determines the form of a state: number of dims, dtype and device of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer of torch whose parameters all belong to the model (`LiveOptimizer`)."""

    handle: Optimizer
    """The optimizer itself."""
    names: tuple[tuple[str, ...], ...]
    """Names of the parameters of each group, as the model has them."""
    live: Mapping[str, torch.Tensor]
    """Name to the parameter itself."""
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name to the tensor of this rank's part of it, which may still be on the meta device."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Weights of the model that are cast from masters: name to weight. The master itself is in `live`."""
    wrapper: Sequence[dict[str, Any]] = ()
    """Groups of the optimizer that wraps this one over the parameters of all ranks (ZeroRedundancyOptimizer)."""
    wrapped_names: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each group of `wrapper`."""
    forms: dict[str, Forms]
    """Parameter to the form of the states that the optimizer keeps for it, if known: see `params`."""
    new_states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Parameter and state to the tensor whose memory `landing` returned."""
    device: torch.device | None = None
    """Where parameters on the meta device will get memory."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        import torch

        groups = []
        for names, group in zip(self.wrapped_names or self.names, self.handle.param_groups, strict=True):
            hyper = {
                key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                for key, value in group.items()
                if key != "params"
            }
            groups.append(LiveGroup(params=names, hyper=hyper))
        return groups

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """The states that it keeps, with their dtypes; a momentum in `hyper` may add a state."""
        self.forms.update(_find_forms(self, hyper))
        return [
            LiveParam(name=name, keeps=self._find_types(name), is_frozen=not self.live[name].requires_grad)
            for names in self.names
            for name in names
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """A master, or the current state if it has that form; else a new tensor like the parameter."""
        import torch

        if state == WEIGHT:
            return local_of(self.live[name]).detach()
        torch_dtype: torch.dtype = getattr(torch, dtype.value)
        if counts:
            return torch.empty(shape, dtype=torch_dtype)
        param, current = self.live[name], self.current_states(name).get(state)
        local = local_of(param)
        if (
            not isinstance(current, torch.Tensor)
            or (local_of(current).dtype, local_of(current).device) != (torch_dtype, local.device)
            or local_of(current).shape != shape
            or _layout_of(current) != _layout_of(param)
        ):  # a new one: cut over the ranks like the parameter if it has its shape, else whole on every rank
            if local.shape == shape:
                current = torch.empty_like(param, dtype=torch_dtype, requires_grad=False)
            else:
                current = param.new_empty(shape, dtype=torch_dtype, requires_grad=False)
        self.new_states[name, state] = current
        return local_of(current)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Give parameters exactly these states; an empty mapping makes a parameter one that was never stepped."""
        for name, values in states.items():
            param, forms, are_counts = self.live[name], self.forms.get(name, {}), counts.get(name, ())
            # masters are already loaded in place
            restored = {
                state: _convert_count(value, forms.get(state))
                if state in are_counts
                else self.new_states.pop((name, state), value)
                for state, value in values.items()
                if state != WEIGHT
            }
            if restored:
                self.handle.state[param] = restored
            elif param.numel():
                self.handle.state.pop(param, None)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group, in this optimizer and in one that wraps it; fill tensors in place."""
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
        states: Mapping[str, State] = self.handle.state.get(self.live[name], {})
        return states

    def values(self, name: str) -> dict[str, State]:
        """What it holds for a parameter now, and its master weight if it has one (`ReadableOptimizer`)."""
        master: dict[str, State] = {WEIGHT: self.live[name]} if name in self.weights else {}
        return {**master, **self.current_states(name)}

    def _find_types(self, name: str) -> dict[str, DType | None] | None:
        """The states that are kept for a parameter, with their dtypes; None if they are not known."""
        import torch

        forms = self.forms.get(name)
        if forms is None:
            if name in self.weights:
                raise LoadError(
                    f"{name}: it is not known which states {type(self.handle).__name__} keeps beside masters. Let it "
                    "step once before load_into"
                )
            return None
        types: dict[str, DType | None] = {WEIGHT: dtype_of(local_of(self.live[name]))} if name in self.weights else {}
        for state, value in forms.items():
            types[state] = dtype_of(value) if isinstance(value, torch.Tensor) else None
        return types


def _layout_of(tensor: torch.Tensor) -> object:
    """Mesh and placements of a DTensor; None for another tensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer inside of wrappers (`_WRAPPERS`)."""
    while type(optimizer).__name__ in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # which these classes have
    return optimizer


def describe_zero_redundancy(optimizer: ZeroRedundancyOptimizer, model: LiveModel) -> TorchOptimizer:
    """Torch's ZeroRedundancyOptimizer: every rank has all parameters, but only states of those that it steps.

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
    """The optimizer by names. Raises LoadError for parameters that the model does not have, UnsupportedError."""
    if type(optimizer).__module__.startswith(("torch.distributed", "deepspeed")):
        raise UnsupportedError(
            f"expected an optimizer of torch, or of another library; got {type(optimizer).__name__}, an unknown "
            "wrapper. Pass the optimizer inside of it (optimizer.optim)"
        )
    foreign = [
        f"parameter {position} of group {number}, of shape {list(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for position, param in enumerate(group["params"])
        if id(param) not in model.owners
    ]
    if foreign:
        raise LoadError(
            f"expected an optimizer over the parameters of the model; got others:\n{format_list(foreign)}\n"
            "Make it from model.parameters(). If these are master weights in another precision, pass masters={name of "
            "the parameter: master}: without it they are recognised only if they have the order, shapes and values of "
            "the parameters"
        )
    names = tuple(tuple(model.owners[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    live = {model.owners[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    return TorchOptimizer(handle=optimizer, names=names, live=live, memory=model.handles, forms={}, device=model.device)


def _find_forms(optimizer: TorchOptimizer, hyper: Sequence[Mapping[str, object]]) -> dict[str, Forms]:
    """The form of the states that the optimizer keeps for each parameter, as far as that can be known.

    `hyper`: the hyper-parameters that each group will have; a momentum may add a state.
    """
    bases = (base for base in type(optimizer.handle).__mro__ if base.__module__ != "torch.optim.optimizer")
    base = next((base for base in bases if base.__module__.startswith("torch.optim.")), None)
    forms_of: dict[str, Forms] = {}
    for number, names in enumerate(optimizer.names):
        group = {**optimizer.handle.param_groups[number], **hyper[number]}
        of_neighbour = next((states for name in names if (states := optimizer.current_states(name))), None)
        probed: dict[_Kind, Forms | None] = {}
        for name in names:
            like = optimizer.memory.get(name, optimizer.live[name])
            device = optimizer.device if like.is_meta and optimizer.device else like.device
            kind = optimizer.live[name].ndim, like.dtype, device
            if kind not in probed:
                probed[kind] = None if base is None else _probe(optimizer.handle, base, group, kind)
            forms = probed[kind]
            forms = forms if forms is not None else optimizer.current_states(name) or of_neighbour
            if forms is not None:
                forms_of[name] = forms
    return forms_of


def _probe(optimizer: Optimizer, base: type[Optimizer], group: Mapping[str, object], kind: _Kind) -> Forms | None:
    """The states of a one-element parameter with as many dims after one step of a copy; None if the step fails.

    The copy is made as in unpickling (`Optimizer.__setstate__`); the optimizer itself is not touched.
    """
    import torch

    ndim, dtype, device = kind
    tiny = torch.zeros((1,) * ndim, dtype=dtype, device=device, requires_grad=True)
    tiny.grad = torch.zeros_like(tiny)
    probe = base.__new__(base)
    groups = [{**group, "params": [tiny]}]
    try:
        probe.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
        probe.step()
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):  # KeyError: states that __init__ makes
        return None
    return dict(probe.state[tiny])


def _convert_count(value: torch.Tensor, form: State) -> State:
    """A count in the form that the optimizer keeps it in; unchanged if that is not known."""
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
    """The model, without loading weights that are cast from masters, and the optimizer by names.

    Raises LoadError for parameters of the optimizer that are neither the model's nor recognised masters, UsageError for
    `masters` that the optimizer does not step.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = [param for param in params if id(param) not in model.owners]
    if not foreign and not masters:
        return model, describe_optimizer(optimizer, model)
    model_params = (param for module in modules for param in module.parameters() if id(param) in model.owners)
    weights = {model.owners[id(param)]: param for param in model_params}
    if masters is None:
        masters = _match_in_order(foreign, weights, params)
        notes = tuple(_note_equal_weights({name: weights[name] for name in masters}))
    else:
        _check_masters(masters, weights, foreign)
        notes = ()
    owners = {**model.owners, **{id(master): name for name, master in masters.items()}}
    live = describe_optimizer(optimizer, replace(model, owners=owners))
    memory = {**live.memory, **{name: local_of(master) for name, master in masters.items()}}
    note = f"{format_count(len(masters), 'weight is', 'weights are')} cast from masters that the optimizer steps"
    model = replace(model, derived=model.derived | masters.keys(), notes=(*model.notes, note, *notes))
    return model, replace(live, memory=memory, weights={name: weights[name] for name in masters})


def _match_in_order(
    foreign: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], params: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Masters by name if order, shapes and values agree; none unless they all do."""
    import torch

    param_ids = set(map(id, params))
    others = {name: param for name, param in weights.items() if param.requires_grad and id(param) not in param_ids}
    if len(others) != len(foreign):
        return {}
    for weight, master in zip(others.values(), foreign, strict=True):
        if weight.shape != master.shape or weight.is_meta or master.is_meta:
            return {}
        values, expected = local_of(weight).detach(), local_of(master).detach()
        if values.shape != expected.shape or not torch.equal(values, expected.to(values.dtype).to(values.device)):
            return {}
    return dict(zip(others, foreign, strict=True))


def _note_equal_weights(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A note if some weights are equal: values then cannot show which master belongs to which."""
    import torch

    by_content: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        total = float(local_of(weight).detach().sum(dtype=torch.float64))
        by_content.setdefault((tuple(weight.shape), total), []).append(name)
    equal = [name for names in by_content.values() if len(names) > 1 for name in names]
    if equal:
        few = f"{', '.join(equal[:4])}{', ...' if len(equal) > 4 else ''}"
        yield (
            f"{len(equal)} of these masters were assigned by order alone, as their weights are equal ({few}): pass "
            "masters={name of the parameter: master} if the optimizer has them in another order than the model"
        )


def _check_masters(
    masters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], foreign: Sequence[torch.Tensor]
) -> None:
    """Raise UsageError for masters that do not belong to a parameter of the model."""
    master_ids = set(map(id, foreign))
    problems = [f"{name}: the model has no such parameter" for name in masters if name not in weights]
    for name in masters.keys() & weights.keys():
        master, weight = masters[name], weights[name]
        if id(master) not in master_ids:
            problems.append(f"{name}: the optimizer does not step it, or it is the parameter of the model itself")
        elif master.shape != weight.shape or local_of(master).shape != local_of(weight).shape:
            problems.append(f"{name}: has shape {list(master.shape)}, but the weight {list(weight.shape)}")
    if problems:
        raise UsageError(
            "expected masters= to map names of parameters to tensors that the optimizer steps; got\n"
            f"{format_list(problems)}"
        )
