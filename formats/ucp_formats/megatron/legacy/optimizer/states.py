"""What the optimizer files of ranks say, whatever their shape: states of stored tensors, and their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra, Loss
from ucp.core.tensor import TensorRef
from ucp.io.pickle.fields import mapping, sequence
from ucp_formats.megatron.legacy.model import Held, Slot
from ucp_formats.megatron.param_groups.rules import SavedGroup

__all__ = ["LegacyStates", "Population", "groups_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Tensors that one optimizer may have states of, in registration order."""

    where: str
    """The optimizer, for messages."""
    held: tuple[Held, ...]
    """Parameters of one rank, one per stored tensor; buffers left out."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the run, which decide on groups; empty where they were not saved."""


@dataclass(slots=True, kw_only=True)
class LegacyStates:
    """States by the stored tensor that they belong to."""

    tensors: dict[Slot, dict[str, TensorRef]] = field(default_factory=dict)
    """State name to its elements, of the shape of the stored tensor; the master is `weight`."""
    numbers: dict[Slot, dict[str, object]] = field(default_factory=dict)
    """State name to one number for the whole tensor (`step`)."""
    groups: list[SavedGroup] = field(default_factory=list)
    """Groups, each once, however many ranks have it."""
    group_of: dict[Slot, int] = field(default_factory=dict)
    """Number of the group of a stored tensor, where it is known."""
    extras: list[Extra] = field(default_factory=list)
    """What says nothing of a parameter."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What is not carried, with the reason."""
    lost: dict[str, Loss] = field(default_factory=dict)
    """Parameters whose group is not known, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no state at all."""
        return not self.tensors and not self.numbers

    def group(self, saved: SavedGroup) -> int:
        """Number of the group with these hyper-parameters, which is added when it is new."""
        for number, known in enumerate(self.groups):
            if _same(known, saved):
                return number
        self.groups.append(saved)
        return len(self.groups) - 1


def groups_of(saved: object, where: str, *, chain: int | None) -> Iterator[tuple[SavedGroup, Sequence[object]]]:
    """Groups of an optimizer, each with the numbers of its parameters, where it has them. Raises MalformedError."""
    for own in sequence(saved, f"param_groups in {where}"):
        group = mapping(own, f"a group in {where}")
        hyper = {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
        params = sequence(group["params"], f"params of a group in {where}") if "params" in group else ()
        yield SavedGroup(chain=chain, hyper=hyper), params


def _same(a: SavedGroup, b: SavedGroup) -> bool:
    return a.chain == b.chain and Checksums(()).same(dict(a.hyper), dict(b.hyper))
