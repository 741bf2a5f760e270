"""The optimizer files of stage 3: the chunk of every parameter that a rank holds, sub-group after sub-group.

Keys and their order are those of `_rigid_state_dict` (runtime/zero/stage3.py, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucp.contract.flat_buffer import Chunks
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.partition import sub_groups
from ucp_formats.deepspeed.write.draft import AtomDraft, Stored
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.values import common_keys, group_entry, scalar_value
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["SubGroup", "optimizer_state", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """Parameters whose chunks share one flat tensor."""

    group: Group
    """The parameter group it is cut from."""
    chunks: Chunks
    """What a rank has of each parameter."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters."""
        return tuple(self.chunks.numels)

    def numel(self) -> int:
        """Elements of its flat tensor on each rank, padding counted."""
        return self.chunks.lengths(0).start


def split(facts: RunFacts, groups: Sequence[Group]) -> tuple[tuple[SubGroup, ...], ...]:
    """Sub-groups of each group, as the engine of the target would cut them."""
    found = []
    for group in groups:
        sizes = dict(group.sizes)
        cut = sub_groups(group.sizes, ranks=facts.ranks, limit=facts.config.sub_group_size)
        chunks = [Chunks({name: sizes[name] for name in names}, facts.ranks) for names in cut]
        found.append(tuple(SubGroup(group=group, chunks=own) for own in chunks))
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
    stored = [draft.stored(sub.chunks, sub.chunks.axes(), rank) for sub in flat]
    state = {
        number: _state(draft, sub, own)
        for number, (sub, own) in enumerate(zip(flat, stored, strict=True))
        if sub.group.state_names
    }
    return {
        "zero_stage": Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,), new=False),
        **common_keys(facts, rank),
        "partition_count": facts.ranks,
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_flat_groups": [
            draft.flat(WEIGHT, sub.group.weight_dtype(facts.dtypes), sub.numel(), own)
            for sub, own in zip(flat, stored, strict=True)
        ],
    }


def _state(draft: AtomDraft, sub: SubGroup, stored: Sequence[Stored]) -> dict[str, object]:
    state: dict[str, object] = {}
    for name in sub.group.state_names:
        if name in sub.group.elementwise:
            state[name] = draft.flat(name, sub.group.elementwise[name], sub.numel(), stored)
        else:
            state[name] = scalar_value(draft, sub.group, name, sub.names)
    return state
