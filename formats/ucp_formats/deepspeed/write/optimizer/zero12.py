"""The optimizer files of stages 1 and 2, and of BF16_Optimizer: one share of each group's flat buffer per rank.

Keys and their order are those of `DeepSpeedZeroOptimizer.state_dict` (runtime/zero/stage_1_and_2.py, 0.19.8).
BF16_Optimizer loads the same file: it reads a subset of the keys, and pads the weights itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.flat_buffer import FlatBuffer, WholeParameters
from ucp.core.layout import AxisLayout
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.partition import alignment_paddings, round_robin, shared_buffers
from ucp_formats.deepspeed.write.draft import AtomDraft, Stored
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.values import clipping, common_keys, group_entry, scalar_value
from ucp_formats.deepspeed.write.run import EMULATED, RunFacts

__all__ = ["GroupBuffer", "Share", "keeps_whole", "optimizer_state"]


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
        own = self.layout
        return [start - stop for stop, start in zip(own.stops, (*own.starts[1:], *own.stops[-1:]), strict=True)]


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


def optimizer_state(draft: AtomDraft, facts: RunFacts, shares: Sequence[Share], rank: int) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank`."""
    flats = [share.buffer.layout for share in shares]
    stored = [draft.stored(share.buffer.layout, share.buffer.axes, share.place) for share in shares]
    used = [share.buffer.layout.lengths(share.place).start for share in shares]
    every = list(zip(shares, used, stored, strict=True))
    state = {
        number: _state(draft, facts, own, parts)
        for number, (own, _, parts) in enumerate(every)
        if own.group.state_names
    }
    entries = [group_entry(draft, share.group, [number]) for number, share in enumerate(shares)]
    return {
        **common_keys(facts, rank),
        **clipping(facts, rank),
        "base_optimizer_state": {"state": state, "param_groups": entries},
        "single_partition_of_fp32_groups": [
            draft.flat(WEIGHT, share.group.weight_dtype(facts.dtypes), numel, own) for share, numel, own in every
        ],
        "zero_stage": Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (facts.stage,), new=False),
        "group_paddings": [flat.share - numel for flat, numel in zip(flats, used, strict=True)],
        "param_alignment_paddings": [share.buffer.paddings for share in shares],
        "partition_count": [flat.ranks for flat in flats],
        "ds_version": EMULATED,
        "param_slice_mappings": [_slice_mapping(share, own) for share, _, own in every],
    }


def _state(draft: AtomDraft, facts: RunFacts, share: Share, stored: Sequence[Stored]) -> dict[str, object]:
    """States of one flat parameter; as in DeepSpeed they are as long as the share, padding included."""
    group = share.group
    state: dict[str, object] = {}
    for name in group.state_names:
        numel, parts = share.buffer.layout.share, stored
        if name in group.scalars:
            state[name] = scalar_value(draft, group, name)
            continue
        if keeps_whole(facts, group, name):
            whole = WholeParameters(share.buffer.layout)
            parts = draft.stored(whole, whole.axes(), share.place)
            numel = sum(own.stop - own.start for own in parts)
        state[name] = draft.flat(name, group.elementwise[name], numel, parts)
    return state


def keeps_whole(facts: RunFacts, group: Group, state: str) -> bool:
    """Whether a rank keeps a state of all elements of the parameters it shares (`_muon_momentum_buffer`, 0.19.8)."""
    shared = facts.config.offloaded or (facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision))
    return state == "momentum_buffer" and group.hyper.get("use_muon") is True and not shared


def _slice_mapping(share: Share, stored: Sequence[Stored]) -> OrderedDict[object, object]:
    """Where each parameter lies in the share, in the order of the group; true also under round robin."""
    held = {own.param: own for own in stored}
    address = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
    return OrderedDict(
        (
            share.renamed.get(atom.name, atom.name),
            Stub(address, state={"numel": own.stop - own.start, "start": own.offset}, has_state=True),
        )
        for atom in share.group.params
        if (own := held.get(atom.name)) is not None
    )
