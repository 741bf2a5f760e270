"""Files of tensors, cut as `save_pretrained` cuts them, and each with the bytes that safetensors' own writer gives it.

The cut is greedy, in the order of the model (huggingface_hub 2.4, `serialization/_base.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ucp.contract.output_names import shorter
from ucp.core.dtypes import DType
from ucp.core.slices import Slice
from ucp.core.target import Literal, OutputFile, Placement
from ucp.errors import UsageError
from ucp.io.safetensors import layout_safetensors

__all__ = ["MAX_SHARD_SIZE", "NewTensor", "Shard", "laid_out", "nbytes_of_shard"]

MAX_SHARD_SIZE = "5GB"
"""Default of huggingface_hub; transformers 5 has 50GB."""

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_ORDER = (
    *(DType.BOOL, DType.UINT8, DType.INT8, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ),
    *(DType.FLOAT8_E5M2FNUZ, DType.INT16, DType.UINT16, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.UINT32),
    *(DType.FLOAT32, DType.COMPLEX64, DType.FLOAT64, DType.INT64, DType.UINT64),
)
"""Types in the order of safetensors 0.8 (`Dtype` in tensor.rs), which writes the last of them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    """Name in the file."""
    slice: Slice
    """Its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of tensors, laid out."""

    path: str
    """Its name."""
    file: OutputFile
    """Its size and header."""
    placements: tuple[Placement, ...]
    """What fills it, in increasing offset."""
    names: tuple[str, ...]
    """Tensors in it."""


def nbytes_of_shard(size: str) -> int:
    """Bytes of a size such as 5GB, of the units of huggingface_hub: powers of 1000. Raises UsageError.

    >>> nbytes_of_shard("1.5 mb"), nbytes_of_shard("4096")
    (1500000, 4096)
    """
    found = _SIZE.fullmatch(size.strip())
    nbytes = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if nbytes < 1:
        raise UsageError(
            "expected --set max_shard_size= a size above 0, such as 5GB or 500MB (KB, MB, GB, TB are powers of 1000); "
            f"got {shorter(size)!r}"
        )
    return nbytes


def laid_out(tensors: Sequence[NewTensor], *, limit: int) -> list[Shard]:
    """The files, of at most `limit` bytes of tensors each; a tensor that is larger has one of its own."""
    lone: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    room = limit
    for own in tensors:
        nbytes = own.slice.nbytes
        if nbytes > limit:
            lone.append([own])
            continue
        if nbytes > room:
            lone.append(current)
            current, room = [], limit
        current.append(own)
        room -= nbytes
    parts = [*lone, current] if current or not lone else lone
    count = len(parts)
    names = (f"-{number:05d}-of-{count:05d}" if count > 1 else "" for number in range(1, count + 1))
    return [_shard(f"model{suffix}.safetensors", part) for suffix, part in zip(names, parts, strict=True)]


def _shard(path: str, tensors: Sequence[NewTensor]) -> Shard:
    ordered = sorted(tensors, key=lambda own: (-_ORDER.index(own.slice.dtype), own.name))
    entries = [(own.name, own.slice.dtype, own.slice.local_shape) for own in ordered]
    layout = layout_safetensors(entries, metadata={"format": "pt"}, alignment=8)
    places = [
        Placement(slice=own.slice, path=path, offset=layout.offsets[own.name]) for own in ordered if own.slice.nbytes
    ]
    return Shard(
        path=path,
        file=OutputFile(path=path, nbytes=layout.nbytes, literals=(Literal(0, layout.header),)),
        placements=tuple(places),
        names=tuple(own.name for own in tensors),
    )
