"""The optimizer files of stages 1 and 2, and of BF16_Optimizer: one share of each group's flat buffer per rank.

Keys and their order are those of `DeepSpeedZeroOptimizer.state_dict` (runtime/zero/stage_1_and_2.py, 0.19.8).
BF16_Optimizer loads the same file: it reads a subset of the keys, and pads the weights itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.partition import FlatGroup, alignment_paddings, flat_group, round_robin
from ucp_formats.deepspeed.write.draft import AtomDraft, Stretch
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.values import clipping, common_keys, group_entry, scalar_value
from ucp_formats.deepspeed.write.run import EMULATED, RunFacts

__all__ = ["Share", "buffer", "buffers", "keeps_whole", "optimizer_state"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one file has of a group."""

    group: Group
    """The group."""
    flat: FlatGroup
    """Its buffer."""
    place: int
    """Which share of the buffer it is."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parameter to its name on the rank, where that is another (experts count from 0 on each rank)."""


def buffers(facts: RunFacts, groups: Sequence[Group]) -> tuple[FlatGroup, ...]:
    """The flat buffer of each group, as the engine of the target would build it."""
    return tuple(buffer(facts, group, ranks=facts.ranks) for group in groups)


def buffer(facts: RunFacts, group: Group, *, ranks: int) -> FlatGroup:
    """The flat buffer of a group that is cut over `ranks` ranks."""
    plain = facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision)
    sizes = dict(group.sizes)
    names: Sequence[str] = tuple(sizes)
    if facts.config.round_robin and not plain:
        names = round_robin(names, ranks=ranks)
    ordered = [(name, sizes[name]) for name in names]
    paddings = None
    if facts.config.parameter_alignment and not plain:
        itemsize = facts.module_dtype(group.params[0]).itemsize
        paddings = alignment_paddings([numel for _, numel in ordered], itemsize=itemsize)
    return flat_group(ordered, ranks=ranks, paddings=paddings)


def optimizer_state(draft: AtomDraft, facts: RunFacts, shares: Sequence[Share], rank: int) -> dict[str, object]:
    """`optimizer_state_dict` of the file of `rank`."""
    base = {
        "state": {
            number: _state(draft, facts, share) for number, share in enumerate(shares) if share.group.state_names
        },
        "param_groups": [group_entry(draft, share.group, [number]) for number, share in enumerate(shares)],
    }
    flats = [share.flat for share in shares]
    return {
        **common_keys(facts, rank),
        **clipping(facts, rank),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [_weights(draft, facts, share) for share in shares],
        "zero_stage": Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (facts.stage,), new=False),
        "group_paddings": [share.flat.padding(share.place) for share in shares],
        "param_alignment_paddings": [list(flat.paddings) for flat in flats],
        "partition_count": [flat.ranks for flat in flats],
        "ds_version": EMULATED,
        "param_slice_mappings": [_slice_mapping(share) for share in shares],
    }


def _state(draft: AtomDraft, facts: RunFacts, share: Share) -> dict[str, object]:
    """States of one flat parameter; as in DeepSpeed they are as long as the share, padding included."""
    group, flat, rank = share.group, share.flat, share.place
    state: dict[str, object] = {}
    for name in group.state_names:
        if name in group.scalars:
            state[name] = scalar_value(draft, group, name)
            continue
        numel, parts = flat.partition, _parts(group, flat, rank, name)
        if keeps_whole(facts, group, name):
            numel, parts = _whole_parts(group, flat, rank, name)
        state[name] = draft.flat(name, group.elementwise[name], numel, parts)
    return state


def keeps_whole(facts: RunFacts, group: Group, state: str) -> bool:
    """Whether a rank keeps a state of all elements of the parameters it shares (`_muon_momentum_buffer`, 0.19.8)."""
    shared = facts.config.offloaded or (facts.stage == 1 and facts.config.uses_bf16_optimizer(facts.precision))
    return state == "momentum_buffer" and group.hyper.get("use_muon") is True and not shared


def _weights(draft: AtomDraft, facts: RunFacts, share: Share) -> object:
    group, flat, rank = share.group, share.flat, share.place
    numel = flat.partition - flat.padding(rank)
    return draft.flat(WEIGHT, group.weight_dtype(facts.dtypes), numel, _parts(group, flat, rank, WEIGHT))


def _parts(group: Group, flat: FlatGroup, rank: int, state: str) -> list[Stretch]:
    having = {atom.name for atom in group.params if state in atom.states}
    return [
        Stretch(param=held.name, start=held.start, stop=held.stop, offset=held.offset)
        for held in flat.held(rank)
        if held.name in having
    ]


def _whole_parts(group: Group, flat: FlatGroup, rank: int, state: str) -> tuple[int, list[Stretch]]:
    """Elements, and stretches, of all parameters that the share touches, one after another."""
    having = {atom.name for atom in group.params if state in atom.states}
    numels = dict(group.sizes)
    parts = []
    offset = 0
    for held in flat.held(rank):
        if held.name in having:
            parts.append(Stretch(param=held.name, start=0, stop=numels[held.name], offset=offset))
        offset += numels[held.name]
    return offset, parts


def _slice_mapping(share: Share) -> OrderedDict[object, object]:
    """Where each parameter lies in the share, in the order of the group; true also under round robin."""
    held = {own.name: own for own in share.flat.held(share.place)}
    address = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
    return OrderedDict(
        (
            share.renamed.get(atom.name, atom.name),
            Stub(address, state={"numel": own.stop - own.start, "start": own.offset}, has_state=True),
        )
        for atom in share.group.params
        if (own := held.get(atom.name)) is not None
    )
