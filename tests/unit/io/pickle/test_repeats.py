"""Objects that are recognised by their bytes come out as those that are read instruction by instruction."""

from __future__ import annotations

import pickle
import pickletools
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ucp.core.pickle_values import GlobalName, Stub, TorchSize
from ucp.errors import MalformedError, UcpError
from ucp.io.pickle import repeats
from ucp.io.pickle.unpickle import parse_pickle


@dataclass
class Properties:
    dtype: Any
    layout: Any = torch.strided
    pinned: bool = False

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.dtype, self.layout, self.pinned, None)


@dataclass
class Chunk:
    offsets: torch.Size
    sizes: torch.Size


@dataclass
class Entry:
    size: torch.Size
    chunks: list[Chunk]
    properties: Properties


@dataclass(eq=False)
class Place:
    file: str
    offset: int
    nbytes: int
    more: dict[str, Any] = field(default_factory=dict)


def entries(count: int) -> dict[str, Entry]:
    found = {}
    for i in range(count):
        sizes = [torch.Size([i, 3]), torch.Size([]), torch.Size([300, 2, 70_000]), torch.Size([1, 2, 3, 4, i])][i % 4]
        chunks = [Chunk(torch.Size([j] * len(sizes)), sizes) for j in range(1 + i % 3)]
        found[f"layer.{i}"] = Entry(sizes, chunks, Properties((torch.float32, torch.bfloat16)[i % 2]))
    return found


def places(count: int) -> list[Place]:
    offsets = (5, 300, 70_000, 2**31 + 5, 2**40 + 7)
    return [Place(f"__{i % 3}_0.distcp", offsets[i % 5] + i, 2**31 - 1 - i) for i in range(count)]


def plain(value: object) -> object:
    """A tree of plain values that says everything of `value`."""
    match value:
        case Stub():
            parts = (value.made_by, value.args, value.kwargs, value.new, value.state, value.has_state)
            return ("object", *map(plain, parts), plain(value.items), plain(value.entries))
        case dict():
            return [(plain(key), plain(own)) for key, own in value.items()]
        case TorchSize():
            return ("size", *value)
        case list() | tuple():
            return (type(value).__name__, *map(plain, value))
    return (type(value).__name__, value)


def both(data: bytes) -> tuple[Any, Any]:
    """What a pickle says, read with and without recognition."""
    with_it = parse_pickle(data, where="test", repetitive=True)
    without = parse_pickle(data, where="test")
    assert with_it.end == without.end
    return with_it.value, without.value


@pytest.fixture
def recognised(monkeypatch) -> list[GlobalName]:
    """Classes of the objects that are recognised, one by one."""
    names: list[GlobalName] = []
    read = repeats.Repeats.read

    def counted(self: repeats.Repeats, made_by: GlobalName, data: bytes, at: int) -> tuple[object, int] | None:
        found = read(self, made_by, data, at)
        if found is not None:
            names.append(made_by)
        return found

    monkeypatch.setattr(repeats.Repeats, "read", counted)
    return names


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("made", [entries(200), places(200), (entries(40), places(40)), [*places(30), *entries(30)]])
def test_the_same_values(made, protocol, recognised):
    found, wanted = both(pickle.dumps(made, protocol))
    assert plain(found) == plain(wanted)
    assert recognised


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_read_as_ever(protocol, recognised):
    found, wanted = both(pickle.dumps(entries(60), protocol))
    assert plain(found) == plain(wanted)
    assert not recognised


def test_most_objects_are_recognised(recognised):
    both(pickle.dumps(places(500), 4))
    assert len(recognised) > 450


def test_an_object_that_is_met_again_is_the_same(recognised):
    made = places(100)
    found, _ = both(pickle.dumps([*made, made[50], made[50].more], 4))
    assert found[100] is found[50]
    assert found[101] is found[50].state["more"]
    assert recognised


def test_a_text_inside_of_an_object_may_be_met_again():
    made = places(100)
    once = [Place(f"file{i:03}", i, i) for i in range(100)]
    found, wanted = both(pickle.dumps([*made, *once, *[place.file for place in once]], 4))
    assert plain(found) == plain(wanted)


def test_entries_of_the_memo_that_the_writer_chose():
    """BINPUT and LONG_BINPUT among MEMOIZE, after objects whose entries were counted only."""
    data = pickle.dumps(places(50), 4)
    for put in (b"q\x07", b"r" + struct.pack("<I", 40), b"r" + struct.pack("<I", 10**6), b"p3\n"):
        found, wanted = both(data[:-1] + b"(" + put.replace(b"(", b"") + b"1.")
        assert plain(found) == plain(wanted)
        tail = b"0]" + put + b"K\x05\x94a" + b"h\x07" + b"\x86."
        assert plain(both(data[:-1] + tail)[0]) == plain(both(data[:-1] + tail)[1])


def test_a_class_that_is_named_anew_each_time():
    """Names made by getattr are other objects, and may come to lie where one lay before."""
    names = [f"getattr{i}" for i in range(40)]
    program = (
        b"\x80\x04("
        + b"".join(
            b"cbuiltins\ngetattr\n(cmodule\nOuter\n\x8c"
            + bytes([len(name)])
            + name.encode()
            + b"tR\x94h"
            + bytes([3 * i])
            + b")\x81\x94}\x94(\x8c\x01aK\x01ub0"
            for i, name in enumerate(names)
        )
        + b"t."
    )
    found, wanted = both(program)
    assert plain(found) == plain(wanted)


def test_values_deep_inside_of_each_other():
    """Recipes are called in each other; values may lie in each other without end."""
    for depth in (20, 200, 900):
        one = b"h\x00)\x81\x94}\x94(h\x01N" + b"\x85" * depth + b"ub"
        program = b"\x80\x04cmodule\nOuter\n\x94\x8c\x01a\x940(" + one * 20 + b"t."
        found = parse_pickle(program, where="test", repetitive=True).value
        value, levels = found[-1].state["a"], 0
        while type(value) is tuple:
            value, levels = value[0], levels + 1
        assert (len(found), levels, value) == (20, depth, None)


def cases_of_damage() -> list[bytes]:
    data = pickle.dumps(places(60), 4)
    spots = [pos for op, _, pos in pickletools.genops(data) if op.name in {"SHORT_BINUNICODE", "BUILD", "BININT"}][-40:]
    return [data[:spot] + bytes([data[spot] ^ 0x41]) + data[spot + 1 :] for spot in spots] + [
        data[:spot] for spot in spots
    ]


@pytest.mark.parametrize("data", cases_of_damage())
def test_damage_is_told_alike(data):
    def told(*, repetitive: bool) -> object:
        try:
            return plain(parse_pickle(data, where="test", repetitive=repetitive).value)
        except UcpError as error:
            return str(error)

    assert told(repetitive=True) == told(repetitive=False)


def test_a_text_that_is_none():
    made = [Place("ascii", i, 2**20 + i) for i in range(60)]
    made[50].file = "bytes"
    data = pickle.dumps(made, 4).replace(b"bytes", b"\xff\xfe\xfd\xfc\xfb")
    with pytest.raises(MalformedError, match="text that is not in the encoding"):
        parse_pickle(data, where="test", repetitive=True)
