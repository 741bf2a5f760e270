"""An index written by hand goes through the whole pipeline into every layout of the store, and reads back equal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import safetensors.numpy
from ucp_patterns.partition import Partition
from ucp_patterns.pieces import Pieces
from ucp_patterns.shard import Shard
from ucp_patterns.unique import Unique

import ucp
from ucp.contract.locating import Evidence
from ucp.contract.protocols import Format
from ucp.core.index import Extra, Fragment, Index, Kind, LostStates, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType, TensorRef
from ucp.core.topology import Topology
from ucp.errors import ChangedError, CorruptError, DestinationError, MalformedError, MissingFileError, UsageError
from ucp.io.elements import viewed
from ucp.io.files import Sources
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.source.read import index_of
from ucp.store.format import StoreFormat
from ucp.testing.handmade import Shards, inline, make_index, write_checkpoint
from ucp.transfer.gather import Gatherer

LAYOUTS = [{}, {"layout": "packed"}, {"layout": "per-parameter"}, {"compress": True}, {"virtual": True}]
LABELS = ["default", "packed", "per-parameter", "compressed", "virtual"]


def elements(index: Index, param: str, state: str) -> np.ndarray:
    found = index.atoms[param].states[state]
    own = full_slice(param, state, found)
    data = memoryview(bytearray(own.nbytes))
    gatherer = Gatherer(sources=Sources())
    gatherer.fill(data, own.dtype, resolve(own, Locator(found), 0, own.stop))
    gatherer.sources.close()
    return viewed(data, own.dtype).reshape(found.global_shape)


@pytest.fixture
def memory_format(monkeypatch):
    """Makes any folder a checkpoint with the index that is set here."""

    class MemoryFormat(Format):
        name = "memory"
        index: Index | None = None

        def detect(self, path):
            return Evidence(path, ("here",)) if self.index and str(path) == self.index.path else None

        def read(self, path):
            return self.index

    fmt = MemoryFormat()
    plugins = import_module("ucp.contract.plugins")
    real_found, real_made = plugins.registered, plugins.instance
    monkeypatch.setattr(
        plugins,
        "registered",
        lambda group: {**real_found(group), **({"memory": None} if group == "ucp.formats" else {})},
    )
    monkeypatch.setattr(plugins, "instance", lambda group, name: fmt if name == "memory" else real_made(group, name))
    return fmt


@pytest.mark.parametrize(
    ("options", "workers"),
    [*((own, 1) for own in LAYOUTS), ({"layout": "per-parameter"}, 2), ({"compress": True}, 2)],
    ids=[*LABELS, "per-parameter-2", "compressed-2"],
)
class TestEveryLayout:
    def test_bytes_come_back(self, source, arrays, tmp_path, options, workers, small_blocks):
        ucp.convert(source, tmp_path / "out", workers=workers, **options)
        index = StoreFormat().read(tmp_path / "out")
        before, after = index_of(source), index_of(tmp_path / "out")
        assert after.groups == before.groups
        assert list(after.atoms) == list(before.atoms)
        assert (after.step, after.topology) == (before.step, before.topology)
        assert {(atom.name, name) for atom, name, _ in index.states()} == set(arrays)
        for (param, state), array in arrays.items():
            assert elements(index, param, state).tobytes() == array.tobytes(), (param, state)
            assert index.atoms[param].states[state].global_shape == array.shape


def test_a_file_per_state_is_a_safetensors_file(source, arrays, tmp_path):
    ucp.convert(source, tmp_path / "out", layout="per-parameter")
    for (param, state), array in arrays.items():
        found = safetensors.numpy.load_file(tmp_path / "out" / "atoms" / param / f"{state}.safetensors")
        assert found[f"{param}/{state}"].tobytes() == array.tobytes()


def test_packs_are_closed_between_parameters(source, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ucp.store.target"), "PACK", 1000)
    ucp.convert(source, tmp_path / "out")
    packs = sorted((tmp_path / "out" / "packs").iterdir())
    assert len(packs) > 1
    homes: dict[str, set[str]] = {}
    for pack in packs:
        for name in safetensors.numpy.load_file(pack):
            homes.setdefault(name.rpartition("/")[0], set()).add(pack.name)
    assert all(len(own) == 1 for own in homes.values())
    assert ucp.verify(tmp_path / "out", against=source).ok


@pytest.mark.parametrize("options", LAYOUTS, ids=LABELS)
def test_plain_numbers_stay_plain(tmp_path, memory_format, options):
    """A step that was no tensor is none afterwards: targets write it back as it was."""
    shards = Shards(tmp_path / "src")
    step = inline(np.array(7, np.int64))
    whole = StateIndex(dtype=DType.INT64, global_shape=(), fragments=(Fragment(box=Box((), ()), ref=step),))
    made = make_index(tmp_path / "src", {("w", "weight"): shards.whole(np.arange(3, dtype=np.float32))})
    atom = replace(made.atoms["w"], states={**made.atoms["w"].states, "step": whole})
    memory_format.index = replace(made, atoms={"w": atom})
    ucp.convert(memory_format.index.path, tmp_path / "dst", **options)
    index = StoreFormat().read(tmp_path / "dst")
    (fragment,) = index.atoms["w"].states["step"].fragments
    assert fragment.ref == step
    assert elements(index, "w", "step") == 7
    assert ucp.verify(tmp_path / "dst", against=memory_format.index.path).ok


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a..b", "%", "é\u2028", "a b", "x" * 200])
def test_any_name_is_a_folder(tmp_path, name):
    shards = Shards(tmp_path / "source")
    index = make_index(shards.folder, {(name, "weight"): shards.whole(np.arange(3, dtype="int32"))})
    write_checkpoint(index)
    ucp.convert(shards.folder, tmp_path / "out", layout="per-parameter")
    assert elements(index_of(tmp_path / "out"), name, "weight").tolist() == [0, 1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


LONG = {"long": "x" * 256, "wide": "\u00e4" * 43, "deep": "/".join(["y" * 200] * 25)}
"""Names whose folder would have more than 255 bytes; a letter of two bytes is written as six."""


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_a_name_too_long_for_a_folder_is_refused_before_anything_is_written(tmp_path, name):
    shards = Shards(tmp_path / "source")
    states = {(own, "weight"): shards.whole(np.arange(3, dtype="int32")) for own in ("short", name)}
    write_checkpoint(make_index(shards.folder, states))
    with pytest.raises(DestinationError, match=r"(?s)got 1 .*--layout per-parameter"):
        ucp.convert(shards.folder, tmp_path / "out", layout="per-parameter")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    ucp.convert(shards.folder, tmp_path / "out")
    assert elements(index_of(tmp_path / "out"), name, "weight").tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", LAYOUTS, ids=LABELS)
@pytest.mark.parametrize("where", ["parameter", "state", "alias"])
def test_names_that_are_no_text_are_refused_together(tmp_path, memory_format, options, where):
    """JSON would join two lone surrogates to one character; torch pickles keep both."""
    shards = Shards(tmp_path / "source")
    one, two = "a\ud800b", "\ud83d\ude00"
    names = {"parameter": [(one, "weight"), (two, "weight")], "state": [("w", one), ("w", two)]}
    states = {own: shards.whole(np.arange(3, dtype="int32")) for own in names.get(where, [("w", "weight")])}
    index = make_index(shards.folder, states)
    memory_format.index = replace(index, aliases={one: "w", two: "w"}) if where == "alias" else index
    with pytest.raises(DestinationError, match=r"got 2 names .*surrogates") as caught:
        ucp.convert(shards.folder, tmp_path / "out", **options)
    str(caught.value).encode()
    assert "'a\\ud800b'" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("options", LAYOUTS, ids=LABELS)
def test_names_that_are_one_when_joined_are_told_apart_or_refused(tmp_path, options):
    shards = Shards(tmp_path / "source")
    names = [("a/b", "weight"), ("a/b", "c"), ("a", "weight"), ("a", "b/c")]
    states = {own: shards.whole(np.full(3, at, dtype="int32")) for at, own in enumerate(names)}
    write_checkpoint(make_index(shards.folder, states))
    if options in ({}, {"layout": "packed"}):
        with pytest.raises(DestinationError, match=r" 1 .*:\n  'a/b/c'\n.*--layout per-parameter"):
            ucp.convert(shards.folder, tmp_path / "out", **options)
        assert [p.name for p in tmp_path.iterdir()] == ["source"]
    else:
        ucp.convert(shards.folder, tmp_path / "out", **options)
        index = index_of(tmp_path / "out")
        assert [elements(index, *own)[0] for own in names] == [0, 1, 2, 3]


EXTRAS = {
    "plain": {"epoch": 3, "betas": (0.9, 0.95), 5: None, "nan": float("nan"), "raw": b"\x00\xff", "big": 1 << 100},
    "size": TorchSize((2, 3)),
    "names/with strange.chars?": [GlobalName("torch", "float32"), {1, 2}, "\ud800"],
    "stub": {"scheduler": Stub(GlobalName("a.b", "C"), args=(1,), state={"x": (1, 2)}, has_state=True)},
}


@pytest.mark.parametrize("options", LAYOUTS, ids=LABELS)
class TestExtras:
    def convert(self, tmp_path, memory_format, options, extras):
        shards = Shards(tmp_path / "source")
        states = {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))}
        memory_format.index = make_index(shards.folder, states, extras=extras(shards))
        ucp.convert(shards.folder, tmp_path / "out", **options)
        found = {(extra.name, extra.rank): extra.value for extra in index_of(tmp_path / "out").extras}
        assert elements(index_of(tmp_path / "out"), "w", "weight").tolist() == list(range(100))
        return found

    def test_values_come_back(self, tmp_path, memory_format, options, small_blocks):
        extras = [Extra(name=name, value=value) for name, value in EXTRAS.items()]
        found = self.convert(tmp_path, memory_format, options, lambda shards: extras)
        assert list(found) == [(name, None) for name in EXTRAS]
        plain = dict(EXTRAS["plain"])
        assert str(found["plain", None].pop("nan")) == str(plain.pop("nan"))
        assert found["plain", None] == plain
        assert type(found["size", None]) is TorchSize
        assert found["names/with strange.chars?", None] == EXTRAS["names/with strange.chars?"]
        stub = found["stub", None]["scheduler"]
        assert (stub.made_by, stub.args, stub.state) == (GlobalName("a.b", "C"), (1,), {"x": (1, 2)})

    def test_tensors_come_back(self, tmp_path, memory_format, options, small_blocks):
        arrays = {
            "plain": np.arange(100, dtype="int16").reshape(10, 10),
            "transposed": np.arange(60, dtype="float64").reshape(6, 10),
            "scalar": np.float32(3.5).reshape(()),
            "empty": np.zeros((0, 3), dtype="float32"),
        }

        def extras(shards):
            refs = {
                name: shards.put(array, order=(1, 0) if name == "transposed" else (), file="extra.bin")
                for name, array in arrays.items()
            }
            return [Extra(name="rng", rank=rank, value={"tensors": refs, "tied": [refs["plain"]]}) for rank in (0, 1)]

        found = self.convert(tmp_path, memory_format, options, extras)
        assert list(found) == [("rng", 0), ("rng", 1)]
        for value in found.values():
            for name, array in arrays.items():
                ref = value["tensors"][name]
                assert isinstance(ref, TensorRef)
                assert ref.path.startswith(str(tmp_path / "out"))
                assert (ref.shape, ref.dtype) == (array.shape, array.dtype.name)
                assert _bytes_of(ref) == array.tobytes()

    def test_names_and_ranks_are_told_apart(self, tmp_path, memory_format, options):
        labels = [("a", None), ("a", 0), ("a", 1), ("a.rank0", None), ("A", None), ("a/b", None), ("a%2Fb", None)]
        extras = [Extra(name=name, rank=rank, value=[name, rank]) for name, rank in labels]
        found = self.convert(tmp_path, memory_format, options, lambda shards: extras)
        assert found == {(name, rank): [name, rank] for name, rank in labels}


def _bytes_of(ref: TensorRef) -> bytes:
    if not ref.numel:
        return b""
    with open(ref.path, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.nbytes)


@pytest.mark.parametrize("options", LAYOUTS, ids=LABELS)
def test_everything_that_is_said_of_an_atom_comes_back(tmp_path, memory_format, options):
    shards = Shards(tmp_path / "source")
    array = np.arange(6, dtype="float32")
    index = make_index(shards.folder, {(name, "weight"): shards.whole(array) for name in ("w", "frozen", "buffer")})
    boxes = tuple((RegionPair(Box((at,), (3,)), Box((0,), (3,))),) for at in (0, 3))
    axes = (AxisLayout("tp", 2, Pieces(held=boxes), "FILE"), AxisLayout("pp", 2, Unique(1), "names of files"))
    layout = Layout(axes, (AxisLayout("dp", 4, Partition(start=1, share=4), "ZeRO-1"),))
    sources = {"q": Layout((AxisLayout("tp", 2, Shard(0, blocks=(4, 2), copies=(1, 2))),))}
    index.atoms["w"] = replace(index.atoms["w"], model_dtype=DType.BFLOAT16, layout=layout)
    index.atoms["frozen"] = replace(index.atoms["frozen"], kind=Kind.FROZEN)
    index.atoms["buffer"] = replace(index.atoms["buffer"], kind=Kind.BUFFER, made_of=sources)
    memory_format.index = replace(
        index,
        topology=Topology(dp=4, tp=2, zero=1),
        aliases={"tied": "w"},
        notes=("assumed",),
        dropped=("left out",),
        lost={
            "w": LostStates(reason="shifted", detail="by: 3\n"),
            "frozen": LostStates(reason="shifted", is_chosen=True),
        },
        unselected=14,
        step=None,
    )
    ucp.convert(shards.folder, tmp_path / "out", **options)
    found = index_of(tmp_path / "out")
    for name, atom in index.atoms.items():
        own = found.atoms[name]
        assert (own.kind, own.model_dtype, own.layout) == (atom.kind, atom.model_dtype, atom.layout)
        assert (own.layout.lines, own.made_of) == (atom.layout.lines, atom.made_of)
    assert (found.topology, found.aliases, found.step) == (Topology(dp=4, tp=2, zero=1), {"tied": "w"}, None)
    assert (found.notes, found.dropped) == (("assumed",), ("left out",))
    assert (found.lost, found.unselected) == (memory_format.index.lost, 14)
    document = json.loads((tmp_path / "out" / "ucp.json").read_text())
    del document["lost"], document["unselected"], document["xxh3"]
    (tmp_path / "out" / "ucp.json").write_text(json.dumps(document))
    older = index_of(tmp_path / "out")
    assert (older.lost, older.unselected) == ({}, 0)


def test_a_layout_by_a_pattern_that_is_not_installed_is_left_out_with_a_note(tmp_path, memory_format):
    shards = Shards(tmp_path / "source")
    index = make_index(shards.folder, {("w", "weight"): shards.whole(np.arange(6, dtype="float32"))})
    layout = Layout((AxisLayout("tp", 2, Shard(0), "FILE"),))
    memory_format.index = replace(index, atoms={"w": replace(index.atoms["w"], layout=layout)})
    ucp.convert(shards.folder, tmp_path / "out")
    rewrite(tmp_path / "out", lambda manifest: manifest["axes"][0].__setitem__(2, "theirs"))
    index = index_of(tmp_path / "out")
    assert index.atoms["w"].layout == Layout()
    assert index.notes == ("the layout over tp is not shown: no pattern 'theirs' is installed here",)


def test_an_extra_stored_twice_is_malformed(tmp_path, memory_format):
    shards = Shards(tmp_path / "source")
    states = {("w", "weight"): shards.whole(np.zeros(3, "float32"))}
    memory_format.index = make_index(shards.folder, states, extras=[Extra(name="e", value=1)])
    ucp.convert(shards.folder, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "ucp.json").read_text())
    del document["xxh3"]
    document["extras"] *= 2
    (tmp_path / "out" / "ucp.json").write_text(json.dumps(document))
    with pytest.raises(MalformedError, match=r"'e' .*twice"):
        ucp.open(tmp_path / "out")


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "facts"),
        [
            ({"layout": "flat"}, "packed, per-parameter, virtual; got 'flat'"),
            ({"topology": "dp=2"}, "--topology"),
            ({"layout": "per-parameter", "compress": True}, "--compress .*per-parameter"),
            ({"virtual": True, "dtypes": {"weight": "bfloat16"}}, "virtual .*--dtype"),
            ({"dtypes": {"momentum": "bfloat16"}}, "momentum"),
        ],
    )
    def test_those_that_do_not_go_together(self, source, tmp_path, options, facts):
        with pytest.raises(UsageError, match=facts):
            ucp.convert(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_a_cast_is_of_floats_and_is_named(self, source, arrays, tmp_path):
        report = ucp.convert(source, tmp_path / "out", dtypes={"weight": "bfloat16"})
        (cast,) = report.casts
        assert "weight: float32 -> bfloat16 in 4 parameters" in cast
        assert json.loads((tmp_path / "out" / "ucp.json").read_text())["casts"] == [cast]
        index = index_of(tmp_path / "out")
        assert index.atoms["embed"].states["weight"].dtype == "bfloat16"
        assert index.atoms["counter"].states["weight"].dtype == "int64"
        wanted = arrays["embed", "weight"].astype(elements(index, "embed", "weight").dtype)
        assert elements(index, "embed", "weight").tobytes() == wanted.tobytes()
        assert elements(index, "embed", "exp_avg").tobytes() == arrays["embed", "exp_avg"].tobytes()
        assert elements(index, "counter", "weight") == 12345


class TestVirtual:
    def test_no_tensor_is_copied(self, source, tmp_path):
        ucp.convert(source, tmp_path / "out", virtual=True)
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["ucp-conversion.json", "ucp.json"]

    def test_a_changed_source_is_refused(self, source, tmp_path):
        ucp.convert(source, tmp_path / "out", virtual=True)
        with (source / "weight.bin").open("r+b") as file:
            file.write(b"\xff")
        with pytest.raises(ChangedError, match=r"weight\.bin"):
            StoreFormat().read(tmp_path / "out")

    def test_it_may_refer_to_a_compressed_store(self, source, tmp_path, small_blocks):
        ucp.convert(source, tmp_path / "one", compress=True)
        ucp.convert(tmp_path / "one", tmp_path / "two", virtual=True)
        assert ucp.diff(source, tmp_path / "two").equal
        assert ucp.verify(tmp_path / "two").ok


class TestDamage:
    @pytest.mark.parametrize(
        "options", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]], ids=["packed", "per-parameter", "compressed"]
    )
    def test_a_flipped_bit_is_named(self, source, tmp_path, options, small_blocks):
        ucp.convert(source, tmp_path / "out", **options)
        place = index_of(tmp_path / "out").atoms["embed"].states["exp_avg"].fragments[-1].ref
        with open(place.path, "r+b") as file:
            file.seek(place.offset + 20)
            byte = file.read(1)[0]
            file.seek(place.offset + 20)
            file.write(bytes([byte ^ 4]))
        report = ucp.verify(tmp_path / "out")
        assert not report.ok
        assert all("embed/exp_avg" in line and place.path in line for line in report.problems)
        with pytest.raises(CorruptError) as caught:
            ucp.convert(tmp_path / "out", tmp_path / "again", workers=1)
        assert "embed/exp_avg" in str(caught.value)
        assert place.path in str(caught.value)
        assert not (tmp_path / "again").exists()

    @pytest.mark.parametrize("options", [LAYOUTS[0], LAYOUTS[2]], ids=["packed", "per-parameter"])
    def test_a_flipped_bit_in_the_header_of_a_pack_is_named(self, source, tmp_path, options):
        """Other tools go by it."""
        ucp.convert(source, tmp_path / "out", **options)
        pack = next((tmp_path / "out").rglob("*.safetensors"))
        pack.write_bytes(pack.read_bytes().replace(b"F32", b"I32", 1))
        (problem,) = ucp.verify(tmp_path / "out").problems
        assert problem == f"CRC-32 differs: {pack}: header"

    def test_a_flipped_bit_in_a_tensor_of_an_extra_is_named(self, tmp_path, memory_format):
        shards = Shards(tmp_path / "source")
        states = {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))}
        extra = Extra(name="rng", value=shards.put(np.zeros(100, dtype="uint8"), file="extra.bin"))
        memory_format.index = make_index(shards.folder, states, extras=[extra])
        ucp.convert(shards.folder, tmp_path / "out")
        (ref,) = (extra.value for extra in index_of(tmp_path / "out").extras)
        with open(ref.path, "r+b") as file:
            file.seek(ref.offset + 20)
            file.write(b"\x01")
        report = ucp.verify(tmp_path / "out")
        assert not report.ok
        assert ref.path in report.problems[0]

    def test_a_manifest_that_is_gone_is_named(self, source, tmp_path):
        ucp.convert(source, tmp_path / "out")
        (tmp_path / "out" / "ucp.json").unlink()
        with pytest.raises(MissingFileError, match=r"/out/ucp\.json"):
            ucp.open(tmp_path / "out")


@pytest.mark.parametrize("options", LAYOUTS[1:], ids=LABELS[1:])
class TestExtrasAreSummed:
    """Every extra has its checksum in the manifest, in every layout: what is another file now is found, and named."""

    @pytest.fixture
    def out(self, tmp_path, memory_format, options):
        shards = Shards(tmp_path / "source")
        states = {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))}
        scheduler = Stub(GlobalName("a.b", "C"), args=(1,), state={"x": (1, 2)}, has_state=True)
        extras = [
            Extra(name="engine", value={"global_steps": 3}),
            Extra(name="client_state", value={"global_steps": 4}),
            Extra(name="scheduler", value=scheduler),
            *(Extra(name="rng", rank=n, value=shards.put(np.full(9, n, "uint8"), file="rng.bin")) for n in (0, 1)),
        ]
        memory_format.index = make_index(shards.folder, states, extras=extras)
        ucp.convert(shards.folder, tmp_path / "out", **options)
        assert ucp.verify(tmp_path / "out", against=shards.folder).ok
        return tmp_path / "out"

    def problems(self, out, *names):
        (problem,) = ucp.verify(out).problems
        assert [name for name in names if name not in problem] == []
        assert ucp.verify(out, against=out.parent / "source").problems == (problem,)
        with pytest.raises(ucp.UcpError) as caught:
            ucp.convert(out, out.parent / "again")
        assert str(caught.value) == problem
        assert not (out.parent / "again").exists()

    def test_a_byte_outside_tensors_and_pickle(self, out):
        extra = out / "extra" / "rng@rank0.pt"
        damaged = bytearray(extra.read_bytes())
        damaged[damaged.index(b"serialization_id") + 30] ^= 1
        extra.write_bytes(damaged)
        self.problems(out, "rng@rank0.pt")

    @pytest.mark.parametrize("name", ["engine.json", "scheduler.pt", "rng@rank1.pt"])
    def test_what_is_cut_longer_or_gone(self, out, name):
        extra = out / "extra" / name
        whole = extra.read_bytes()
        for damaged in (whole[:-1], whole + b"\n", b""):
            extra.write_bytes(damaged)
            self.problems(out, name)
        extra.unlink()
        self.problems(out, name)

    def test_a_file_that_the_manifest_does_not_name_is_told_and_not_read(self, out):
        (out / "extra" / "args.json").write_text("{}")
        report = ucp.verify(out)
        assert report.ok
        assert report.notes == (f"not in the manifest of {out}, not read: extra/args.json",)
        assert report.notes[0] in ucp.convert(out, out.parent / "again").notes
        assert "args" not in [extra.name for extra in index_of(out.parent / "again").extras]

    def test_against_the_source_every_extra_is_compared(self, out, memory_format):
        index = memory_format.index
        *others, last = index.extras
        changed = replace(last, value=replace(last.value, offset=0))
        extras = (Extra(name="engine", value={"global_steps": 9}), *others[2:], changed)
        memory_format.index = replace(index, extras=extras)
        found = [(c.param, c.state, c.what, c.a, c.b) for c in ucp.verify(out, against=index.path).changes]
        assert found == [
            ("extra/engine", "global_steps", "extra", "3", "9"),
            ("extra/client_state", "", "missing", "present", "missing"),
            ("extra/rng@rank1", "", "values", "9 of 9 elements", "9 of 9 elements"),
        ]
        memory_format.index = replace(memory_format.index, topology=Topology(dp=2))
        assert ucp.verify(out, against=index.path).ok
        assert [change.what for change in ucp.diff(index.path, out, extras=True).changes] == [c[2] for c in found]
        assert ucp.diff(index.path, out).equal


def rewrite(store, edit):
    """Edits the manifest of a store and takes its seal away."""
    document = json.loads((store / "ucp.json").read_text())
    edit(document)
    del document["xxh3"]
    (store / "ucp.json").write_text(json.dumps(document))


class TestForgedManifests:
    """What a store says of files is not believed: it is read from inside alone, or from what it has an identity of."""

    SECRET = bytes(range(200, 240)) * 100

    @pytest.fixture
    def out(self, source, tmp_path):
        (tmp_path / "secret").write_bytes(self.SECRET)
        ucp.convert(source, tmp_path / "out")
        return tmp_path / "out"

    def refused(self, out, facts):
        for verb in (ucp.open, ucp.plan, lambda path: ucp.convert(path, out.parent / "dst")):
            with pytest.raises(MalformedError, match=facts):
                verb(out)
        assert not (out.parent / "dst").exists()

    @pytest.mark.parametrize("link", ["packs/00000.safetensors", "packs", "extra/e.json", "extra", "ucp.json"])
    def test_links_are_refused(self, source, tmp_path, memory_format, link):
        shards = Shards(tmp_path / "shards")
        states = {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))}
        memory_format.index = make_index(shards.folder, states, extras=[Extra(name="e", value=1)])
        ucp.convert(shards.folder, tmp_path / "out")
        (tmp_path / "out" / link).rename(tmp_path / "elsewhere")
        (tmp_path / "out" / link).symlink_to(tmp_path / "elsewhere")
        self.refused(tmp_path / "out", f"link at .*{link}")

    def test_a_link_to_a_whole_store_is_the_store(self, out, tmp_path):
        (tmp_path / "link").symlink_to(out)
        assert ucp.verify(tmp_path / "link").ok

    def test_parts_of_a_file_are_no_way_out(self, out, tmp_path):
        (out / "packs" / "x-0.1").symlink_to(tmp_path / "secret")
        rewrite(out, lambda manifest: manifest["files"].append({"path": "packs/x"}))
        with pytest.raises(MissingFileError, match="packs/x"):
            ucp.open(out)

    @pytest.mark.parametrize("path", ["../secret", "{}/secret", "packs/../../secret", ""])
    def test_paths_that_leave_the_store(self, out, tmp_path, path):
        named = path.format(tmp_path)
        rewrite(out, lambda manifest: manifest["files"][0].update(path=named))
        self.refused(out, rf"store .*out; got {re.escape(repr(named))}")

    @pytest.mark.parametrize("virtual", [False, True])
    def test_a_path_that_no_file_can_have(self, source, tmp_path, virtual):
        ucp.convert(source, tmp_path / "out", virtual=virtual)
        rewrite(tmp_path / "out", lambda manifest: manifest["files"][0].update(path="a\0b"))
        with pytest.raises(MalformedError):
            ucp.open(tmp_path / "out")

    def test_a_virtual_store_needs_an_identity_of_every_file(self, source, tmp_path):
        ucp.convert(source, tmp_path / "out", virtual=True)
        rewrite(tmp_path / "out", lambda manifest: manifest["files"][0].pop("identity"))
        self.refused(tmp_path / "out", r"refers to .*\.bin.* does not record its identity")

    def test_a_range_is_of_one_tensor(self, out):
        def edit(manifest):
            states = [state for atom in manifest["atoms"].values() for state in atom["states"].values()]
            first, second = sorted(states, key=lambda state: state["offset"])[:2]
            second["offset"] = first["offset"]

        rewrite(out, edit)
        self.refused(out, "overlaps")

    def test_a_weight_has_the_shape_of_its_parameter(self, source, tmp_path):
        ucp.convert(source, tmp_path / "out", compress=True)
        rewrite(tmp_path / "out", lambda manifest: manifest["atoms"]["embed"]["shape"].reverse())
        self.refused(tmp_path / "out", r"embed: .*weight .*; got ")

    def test_groups_and_tied_names_of_nothing(self, out):
        def edit(manifest):
            manifest["groups"] = [{"params": ["nobody", "embed"], "hyper": {}}, {"params": ["embed"], "hyper": {}}]
            manifest["aliases"] = {"tied": "no one"}

        rewrite(out, edit)
        with pytest.raises(MalformedError, match=r"(?s)group: nobody\n.*tied = no one\n.*groups: embed\n"):
            ucp.convert(out, out.parent / "dst")
        assert "nobody" in ucp.verify(out).problems[0]

    @pytest.mark.parametrize("name", ["ucp.json", "extra/e.json"])
    def test_a_document_of_any_length_is_not_read(self, source, tmp_path, memory_format, name):
        shards = Shards(tmp_path / "shards")
        states = {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))}
        memory_format.index = make_index(shards.folder, states, extras=[Extra(name="e", value=1)])
        ucp.convert(shards.folder, tmp_path / "out")
        with (tmp_path / "out" / name).open("r+b") as file:
            file.truncate(20 << 30)
        self.refused(tmp_path / "out", rf"1,073,741,824 bytes in .*{name}; got 21,474,836,480")

    def test_a_manifest_too_long_to_be_read_is_not_written(self, tmp_path, memory_format, monkeypatch):
        shards = Shards(tmp_path / "source")
        memory_format.index = make_index(shards.folder, {("w", "weight"): shards.whole(np.arange(9, dtype="int32"))})
        monkeypatch.setattr(import_module("ucp.store.manifest"), "LONGEST", 400)
        with pytest.raises(DestinationError, match=r"400 bytes; got .*--virtual"):
            ucp.convert(shards.folder, tmp_path / "out", virtual=True)
        assert not (tmp_path / "out").exists()


def test_a_virtual_store_of_split_files(tmp_path, memory_format):
    """The index has their parts, the store knows them by the whole."""
    shards = Shards(tmp_path / "source")
    index = make_index(shards.folder, {("w", "weight"): shards.whole(np.arange(100, dtype="float32"))})
    (file,) = index.files
    data = (shards.folder / "shard.bin").read_bytes()
    (shards.folder / "shard.bin").unlink()
    for part, chunk in enumerate((data[:50], data[50:])):
        (shards.folder / f"shard.bin-{part}.2").write_bytes(chunk)
    parts = tuple(replace(file, path=f"{file.path}-{part}.2", nbytes=50) for part in range(2))
    memory_format.index = replace(index, files=parts)
    ucp.convert(shards.folder, tmp_path / "out", virtual=True)
    assert ucp.verify(tmp_path / "out", against=shards.folder).ok
    (shards.folder / "shard.bin-1.2").write_bytes(data[50:-1] + b"\xff")
    with pytest.raises(ChangedError, match=r"shard\.bin"):
        index_of(tmp_path / "out")
