"""Measure every expert of a checkpoint: norms, moments, zeros, and a digest that shows which experts are equal.

Reads the tensors of experts and routers once, block by block, on several threads. Each block belongs to one expert;
the measures of an expert's blocks are added up.

    mean of exp_avg_sq    mean squared gradient over the last 1 / (1 - beta2) steps: how much an expert is trained
    norm of a row         of the router: how strongly it asks for an expert
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from threading import Lock

import xxhash

from ucp.contract.protocols import Observer
from ucp.core.index import Index
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import Slice, full_slice
from ucp.io.elements import viewed, widened
from ucp.moe.layers import ExpertLayer, Role
from ucp.transfer.gather import Gatherer, ThreadedReader
from ucp.transfer.plan.tasks import BLOCK, bundle
from ucp.transfer.plan.tiles import split_blocks

_WINDOW = 1 << 20
"""Bytes that are read, hashed and summed at once, while they are in the processor's cache."""

MOMENT = "exp_avg_sq"
"""State with the running mean of squared gradients (Adam)."""


@dataclass(slots=True)
class Measure:
    """Sums over one state of one expert, over the elements of all its tensors."""

    numel: int = 0
    """Elements."""
    total: float = 0.0
    """Sum of them."""
    squares: float = 0.0
    """Sum of their squares."""
    is_finite: bool = True
    """Whether every element is a finite number."""
    is_zero: bool = True
    """Whether every element is zero."""
    is_negative: bool = False
    """Whether an element of `exp_avg_sq` is below zero."""
    digests: dict[tuple[object, ...], int] = field(default_factory=dict)
    """xxh3-64 of each block, by tensor and position of the block in it."""

    @property
    def mean(self) -> float:
        """Mean of the elements."""
        return self.total / self.numel if self.numel else 0.0

    @property
    def norm(self) -> float:
        """Euclidean norm."""
        return sqrt(self.squares)

    def add(self, other: Measure) -> None:
        """Add the sums of `other` to these."""
        self.numel += other.numel
        self.total += other.total
        self.squares += other.squares
        self.is_finite &= other.is_finite
        self.is_zero &= other.is_zero
        self.is_negative |= other.is_negative
        self.digests |= other.digests


Measures = Mapping[str, Mapping[Role, Mapping[int, Mapping[str, Measure]]]]
"""Measures by module of the layer, role, number of the expert, and state."""

_Key = tuple[str, Role, int, str]


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of a tensor of one expert."""

    key: _Key
    """Module, role, number of the expert and state to which it belongs."""
    name: str
    """Name of the tensor inside the expert."""
    row: int | None
    """Row of the parameter, where experts are stacked."""
    slice: Slice
    """The elements."""
    locator: Locator
    """Finds where they are stored."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.slice.nbytes


def measure(index: Index, layers: Sequence[ExpertLayer], observer: Observer, *, threads: int) -> Measures:
    """Measures of every expert and router of `layers`. Raises SourceError, CorruptError."""
    measures: dict[str, dict[Role, dict[int, dict[str, Measure]]]] = {}
    lock = Lock()

    def measure_batch(parts: Sequence[_Part], gatherer: Gatherer) -> None:
        measured = [_measure_part(part, gatherer) for part in parts]
        with lock:
            for part, block_measure in zip(parts, measured, strict=True):
                module, role, expert, state = part.key
                by_state = measures.setdefault(module, {}).setdefault(role, {}).setdefault(expert, {})
                by_state.setdefault(state, Measure()).add(block_measure)
        observer.advance(sum(part.nbytes for part in parts))

    params = {tensor.param for layer in layers for _, _, _, tensor in layer.tensors()}
    observer.begin(title="experts", nbytes=sum(index.atoms[param].nbytes for param in params))
    try:
        with ThreadedReader(threads) as reader:
            reader.run_all(bundle(_list_parts(index, layers), limit=BLOCK), measure_batch)
    finally:
        observer.end()
    return measures


def _measure_part(part: _Part, gatherer: Gatherer) -> Measure:
    """Measure of a part."""
    tensor, numel, digest = part.slice, _WINDOW // part.slice.dtype.itemsize, xxhash.xxh3_64()
    sums = Measure()
    for low, high in block_ranges(tensor.start, tensor.stop, numel):
        (data,) = gatherer.read([(high - low, tensor.dtype, resolve(tensor, part.locator, low, high))])
        digest.update(data)
        sums.add(_measure_window(part, data))
    first = 0 if part.row is None else part.row * (part.locator.state.numel // part.locator.state.global_shape[0])
    place = (part.name, *tensor.pairs[0].global_box.offsets, tensor.start - first)
    sums.digests[place] = digest.intdigest()
    return sums


def _measure_window(part: _Part, data: memoryview) -> Measure:
    """Measure of some elements of a part, without a digest."""
    import numpy as np

    values, is_floating = viewed(data, part.slice.dtype), part.slice.dtype.is_floating
    values = np.abs(values) if np.iscomplexobj(values) else values
    if values.dtype != np.float32:
        values = widened(values, "float32" if is_floating and values.dtype != np.float64 else "float64")
    with np.errstate(all="ignore"):
        squares, total = float(np.dot(values, values)), float(values.sum())
        is_finite = bool(np.isfinite(squares)) or bool(np.isfinite(values).all())
        if is_finite and not np.isfinite(squares):  # the squares are too large for float32
            squares, total = float(np.square(values, dtype=np.float64).sum()), float(values.sum(dtype=np.float64))
        return Measure(
            numel=values.size,
            total=total,
            squares=squares,
            is_finite=is_finite,
            is_zero=squares == 0 and not values.any(),
            is_negative=part.key[-1] == MOMENT and bool((values < 0).any()),
        )


def _list_parts(index: Index, layers: Sequence[ExpertLayer]) -> Iterator[_Part]:
    """Every block of every expert, in the order of the parameters."""
    for layer in layers:
        for role, expert, name, tensor in layer.tensors():
            atom = index.atoms[tensor.param]
            for state_name, state in atom.states.items():
                if atom.is_count(state_name) or state.global_shape != atom.global_shape:
                    continue
                full, locator = full_slice(tensor.param, state_name, state), Locator(state)
                key = (layer.module, role, expert, state_name)
                if tensor.row is None:
                    parts = split_blocks(full, state, nbytes=BLOCK)
                else:
                    numel = state.numel // state.global_shape[0]
                    step = BLOCK // state.dtype.itemsize
                    low = tensor.row * numel
                    parts = (
                        replace(full, start=start, stop=stop) for start, stop in block_ranges(low, low + numel, step)
                    )
                yield from (_Part(key, name, tensor.row, part, locator) for part in parts)
