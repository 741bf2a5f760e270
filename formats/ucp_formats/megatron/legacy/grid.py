"""The grid of ranks of a legacy checkpoint: which folders must be there, and what part of an expert each holds.

The ranks of one pipeline stage are numbered twice (parallel_state.py, order tp-cp-ep-dp-pp): as `tp + TP * d` for the
dense layers, and as `etp + ETP * (ep + EP * copy)` for the experts. A rank saves when it is the first of its dense or
of its expert data-parallel group (checkpointing.py: save_checkpoint), under its tp and ep. So where TP and EP share
ranks the grid is sparse:

>>> grid = Grid(tp=2, pp=1, ep=2, etp=1)
>>> [(place.tp, place.ep) for place in grid.places()]
[(0, 0), (1, 1)]
>>> grid.expert_part(GridPlace(tp=1, pp=0, ep=1))
ExpertPart(etp=0, copy=0)
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp_formats.megatron.names import GridPlace, RankFolder
from ucp_formats.megatron.run.arguments import Arguments

__all__ = ["ExpertPart", "Grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """What a rank holds of each of its experts."""

    etp: int
    """Tensor-parallel rank among those of an expert."""
    copy: int
    """How many ranks before it hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees of parallelism that files are named by."""

    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    ep: int
    """Expert-parallel ranks."""
    etp: int
    """Tensor-parallel ranks of an expert."""

    @classmethod
    def of(cls, arguments: Arguments, folders: tuple[RankFolder, ...]) -> Grid:
        """The grid that the arguments say; of what they do not say, what the names of the folders show."""
        tp = arguments.tp or 1 + max(folder.tp for folder in folders)
        numbers = [folder.numbers for folder in folders]
        several = [own[0] for own in numbers if own]
        # experts came with version 3 of the checkpoint, long after the arguments: without these a number is a stage
        pp = arguments.pp or (1 if arguments.ep else 1 + max(several, default=0))
        ep = arguments.ep or 1 + max((own[1] for own in numbers if len(own) == 2), default=0)
        etp = arguments.etp if arguments.num_experts or ep > 1 else None  # without experts it says nothing
        return cls(tp=tp, pp=pp, ep=ep, etp=etp or tp)

    @property
    def collides(self) -> bool:
        """Whether two ranks with different parts of experts have the same name, and one overwrote the other."""
        named = {(rank % self.tp, rank // self.etp % self.ep) for rank in range(self.etp * self.ep)}
        return len(named) < self.etp * self.ep

    def places(self) -> tuple[GridPlace, ...]:
        """Every rank that must have saved, by stage."""
        count = max(self.tp, self.etp * self.ep if self.ep > 1 else 1)
        named = {(rank % self.tp, rank // self.etp % self.ep): None for rank in range(count)}
        return tuple(GridPlace(tp=tp, pp=pp, ep=ep) for pp in range(self.pp) for tp, ep in named)

    def unsaved(self) -> tuple[GridPlace, ...]:
        """Ranks that saved nothing while Megatron let only the first of an expert data-parallel group save.

        Newer versions let the first of a dense one save as well (checkpointing.py: save_checkpoint).
        """
        saved = {(rank % self.tp, rank // self.etp % self.ep) for rank in range(self.etp * self.ep)}
        return tuple(place for place in self.places() if (place.tp, place.ep) not in saved)

    def contains(self, place: GridPlace) -> bool:
        """Whether a rank lies in the grid at all."""
        return place.tp < self.tp and place.pp < self.pp and place.ep < self.ep

    def rank(self, place: GridPlace) -> int:
        """Number, among those of its stage, of the first rank of that place."""
        ranks = range(place.tp, self.tp * self.etp * self.ep, self.tp)
        return next((rank for rank in ranks if rank // self.etp % self.ep == place.ep), place.tp)

    def expert_part(self, place: GridPlace) -> ExpertPart:
        """What the rank at `place` holds of its experts."""
        rank = self.rank(place)
        return ExpertPart(etp=rank % self.etp, copy=rank // (self.etp * self.ep))

    def __str__(self) -> str:
        """Degrees above one, e.g. "tp=2,pp=4"."""
        degrees = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        if self.etp != self.tp:
            degrees["etp"] = self.etp
        shown = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1 or axis == "etp"]
        return ",".join(shown) or "one rank"
