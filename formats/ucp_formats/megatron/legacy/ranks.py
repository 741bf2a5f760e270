"""Which rank wrote the files of a folder, by its own arguments, against the place that the folder's name says.

Every rank saves its own arguments, `rank` and `world_size` among them. Ranks are numbered in the order tp-cp-ep-dp-pp,
or tp-cp-ep-pp-dp under `--use-tp-pp-dp-mapping` (megatron-core, parallel_state.py: initialize_model_parallel); which of
the data-parallel ranks wrote a folder differs, so only the tensor-parallel rank, the stage and the expert-parallel rank
are compared.

>>> grid = Grid(tp=2, pp=2, ep=1, etp=2)
>>> Numbering.of(grid, Arguments(raw={}, world=8, dp=2)).place(5)
GridPlace(tp=1, pp=1, ep=0)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucp_formats.megatron.legacy.grid import Grid
from ucp_formats.megatron.names import GridPlace, RankFolder, rank_folder_name
from ucp_formats.megatron.run.arguments import Arguments

__all__ = ["Numbering", "misplaced"]

_ENCODER = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
"""Degrees of an encoder with ranks of its own, which shift all others (megatron-core 0.9 to 0.12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """How the ranks of a run are numbered."""

    grid: Grid
    """Degrees that files are named by."""
    world: int
    """All ranks."""
    stride: int
    """Ranks of one stage before those of the next."""

    @classmethod
    def of(cls, grid: Grid, arguments: Arguments) -> Numbering | None:
        """That of a run; None where its arguments do not say it, or contradict one another."""
        cp, world = arguments.cp or 1, arguments.world or 0
        dense = grid.tp * cp
        per_stage = world // grid.pp
        inner = arguments.raw.get("use_tp_pp_dp_mapping") is True
        stride = dense if inner else per_stage
        whole = world > 0 and world % (dense * grid.pp) == 0 and per_stage % (grid.etp * grid.ep) == 0
        if arguments.dp is not None and world != dense * grid.pp * arguments.dp:
            whole = False
        if inner and grid.ep > 1 and grid.etp * grid.ep != dense:
            whole = False
        if cp > 1 and grid.ep > 1 and arguments.etp is None:  # up to 0.9 expert ranks lay above those of context
            whole = False
        if not whole or any(arguments.raw.get(key) for key in _ENCODER):
            return None
        return cls(grid=grid, world=world, stride=stride)

    def place(self, rank: int) -> GridPlace:
        """Where a rank is in the grid."""
        grid = self.grid
        return GridPlace(tp=rank % grid.tp, pp=rank // self.stride % grid.pp, ep=rank // grid.etp % grid.ep)


def misplaced(
    grid: Grid, folders: tuple[RankFolder, ...], arguments: Arguments, ranks: Mapping[str, object]
) -> Iterator[str]:
    """Folders whose files another rank wrote. `ranks`: folder to `rank` in the arguments of its file.

    Nothing where the numbering is not known, a rank is not recorded, or all files record the same one: tools that
    convert a checkpoint in one process write such files.
    """
    numbering = Numbering.of(grid, arguments)
    known = {name: rank for name, rank in ranks.items() if type(rank) is int}
    if numbering is None or len(known) < len(ranks) or any(not 0 <= own < numbering.world for own in known.values()):
        return
    if len(known) > 1 and len(set(known.values())) == 1:
        return
    for folder in folders:
        own = folder.place(pipelined=grid.pp > 1)
        if folder.name in known and grid.contains(own):
            found = numbering.place(known[folder.name])
            if found != own:
                home = rank_folder_name(found, pipelined=grid.pp > 1, experts=grid.ep > 1)
                yield (
                    f"{folder.name}: expected files of {_told(own)}; got those that rank {known[folder.name]} of "
                    f"{numbering.world} saved, {_told(found)}: they belong in {home}"
                )


def _told(place: GridPlace) -> str:
    return f"tp rank {place.tp}, stage {place.pp}, expert rank {place.ep}"
