"""Names of the files that scripts and trainers save by `torch.save`.

    model_world_size_4_rank_1.pt, optim_..., extra_state_...       verl (`fsdp_checkpoint_manager.py`, 2026)
    pytorch_model_fsdp_0_rank1.bin, optimizer_0_rank1.bin          accelerate 1.15, `use_dcp=False` (`fsdp_utils.py`)
    pytorch_model_fsdp_rank1.bin                                   accelerate, FSDP1's LOCAL_STATE_DICT
    pytorch_model_fsdp.bin, optimizer.bin                          accelerate, FULL_STATE_DICT
    model.safetensors or pytorch_model.bin, with optimizer.pt      Trainer of transformers; optimizer.bin: accelerate
    ckpt.pt, last.ckpt, ...                                        scripts, Lightning

>>> item_of_rank("optim_world_size_4_rank_1.pt"), item_of_rank("pytorch_model_fsdp_rank0.bin")
(RankFile(item='optimizer', rank=1, ranks=4), RankFile(item='model', rank=0, ranks=None))
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

__all__ = [
    "INDEX",
    "NAME",
    "OPTIMIZERS",
    "WEIGHTS",
    "Item",
    "RankFile",
    "is_beside",
    "is_of_another_framework",
    "is_torch_file",
    "item_of_rank",
    "name_of_rank",
]

Item = Literal["model", "optimizer", "others", "all"]
"""What a file holds."""

NAME = "checkpoint.pt"
"""What `--to torch` writes."""

INDEX = "model.safetensors.index.json"
"""Says which files of safetensors hold which tensors, where there are several."""

WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model_fsdp.bin")
"""Weights beside an optimizer, the first that is there; and the optimizers:"""
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")

_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_VERL_ITEMS: dict[str, Item] = {"model": "model", "optim": "optimizer", "extra_state": "others"}
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_0)?_rank(\d+)\.bin")
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_ALIEN = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_.*|(?:zero_)?mp_rank_.*|layer_\d+-model.*|.*expert_.*_(?:model|optim)_states\.pt"
    r"|model_optim_rng\.pt|distrib_optim\.pt|pytorch_model(?:-\d+-of-\d+)?\.bin|adapter_model\.bin"
)
"""Files of DeepSpeed and Megatron and weights of Hugging Face: `mp_rank_00_model_states.pt`, `pytorch_model.bin`."""
_BESIDE = re.compile(
    r"scheduler\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|scaler\.pt|training_args\.bin|sampler.*\.bin|dl_state_dict.*\.bin"
    r"|custom_checkpoint_\d+\.pkl|meta\.pt|common\.pt|data\.pt"
)
"""What trainers save beside a checkpoint, and never without one: `scheduler.pt`, `rng_state_0.pth`, `data.pt`."""


class RankFile(NamedTuple):
    """What the name of a rank's file says."""

    item: Item
    """What it holds."""
    rank: int
    """Rank that saved it."""
    ranks: int | None
    """Ranks of the run, where the name says it."""


def item_of_rank(name: str) -> RankFile | None:
    """What a file of one rank holds; None for other files."""
    if found := _VERL.fullmatch(name):
        return RankFile(_VERL_ITEMS[found[1]], int(found[3]), int(found[2]))
    if found := _ACCELERATE.fullmatch(name):
        return RankFile("optimizer" if found[1] == "optimizer" else "model", int(found[2]), None)
    return None


def name_of_rank(name: str, rank: int) -> str:
    """Name of the same file of another rank.

    >>> name_of_rank("optim_world_size_4_rank_1.pt", 3)
    'optim_world_size_4_rank_3.pt'
    """
    return re.sub(r"(rank_?)\d+\.", rf"\g<1>{rank}.", name)


def is_torch_file(name: str) -> bool:
    """Whether a file may be of `torch.save`, by its suffix.

    >>> is_torch_file("ckpt.pt"), is_torch_file("config.json")
    (True, False)
    """
    return name.endswith(_SUFFIXES)


def is_beside(name: str) -> bool:
    """Whether a file goes with a checkpoint, and is none.

    >>> is_beside("rng_state_3.pth"), is_beside("last.ckpt")
    (True, False)
    """
    return _BESIDE.fullmatch(name) is not None


def is_of_another_framework(name: str) -> bool:
    """Whether a file of `torch.save` is part of a format of its own.

    >>> is_of_another_framework("mp_rank_00_model_states.pt"), is_of_another_framework("checkpoint.pt")
    (True, False)
    """
    return _ALIEN.fullmatch(name) is not None
