"""ZeRO-1 by hand: each rank steps its range of all parameters laid end to end, and gathers what the others stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from tests.integration.live.reference.collectives import Group


class FlatAdamW(torch.optim.Optimizer):
    """AdamW over flat fp32 masters; gradients are whole. `group_of`: ranks that hold the same of a parameter."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, group_of: Callable[[nn.Parameter], Group | None], **options: Any
    ) -> None:
        super().__init__(groups, options)
        self.parts = [
            Flat([own for own in group["params"] if group_of(own) is ranks], ranks, group)
            for group in self.param_groups
            for ranks in dict.fromkeys(map(group_of, group["params"]))
        ]
        self.inner = torch.optim.AdamW([part.settings | {"params": [part.master]} for part in self.parts])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody gives one
        """Step this rank's range with the hyper-parameters that the groups have now, then gather."""
        for part, group in zip(self.parts, self.inner.param_groups, strict=True):
            group.update(part.settings)
            part.master.grad = part.range_of(own.grad for own in part.params)
        self.inner.step()
        for part in self.parts:
            part.gather()

    def states(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Master (`weight`) and moments of every parameter, in its shape, gathered from the ranks. Collective."""
        found: dict[nn.Parameter, dict[str, Tensor]] = {own: {} for part in self.parts for own in part.params}
        for part in self.parts:
            own = self.inner.state[part.master]
            for state, tensor in {"weight": part.master.detach(), **own}.items():
                if state != "step":
                    for param, values in zip(part.params, part.whole(tensor), strict=True):
                        found[param][state] = values
        return found


class Flat:
    """Parameters of one group that the same ranks hold, laid end to end and padded to equal ranges."""

    def __init__(self, params: list[nn.Parameter], ranks: Group | None, group: dict[str, Any]) -> None:
        self.params, self.ranks, self.group = params, ranks, group
        self.count, self.index = (ranks.size(), ranks.rank()) if ranks is not None else (1, 0)
        self.numel = -(-sum(own.numel() for own in params) // self.count)
        self.master = nn.Parameter(self.range_of(own.detach() for own in params))

    @property
    def settings(self) -> dict[str, Any]:
        """Hyper-parameters."""
        return {key: own for key, own in self.group.items() if key != "params"}

    def place(self, param: nn.Parameter) -> tuple[nn.Parameter, int]:
        """A parameter, and the element at which it starts."""
        before = next(at for at, own in enumerate(self.params) if own is param)
        return param, sum(own.numel() for own in self.params[:before])

    def range_of(self, tensors: Iterable[Tensor]) -> Tensor:
        """This rank's range of tensors laid end to end."""
        flat = parameters_to_vector(tensors).float()
        padded = torch.cat([flat, flat.new_zeros(self.count * self.numel - len(flat))])
        return padded[self.index * self.numel :][: self.numel].clone()

    def whole(self, own: Tensor) -> list[Tensor]:
        """Tensors in the shapes of the parameters, of the ranges of all ranks. Collective."""
        parts = [torch.empty_like(own) for _ in range(self.count)]
        if self.ranks is None:
            parts = [own]
        else:
            dist.all_gather(parts, own, group=self.ranks)
        flat = torch.cat(parts)[: sum(param.numel() for param in self.params)]
        split = flat.split([param.numel() for param in self.params])
        return [values.view_as(param) for values, param in zip(split, self.params, strict=True)]

    def gather(self) -> None:
        """Set the parameters from the ranges of all ranks."""
        for param, values in zip(self.params, self.whole(self.master.detach()), strict=True):
            param.copy_(values)
