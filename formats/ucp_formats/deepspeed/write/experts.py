"""Native mixture of experts in DeepSpeed's files: an expert a file, and optimizer states by expert-parallel rank.

The experts of a layer are dealt out in stretches: expert-parallel rank `e` has those with the numbers `e * n` to
`e * n + n - 1`. Their optimizer groups are cut over the data-parallel ranks that hold the same experts, and name an
expert by its number on the rank (`experts`, for reading, says the same).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ucp.core.names import WEIGHT
from ucp.errors import UnsupportedError
from ucp.io.torch_file.draft import Drafted
from ucp_formats.deepspeed.experts import Numbered, holders
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.optimizer.sharded import GroupBuffer, Share
from ucp_formats.deepspeed.write.rank_views import narrowed
from ucp_formats.deepspeed.write.run import RunFacts, tag

__all__ = ["ExpertRanks", "expert_files", "without_experts"]


class ExpertRanks:
    """Optimizer groups as each expert-parallel rank has them."""

    def __init__(self, facts: RunFacts, groups: Sequence[Group], numbered: Numbered, ep: int) -> None:
        contiguous = facts.config.raw.get("use_data_before_expert_parallelism") is True
        self._facts = facts
        self._numbered = numbered
        self._ep = ep
        self._subsets = holders(ranks=facts.ranks, ep=ep, contiguous=contiguous)
        self._groups = [[self._narrowed(group, rank) for group in groups] for rank in range(ep)]

    def shares(self, rank: int) -> list[Share]:
        """What the file of data-parallel rank `rank` has."""
        (own,) = (number for number, subset in enumerate(self._subsets) if rank in subset)
        place = self._subsets[own].index(rank)
        every = self._facts.ranks
        shares = self._shares[own]
        return [replace(one, place=rank if one.buffer.layout.ranks == every else place) for one in shares]

    @cached_property
    def _shares(self) -> list[list[Share]]:
        """The first share of every buffer of each expert-parallel rank."""
        subsets = zip(self._groups, self._subsets, strict=True)
        return [[self._first_share(group, len(subset)) for group in groups] for groups, subset in subsets]

    def _first_share(self, group: Group, holders: int) -> Share:
        owners = {self._numbered.owner(atom.name, self._ep) for atom in group.params}
        renamed = {atom.name: self._numbered.local(atom.name, self._ep) for atom in group.params}
        ranks = self._facts.ranks if owners <= {None} else holders
        return Share(GroupBuffer.of(self._facts, group, ranks=ranks), 0, renamed)

    def views(self) -> Iterator[tuple[RunFacts, Sequence[Group]]]:
        """Facts and groups of each expert-parallel rank, with its own experts only."""
        for rank, groups in enumerate(self._groups):
            atoms = {
                name: atom
                for name, atom in self._facts.index.atoms.items()
                if self._numbered.owner(name, self._ep) in (None, rank)
            }
            yield replace(self._facts, index=narrowed(self._facts.index, atoms)), groups

    def _narrowed(self, group: Group, rank: int) -> Group:
        """A group with the experts of one rank only."""
        owners = [self._numbered.owner(atom.name, self._ep) for atom in group.params]
        if self._facts.stage and None in owners and any(owner is not None for owner in owners):
            expert = next(atom.name for atom, owner in zip(group.params, owners, strict=True) if owner is not None)
            other = group.params[owners.index(None)].name
            raise UnsupportedError(
                "expected parameter groups of experts alone, as every run with ZeRO has them; "
                f"{self._facts.index.path} has one with {expert} and {other}. Write files of a run without ZeRO "
                "(--topology with zero=0)"
            )
        params = tuple(atom for atom, owner in zip(group.params, owners, strict=True) if owner in (None, rank))
        hyper = dict(group.hyper)
        if hyper.get("moe") is True:
            hyper.setdefault("name", f"ep_size_{self._ep}")
        return replace(group, params=params, hyper=hyper)


def without_experts(facts: RunFacts, numbered: Numbered) -> RunFacts:
    """Facts with the parameters that are in the model-states file."""
    atoms = {name: atom for name, atom in facts.index.atoms.items() if numbered.owner(name, 1) is None}
    return replace(facts, index=narrowed(facts.index, atoms))


def expert_files(facts: RunFacts, numbered: Numbered) -> Iterator[Drafted]:
    """A file for each expert of each layer."""
    for (layer, expert), names in numbered.by_file(facts.index.atoms).items():
        draft = facts.draft(f"{tag(facts.index)}/layer_{layer}_expert_{expert}_mp_rank_{facts.mp:02d}_model_states.pt")
        dtypes = {name: facts.module_dtype(facts.index.atoms[name]) for name in names}
        yield draft.finish({name: draft.whole(name, WEIGHT, dtype) for name, dtype in dtypes.items()})
