"""Parameter groups and steps of a torch_dist checkpoint.

They stand in the common state, or, where states cannot be laid out anew (`dp_reshardable` and its like), in an object
per data-parallel group; those of all groups of one optimizer are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ucp.contract.rank_extras import Checksums
from ucp.contract.scalars import scalar_state
from ucp.core.index import Loss, ParamGroup, StateIndex
from ucp.core.names import STEP
from ucp.io.pickle.fields import mapping
from ucp_formats.megatron.param_groups.rules import SavedGroup, deal, rank_free
from ucp_formats.megatron.torch_dist.common import CommonState, SavedObjects, as_list, optimizer_dicts

__all__ = ["DistGroups", "read_groups"]


@dataclass(slots=True, kw_only=True)
class DistGroups:
    """Groups and steps."""

    groups: tuple[ParamGroup, ...] = ()
    """Groups with the names of their parameters."""
    steps: dict[str, StateIndex] = field(default_factory=dict)
    """Parameter to its step."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What is not known, and of which parameters."""
    lost: dict[str, Loss] = field(default_factory=dict)
    """Parameters whose group is not known, and why."""


def read_groups(
    common: CommonState,
    objects: SavedObjects,
    shapes: Mapping[str, tuple[int, ...]],
    chains: Mapping[str, int | None],
    arguments: Mapping[str, object],
) -> DistGroups:
    """Groups of the trained parameters `shapes` (in the order of registration), and their steps.

    `chains`: which of several optimizers a parameter is in, where that is known. `arguments`: of the run.
    """
    found = DistGroups()
    saved = list(_saved_groups(common, objects, found))
    if not saved or not shapes:
        return found
    dealt = deal(saved, shapes, arguments, chains)
    found.notes.append(dealt.note)
    found.dropped += dealt.dropped
    found.lost |= dealt.lost
    shared = _common_step(common)
    for group in dealt.groups:
        step = scalar_state(group.hyper.get(STEP)) or shared
        if step is not None:
            found.steps |= dict.fromkeys(group.params, step)
    agreed = shared or scalar_state(dealt.step)
    if agreed is not None:
        found.steps |= dict.fromkeys(dealt.lost, agreed)
    found.groups = tuple(rank_free(group, found.steps) for group in dealt.groups)
    if not found.steps:
        found.notes.append("no step is recorded")
    return found


def _saved_groups(common: CommonState, objects: SavedObjects, found: DistGroups) -> Iterator[SavedGroup]:
    """Groups as saved: of the common state, else of the first data-parallel group, for every optimizer."""
    inner = {chain: own.get("optimizer") for chain, own in optimizer_dicts(common.values).items()}
    where = common.where
    inner = {chain: own for chain, own in inner.items() if isinstance(own, dict) and "param_groups" in own}
    apart = {chain: own for chain, own in _of_data_parallel_groups(objects, found).items() if chain not in inner}
    if apart:
        where = f"{where}, or of an object 'optimizer' of a data-parallel group"
    for chain, own in sorted({**inner, **apart}.items(), key=lambda item: item[0] or 0):
        groups = own.get("param_groups") if isinstance(own, dict) else None
        for group in as_list(groups, f"param_groups of {where}") if groups is not None else ():
            entries = mapping(group, f"a group of {where}")
            hyper = {str(key): value for key, value in entries.items() if key not in ("params", "param_names")}
            yield SavedGroup(chain=chain, hyper=hyper)


def _of_data_parallel_groups(objects: SavedObjects, found: DistGroups) -> dict[int | None, object]:
    first: dict[int | None, object] = {}
    checksums = Checksums(objects.records)
    for key, value in sorted(objects.groups.items(), key=lambda item: (item[0].chain or 0, item[0].group)):
        if key.what != "optimizer":
            continue
        usual = first.setdefault(key.chain, value)
        if not checksums.same(value, usual):
            found.notes.append(f"parameter groups of data-parallel group {key.group} differ from the first one's")
    return first


def _common_step(common: CommonState) -> StateIndex | None:
    """A step that all parameters share: `common_step`, or that of the first parameter (megatron-core up to 0.15)."""
    for own in optimizer_dicts(common.values).values():
        inner = own.get("optimizer")
        state = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(state, dict) and "common_step" in state:
            return scalar_state(state["common_step"])
        params = own.get("param_state")
        for param in params.values() if isinstance(params, dict) else ():
            if isinstance(param, dict) and STEP in param:
                return scalar_state(param[STEP])
    return None
