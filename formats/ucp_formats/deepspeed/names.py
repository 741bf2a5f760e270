"""The grammar of file names in a tag folder that DeepSpeed wrote (runtime/engine.py, pipe/module.py, 0.19.8).

`dp` is the rank in the group over which ZeRO partitions (the "pp" in a file name means partition-parallel), `mp` the
model-parallel rank. Numbers have a minimum width only, so they are parsed and never compared as text.

| role | example |
|---|---|
| MODEL | mp_rank_00_model_states.pt |
| SHARDED_MODEL | zero_pp_rank_3_mp_rank_00_model_states.pt |
| OPTIMIZER | bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt, zero_pp_rank_3_mp_rank_00optim_states.pt (old) |
| LAYER | layer_02-model_01-model_states.pt, layer_02-model_states.pt |
| EXPERT | layer_0_expert_3_mp_rank_00_model_states.pt, expert_3_mp_rank_00_model_states.pt (old) |
| EXPERT_OPTIMIZER | expp_rank_1_mp_rank_00_optim_states.pt |

FastPersist splits any of them by bytes into `NAME-0.4` to `NAME-3.4` (runtime/model_checkpointing/writer_factory.py).

>>> found = parse_name("bf16_zero_pp_rank_103_mp_rank_00_optim_states.pt-1.4")
>>> found.role, found.dp, found.prefix
(<Role.OPTIMIZER: 'optimizer states'>, 103, 'bf16_')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LATEST", "LATEST_UNIVERSAL", "OFFLOADED", "UNIVERSAL", "FileName", "Role", "parse_name"]

LATEST = "latest"
"""Text file beside the tag folders: the tag to load."""
LATEST_UNIVERSAL = "latest_universal"
"""The same for a universal checkpoint."""
UNIVERSAL = "zero"
"""Folder in a tag folder that makes it a universal checkpoint: one folder per parameter."""
OFFLOADED = "offloaded_tensors"
"""Folder in a tag folder with optimizer states that were on NVMe."""


class Role(StrEnum):
    """What a file holds."""

    MODEL = "model states"
    SHARDED_MODEL = "model states of one rank"
    OPTIMIZER = "optimizer states"
    LAYER = "pipeline layer"
    EXPERT = "expert"
    EXPERT_OPTIMIZER = "optimizer states of experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A file name, understood."""

    role: Role
    """What the file holds."""
    name: str
    """The name without the suffix of a part."""
    dp: int = 0
    """Rank in the partition group; 0 where the name has none."""
    mp: int = 0
    """Model-parallel rank; 0 where the name has none."""
    prefix: str = ""
    """"bf16_", "fp16_" or nothing."""
    layer: int = -1
    """Layer of a pipeline, or mixture-of-experts layer of an expert; -1 where the name has none."""
    expert: int = 0
    """Global number of an expert; for optimizer states of experts, the expert-parallel rank."""
    axes: tuple[tuple[str, int], ...] = ()
    """Axes that the file of a pipeline layer is cut over, with the rank along each."""

    @property
    def tp(self) -> int:
        """Tensor-parallel rank of a pipeline layer."""
        return dict(self.axes).get("model", 0)

    @property
    def label(self) -> str:
        """What the file is to a reader of messages, e.g. "optimizer states of rank 3"."""
        ranked = self.role in (Role.SHARDED_MODEL, Role.OPTIMIZER)
        whose = f", model-parallel rank {self.mp}" if self.mp else ""
        match self.role:
            case Role.LAYER:
                return f"{self.role.value} {self.layer}{f', tensor-parallel rank {self.tp}' if self.tp else ''}"
            case Role.EXPERT:
                return f"{self.role.value} {self.expert} of layer {max(self.layer, 0)}{whose}"
            case Role.EXPERT_OPTIMIZER:
                return f"{self.role.value}, expert-parallel rank {self.expert}{whose}"
        named = self.role.value.removesuffix(" of one rank")
        return f"{named} of rank {self.dp}{whose}" if ranked else f"{named}{whose}"


_AXIS = re.compile(r"-([a-z]+)_(\d+)")
_PART = re.compile(r"-\d+\.\d+\Z")
_FORMS = (
    (Role.MODEL, re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    (Role.SHARDED_MODEL, re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    (
        Role.OPTIMIZER,
        re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    ),
    (Role.LAYER, re.compile(r"layer_(?P<layer>\d+)(?P<axes>(-[a-z]+_\d+)*)-model_states\.pt")),
    (
        Role.EXPERT,
        re.compile(r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    ),
    (Role.EXPERT_OPTIMIZER, re.compile(r"expp_rank_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
)


def parse_name(name: str) -> FileName | None:
    """The name understood, or None when it is not part of the grammar. A part of a split file is named as the whole."""
    whole = _PART.sub("", name)
    for role, form in _FORMS:
        match = form.fullmatch(whole)
        if match:
            found = match.groupdict()
            return FileName(
                role=role,
                name=whole,
                dp=int(found.get("dp") or 0),
                mp=int(found.get("mp") or 0),
                prefix=found.get("prefix") or "",
                layer=int(found.get("layer") or -1),
                expert=int(found.get("expert") or 0),
                axes=tuple((axis, int(rank)) for axis, rank in _AXIS.findall(found.get("axes") or "")),
            )
    return None
