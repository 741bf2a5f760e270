"""What reads a checkpoint reads it from a store with the same result, without a file of it on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ucp
from tests.unit.conftest import shrink
from ucp.errors import ChangedError, MalformedError, MissingLibraryError, UnknownFormatError
from ucp.io.remote import ends
from ucp.io.remote import file as remote_file
from ucp.io.remote.stores import Store
from ucp_cli.verbs import cli

FIXTURES = Path(__file__).parents[4] / "fixtures"
SOURCES = [
    "deepspeed/z2-dp2-client-state",
    "huggingface/llama-sharded",
    "megatron/gpt-tp2-pp2-torch",
    "megatron/llama-tp2-pp2-dp2-full",
    "torch/ddp-dp2",
]


@pytest.fixture(params=SOURCES)
def both(request, memory):
    """A checkpoint on the disk, and its copy in a store."""
    return stored(memory, request.param)


@pytest.fixture
def llama(memory):
    return stored(memory, "huggingface/llama-sharded")


def stored(memory, name):
    folder = FIXTURES / name / ("model" if name.startswith("huggingface") else "checkpoint")
    return folder, memory.put(folder, f"memory://bucket/{name}")


def tree(folder, source):
    """Files of a destination, `source` as it is named in them taken out."""
    found = {}
    for file in sorted(own for own in folder.rglob("*") if own.is_file()):
        data = file.read_bytes()
        if file.suffix == ".json" and file.name.startswith("ucp"):
            document = json.loads(data.replace(str(source).encode(), b"SOURCE"))
            data = {key: own for key, own in document.items() if key not in ("xxh3", "fingerprint", "crc32")}
            if file.name == "ucp-conversion.json":
                data["files"] = list(data["files"])  # without lengths: that of `ucp.json` goes with the source's name
        found[str(file.relative_to(folder))] = data
    return found


def test_inspect(both):
    disk, store = (ucp.inspect(own) for own in both)

    def told(index, source):
        files = tuple(replace(own, mtime_ns=0, version="") for own in index.files)
        own = {field.name: getattr(replace(index, files=files), field.name) for field in fields(index)}
        return repr(own).replace(str(source), "SOURCE")

    assert told(disk, both[0]) == told(store, both[1])


@pytest.mark.parametrize("both", [SOURCES[0], SOURCES[1], SOURCES[3]], indirect=True)
def test_convert_verify_and_diff(both, tmp_path, monkeypatch):
    shrink(monkeypatch, block=2048, task=4096)
    for name, source in zip(("disk", "store"), both, strict=True):
        ucp.convert(source, tmp_path / name, workers=2, fsync=False, verify=True)
    assert tree(tmp_path / "disk", both[0]) == tree(tmp_path / "store", both[1])
    assert ucp.verify(both[1]).ok
    assert ucp.verify(tmp_path / "disk", against=both[1]).ok
    assert ucp.diff(*both, extras=True).equal


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("megatron/llama-tp2-pp2-dp2-full", {"to": "dcp", "topology": "dp=4"}),
        ("torch/fsdp2-dp2-tp2", {"to": "deepspeed", "topology": "dp=2,zero=1"}),
        ("huggingface/llama-sharded", {"to": "ucp", "compress": True}),
    ],
)
def test_convert_to_other_layouts_reads_hardly_more_than_there_is(memory, tmp_path, monkeypatch, name, asked):
    """Strided, cast and encoded pieces; blocks so small that most are read crosswise."""
    shrink(monkeypatch, block=512, task=2048)
    got = []
    fetch = Store.fetch
    monkeypatch.setattr(Store, "fetch", lambda *own: got.append(own[-1] - own[-2]) or fetch(*own))
    disk, store = stored(memory, name)
    ucp.convert(disk, tmp_path / "disk", **asked, workers=1, fsync=False)
    monkeypatch.setattr(ends, "BLOCK", 0)  # small objects are all ends: so that what is announced is read anew
    monkeypatch.setattr(remote_file, "_SMALL", 0)
    index = ucp.inspect(store)
    got.clear()
    ucp.convert(store, tmp_path / "store", **asked, workers=1, fsync=False)
    assert tree(tmp_path / "disk", disk) == tree(tmp_path / "store", store)
    announced = sum(state.nbytes for _, _, state in index.states())
    assert announced < sum(got) < 6 * sum(file.nbytes for file in index.files), "index, copies, and what lies between"


@pytest.mark.parametrize("name", ["atoms", "virtual"])
@pytest.mark.parametrize("kept", [SOURCES[0], SOURCES[1]])
def test_atoms_in_a_store(kept, tmp_path, memory, name):
    both = stored(memory, kept)
    ucp.convert(both[0], tmp_path / name, virtual=name == "virtual", fsync=False)
    url = memory.put(tmp_path / name, f"memory://bucket/{name}")
    assert ucp.inspect(url).shapes == ucp.inspect(both[0]).shapes
    ucp.convert(url, tmp_path / "again", fsync=False)
    assert ucp.diff(tmp_path / "again", both[0], extras=True).equal


@pytest.mark.parametrize("both", [SOURCES[0], SOURCES[3]], indirect=True)
def test_references_into_a_store(both, tmp_path, memory):
    report = ucp.convert(both[1], tmp_path / "virtual", virtual=True, fsync=False)
    assert report.references
    assert ucp.diff(tmp_path / "virtual", both[0], extras=True).equal
    assert ucp.verify(tmp_path / "virtual", against=both[0]).ok
    first, *_ = json.loads((tmp_path / "virtual/ucp.json").read_text())["files"]
    memory.fs.pipe_file(first["path"], memory.fs.cat_file(first["path"]))
    with pytest.raises(ChangedError, match=rf"virtual .*\n  {first['path']}"):
        ucp.inspect(tmp_path / "virtual")


def test_load_into_a_model(llama):
    def model():
        own = torch.nn.Module()
        for name, atom in ucp.open(llama[0]).atoms.items():
            *path, last = name.split(".")
            at = own
            for part in path:
                at = getattr(at, part, None) or at.register_module(part, torch.nn.Module()) or getattr(at, part)
            at.register_parameter(last, torch.nn.Parameter(torch.zeros(tuple(atom.global_shape))))
        return own

    disk, store = model(), model()
    for own, source in zip((disk, store), llama, strict=True):
        ucp.load_into(own, checkpoint=source)
    for (name, a), (_, b) in zip(disk.named_parameters(), store.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.any(), name


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify"])
def test_the_command_line(llama, verb):
    result = CliRunner().invoke(cli, [verb, llama[1]], prog_name="ucp")
    assert result.exit_code == 0, result.output
    assert llama[1] in result.output or verb == "plan"


def test_nothing_there():
    with pytest.raises(UnknownFormatError, match="memory://bucket/no; "):
        ucp.inspect("memory://bucket/no")
    result = CliRunner().invoke(cli, ["inspect", "s3://key:hidden@bucket/x"], prog_name="ucp")
    assert result.exit_code == 2
    assert "hidden" not in result.output
    assert "without a user and password" in result.output


def test_damage_is_told_by_its_url(llama, memory):
    file = next(own for own in ucp.inspect(llama[1]).files if own.path.endswith(".safetensors"))
    memory.fs.pipe_file(file.path, memory.fs.cat_file(file.path)[:-10])
    with pytest.raises(MalformedError, match=file.path):
        ucp.inspect(llama[1])


def test_replaced_while_it_is_converted(llama, memory, tmp_path, monkeypatch):
    from ucp.transfer.worker import Worker

    file = next(own for own in ucp.inspect(llama[1]).files if own.path.endswith(".safetensors"))
    data = bytearray(memory.fs.cat_file(file.path))
    data[-1] ^= 1
    carry_out = Worker.carry_out

    def after_a_change(self, task):
        memory.fs.pipe_file(file.path, bytes(data))
        return carry_out(self, task)

    monkeypatch.setattr(Worker, "carry_out", after_a_change)
    with pytest.raises(ChangedError, match=rf"replaced .*\n  {file.path}"):
        ucp.convert(llama[1], tmp_path / "out", workers=1, fsync=False)
    assert list(tmp_path.iterdir()) == [], "what was read of two states is no beginning of anything"


_NOTHING = """
import sys
import ucp
from ucp_cli.verbs import cli
from click.testing import CliRunner
assert CliRunner().invoke(cli, ["inspect", sys.argv[1]], prog_name="ucp").exit_code == 0
ucp.convert(sys.argv[1], sys.argv[2])
heavy = {"fsspec", "s3fs", "gcsfs", "boto3", "botocore", "aiobotocore", "aiohttp", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
assert "ucp.io.remote.connections" not in sys.modules
"""


def test_a_run_without_urls_imports_nothing_of_stores(llama, tmp_path):
    subprocess.run([sys.executable, "-c", _NOTHING, llama[0], tmp_path / "out"], check=True, env=os.environ)


def test_without_its_library_a_scheme_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingLibraryError, match=r"s3:// .*s3fs.*universal-checkpoint\[s3\]"):
        ucp.inspect("s3://bucket/run")
