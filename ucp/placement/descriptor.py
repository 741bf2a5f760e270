"""`expert_placement` of DeepSpeed: which experts each expert-parallel rank holds of a layer, in its order.

`ds_autoep_layers` of a checkpoint has one for each layer (checkpoint/autoep_affine.py, 0.19.8), and so has a placement
file of the form `deepspeed`. Replicas are the same number on several ranks. Ranks may hold different numbers of
experts.

>>> placement = ExpertPlacement.of([(0, 2), (1, 2)], num_experts=3)
>>> placement.experts_by_rank, placement.problem
(((0, 2), (1, 2)), '')
>>> ExpertPlacement.of([(0, 0), (1,)], num_experts=3).problem
'rank 0 lists expert 0 twice, no rank has expert 2'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from ucp.core.text.units import ranges_text
from ucp.core.topology import ExpertsByRank
from ucp.io.json_text import Natural

Version1 = Annotated[int, Meta(ge=1, le=1)]
"""A version that is 1."""
_MOST = 1000
"""Missing experts that are listed; a damaged record may have any number."""


class RankExperts(Struct, frozen=True):
    """Experts of one expert-parallel rank."""

    rank: Natural
    """The rank."""
    experts: tuple[Natural, ...]
    """Numbers of its experts in the order in which it stores them."""


class ExpertPlacement(Struct, frozen=True):
    """Where the experts of a layer are."""

    version: Version1
    """1."""
    num_experts: Natural
    """Experts of the layer."""
    ep_size: Natural
    """Expert-parallel ranks."""
    ranks: tuple[RankExperts, ...]
    """Every rank once; an expert on several ranks has replicas."""

    @classmethod
    def of(cls, experts_by_rank: Sequence[tuple[int, ...]], *, num_experts: int) -> ExpertPlacement:
        """The record for experts by rank."""
        ranks = tuple(RankExperts(rank=rank, experts=experts) for rank, experts in enumerate(experts_by_rank))
        return cls(version=1, num_experts=num_experts, ep_size=len(experts_by_rank), ranks=ranks)

    @property
    def experts_by_rank(self) -> ExpertsByRank:
        """Experts of each rank."""
        return tuple(entry.experts for entry in sorted(self.ranks, key=lambda entry: entry.rank))

    @property
    def problem(self) -> str:
        """Why DeepSpeed would refuse it; empty if it would not."""
        return ", ".join(self._list_problems())

    def _list_problems(self) -> Iterator[str]:
        numbers = sorted(entry.rank for entry in self.ranks)
        if len(numbers) != self.ep_size or numbers != list(range(len(numbers))):
            yield f"it lists ranks {ranges_text(numbers)}, not each of {self.ep_size} ranks once"
        for entry in self.ranks:
            twice = [expert for expert, count in Counter(entry.experts).items() if count > 1]
            if twice:
                yield f"rank {entry.rank} lists expert {ranges_text(sorted(twice))} twice"
        present = set(chain(*self.experts_by_rank))
        if unknown := sorted(expert for expert in present if expert >= self.num_experts):
            yield f"expert {ranges_text(unknown)} is not among {self.num_experts} experts"
        if absent := list(islice((expert for expert in range(self.num_experts) if expert not in present), _MOST)):
            yield f"no rank has expert {ranges_text(absent)}"

    def to_document(self) -> dict[str, object]:
        """The record as DeepSpeed saves it, of dicts, lists and numbers."""
        ranks = [{"rank": entry.rank, "experts": list(entry.experts)} for entry in self.ranks]
        return {**to_builtins(self), "ranks": ranks}
