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

Every rank saves its own arguments, `rank` and `world_size` among them, which tell whether files lie under their own
name. Ranks are numbered in the order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp under `--use-tp-pp-dp-mapping`
(parallel_state.py: initialize_model_parallel); which of the data-parallel ranks wrote a folder differs, so only the
tensor-parallel rank, the stage and the expert-parallel rank are compared.

>>> placing(Grid(tp=2, pp=2, ep=1, etp=2), Arguments(raw={}, world=8, dp=2))(5)
GridPlace(tp=1, pp=1, ep=0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ucp_formats.megatron.names import GridPlace, RankFolder, rank_folder_name
from ucp_formats.megatron.run.arguments import Arguments

__all__ = ["ExpertPart", "Grid", "misplaced", "placing"]

_ENCODER = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
"""Degrees of an encoder with ranks of its own, which shift all others (megatron-core 0.9 to 0.12)."""


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
        return len(self._named(self.etp * self.ep)) < self.etp * self.ep

    def places(self) -> tuple[GridPlace, ...]:
        """Every rank that must have saved, by stage."""
        named = self._named(max(self.tp, self.etp * self.ep if self.ep > 1 else 1))
        return tuple(GridPlace(tp=tp, pp=pp, ep=ep) for pp in range(self.pp) for tp, ep in named)

    def _named(self, ranks: int) -> dict[tuple[int, int], None]:
        """Tp and ep of so many ranks of a stage."""
        return dict.fromkeys((rank % self.tp, rank // self.etp % self.ep) for rank in range(ranks))

    def unsaved(self) -> tuple[GridPlace, ...]:
        """Ranks that saved nothing while Megatron let only the first of an expert data-parallel group save.

        Newer versions let the first of a dense one save as well (checkpointing.py: save_checkpoint).
        """
        saved = self._named(self.etp * self.ep)
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


def placing(grid: Grid, arguments: Arguments) -> Callable[[int], GridPlace] | None:
    """Where the ranks of a run are in the grid; None where its arguments do not say it, or contradict one another."""
    cp, world = arguments.cp or 1, arguments.world or 0
    dense, experts = grid.tp * cp, grid.etp * grid.ep
    per_stage = world // grid.pp
    inner = arguments.raw.get("use_tp_pp_dp_mapping") is True
    stride = dense if inner else per_stage
    contradictions = (
        world <= 0 or world % (dense * grid.pp) or per_stage % experts,
        arguments.dp is not None and world != dense * grid.pp * arguments.dp,
        inner and grid.ep > 1 and experts != dense,
        cp > 1 and grid.ep > 1 and arguments.etp is None,  # up to 0.9 expert ranks lay above those of context
        any(arguments.raw.get(key) for key in _ENCODER),
    )
    if any(contradictions):
        return None
    return lambda rank: GridPlace(tp=rank % grid.tp, pp=rank // stride % grid.pp, ep=rank // grid.etp % grid.ep)


def misplaced(
    grid: Grid, folders: tuple[RankFolder, ...], arguments: Arguments, ranks: Mapping[str, object]
) -> Iterator[str]:
    """Folders whose files another rank wrote. `ranks`: folder to `rank` in the arguments of its file.

    Nothing where the numbering is not known, a rank is not recorded, or all files record the same one: tools that
    convert a checkpoint in one process write such files.
    """
    placed = placing(grid, arguments)
    known = {name: rank for name, rank in ranks.items() if type(rank) is int}
    if (
        placed is None
        or len(known) < len(ranks)
        or any(not 0 <= own < (arguments.world or 0) for own in known.values())
    ):
        return
    if len(known) > 1 and len(set(known.values())) == 1:
        return
    for folder in folders:
        own = folder.place(pipelined=grid.pp > 1)
        found = placed(known[folder.name]) if folder.name in known and grid.contains(own) else own
        if found != own:
            home = rank_folder_name(found, pipelined=grid.pp > 1, experts=grid.ep > 1)
            yield (
                f"{folder.name}: expected files of {_told(own)}; got those that rank {known[folder.name]} of "
                f"{arguments.world} saved, {_told(found)}: they belong in {home}"
            )


def _told(place: GridPlace) -> str:
    return f"tp rank {place.tp}, stage {place.pp}, expert rank {place.ep}"
