"""Tensors of a torch_dist checkpoint unstacked into parameters: one layer, one expert, one name each.

1. A key is parsed (`keys`): what its leading dims count, and whether it is a part of a fused tensor.
2. Every chunk is cut into its layers and experts; a flattened one (up to megatron-core 0.15) into boxes.
3. Parts of a fused tensor are concatenated along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ucp.core.region import Box, find_gaps, locate_flat_range
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import CoverError, MalformedError, format_count, format_list
from ucp.io.dcp.checkpoint import StoredChunk, StoredTensor
from ucp_formats.megatron.torch_dist.keys import PARTS, ModelKey

Shape = tuple[int, ...]

_MOST_EMPTY = 1 << 20
"""Most tensors without elements that one tensor may be unstacked into: no chunk confirms their number."""


class StoredBox(NamedTuple):
    """A box of a parameter, and where it is stored."""

    box: Box
    """Elements of the parameter."""
    ref: TensorRef
    """Where they are stored."""


@dataclass(slots=True, kw_only=True)
class GlobalTensor:
    """The weight, or a state, of one parameter."""

    name: str
    """Name of the parameter."""
    shape: Shape
    """Elements per dim."""
    dtype: DType
    """Element type."""
    boxes: list[StoredBox] = field(default_factory=list)
    """Its stored boxes."""
    parts: tuple[int, ...] = ()
    """For a fused tensor that is stored in parts: their lengths along dim 0."""


_box = lru_cache(maxsize=1 << 12)(Box)
"""Many tensors have the same shape: a box is made and checked once."""

OriginalShape = Callable[[str], Shape | None]
"""Shape of the tensor saved under a key, before it was flattened to be saved; None if it was not."""


def unstack(
    tensors: Iterable[tuple[str, StoredTensor]], parse: Callable[[str], ModelKey], original_shape: OriginalShape
) -> dict[str, GlobalTensor]:
    """Parameters in `tensors`: pairs of a key of the model and a stored tensor.

    `parse`: parses a key, with the template of the canonical name.

    Raises
    ------
    MalformedError
        A part of a fused tensor is missing, or a tensor does not have the dims of its key.
    """
    problems: list[str] = []
    fused: dict[str, dict[str, list[GlobalTensor]]] = {}
    params: dict[str, GlobalTensor] = {}
    for key, tensor in tensors:
        parsed, saved = parse(key), tensor.saved
        original = original_shape(saved.key)
        if parsed.stacked or original is not None:
            unstacked = _Stack(parsed, tensor, original).split(problems)
        else:
            boxes = [StoredBox(_box(offsets, sizes), ref) for offsets, sizes, ref in tensor.chunks]
            unstacked = [GlobalTensor(name=parsed.template, shape=saved.shape, dtype=saved.dtype, boxes=boxes)]
        if parsed.part:
            fused.setdefault(parsed.template, {})[parsed.part] = unstacked
            continue
        for param in unstacked:
            if param.name in params:
                problems.append(f"{key}: a second tensor of {param.name}")
            params[param.name] = param
    for template, parts in fused.items():
        params |= {param.name: param for param in _fuse(template, parts, problems)}
    if problems:
        raise MalformedError(
            f"{format_count(len(problems), 'tensor does not fit its key', 'tensors do not fit their keys')}"
            f":\n{format_list(problems)}\n"
            "Their entries in .metadata are damaged, or .metadata is from another run: copy it again from where it was "
            "saved"
        )
    return params


def check_tiled(tensors: Iterable[GlobalTensor], where: str) -> None:
    """Check that boxes tile the tensors that are read as copies of masters; other tensors are checked by their reader.

    Raises CoverError listing every hole and overlap.
    """
    problems = [
        f"{tensor.name} {gap.box} of {list(tensor.shape)}: in {'no piece' if not gap.owners else 'several pieces'}"
        for tensor in tensors
        if len(tensor.boxes) != 1 or tensor.boxes[0].box.sizes != tensor.shape
        if all(len(box.sizes) == len(tensor.shape) for box, _ in tensor.boxes)
        if not any(stop > n for box, _ in tensor.boxes for stop, n in zip(box.stops, tensor.shape, strict=True))
        for gap in find_gaps(tensor.shape, [box for box, _ in tensor.boxes])
    ]
    if problems:
        raise CoverError(
            f"expected the pieces in {where} to cover the model's tensors exactly once; "
            f"{format_count(len(problems), 'region is', 'regions are')} in none or in several:\n"
            f"{format_list(problems)}\n"
            ".metadata is damaged or from another run: copy it again from where it was saved"
        )


class _Stack:
    """A stored tensor that stacks the parameters of layers or experts."""

    def __init__(self, key: ModelKey, tensor: StoredTensor, original: Shape | None) -> None:
        self._key = key
        self._tensor = tensor
        self._shape = tensor.saved.shape if original is None else original
        self._cut = self._cut_stacked if original is None else self._cut_flattened
        self._lead = len(key.stacked)

    def split(self, problems: list[str]) -> list[GlobalTensor]:
        """A tensor per layer and expert."""
        saved, lead = self._tensor.saved, self._lead
        if len(self._shape) < lead:
            problems.append(f"{saved.key}: expected {' and '.join(self._key.stacked)} as dims; got {list(self._shape)}")
            return []
        if not self._has_elements(problems):
            return []
        params: dict[Shape, GlobalTensor] = {}
        for index in product(*map(range, self._shape[:lead])):
            name = self._key.template
            for stacked, number in zip(self._key.stacked, index, strict=True):
                name = name.replace(f"{{{stacked}}}", str(number))
            params[index] = GlobalTensor(name=name, shape=self._shape[lead:], dtype=saved.dtype)
        for chunk in self._tensor.chunks:
            for index, stored in self._cut(chunk, problems):
                if index in params:
                    params[index].boxes.append(stored)
                else:
                    problems.append(f"{saved.key}: a chunk at {list(chunk.offsets)}, outside {list(self._shape)}")
        return list(params.values())

    def _has_elements(self, problems: list[str]) -> bool:
        """Whether the chunks have elements for as many tensors as the dims say, which may be damaged."""
        saved, count = self._tensor.saved, prod(self._shape[: self._lead])
        refs = [chunk.ref for chunk in self._tensor.chunks]
        stored = sum(
            ref.numel if ref.is_contiguous else min(ref.numel, ref.extent // saved.dtype.itemsize) for ref in refs
        )
        expected = sum(prod(chunk.sizes) for chunk in self._tensor.chunks)
        if count <= (stored if prod(self._shape[self._lead :]) else _MOST_EMPTY) and expected <= stored:
            return True
        problems.append(
            f"{saved.key}: shape {list(self._shape)} means {count:,} tensors; its chunks have {stored:,} elements"
        )
        return False

    def _cut_stacked(self, chunk: StoredChunk, _: list[str]) -> Iterator[tuple[Shape, StoredBox]]:
        lead, ref = self._lead, chunk.ref
        box = _box(chunk.offsets[lead:], chunk.sizes[lead:])
        for position in product(*map(range, chunk.sizes[:lead])):
            index = tuple(map(int.__add__, chunk.offsets[:lead], position))
            skip = sum(map(int.__mul__, position, ref.strides[:lead]))
            yield index, StoredBox(box, ref.strided(skip, ref.shape[lead:], ref.strides[lead:]))

    def _cut_flattened(self, chunk: StoredChunk, problems: list[str]) -> Iterator[tuple[Shape, StoredBox]]:
        """Boxes of a flattened chunk.

        A tensor of shape [X, Y] in local tensors of [x, y] is saved as [X/x, Y/y, x*y] (megatron-core 0.15
        dist_checkpointing/strategies/resharding.py): the last dim is the local tensor, flattened.
        """
        saved, lead = self._tensor.saved, self._lead
        grid = saved.shape[:-1]
        fits = len(grid) == len(self._shape) and not any(n % max(g, 1) for n, g in zip(self._shape, grid, strict=True))
        if not fits or prod(grid) * saved.shape[-1] != prod(self._shape) or prod(chunk.sizes[:-1]) != 1:
            problems.append(f"{saved.key}: {list(saved.shape)} is not {list(self._shape)}, flattened")
            return
        local = tuple(n // g for n, g in zip(self._shape, grid, strict=True))
        origin = tuple(map(int.__mul__, chunk.offsets[:-1], local))
        low, strides = chunk.offsets[-1], contiguous_strides(local)[lead:]
        for box, start in locate_flat_range(local, low, low + chunk.sizes[-1]):
            param_box = Box(tuple(map(int.__add__, origin[lead:], box.offsets[lead:])), box.sizes[lead:])
            for position in product(*map(range, box.sizes[:lead])):
                skip = sum(map(int.__mul__, position, contiguous_strides(box.sizes)[:lead]))
                index = tuple(sum(t) for t in zip(origin, box.offsets, position, strict=False))  # only stacked dims
                yield index, StoredBox(param_box, chunk.ref.strided(start + skip, param_box.sizes, strides))


def _fuse(template: str, parts: dict[str, list[GlobalTensor]], problems: list[str]) -> Iterator[GlobalTensor]:
    """Fused tensors concatenated from their parts, one per layer and expert."""
    row = next((row for row in PARTS if parts.keys() == set(row)), None)
    if row is None:
        problems.append(f"{template}: expected all parts of a fused tensor; got {', '.join(sorted(parts))}")
        return
    by_name = [{tensor.name: tensor for tensor in parts[part]} for part in row]
    for name, first in by_name[0].items():
        tensors = [params[name] for params in by_name if name in params]
        if len(tensors) != len(row) or any(
            tensor.shape[1:] != first.shape[1:] or tensor.dtype is not first.dtype for tensor in tensors
        ):
            problems.append(f"{name}: its parts {', '.join(row)} are not all there, or differ in shape or dtype")
            continue
        rows = 0
        boxes = []
        for tensor in tensors:
            boxes += [StoredBox(_shift(box, rows), ref) for box, ref in tensor.boxes] if rows else tensor.boxes
            rows += tensor.shape[0]
        lengths = tuple(tensor.shape[0] for tensor in tensors)
        yield GlobalTensor(name=name, shape=(rows, *first.shape[1:]), dtype=first.dtype, boxes=boxes, parts=lengths)


@lru_cache(maxsize=1 << 12)
def _shift(box: Box, rows: int) -> Box:
    """The box, moved by `rows` along dim 0."""
    return Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes)
