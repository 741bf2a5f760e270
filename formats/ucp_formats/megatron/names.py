"""Names of files and folders in a checkpoint of Megatron (megatron/training/checkpointing.py, core_v0.19).

| where | what | example |
|---|---|---|
| save folder | tracker: the iteration, or "release" | latest_checkpointed_iteration.txt |
| save folder | iteration | iter_0001234, release |
| iteration, `torch` | a rank of the model-parallel grid | mp_rank_03, mp_rank_03_001, mp_rank_03_001_007 |
| rank | model, optimizer, RNG states | model_optim_rng.pt |
| rank | distributed optimizer (since 2023-05) | distrib_optim.pt |
| rank | Muon: optimizer of a data-parallel rank | layer_wise_optimizer_3.pt |
| rank | position of a data loader | train_dataloader_dprank007.pt |
| iteration, others | how it was saved | metadata.json, .metadata, common.pt, __3_0.distcp |

`mp_rank_TT_NNN` is ambiguous: NNN is the pipeline stage, or the expert rank if there is only one stage. Only the
arguments in the file tell which (`RankFolder.place`).

>>> folder = parse_rank_folder("mp_rank_03_001")
>>> folder.place(pipelined=True), folder.place(pipelined=False)
(GridPlace(tp=3, pp=1, ep=0), GridPlace(tp=3, pp=0, ep=1))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

TRACKER = "latest_checkpointed_iteration.txt"
"""Text file beside the iteration folders: the iteration to load, or "release"."""
RELEASE = "release"
"""Folder of a checkpoint for publication; counts as iteration 0."""
MODEL = "model_optim_rng.pt"
"""Model, optimizer, scheduler, RNG states and arguments of one rank."""
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
"""The masters and moments of one rank's data-parallel group, gathered."""
METADATA = "metadata.json"
"""Says which backend of megatron-core wrote the folder."""
DCP_METADATA = ".metadata"
"""Index of a checkpoint of torch.distributed.checkpoint."""
COMMON = "common.pt"
"""Values common to all ranks, in torch_dist up to 0.18."""

MODULES = "modules"
"""Name of the extra that records which modules the layers are built from."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_ITERATION = re.compile(r"iter_(?P<number>\d{7,})")
_RANK_FOLDER = re.compile(r"mp_rank_(?P<tp>\d{2,})(_(?P<first>\d{3,}))?(_(?P<second>\d{3,}))?")
_SIDE_FILE = re.compile(r"layer_wise_optimizer_\d+\.pt|train_dataloader_dprank\d+\.pt")


class SavedAs(StrEnum):
    """How an iteration was saved (`--ckpt-format`)."""

    TORCH = "torch"
    """A folder per rank, files of torch.save."""
    TORCH_DIST = "torch_dist"
    """megatron-core over torch.distributed.checkpoint."""
    ZARR = "zarr"
    """megatron-core over zarr, up to 0.15."""
    TORCH_DCP = "torch_dcp"
    """Plain torch.distributed.checkpoint: torch_dcp, or the fsdp_dtensor of Megatron-FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GridPlace:
    """A position in the model-parallel grid. All data-parallel ranks at one position hold the same weights."""

    tp: int
    """Tensor-parallel rank."""
    pp: int
    """Pipeline stage."""
    ep: int
    """Expert-parallel rank."""

    def __str__(self) -> str:
        """Its three ranks, for messages."""
        return f"tp rank {self.tp}, stage {self.pp}, expert rank {self.ep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """A folder name `mp_rank_...`, parsed."""

    name: str
    """The name."""
    tp: int
    """First number: the tensor-parallel rank."""
    numbers: tuple[int, ...]
    """Further numbers: none, one or two."""

    def place(self, *, pipelined: bool) -> GridPlace:
        """Its position in the grid. `pipelined`: whether the run had more than one pipeline stage."""
        pp, ep = (*self.numbers, 0, 0)[:2] if pipelined or len(self.numbers) == 2 else (0, (*self.numbers, 0)[0])
        return GridPlace(tp=self.tp, pp=pp, ep=ep)


def rank_folder_name(place: GridPlace, *, pipelined: bool, experts: bool) -> str:
    """Name of the folder of a rank.

    >>> rank_folder_name(GridPlace(tp=1, pp=0, ep=2), pipelined=False, experts=True)
    'mp_rank_01_002'
    """
    return (
        f"mp_rank_{place.tp:02d}" + (f"_{place.pp:03d}" if pipelined else "") + (f"_{place.ep:03d}" if experts else "")
    )


def parse_rank_folder(name: str) -> RankFolder | None:
    """The parsed name; None if it is not the folder of a rank."""
    match = _RANK_FOLDER.fullmatch(name)
    if match is None:
        return None
    numbers = tuple(int(text) for text in match.group("first", "second") if text is not None)
    return RankFolder(name=name, tp=int(match["tp"]), numbers=numbers)


def parse_iteration(name: str) -> int | None:
    """The iteration in a folder name; None if the name has none.

    >>> parse_iteration("iter_0001234"), parse_iteration("release"), parse_iteration("iter_x")
    (1234, 0, None)
    """
    if name == RELEASE:
        return 0
    match = _ITERATION.fullmatch(name)
    return None if match is None else int(match["number"])


def is_side_file(name: str) -> bool:
    """Whether this is a known file in the folder of a rank, other than the model and the distributed optimizer.

    >>> is_side_file("layer_wise_optimizer_3.pt"), is_side_file("train_dataloader_dprank007.pt")
    (True, True)
    """
    return _SIDE_FILE.fullmatch(name) is not None
