"""fp32 masters of one's own: an optimizer over copies of the model's parameters in another precision.

    masters = {name: param.detach().clone().float() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values())
    ucp.load_into(model, checkpoint=PATH, optimizer=optimizer, masters=masters)

The masters are brought, and the weights are cast from them. Which master is whose is what the user says, or what nobody
can doubt: masters in the order of the parameters, with their shapes, whose values are those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ucp.errors import UsageError, counted, listed
from ucp.live.adapters import LiveModel
from ucp.live.model.dtensor import local_of
from ucp.live.optimizer.torch_optimizer import TorchOptimizer, describe_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["describe_masters"]


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
    direct = set(map(id, params))
    left = {name: param for name, param in own.items() if param.requires_grad and id(param) not in direct}
    if len(left) != len(strangers):
        return {}
    pairs = dict(zip(left, strangers, strict=True))
    return pairs if all(_is_cast_of(left[name], master) for name, master in pairs.items()) else {}


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


def _is_cast_of(weight: torch.Tensor, master: torch.Tensor) -> bool:
    import torch

    if weight.shape != master.shape or weight.is_meta or master.is_meta:
        return False
    held, wanted = local_of(weight).detach(), local_of(master).detach()
    return held.shape == wanted.shape and torch.equal(held, wanted.to(held.dtype).to(held.device))


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
