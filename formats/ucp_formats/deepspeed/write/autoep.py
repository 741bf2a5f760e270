"""What native files of AutoEP have more than others: parts of stacks, groups of experts, a file per expert, layers.

`ExpertStacks.axis` says which experts an expert-parallel rank holds. Masters and moments of these are in its ZeRO
files, like any other parameter's. Up to ZeRO-2 the weights are in a file per expert (`_save_moe_checkpoint`,
runtime/engine.py, 0.19.8), which holds what one of as many ranks as there are experts would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ucp.contract.plugins import pattern
from ucp.core.index import WEIGHT, Index, Kind, ParamGroup
from ucp.core.topology import ExpertsByRank, Topology, list_experts
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, format_list
from ucp.io.torch_file.draft import FinishedFile
from ucp.moe.layers import number_layers
from ucp.placement.descriptor import ExpertPlacement
from ucp_formats.deepspeed.placement import MAPS, PLACEMENT, write_affine_map
from ucp_formats.deepspeed.read.stacks import EXPERT_PATTERNS, INFO, LAYERS, PARTS, ExpertStacks
from ucp_formats.deepspeed.tp.layout import TensorLayout
from ucp_formats.deepspeed.write.run import AtomDraft, RunFacts, localize, tag

_LARGEST_GROUP = 178_956_971
"""Elements of a rank's experts in an optimizer group (`split_params_into_different_moe_groups_for_optimizer`)."""


def place_stacks(facts: RunFacts, wanted: Topology) -> RunFacts:
    """Facts of a run of topology `wanted`, whose ranks hold parts of the stacks; unchanged if there are none.

    Raises MissingStateError for an incomplete layer, TopologyError for stacks that misfit `wanted`, and
    UnsupportedError for frozen ones that DeepSpeed does not restore.
    """
    stacks, index = facts.stacks, facts.index
    present = stacks.counts.keys() & index.atoms.keys()
    if not present and wanted.placement is not None:
        raise TopologyError(
            f"expected experts of AutoEP (LAYER.experts.w1, w2 and w3) for a placement; {index.path} has none: drop it"
        )
    if not present or (wanted.ep == 1 and stacks.known_from != LAYERS):
        return replace(facts, stacks=ExpertStacks())
    if missing := [name for name in stacks.counts if name not in present]:
        raise MissingStateError(
            f"expected {index.path} to have w1, w2 and w3 of each layer of AutoEP; missing:\n{format_list(missing)}\n"
            "Include these, or exclude all experts"
        )
    if wanted.tp > 1 or wanted.pp > 1:
        raise TopologyError(f"expected tp=1 and pp=1 for experts of AutoEP, because ucp writes no others; got {wanted}")
    frozen = [name for name in stacks.counts if index.atoms[name].kind is not Kind.PARAMETER]
    if frozen and facts.stage >= 2:
        raise UnsupportedError(
            f"expected zero=0 or zero=1 for frozen experts of AutoEP; got {wanted}. With ZeRO 2 DeepSpeed restores "
            f"rank 0's on every rank, and with ZeRO 3 it does not save any:\n{format_list(frozen)}"
        )
    index = replace(index, groups=_split_groups(index, stacks, wanted.ep))
    by_rank = (
        {} if wanted.placement is None else _place_by_rank(stacks, index, list_experts(wanted.placement, wanted.ep))
    )
    return replace(facts, index=index, stacks=replace(stacks, ep=wanted.ep, by_rank=by_rank))


def _place_by_rank(stacks: ExpertStacks, index: Index, placed: Mapping[int, ExpertsByRank]) -> dict[str, ExpertsByRank]:
    """Stack to the experts of each rank, by the placement of each layer. Raises TopologyError if it misfits one."""
    numbers = {layer.module: number for number, layer in number_layers(index.shapes)}
    by_rank, wrong = dict[str, ExpertsByRank](), list[str]()
    for layer in stacks.layers:
        names, ranks = [f"{layer}.experts.{part}" for part in PARTS], placed.get(numbers[layer])
        if ranks is None:
            wrong.append(f"{layer}: the placement has no layer {numbers[layer]}")
        elif problem := ExpertPlacement.of(ranks, num_experts=stacks.counts[names[0]]).problem:
            wrong.append(f"{layer}: {problem}")
        elif not all(ranks):
            wrong.append(f"{layer}: rank {ranks.index(())} has no expert, which ucp does not write")
        else:
            by_rank |= dict.fromkeys(names, ranks)
    if wrong:
        raise TopologyError(f"expected a placement of all experts of the model; got\n{format_list(wrong)}")
    return by_rank


def _split_groups(index: Index, stacks: ExpertStacks, ep: int) -> tuple[ParamGroup, ...]:
    """The groups as DeepSpeed splits them: other parameters, then the experts of each group, in parts of limited size.

    The experts of one group are in several groups of the source if a rank held too many elements of them.
    """
    numels = {name: index.atoms[name].states[WEIGHT].numel for name in stacks.counts}
    others, experts, last = list[ParamGroup](), list[ParamGroup](), 0
    for group in index.groups:
        members = tuple(name for name in group.params if name in numels)
        if not members or len(members) < len(group.params):
            others.append(replace(group, params=tuple(name for name in group.params if name not in numels)))
        if not members:
            continue
        hyper = {**group.hyper, "name": f"ep_size_{ep}", "moe": True}
        was_full = last + numels[members[0]] > _LARGEST_GROUP * stacks.ep
        if group.hyper.get("moe") is True and experts and was_full and experts[-1].hyper == hyper:
            experts[-1] = replace(experts[-1], params=(*experts[-1].params, *members))
        else:
            experts.append(replace(group, params=members, hyper=hyper))
        last = sum(numels[name] for name in members)
    return (*others, *(part for group in experts for part in _limit(group, numels, _LARGEST_GROUP * ep)))


def _limit(group: ParamGroup, numels: dict[str, int], limit: int) -> Iterator[ParamGroup]:
    """Groups of at most `limit` elements, unless one parameter has more."""
    part, used = list[str](), 0
    for name in group.params:
        if part and used + numels[name] > limit:
            yield replace(group, params=tuple(part))
            part, used = [], 0
        part.append(name)
        used += numels[name]
    yield replace(group, params=tuple(part))


def stack_view(facts: RunFacts, rank: int) -> RunFacts:
    """Facts of expert-parallel rank `rank`, with the shapes that the stacks have there."""
    if not facts.stacks.counts:
        return facts
    index, cuts = facts.index, dict(facts.cuts)
    for name in facts.stacks.counts:
        axis = facts.stacks.axis(name)
        shape = index.atoms[name].global_shape
        cuts[name] = TensorLayout(axis.pattern, shape, axis.parts, axis.axis, axis.known_from)
    atoms = localize(index.atoms, cuts, rank)
    return replace(facts, index=replace(index, atoms=atoms), cuts=cuts, ep_rank=rank)


def expert_files(facts: RunFacts) -> Iterator[FinishedFile]:
    """The files of experts: each has a matrix per stack."""
    for number, layer in enumerate(facts.stacks.layers):
        atoms = {name: facts.index.atoms[name] for name in (f"{layer}.experts.{part}" for part in PARTS)}
        count = facts.stacks.counts[next(iter(atoms))]
        one_each = pattern("shard", dim=0)
        cuts = {name: TensorLayout(one_each, atom.global_shape, count, "ep") for name, atom in atoms.items()}
        for expert in range(count):
            path = f"{tag(facts.index)}/layer_{number}_expert_{expert}_mp_rank_{facts.mp:02d}_model_states.pt"
            index = replace(facts.index, atoms=localize(atoms, cuts, expert))
            draft = AtomDraft(path, index, cuts, {"ep": expert})
            root = {
                f"{name}.{expert}": draft.full(name, WEIGHT, facts.module_dtype(atom), shape=atom.global_shape[1:])
                for name, atom in atoms.items()
            }
            yield replace(draft.finish(root), layouts={})  # how the files cut stacks is not how ranks do


def record_layers(facts: RunFacts, *, place: int, holders: int) -> dict[str, object]:
    """Values of a model-states file that describe the layers; `place`: the rank among `holders` of the same experts."""
    stacks, layers = facts.stacks, list[object]()
    for number, layer in enumerate(stacks.layers):
        names = [f"{layer}.experts.{part}" for part in PARTS]
        count, by_rank = stacks.counts[names[0]], stacks.experts_by_rank(names[0])
        shapes = {name: (count, *facts.index.atoms[name].global_shape[1:]) for name in names}
        layers.append({
            "moe_layer_id": number,
            "module_path": layer,
            "num_experts": count,
            "num_local_experts": len(by_rank[facts.ep_rank]),
            "ep_size": stacks.ep,
            PLACEMENT: ExpertPlacement.of(by_rank, num_experts=count).to_document(),
            MAPS: {"version": 1, "params": {name: write_affine_map(by_rank, shape) for name, shape in shapes.items()}},
            "expert_key_prefix": f"{layer}.experts",
            "checkpoint_format": "zero3_partitioned" if facts.stage == 3 else "per_expert_files",
            "checkpoint_format_version": 1 if facts.stage == 3 else None,
            "ep_group_name": f"ep_size_{stacks.ep}",
            "ep_rank": facts.ep_rank,
            "expert_data_parallel_rank": place,
            "expert_data_parallel_world_size": holders,
            "global_expert_start": facts.ep_rank * (count // stacks.ep),
            "global_expert_end": (facts.ep_rank + 1) * (count // stacks.ep),
        })  # fmt: skip
    if not layers:
        return {}
    info: dict[object, object] = {"universal_checkpoint_version": 0.4}
    if facts.rules is not None:
        info |= facts.rules.for_degree(facts.tp)
    info |= {EXPERT_PATTERNS: [r".*\.experts\.w[123]$"], LAYERS: layers}
    return {
        "num_experts": [stacks.counts[f"{layer}.experts.w1"] for layer in stacks.layers],
        LAYERS: layers,
        INFO: info,
    }
