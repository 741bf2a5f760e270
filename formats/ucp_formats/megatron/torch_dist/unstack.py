"""Tensors of a torch_dist checkpoint taken apart into parameters: one layer, one expert, one name each.

1. A key is understood (`keys`): what its leading dims count, and whether it is a part of a fused tensor.
2. Every chunk is cut into its layers and experts; a flattened one (up to megatron-core 0.15) into boxes.
3. Parts of a fused tensor are put one behind the other along dim 0.
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
from ucp.errors import CoverError, MalformedError, counted, listed
from ucp.io.dcp.checkpoint import StoredChunk, StoredTensor
from ucp_formats.megatron.torch_dist.keys import PARTS, ModelKey

Shape = tuple[int, ...]

_MOST_EMPTY = 1 << 20
"""Tensors without elements that one may be taken apart into: no chunk bears them out."""


class StoredBox(NamedTuple):
    """A box of a parameter, and where it lies."""

    box: Box
    """Elements of the parameter."""
    ref: TensorRef
    """Where they are stored."""


@dataclass(slots=True, kw_only=True)
class GlobalTensor:
    """One tensor of one parameter."""

    name: str
    """Name of the parameter."""
    shape: Shape
    """Elements per dim."""
    dtype: DType
    """Element type."""
    boxes: list[StoredBox] = field(default_factory=list)
    """Its pieces."""
    parts: tuple[int, ...] = ()
    """Lengths along dim 0 of the parts it was stored in, where it is a fused tensor stored apart."""


_box = lru_cache(maxsize=1 << 12)(Box)
"""Many tensors have the same shape: a box is made and checked once."""

Flattened = Callable[[str], Shape | None]
"""Shape of the tensor saved under a key that was flattened to be saved; None for one that was not."""


def unstack(
    tensors: Iterable[tuple[str, StoredTensor]], understood: Callable[[str], ModelKey], flattened: Flattened
) -> dict[str, GlobalTensor]:
    """Parameters in `tensors`, each given with the key of the model that it belongs to.

    `understood`: a key, with the template of the canonical name. `flattened`: see there.

    Raises
    ------
    MalformedError
        A part of a fused tensor is not there, or a tensor does not have the dims that its key says.
    """
    problems: list[str] = []
    fused: dict[str, dict[str, list[GlobalTensor]]] = {}
    found: dict[str, GlobalTensor] = {}
    for key, tensor in tensors:
        parsed = understood(key)
        original = flattened(tensor.saved.key)
        if parsed.stacked or original is not None:
            wholes = _Apart(parsed, tensor, original).wholes(problems)
        else:
            pieces = [StoredBox(_box(offsets, sizes), ref) for offsets, sizes, ref in tensor.chunks]
            saved = tensor.saved
            wholes = [GlobalTensor(name=parsed.template, shape=saved.shape, dtype=saved.dtype, boxes=pieces)]
        if parsed.part:
            fused.setdefault(parsed.template, {})[parsed.part] = wholes
            continue
        for whole in wholes:
            if whole.name in found:
                problems.append(f"{key}: a second tensor of {whole.name}")
            found[whole.name] = whole
    for template, parts in fused.items():
        for whole in _joined(template, parts, problems):
            found[whole.name] = whole
    if problems:
        raise MalformedError(
            f"{counted(len(problems), 'tensor does not fit its key', 'tensors do not fit their keys')}"
            f":\n{listed(problems)}\n"
            "What .metadata says of them is damaged, or of another run: copy it again from where it was saved"
        )
    return found


def check_tiled(wholes: Iterable[GlobalTensor], where: str) -> None:
    """Prove that pieces tile tensors which are read as copies of masters; for all others, whoever reads them does so.

    Raises CoverError listing every hole and overlap.
    """
    problems = [
        f"{whole.name} {gap.box} of {list(whole.shape)}: held by {'nothing' if not gap.owners else 'several pieces'}"
        for whole in wholes
        if len(whole.boxes) != 1 or whole.boxes[0].box.sizes != whole.shape
        if all(len(own.box.sizes) == len(whole.shape) for own in whole.boxes)
        if not any(stop > n for own in whole.boxes for stop, n in zip(own.box.stops, whole.shape, strict=True))
        for gap in find_gaps(whole.shape, [piece.box for piece in whole.boxes])
    ]
    if problems:
        raise CoverError(
            f"the pieces in {where} do not tile {counted(len(problems), 'region')} of the model's own tensors exactly "
            f"once:\n{listed(problems)}\n.metadata is damaged or of another run: copy it again from where it was saved"
        )


class _Apart:
    """One stored tensor, cut into layers and experts."""

    def __init__(self, key: ModelKey, tensor: StoredTensor, original: Shape | None) -> None:
        self._key = key
        self._tensor = tensor
        self._shape = tensor.saved.shape if original is None else original
        self._flattened = original is not None
        self._lead = len(key.stacked)

    def wholes(self, problems: list[str]) -> list[GlobalTensor]:
        """A whole per layer and expert."""
        saved = self._tensor.saved
        if len(self._shape) < self._lead:
            problems.append(f"{saved.key}: expected {' and '.join(self._key.stacked)} as dims; got {list(self._shape)}")
            return []
        inner = self._shape[self._lead :]
        if not self._is_borne_out(inner, problems):
            return []
        wholes: dict[Shape, GlobalTensor] = {}
        for index in product(*map(range, self._shape[: self._lead])):
            name = self._key.template
            for what, number in zip(self._key.stacked, index, strict=True):
                name = name.replace(f"{{{what}}}", str(number))
            wholes[index] = GlobalTensor(name=name, shape=inner, dtype=saved.dtype)
        for chunk in self._tensor.chunks:
            pieces = self._unflattened(chunk, problems) if self._flattened else self._cut(chunk)
            for index, piece in pieces:
                if index in wholes:
                    wholes[index].boxes.append(piece)
                else:
                    problems.append(f"{saved.key}: a chunk at {list(chunk.offsets)}, past {list(self._shape)}")
        return list(wholes.values())

    def _is_borne_out(self, inner: Shape, problems: list[str]) -> bool:
        """Whether there are bytes for as many tensors as the dims say; they may be damaged, and say anything."""
        saved, count = self._tensor.saved, prod(self._shape[: self._lead])
        refs = [chunk.ref for chunk in self._tensor.chunks]
        held = sum(
            ref.numel if ref.is_contiguous else min(ref.numel, ref.extent // saved.dtype.itemsize) for ref in refs
        )
        told = sum(prod(chunk.sizes) for chunk in self._tensor.chunks)
        if count <= (held if prod(inner) else _MOST_EMPTY) and told <= held:
            return True
        problems.append(f"{saved.key}: {list(self._shape)} are {count:,} tensors; its chunks hold {held:,} elements")
        return False

    def _cut(self, chunk: StoredChunk) -> Iterator[tuple[Shape, StoredBox]]:
        lead = self._lead
        box = _box(chunk.offsets[lead:], chunk.sizes[lead:])
        for at in product(*map(range, chunk.sizes[:lead])):
            index = tuple(map(int.__add__, chunk.offsets[:lead], at))
            skip = sum(map(int.__mul__, at, chunk.ref.strides[:lead]))
            yield index, StoredBox(box, chunk.ref.strided(skip, chunk.ref.shape[lead:], chunk.ref.strides[lead:]))

    def _unflattened(self, chunk: StoredChunk, problems: list[str]) -> Iterator[tuple[Shape, StoredBox]]:
        """Boxes of a flattened chunk.

        A tensor of shape [X, Y] in local tensors of [x, y] is saved as [X/x, Y/y, x*y] (megatron-core 0.15
        dist_checkpointing/strategies/resharding.py): the last dim is the local tensor, flattened.
        """
        saved = self._tensor.saved
        grid = saved.shape[:-1]
        fits = len(grid) == len(self._shape) and not any(n % max(g, 1) for n, g in zip(self._shape, grid, strict=True))
        if not fits or prod(grid) * saved.shape[-1] != prod(self._shape) or prod(chunk.sizes[:-1]) != 1:
            problems.append(f"{saved.key}: {list(saved.shape)} is not {list(self._shape)}, flattened")
            return
        local = tuple(n // g for n, g in zip(self._shape, grid, strict=True))
        origin = tuple(map(int.__mul__, chunk.offsets[:-1], local))
        low = chunk.offsets[-1]
        lead, strides = self._lead, contiguous_strides(local)[self._lead :]
        for box, position in locate_flat_range(local, low, low + chunk.sizes[-1]):
            for at in product(*map(range, box.sizes[: self._lead])):
                inside = sum(map(int.__mul__, at, contiguous_strides(box.sizes)[: self._lead]))
                index = tuple(sum(t) for t in zip(origin, box.offsets, at, strict=False))  # only the stacked dims
                offsets = tuple(map(int.__add__, origin[lead:], box.offsets[lead:]))
                sizes = box.sizes[lead:]
                yield index, StoredBox(Box(offsets, sizes), chunk.ref.strided(position + inside, sizes, strides))


def _joined(template: str, parts: dict[str, list[GlobalTensor]], problems: list[str]) -> Iterator[GlobalTensor]:
    """Fused tensors out of their parts, one per layer and expert."""
    row = next((row for row in PARTS if parts.keys() == set(row)), None)
    if row is None:
        problems.append(f"{template}: expected all parts of a fused tensor; got {', '.join(sorted(parts))}")
        return
    by_name = [{whole.name: whole for whole in parts[part]} for part in row]
    for name in by_name[0]:
        own = [wholes[name] for wholes in by_name if name in wholes]
        if len(own) != len(row) or any(
            whole.shape[1:] != own[0].shape[1:] or whole.dtype is not own[0].dtype for whole in own[1:]
        ):
            problems.append(f"{name}: its parts {', '.join(row)} are not all there, or differ in shape")
            continue
        lengths = tuple([part.shape[0] for part in own])
        first, before = own[0], 0
        pieces = []
        for part, length in zip(own, lengths, strict=True):
            pieces += [StoredBox(_below(box, before), ref) for box, ref in part.boxes] if before else part.boxes
            before += length
        shape = before, *first.shape[1:]
        yield GlobalTensor(name=first.name, shape=shape, dtype=first.dtype, boxes=pieces, parts=lengths)


@lru_cache(maxsize=1 << 12)
def _below(box: Box, rows: int) -> Box:
    """The box so many rows further along dim 0."""
    return Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes)
