"""Laws of the exchange, on ranks that are threads: every rank holds its slice of the atom, and bytes are read once."""

from __future__ import annotations

import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ucp_patterns.chunk import Chunk
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard
from ucp_patterns.unique import Unique

from tests.strategies import random_array, shapes, states_of
from tests.unit.live import threads
from tests.unit.live.threads import run
from ucp.core.layout import AxisLayout, Layout, locate_shard
from ucp.core.target import Slice
from ucp.core.tensor import DType
from ucp.errors import CorruptError, LoadError, MissingFileError
from ucp.live.exchange.carry import CarryOptions, carry
from ucp.live.exchange.reads import view_bytes
from ucp.live.exchange.stages import Exchange
from ucp.live.parts import LoadItem
from ucp.testing.handmade import Shards

EXCHANGES = st.sampled_from(list(Exchange))
MEMORY = st.sampled_from([64, 700, 5000, 1 << 20])


BOUNDS = {
    "live.exchange.stages._SMALL": 0,
    "live.exchange.reads._SPAN": 64,
    "live.exchange.reads.BLOCK": 64,
    "transfer.plan.tiles.MIN_TILED": 32,
    "transfer.plan.tiles.CALL_BYTES": 32,
}


@contextmanager
def small(bounds=MappingProxyType({})):
    """Small bounds, so that little tensors are cut, transposed and widened as large ones are; no rank waits long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "WAIT", 20)
        for name, value in bounds.items():
            module, _, bound = name.rpartition(".")
            patch.setattr(import_module(f"ucp.{module}"), bound, value)
        yield


@contextmanager
def shards():
    with tempfile.TemporaryDirectory() as folder:
        yield Shards(Path(folder))


@st.composite
def layouts(draw, mesh: dict[str, int], ndim: int):
    """A pattern for every axis of the mesh: over dims, or over the row-major order of what those leave."""
    own, flat = [], []
    for axis, parts in mesh.items():
        dim = draw(st.integers(0, max(ndim - 1, 0)))
        cut = [Shard(dim), Chunk(dim), Unique(draw(st.integers(0, parts - 1)))] if ndim else []
        own.append(AxisLayout(axis, parts, draw(st.sampled_from([Replicate(), Replicate(), *cut]))))
    if ndim and draw(st.booleans()):
        last = own.pop()
        flat.append(AxisLayout(last.axis, last.parts, Chunk(0)))
    return Layout(axes=tuple(own), flat=tuple(flat))


class World:
    """Tensors in files, and what each rank of a mesh holds of them."""

    def __init__(self, mesh: dict[str, int]) -> None:
        self.mesh = mesh
        self.count = prod(mesh.values())
        self.items: list[list[LoadItem]] = [[] for _ in range(self.count)]
        self.wanted: list[list[np.ndarray]] = [[] for _ in range(self.count)]

    def coords(self, rank: int) -> dict[str, int]:
        at = np.unravel_index(rank, tuple(self.mesh.values()))
        return dict(zip(self.mesh, map(int, at), strict=True))

    def add(self, name: str, layout: Layout, array: np.ndarray, source, dtype: DType) -> None:
        param, _, state = name.rpartition("/")
        for rank in range(self.count):
            try:
                part = locate_shard(layout, array.shape, coords=self.coords(rank))
            except ValueError:  # the pattern cannot cut this shape
                return
            if not part.regions:
                continue
            pairs = tuple(own.pair for own in part.regions)
            local = np.zeros(part.local_shape, dtype=array.dtype)
            for pair in pairs:
                local[box(pair.local)] = array[box(pair.global_box)]
            runs = [(0, local.size)] if part.flat is None else [edges(run) for run in part.flat]
            for start, stop in runs:
                own = Slice(
                    param=param,
                    state=state,
                    dtype=dtype,
                    pairs=pairs,
                    local_shape=part.local_shape,
                    start=start,
                    stop=stop,
                )
                self.items[rank].append(LoadItem(name=param, slice=own, source=source))
                held = local if part.flat is None else local.reshape(-1)[start:stop]
                self.wanted[rank].append(held)

    def shuffle(self, seed: int) -> None:
        for rank in range(self.count):
            both = list(zip(self.items[rank], self.wanted[rank], strict=True))
            random.Random(seed + rank).shuffle(both)
            self.items[rank] = [item for item, _ in both]
            self.wanted[rank] = [held for _, held in both]

    def landing(self, rank: int, *, turned: bool = False) -> list[torch.Tensor]:
        made = []
        for item, held in zip(self.items[rank], self.wanted[rank], strict=True):
            dtype = getattr(torch, item.slice.dtype.value)
            if turned and held.ndim > 1:
                made.append(torch.full(held.shape[::-1], 7, dtype=dtype).permute(*reversed(range(held.ndim))))
            else:
                made.append(torch.full(held.shape, 7, dtype=dtype))
        return made

    def check(self, rank: int, landed: list[torch.Tensor]) -> None:
        for item, held, own in zip(self.items[rank], self.wanted[rank], landed, strict=True):
            truth = torch.from_numpy(np.ascontiguousarray(held)).reshape(held.shape).to(own.dtype)
            assert own.shape == truth.shape
            assert torch.equal(view_bytes(own.contiguous()), view_bytes(truth.contiguous())), (item.name, rank)

    @property
    def nbytes_once(self) -> int:
        """Bytes of files for everything that some rank holds, each different slice once."""
        kinds = {(i.slice, i.source.dtype): i for own in self.items for i in own}
        return sum((s.stop - s.start) * dtype.itemsize for s, dtype in kinds)

    def carry(self, ranks, options: CarryOptions, *, turned: bool = False, items=None):
        into = self.landing(ranks.rank, turned=turned)
        traffic = carry(items or self.items[ranks.rank], into, ranks, options)
        self.check(ranks.rank, into)
        return traffic


def box(own):
    return tuple(slice(low, high) for low, high in zip(own.offsets, own.stops, strict=True))


def edges(run):
    return run.pair.global_box.offsets[0], run.pair.global_box.stops[0]


@st.composite
def worlds(draw, files: Shards, *, flat: bool = False):
    """Some tensors; `flat`: in files as they are, else in any pieces and orders."""
    world = World({"pp": draw(st.integers(1, 2)), "dp": draw(st.integers(1, 3)), "tp": draw(st.integers(1, 2))})
    for number in range(draw(st.integers(1, 5))):
        array = random_array(draw(shapes()), DType.FLOAT32, draw(st.integers(0, 1000)))
        source = files.whole(array) if flat else draw(states_of(array, files))
        layout = draw(layouts(world.mesh, array.ndim))
        name = f"layers.{draw(st.integers(0, 11))}.p{number}/{draw(st.sampled_from(['weight', 'exp_avg']))}"
        world.add(name, layout, array, source, draw(st.sampled_from([DType.FLOAT32, DType.FLOAT32, DType.BFLOAT16])))
    world.shuffle(draw(st.integers(0, 99)))
    return world


def raised(found):
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@given(data=st.data(), exchange=EXCHANGES, memory=MEMORY, turned=st.booleans(), verify=st.booleans())
def test_every_rank_holds_its_slice_of_the_atom(data, exchange, memory, turned, verify):
    options = CarryOptions(exchange=exchange, memory=memory, verify=verify)
    with shards() as files, small(BOUNDS):
        world = data.draw(worlds(files))
        found = raised(run(world.count, lambda ranks: world.carry(ranks, options, turned=turned)))
    for rank, traffic in enumerate(found):
        assert traffic.landed_nbytes == sum(item.slice.nbytes for item in world.items[rank])
        assert traffic.nbytes == found[0].nbytes
    if exchange is Exchange.NEVER:
        assert not any(traffic.exchanged_nbytes for traffic in found)


@given(data=st.data(), memory=MEMORY)
def test_what_several_hold_is_read_once(data, memory):
    with shards() as files, small():
        world = data.draw(worlds(files, flat=True))
        found = raised(
            run(world.count, lambda r: world.carry(r, CarryOptions(exchange=Exchange.ALWAYS, memory=memory)))
        )
    assert {traffic.wanted_nbytes for traffic in found} == {world.nbytes_once}


@given(data=st.data(), exchange=EXCHANGES, memory=MEMORY)
@settings(max_examples=30)
def test_what_differs_when_it_is_read_again_is_named_by_all(data, exchange, memory):
    """A bit flips on one rank after everything is in place."""
    with shards() as files, small(BOUNDS):
        world = data.draw(worlds(files))
        rank = data.draw(st.sampled_from(range(world.count)))
        some = [at for at, item in enumerate(world.items[rank]) if item.slice.nbytes]
        assume(some)
        at = data.draw(st.sampled_from(some))

        def work(ranks):
            into = world.landing(ranks.rank)

            class Flipping:
                """Is told of all bytes, and that the stage is over before it is verified."""

                def begin(self, *, title, nbytes):
                    assert title == "load"
                    self.left = nbytes

                def advance(self, nbytes):
                    self.left -= nbytes

                def end(self):
                    assert self.left == 0
                    if ranks.rank == rank:
                        view_bytes(into[at])[0] ^= 1

            options = CarryOptions(exchange=exchange, memory=memory, verify=True, observer=Flipping())
            carry(world.items[ranks.rank], into, ranks, options)

        found = run(world.count, work)
    assert {type(result) for result in found} == {CorruptError}
    (text,) = {str(result) for result in found}
    own = world.items[rank][at]
    assert "1 tensor differs" in text
    assert f"{own.name}/{own.state}" in text


@given(data=st.data(), exchange=EXCHANGES, memory=MEMORY, kind=st.sampled_from(["file", "tensor"]))
@settings(max_examples=30)
def test_a_failure_on_any_rank_is_raised_by_all(data, exchange, memory, kind):
    with shards() as files, small(BOUNDS):
        world = data.draw(worlds(files, flat=True))
        rank = data.draw(st.sampled_from(range(world.count)))
        some = [at for at, item in enumerate(world.items[rank]) if item.slice.nbytes]
        assume(some)
        at = data.draw(st.sampled_from(some))

        def work(ranks):
            items, into = list(world.items[ranks.rank]), world.landing(ranks.rank)
            if ranks.rank == rank and kind == "file":
                items[at] = replace(items[at], source=gone(items[at].source))
            elif ranks.rank == rank:
                with torch.inference_mode():
                    into[at] = into[at].clone()
            carry(items, into, ranks, CarryOptions(exchange=exchange, memory=memory))
            world.check(ranks.rank, into)

        found = run(world.count, work)
    expected = MissingFileError if kind == "file" else LoadError
    if not any(isinstance(result, Exception) for result in found):
        # another rank has read this slice for all, or it was read straight into memory
        assert exchange is not Exchange.NEVER or kind == "tensor"
        return
    assert {type(result) for result in found} == {expected}
    assert len({str(result) for result in found}) == 1


def gone(source):
    """The same on a node that lacks the file."""
    return replace(source, fragments=tuple(replace(own, ref=elsewhere(own.ref)) for own in source.fragments))


def elsewhere(ref):
    return replace(ref, path=f"{ref.path}.gone")
