"""`moevement/window_rank{global rank}.pt`: what one rank saved of a window of iterations.

Written by `SparseSnapshotEngine.save` (deepspeed/moevement/sparse_snapshot.py, version 2):

    0   4  "MOEV"
    4   1  version
    5   8  N, little endian
    13  N  JSON: {"metadata": {...}, "iterations": [...], "byte_order": "little" | "big"}
    13+N   bytes of all tensors; their offsets count from here, and the last one ends the file

An *operator* is one expert, the gate of a layer, or everything else of a pipeline stage. In one iteration of the window
an operator is *active*: its masters and moments are saved. In earlier iterations only its weights are saved, in the
dtype in which the model computes; in later ones, nothing.

There is no checksum: only the lengths show that a file is truncated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.files import open_source
from ucp.io.json_text import Natural, NotJson, decode

_FILE = re.compile(r"window_rank(\d{1,9})\.pt")
"""Example: window_rank0.pt."""
_MAGIC = b"MOEV"
_HEAD = 13
_VERSION = 2
_LONGEST = 1 << 30
"""Bytes of the JSON, at most."""

_DTYPES = {
    "f64": DType.FLOAT64,
    "f32": DType.FLOAT32,
    "f16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "i64": DType.INT64,
    "i32": DType.INT32,
    "i16": DType.INT16,
    "i8": DType.INT8,
    "u8": DType.UINT8,
    "bool": DType.BOOL,
}

Shape = tuple[Natural, ...]


class StoredTensor(Struct, frozen=True, kw_only=True):
    """A tensor of an operator."""

    key: str
    """`params.NAME`, `optimizer.NAME.STATE` or `compute_weights.NAME`."""
    dtype: Literal["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool"]
    """Type of the elements."""
    shape: Shape
    """Elements per dim, as stored."""
    offset: Natural
    """First byte, counted from the end of the JSON."""
    nbytes: Natural
    """Bytes."""
    full_shape: Shape | None = None
    """Shape of the parameter, if this is a rank's range of the flattened one."""
    fragment_numel: Natural | None = None
    """Elements of that range."""


class StoredOperator(Struct, frozen=True, kw_only=True):
    """An operator in one iteration."""

    is_active: bool
    """Whether masters and moments are saved; otherwise weights in the dtype in which the model computes."""
    tensors: tuple[StoredTensor, ...]
    """Its tensors."""


class StoredIteration(Struct, frozen=True, kw_only=True):
    """One iteration of a window."""

    iteration: Natural
    """Training steps that were done when its state was copied."""
    operators: dict[str, StoredOperator]
    """Name to operator."""


class StoredWindow(Struct, frozen=True, kw_only=True):
    """The JSON of a file."""

    metadata: dict[str, object]
    """`window_start_iteration`, `engine_scalars`, `loss_scaler_state`."""
    iterations: tuple[StoredIteration, ...]
    """In increasing iteration."""
    byte_order: Annotated[str, Meta(pattern="^(little|big)$")]
    """Order of the bytes of every element."""


class RankWindow(Struct, frozen=True, kw_only=True):
    """What one rank saved."""

    path: str
    """File."""
    rank: int
    """Global rank."""
    document: StoredWindow
    """The JSON in it."""
    base: int
    """Byte of the file that offsets count from."""

    def tensors(self) -> Iterator[tuple[int, str, StoredOperator, StoredTensor, TensorRef]]:
        """(iteration, name of the operator, operator, tensor, where its elements are stored) for every tensor."""
        for stored in self.document.iterations:
            for name, operator in stored.operators.items():
                for tensor in operator.tensors:
                    yield stored.iteration, name, operator, tensor, self._locate(tensor)

    def _locate(self, tensor: StoredTensor) -> TensorRef:
        return TensorRef(
            path=self.path,
            offset=self.base + tensor.offset,
            dtype=_DTYPES[tensor.dtype],
            shape=tensor.shape,
            strides=contiguous_strides(tensor.shape),
        )


def rank_of(name: str) -> int | None:
    """Rank of a window's file; None for another file.

    >>> rank_of("window_rank12.pt"), rank_of("window.pt")
    (12, None)
    """
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def read_window(path: Path) -> RankWindow:
    """The window of one rank. Raises MalformedError, UnsupportedError."""
    with open_source(str(path)) as file:
        head = file.read(0, min(_HEAD, file.nbytes))
        if head[:4] != _MAGIC or len(head) < _HEAD:
            raise MalformedError(f"expected a window of MoEvement in {path}; it begins with {head[:4]!r}, not MOEV")
        length = int.from_bytes(head[5:], "little")
        if not 1 <= head[4] <= _VERSION:
            raise UnsupportedError(f"expected a window of version 1 or 2 in {path}; it has version {head[4]}")
        base = _HEAD + length
        if length > _LONGEST or base > file.nbytes:
            raise MalformedError(f"expected {base} bytes or more in {path}; it has {file.nbytes}: it was cut short")
        text, nbytes = file.read(_HEAD, length), file.nbytes
    try:
        document = decode(text, StoredWindow)
    except NotJson as error:
        raise MalformedError(f"expected the header of a window in {path}; {error}") from error
    window = RankWindow(path=str(path), rank=rank_of(path.name) or 0, document=document, base=base)
    _check(window, nbytes - base)
    return window


def _check(window: RankWindow, nbytes: int) -> None:
    """Raise MalformedError if tensors do not have the expected lengths, or do not end the file."""
    if window.document.byte_order != "little":
        raise UnsupportedError(f"expected little-endian numbers in {window.path}; they are big-endian")
    stop = 0
    for iteration, operator, _, tensor, ref in window.tensors():
        if tensor.nbytes != prod(tensor.shape) * ref.dtype.itemsize:
            raise MalformedError(
                f"expected {prod(tensor.shape) * ref.dtype.itemsize} bytes of {tensor.key} of {operator}, iteration "
                f"{iteration}, in {window.path}; its header says {tensor.nbytes}"
            )
        stop = max(stop, tensor.offset + tensor.nbytes)
    if stop != nbytes:
        raise MalformedError(
            f"expected {window.base + stop} bytes in {window.path}, where its last tensor ends; it has "
            f"{window.base + nbytes}: it was cut short, or is from another run"
        )
    steps = [stored.iteration for stored in window.document.iterations]
    if steps != list(range(steps[0], steps[0] + len(steps)) if steps else []):
        raise MalformedError(f"expected iterations one after another in {window.path}; got {steps}")


def check_adjacent(window: RankWindow) -> None:
    """Raise MalformedError if tensors overlap, or leave bytes between them: an offset is damaged."""
    ranges = sorted(
        (tensor.offset, tensor.offset + tensor.nbytes, f"{tensor.key} of {operator}")
        for _, operator, _, tensor, _ in window.tensors()
        if tensor.nbytes
    )
    for (_, stop, _), (start, _, what) in pairwise([(0, 0, ""), *ranges]):
        if start != stop:
            raise MalformedError(
                f"expected {what} at byte {window.base + stop} of {window.path}, where the tensor before it ends; its "
                f"header says {window.base + start}"
            )


def engine_steps(window: RankWindow) -> tuple[int | None, int | None]:
    """(steps done when the run saved the file, last step of the next window); None if not recorded."""
    metadata = window.document.metadata
    scalars = metadata.get("engine_scalars")
    steps = scalars.get("global_steps") if isinstance(scalars, Mapping) else None
    start = metadata.get("window_start_iteration")
    return (steps if isinstance(steps, int) else None, start if isinstance(start, int) else None)


def may_skip_steps(window: RankWindow) -> bool:
    """Whether the run may have skipped steps: its loss scale is dynamic, or not recorded."""
    scaler = window.document.metadata.get("loss_scaler_state")
    return not isinstance(scaler, Mapping) or scaler.get("dynamic") is not False
