"""The module of an engine: its tensors by the names that they have in the whole model.

Experts of `deepspeed.moe` are numbered on each rank from 0; here they have the numbers that a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucp_formats.deepspeed.experts import Numbered, is_expert, renumbered
from ucp_formats.deepspeed.live.handles import ExpertParam

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = ["NamedModule", "name_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """Parameters and persistent buffers, each once."""

    tensors: Mapping[torch.Tensor, tuple[str, ...]]
    """Parameter or buffer to the names it goes by."""
    notes: tuple[str, ...]
    """What a checkpoint does not hold."""

    def name(self, param: torch.Tensor) -> str:
        """Its own name."""
        return self.tensors[param][0]


def name_module(module: nn.Module, expert_groups: Mapping[str, ProcessGroup]) -> NamedModule:
    """The tensors of a module; parameters first, in its own order.

    `expert_groups`: name of a kind of experts to the ranks that the experts of a layer are spread over.
    """
    state = module.state_dict(keep_vars=True)
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    named += [(name, own) for name, own in module.named_buffers(remove_duplicate=False) if name in state]
    found: dict[torch.Tensor, list[str]] = {}
    for name, own in _numbered(named, expert_groups):
        found.setdefault(own, []).append(name)
    odd = [name for name in state if name.endswith("_extra_state")]
    notes = (f"restore yourself what modules keep beside tensors: {', '.join(odd)}",) if odd else ()
    return NamedModule(tensors={own: tuple(names) for own, names in found.items()}, notes=notes)


def _numbered(
    named: Sequence[tuple[str, torch.Tensor]], expert_groups: Mapping[str, ProcessGroup]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with experts by their global numbers."""
    from torch import distributed

    counts = Numbered.of(name for name, _ in named).counts
    for name, own in named:
        if is_expert(name):
            local = next(count for start, count in counts.items() if name.startswith(start))
            expert: ExpertParam = own  # type: ignore[assignment]  # what DeepSpeed hangs on it
            rank = distributed.get_rank(expert_groups[expert.group_name])
            yield renumbered(name, rank=rank, local=local), own
        else:
            yield name, own
