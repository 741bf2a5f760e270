"""Names of the files that hold the weights of a Hugging Face model.

| name | written by |
|---|---|
| model.safetensors | save_pretrained, of one file (transformers 4.29 and later) |
| model-00001-of-00003.safetensors | save_pretrained, of several, with model.safetensors.index.json |
| model.fp16.safetensors, model.safetensors.index.fp16.json | save_pretrained(variant="fp16") |
| pytorch_model.bin, pytorch_model-00001-of-00003.bin | save_pretrained of before, by torch.save |
| shard-00002-model-00001-of-00001.safetensors | HuggingFaceStorageWriter of torch (DCP): rank 1 of a run |
| diffusion_pytorch_model.safetensors, consolidated.safetensors | diffusers, Mistral |

>>> parse_weights("model-00002-of-00003.safetensors")
WeightsName(stem='model', suffix='.safetensors', number=2, count=3, rank=None)
>>> parse_weights("shard-00002-model-00001-of-00001.safetensors").rank
1
>>> parse_weights("adapter_model.safetensors"), parse_weights("model.gguf")
(None, None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["BIN", "CONFIG", "SAFETENSORS", "WeightsName", "index_stem", "parse_weights"]

CONFIG = "config.json"
SAFETENSORS, BIN = ".safetensors", ".bin"

_STEMS = r"(?:model|pytorch_model|diffusion_pytorch_model|consolidated)(?:\.[A-Za-z0-9_]+)?"
_WEIGHTS = re.compile(
    rf"(?:shard-(?P<rank>\d{{5}})-)?(?P<stem>{_STEMS})(?:-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}))?"
    r"(?P<suffix>\.safetensors|\.bin)"
)
_INDEX = re.compile(r"(?P<stem>.+)(?P<suffix>\.safetensors|\.bin)\.index(?P<variant>\.[A-Za-z0-9_]+)?\.json")


@dataclass(frozen=True, slots=True)
class WeightsName:
    """Name of a file with weights, understood."""

    stem: str
    """What it begins with, and the variant: "model", "model.fp16"."""
    suffix: str
    """".safetensors" or ".bin"."""
    number: int | None
    """Which of the files it is, from 1; None where there is one."""
    count: int | None
    """How many files there are."""
    rank: int | None
    """Rank that wrote it, where each writes its own."""


def parse_weights(name: str) -> WeightsName | None:
    """A file name, understood; None for what is none of these."""
    found = _WEIGHTS.fullmatch(name)
    if found is None or (found["suffix"] == BIN and not found["stem"].startswith("pytorch_model")):
        return None
    number, count, rank = (None if own is None else int(own) for own in found.group("number", "count", "rank"))
    return WeightsName(found["stem"], found["suffix"], number, count, None if rank is None else rank - 1)


def index_stem(name: str) -> tuple[str, str] | None:
    """Stem and suffix of the files that an index of such a name is of; None for another name.

    >>> index_stem("model.safetensors.index.fp16.json"), index_stem("config.json")
    (('model.fp16', '.safetensors'), None)
    """
    found = _INDEX.fullmatch(name)
    return None if found is None else (found["stem"] + (found["variant"] or ""), found["suffix"])
