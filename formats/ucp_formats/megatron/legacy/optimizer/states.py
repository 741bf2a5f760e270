"""What the optimizer files of ranks say, whatever their shape: states of stored tensors, and their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra, Loss
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import TensorRef
from ucp.io.pickle.fields import mapping, sequence
from ucp_formats.megatron.flat_buffer.boxes import Candidate
from ucp_formats.megatron.legacy.model import Held, Slot
from ucp_formats.megatron.param_groups.rules import SavedGroup

__all__ = ["LegacyStates", "Optimizer", "candidate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer of a rank."""

    where: str
    """Which it is, for messages."""
    chain: int | None
    """Its number in a chain; None for the only one."""
    saved: Mapping[object, object]
    """What the model file says of it."""
    held: tuple[Held, ...]
    """Parameters that it may have states of, in registration order, one per stored tensor; buffers left out."""
    arguments: Mapping[str, object]
    """Arguments of the run, which decide on groups; empty where they were not saved."""

    @property
    def inner(self) -> Mapping[object, object]:
        """What torch's optimizer saved, where another one wraps it."""
        found = self.saved.get("optimizer")
        return found if isinstance(found, dict) else self.saved

    @property
    def is_whole(self) -> bool:
        """Whether it has its states by number (and is not distributed)."""
        return "state" in self.saved or "state" in self.inner

    def groups(self) -> Iterator[tuple[SavedGroup, Sequence[object]]]:
        """Its groups, each with the numbers of its parameters, where it has them. Raises MalformedError."""
        for own in sequence(self.inner.get("param_groups"), f"param_groups in {self.where}"):
            group = mapping(own, f"a group in {self.where}")
            hyper = {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
            params = sequence(group["params"], f"params of a group in {self.where}") if "params" in group else ()
            yield SavedGroup(chain=None, hyper=hyper), params


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
            if known.chain == saved.chain and Checksums(()).same(dict(known.hyper), dict(saved.hyper)):
                return number
        self.groups.append(saved)
        return len(self.groups) - 1


def candidate(name: str, held: Held) -> Candidate:
    """A stored tensor as what may be found by its contents."""
    whole = Box.whole(held.ref.shape)
    return Candidate(name=name, local_shape=held.ref.shape, pairs=(RegionPair(whole, whole),), refs=(held.ref,))
