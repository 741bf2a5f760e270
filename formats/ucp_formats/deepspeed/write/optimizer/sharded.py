"""The optimizer files of stages 1 to 3: what each rank has of the parameters of every group, in flat tensors.

Stages 1 and 2, and BF16_Optimizer, share one flat buffer per group; keys and their order are those of
`DeepSpeedZeroOptimizer.state_dict` (runtime/zero/stage_1_and_2.py, 0.19.8). BF16_Optimizer loads the same file: it
reads a subset of the keys, and pads the weights itself. A rank of stage 3 has a chunk of every parameter, sub-group
after sub-group; keys and their order are those of `_rigid_state_dict` (runtime/zero/stage3.py, 0.19.8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ucp.contract.flat_buffer import Chunks, FlatBuffer, WholeParameters
from ucp.core.index import AtomIndex
from ucp.core.layout import AxisLayout
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.partition import alignment_paddings, round_robin, shared_buffers, sub_groups
from ucp_formats.deepspeed.write.optimizer.groups import Group, clipping, common_keys, group_entry, write_count
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, RunFacts, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffer:
    """The flat buffer of a group."""

    group: Group
    """The group."""
    layout: FlatBuffer
    """How the buffer is shared."""
    axes: Mapping[str, AxisLayout]
    """How it cuts each parameter."""

    @classmethod
    def of(cls, facts: RunFacts, group: Group, *, ranks: int) -> GroupBuffer:
        """That of a group which is cut over `ranks` ranks, as the engine of the target would build it."""
        plain = facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision)
        sizes = dict(group.sizes)
        if facts.config.round_robin and not plain:
            sizes = {name: sizes[name] for name in round_robin(tuple(sizes), ranks=ranks)}
        paddings = None
        if facts.config.parameter_alignment and not plain:
            itemsize = facts.module_dtype(group.params[0]).itemsize
            paddings = alignment_paddings(tuple(sizes.values()), itemsize=itemsize)
        known_from = f"ZeRO-{facts.stage}"
        layout, *_ = shared_buffers(sizes, ranks=ranks, paddings=paddings, first=0, known_from=known_from)
        return cls(group=group, layout=layout, axes=layout.axes())

    @property
    def paddings(self) -> list[int]:
        """Elements of padding after each parameter; none is counted after the last."""
        starts, stops = self.layout.starts, self.layout.stops
        return [start - stop for stop, start in zip(stops, (*starts[1:], *stops[-1:]), strict=True)]


@dataclass(frozen=True, slots=True)
class Share:
    """What one file has of a group."""

    buffer: GroupBuffer
    """Its buffer."""
    place: int
    """Which share of the buffer it is."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parameter to its name on the rank, where that is another (experts count from 0 on each rank)."""

    @property
    def group(self) -> Group:
        """The group."""
        return self.buffer.group


@dataclass(frozen=True, kw_only=True)  # no slots: its counts are asked for by every rank, and kept
class SubGroup:
    """Parameters whose chunks share one flat tensor, at stage 3."""

    group: Group
    """The parameter group it is cut from."""
    chunks: Chunks
    """What a rank has of each parameter."""

    @cached_property
    def counters(self) -> Mapping[str, AtomIndex]:
        """Count to a parameter whose value is that of the sub-group."""
        return {state: self.group.counter(state, self.chunks.numels) for state in self.group.counts}


def split(facts: RunFacts, groups: Sequence[Group]) -> tuple[tuple[SubGroup, ...], ...]:
    """Sub-groups of each group, as the engine of the target would cut them."""
    found = []
    for group in groups:
        sizes = dict(group.sizes)
        cuts = sub_groups(group.sizes, ranks=facts.ranks, limit=facts.config.sub_group_size)
        chunks = [Chunks({name: sizes[name] for name in names}, facts.ranks) for names in cuts]
        found.append(tuple(SubGroup(group=group, chunks=part) for part in chunks))
    return tuple(found)


def shared_state(draft: AtomDraft, facts: RunFacts, shares: Sequence[Share], rank: int) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank` under stages 1 and 2."""
    flats = [share.buffer.layout for share in shares]
    stored = [draft.stored(share.buffer.layout, share.buffer.axes, share.place) for share in shares]
    used = [flat.lengths(share.place).start for share, flat in zip(shares, flats, strict=True)]
    state = {
        number: _shared_states(draft, facts, share, parts)
        for number, (share, parts) in enumerate(zip(shares, stored, strict=True))
        if share.group.state_names
    }
    entries = [group_entry(draft, facts, share.group, [number]) for number, share in enumerate(shares)]
    masters = [
        draft.flat(WEIGHT, share.group.dtypes[WEIGHT], numel, parts)
        for share, numel, parts in zip(shares, used, stored, strict=True)
    ]
    return {
        **common_keys(facts, rank),
        **clipping(facts, rank),
        "base_optimizer_state": {"state": state, "param_groups": entries},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": _stage(facts.stage),
        "group_paddings": [flat.share - numel for flat, numel in zip(flats, used, strict=True)],
        "param_alignment_paddings": [share.buffer.paddings for share in shares],
        "partition_count": [flat.ranks for flat in flats],
        "ds_version": EMULATED,
        "param_slice_mappings": [_slice_mapping(share, parts) for share, parts in zip(shares, stored, strict=True)],
    }


def _stage(stage: int) -> Stub:
    return Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,), new=False)


def _shared_states(draft: AtomDraft, facts: RunFacts, share: Share, stored: Sequence[Stored]) -> dict[str, object]:
    """States of one flat parameter; as in DeepSpeed they are as long as the share, padding included."""
    group = share.group
    # Muon's momentum is whole for all parameters that a rank shares (`_muon_momentum_buffer`, 0.19.8)
    shares_all = facts.config.offloaded or (facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision))
    has_whole = group.hyper.get("use_muon") is True and not shares_all
    state: dict[str, object] = {}
    for name in group.state_names:
        numel, parts = share.buffer.layout.share, stored
        if name in group.counts:
            state[name] = write_count(draft, facts, group.counters[name], name)
            continue
        if has_whole and name == "momentum_buffer":
            whole = WholeParameters(share.buffer.layout)
            parts = draft.stored(whole, whole.axes(), share.place)
            numel = sum(part.stop - part.start for part in parts)
        state[name] = draft.flat(name, group.dtypes[name], numel, parts)
    return state


def _slice_mapping(share: Share, stored: Sequence[Stored]) -> OrderedDict[object, object]:
    """Where each parameter lies in the share, in the order of the group; true also under round robin."""
    parts = {part.param: part for part in stored}
    address = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
    return OrderedDict(
        (
            share.renamed.get(atom.name, atom.name),
            Stub(address, state={"numel": part.stop - part.start, "start": part.offset}, has_state=True),
        )
        for atom in share.group.params
        if (part := parts.get(atom.name)) is not None
    )


def chunked_state(
    draft: AtomDraft, facts: RunFacts, cut: Sequence[tuple[Group, Sequence[SubGroup]]], rank: int
) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank` under stage 3; `cut`: every group with its sub-groups."""
    entries: list[object] = []
    state: dict[int, object] = {}
    masters: list[object] = []
    for group, subs in cut:
        first = len(masters)
        entries.append(group_entry(draft, facts, group, range(first, first + len(subs))))
        for number, sub in enumerate(subs, first):
            stored, numel = draft.stored(sub.chunks, sub.chunks.axes(), rank), sub.chunks.lengths(0).start
            masters.append(draft.flat(WEIGHT, group.dtypes[WEIGHT], numel, stored))
            if group.state_names:
                state[number] = {
                    name: draft.flat(name, group.dtypes[name], numel, stored)
                    if name in group.dtypes
                    else write_count(draft, facts, sub.counters[name], name)
                    for name in group.state_names
                }
    return {
        "zero_stage": _stage(3),
        **common_keys(facts, rank),
        "partition_count": facts.ranks,
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_flat_groups": masters,
    }
