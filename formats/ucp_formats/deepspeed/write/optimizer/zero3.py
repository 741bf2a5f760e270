"""The optimizer files of stage 3: the chunk of every parameter that a rank holds, sub-group after sub-group.

Keys and their order are those of `_rigid_state_dict` (runtime/zero/stage3.py, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.partition import chunk, chunked, sub_groups
from ucp_formats.deepspeed.write.draft import AtomDraft, Stretch
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.values import common_keys, group_entry, scalar_value
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["SubGroup", "optimizer_state", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """Parameters whose chunks share one flat tensor."""

    group: Group
    """The parameter group it is cut from."""
    sizes: tuple[tuple[str, int], ...]
    """Name and elements of each parameter."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters."""
        return tuple(name for name, _ in self.sizes)

    def numel(self, ranks: int) -> int:
        """Elements of its flat tensor on each rank, padding counted."""
        return sum(chunk(numel, ranks=ranks) for _, numel in self.sizes)

    def parts(self, state: str, *, ranks: int, rank: int) -> list[Stretch]:
        """What `rank` holds of a state; parameters that lack the state are left out."""
        having = {atom.name for atom in self.group.params if state in atom.states}
        return [
            Stretch(param=held.name, start=held.start, stop=held.stop, offset=held.offset)
            for held in chunked(self.sizes, ranks=ranks, rank=rank)
            if held.name in having
        ]


def split(facts: RunFacts, groups: Sequence[Group]) -> tuple[tuple[SubGroup, ...], ...]:
    """Sub-groups of each group, as the engine of the target would cut them."""
    found = []
    for group in groups:
        sizes = dict(group.sizes)
        cut = sub_groups(group.sizes, ranks=facts.ranks, limit=facts.config.sub_group_size)
        found.append(tuple(SubGroup(group=group, sizes=tuple((n, sizes[n]) for n in names)) for names in cut))
    return tuple(found)


def optimizer_state(
    draft: AtomDraft, facts: RunFacts, cut: Sequence[tuple[Group, Sequence[SubGroup]]], rank: int
) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank`; `cut`: every group with its sub-groups."""
    flat = [sub for _, subs in cut for sub in subs]
    entries = []
    first = 0
    for group, subs in cut:
        entries.append(group_entry(draft, group, range(first, first + len(subs))))
        first += len(subs)
    state = {n: _state(draft, sub, facts.ranks, rank) for n, sub in enumerate(flat) if sub.group.state_names}
    return {
        "zero_stage": Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,), new=False),
        **common_keys(facts, rank),
        "partition_count": facts.ranks,
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_flat_groups": [
            draft.flat(
                WEIGHT,
                sub.group.weight_dtype(facts.dtypes),
                sub.numel(facts.ranks),
                sub.parts(WEIGHT, ranks=facts.ranks, rank=rank),
            )
            for sub in flat
        ],
    }


def _state(draft: AtomDraft, sub: SubGroup, ranks: int, rank: int) -> dict[str, object]:
    state: dict[str, object] = {}
    for name in sub.group.state_names:
        if name in sub.group.elementwise:
            parts = sub.parts(name, ranks=ranks, rank=rank)
            state[name] = draft.flat(name, sub.group.elementwise[name], sub.numel(ranks), parts)
        else:
            state[name] = scalar_value(draft, sub.group, name, sub.names)
    return state
