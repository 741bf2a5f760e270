"""The optimizer states in the files of each stage: a tensor per parameter, a share of a buffer, or chunks.

Under stages 1 and 2, and with BF16_Optimizer, each rank has a share of one flat buffer per group; keys and their order
are those of `DeepSpeedZeroOptimizer.state_dict` (runtime/zero/stage_1_and_2.py, 0.19.8). BF16_Optimizer loads the same
file: it reads a subset of the keys, and pads the weights itself. Under stage 3, a rank has a chunk of every parameter,
sub-group after sub-group; keys and their order are those of `_rigid_state_dict` (runtime/zero/stage3.py, 0.19.8).

The optimizer of stage 0 is inside the model-states file, in one of three forms (`Wrapper`):

- PLAIN: a torch optimizer over the model's own parameters (fp32);
- UNFUSED: FP16_UnfusedOptimizer, a master per parameter (fp16 or bf16 with any optimizer but FusedAdam);
- FUSED: FP16_Optimizer, one flat master per group and no padding (fp16 or bf16 with FusedAdam).

None of them names its parameters. ucp writes the names of each group to `param_shapes` of the model-states file, which
DeepSpeed leaves None at stage 0 and never reads. It does not write `param_names`, which would make torch refuse to add
a group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from ucp.contract.layouts import Chunks, FlatBuffer, WholeParameters
from ucp.core.index import WEIGHT, AtomIndex, Kind
from ucp.core.layout import AxisLayout
from ucp.errors import UnsupportedError, format_list
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.deepspeed.config import Precision, read_loss_scale, scale_numbers
from ucp_formats.deepspeed.partition import alignment_paddings, round_robin, shared_buffers, sub_groups
from ucp_formats.deepspeed.write.optimizer.groups import Group, clipping_keys, common_keys, group_entry, write_count
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, ParamRange, RunFacts, is_plain_number


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffer:
    """The flat buffer of a group."""

    group: Group
    """The group."""
    layout: FlatBuffer
    """How the buffer is partitioned over ranks."""
    axes: Mapping[str, AxisLayout]
    """How that splits each parameter."""

    @classmethod
    def of(cls, facts: RunFacts, group: Group, *, ranks: int, axis: str = "dp") -> GroupBuffer:
        """The buffer of a group that `ranks` ranks along `axis` partition, as the engine of the target builds it."""
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
        layout = replace(layout, axis=axis)
        return cls(group=group, layout=layout, axes=layout.axes())

    @property
    def paddings(self) -> list[int]:
        """Elements of padding after each parameter; 0 after the last."""
        starts, stops = self.layout.starts, self.layout.stops
        return [start - stop for stop, start in zip(stops, (*starts[1:], *stops[-1:]), strict=True)]


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a group's buffer that one file holds."""

    buffer: GroupBuffer
    """Its buffer."""
    place: int
    """Number of the share, among the ranks that the buffer is partitioned over."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parameter to its name on the rank, where the two differ (each rank numbers its experts from 0)."""

    @property
    def group(self) -> Group:
        """The group."""
        return self.buffer.group


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties need a __dict__
class SubGroup:
    """Parameters whose chunks share one flat tensor, at stage 3."""

    group: Group
    """The parameter group that the sub-group is part of."""
    chunks: Chunks
    """Which elements of each parameter a rank holds."""
    holders: Sequence[int]
    """Data-parallel ranks that hold the chunks, in their order."""

    @cached_property
    def counters(self) -> Mapping[str, AtomIndex]:
        """Name of a count to the parameter whose count the sub-group records."""
        return {state: self.group.counter(state, self.chunks.numels) for state in self.group.counts}


def split_groups(facts: RunFacts, groups: Sequence[Group], holders: Sequence[Sequence[int]]) -> list[list[SubGroup]]:
    """Sub-groups of each group, as the target's engine splits it; `holders`: the ranks that hold each group."""
    split = []
    for group, ranks in zip(groups, holders, strict=True):
        sizes = dict(group.sizes)
        parts = sub_groups(group.sizes, ranks=len(ranks), limit=facts.config.sub_group_size)
        chunks = [Chunks({name: sizes[name] for name in names}, len(ranks)) for names in parts]
        split.append([SubGroup(group=group, chunks=part, holders=ranks) for part in chunks])
    return split


def shared_state(draft: AtomDraft, facts: RunFacts, shares: Sequence[Share], rank: int) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank` under stages 1 and 2."""
    flats = [share.buffer.layout for share in shares]
    stored = [draft.ranges(share.buffer.layout, share.buffer.axes, share.place) for share in shares]
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
        **clipping_keys(facts, rank),
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


def _shared_states(draft: AtomDraft, facts: RunFacts, share: Share, stored: Sequence[ParamRange]) -> dict[str, object]:
    """States of one flat tensor; as in DeepSpeed, they are as long as the share, with padding."""
    group = share.group
    # Muon's momentum is saved in full for each parameter with elements in the share (`_muon_momentum_buffer`, 0.19.8)
    shares_all = facts.config.offloaded or (facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision))
    has_whole = group.hyper.get("use_muon") is True and not shares_all
    state: dict[str, object] = {}
    for name in group.state_names:
        numel, parts = share.buffer.layout.share, stored
        if name in group.counts:
            state[name] = write_count(draft, facts, group.counters[name], name)
            continue
        if has_whole and name == "momentum_buffer":
            unsplit = WholeParameters(share.buffer.layout)
            parts = draft.ranges(unsplit, unsplit.axes(), share.place)
            numel = sum(part.stop - part.start for part in parts)
        state[name] = draft.flat(name, group.dtypes[name], numel, parts)
    return state


def _slice_mapping(share: Share, stored: Sequence[ParamRange]) -> OrderedDict[object, object]:
    """`param_slice_mappings` of the share, in the order of the group; correct under round robin, unlike DeepSpeed's."""
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
    """`optimizer_state_dict` of the file of `rank` under stage 3; `cut`: each group with its sub-groups."""
    entries: list[object] = []
    state: dict[int, object] = {}
    masters: list[object] = []
    for group, subs in cut:
        first = len(masters)
        entries.append(group_entry(draft, facts, group, range(first, first + len(subs))))
        for number, sub in enumerate(subs, first):
            stored = draft.ranges(sub.chunks, sub.chunks.axes(), sub.holders.index(rank))
            numel = sub.chunks.lengths(0).start
            masters.append(draft.flat(WEIGHT, group.dtypes[WEIGHT], numel, stored))
            if group.state_names:
                state[number] = _flat_states(draft, facts, group, stored, numel=numel, counters=sub.counters)
    return {
        "zero_stage": _stage(3),
        **common_keys(facts, rank),
        "partition_count": facts.ranks,
        **_partition_groups(facts, [sub for _, subs in cut for sub in subs], rank),
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_flat_groups": masters,
    }


def _partition_groups(facts: RunFacts, subs: Sequence[SubGroup], rank: int) -> dict[str, object]:
    """The ranks that hold each sub-group of a run with AutoEP, which a load compares with those of its run."""
    if not facts.stacks.counts:
        return {}
    groups = [
        {
            "sub_group": number,
            "partition_count": len(sub.holders),
            "partition_rank": sub.holders.index(rank),
            "partition_ranks": list(sub.holders),
            "families": ["autoep_expert" if is_stack else "replicated"],
            "group_names": [f"ep_size_{facts.stacks.ep}" if is_stack else "replicated"],
        }
        for number, sub in enumerate(subs)
        for is_stack in [not facts.stacks.counts.keys().isdisjoint(sub.chunks.numels)]
    ]
    return {"ds_zero_partition_groups": groups}


def _flat_states(
    draft: AtomDraft,
    facts: RunFacts,
    group: Group,
    stored: Sequence[ParamRange],
    *,
    numel: int,
    counters: Mapping[str, AtomIndex],
) -> dict[str, object]:
    """States of a flat master of `numel` elements; `counters`: count to the parameter whose value is written."""
    return {
        name: draft.flat(name, group.dtypes[name], numel, stored)
        if name in group.dtypes
        else write_count(draft, facts, counters[name], name)
        for name in group.state_names
    }


Members = Sequence[tuple[Group, Sequence[AtomIndex]]]
"""Each group with the parameters that its optimizer numbers, in its order."""

_OF_TORCH = frozenset({"amsgrad", "foreach", "maximize"})
"""Hyper-parameters that Adam and AdamW of torch always have (`__setstate__` adds them), and FusedAdam never."""


class Wrapper(StrEnum):
    """Which class of DeepSpeed holds the optimizer at stage 0."""

    PLAIN = "the optimizer itself"
    UNFUSED = "FP16_UnfusedOptimizer"
    FUSED = "FP16_Optimizer"


def choose_wrapper(facts: RunFacts, groups: Sequence[Group]) -> Wrapper:
    """The class that the engine of the target will use (`_configure_fp16_optimizer`, 0.19.8).

    If the training script builds the optimizer, a hyper-parameter `bias_correction` means FusedAdam, unless there are
    also hyper-parameters that only torch's Adam has: `group_entry` adds `bias_correction`, and torch's Adam keeps it
    when it loads a state_dict.
    """
    if facts.precision is Precision.FP32:
        return Wrapper.PLAIN
    fused = facts.config.names_fused_adam
    if not facts.config.names_optimizer:
        unfused = facts.extras.mapping("optimizer").get("class") == "FP16_UnfusedOptimizer"
        hyper = groups[0].hyper.keys() if groups else ()
        fused = "bias_correction" in hyper and _OF_TORCH.isdisjoint(hyper) and not unfused
    return Wrapper.FUSED if fused else Wrapper.UNFUSED


def optimizer_state(draft: AtomDraft, facts: RunFacts, counted: Members, kind: Wrapper) -> dict[str, object]:
    """`optimizer` of the model-states file."""
    if kind is Wrapper.PLAIN:
        return _per_parameter(draft, facts, counted)
    is_scaled = facts.precision is Precision.FP16
    scale: Mapping[str, object] = {"dynamic": False, "cur_scale": 1.0, "cur_iter": 0}
    scale = read_loss_scale(facts.extras.get("loss_scaler"), facts.config) if is_scaled else scale
    if kind is Wrapper.UNFUSED:
        inner = _per_parameter(draft, facts, counted)
        masters = [
            [draft.full(atom.name, WEIGHT, atom.dtype_of(WEIGHT, facts.dtypes)) for atom in group.params]
            for group, _ in counted
        ]
        return {**scale_numbers(scale), "optimizer_state_dict": inner, "fp32_groups": masters}
    state: dict[int, object] = {}
    flat_masters: list[object] = []
    for number, (group, _) in enumerate(counted):
        numel = sum(numel for _, numel in group.sizes)  # a flat master has no padding
        *_, buffer = shared_buffers(dict(group.sizes), ranks=1, paddings=None, first=numel, known_from="FP16_Optimizer")
        stored = draft.ranges(buffer, buffer.axes(), 0)
        flat_masters.append(draft.flat(WEIGHT, group.dtypes[WEIGHT], numel, stored))
        if group.state_names:
            state[number] = _flat_states(draft, facts, group, stored, numel=numel, counters=group.counters)
    entries = [group_entry(draft, facts, group, [number]) for number, (group, _) in enumerate(counted)]
    return {
        **(scale_numbers(scale) if is_scaled else {}),
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_groups_flat": flat_masters,
        "clip_grad": 0.0,
        **clipping_keys(facts, 0),
    }


def _per_parameter(draft: AtomDraft, facts: RunFacts, counted: Members) -> dict[str, object]:
    """state_dict of a torch optimizer: one entry per parameter, none for a parameter that was never stepped."""
    state: dict[int, object] = {}
    entries = []
    first = 0
    for group, atoms in counted:
        numbers = range(first, first + len(atoms))
        entries.append(group_entry(draft, facts, group, numbers))
        for number, atom in zip(numbers, atoms, strict=True):
            values = {
                name: write_count(draft, facts, atom, name)
                if is_plain_number(atom, name)
                else draft.full(atom.name, name, atom.dtype_of(name, facts.dtypes))
                for name in atom.states
                if name != WEIGHT
            }
            if values:
                state[number] = values
        first = numbers.stop
    return {"state": state, "param_groups": entries}


def group_members(facts: RunFacts, groups: Sequence[Group], kind: Wrapper) -> Members:
    """The parameters that the optimizer numbers in each group.

    torch's optimizers also number parameters without elements. Raises UnsupportedError if it is not known which group
    such a parameter belongs to.
    """
    if kind is not Wrapper.PLAIN:
        return [(group, group.params) for group in groups]
    index = facts.index
    members = [[index.atoms[name] for name in group.params] for group in index.groups]
    grouped = {name for group in index.groups for name in group.params}
    order = {name: position for position, name in enumerate(index.atoms)}
    unknown = []
    for atom in index.atoms.values():
        if atom.name in grouped or atom.kind is Kind.BUFFER or 0 not in atom.global_shape:
            continue
        same_rank = [
            atoms for atoms in members if any(len(member.global_shape) == len(atom.global_shape) for member in atoms)
        ]
        homes = members if len(members) == 1 else same_rank
        if len(homes) == 1:
            homes[0].insert(sum(order[member.name] < order[atom.name] for member in homes[0]), atom)
        else:
            unknown.append(f"{atom.name} {list(atom.global_shape)}")
    if unknown:
        raise UnsupportedError(
            "a stage-0 optimizer numbers parameters without elements too, and the source does not record which group "
            f"they belong to:\n{format_list(unknown)}\nWrite files of stage 1 to 3, which leave them out"
        )
    return list(zip(groups, members, strict=True))
