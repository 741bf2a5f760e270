"""Every command reads a bucket as it reads a disk: byte for byte the same, on checkpoints of every framework."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ucp
from tests.golden.test_stream import check_layers
from tests.integration.storage.servers import SERVERS
from tests.unit.conftest import shrink

pytestmark = pytest.mark.integration

SECRETS = [own for kind in SERVERS.values() for own in kind.secrets.values()]
FIXTURES = Path(__file__).parents[3] / "fixtures"
SOURCES = {
    "deepspeed": "deepspeed/z2-dp2-client-state/checkpoint",
    "deepspeed-split": "deepspeed/z1-pp2-tp2-dp2-bf16/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "megatron-legacy": "megatron/gpt-tp2-pp2-torch/checkpoint",
    "dcp": "torch/fsdp2-dp2-tp2/checkpoint",
    "huggingface": "huggingface/llama-sharded/model",
}


@pytest.fixture(params=SOURCES)
def both(request, bucket, proxy):
    """A checkpoint on the disk, and its copy in the bucket."""
    folder = FIXTURES / SOURCES[request.param]
    return folder, bucket.put(folder, f"runs/{request.param}")


def tree(folder, source):
    """Files of a destination, `source` as it is named in them taken out."""
    found = {}
    for file in sorted(own for own in folder.rglob("*") if own.is_file()):
        data = file.read_bytes()
        if file.name in ("ucp.json", "ucp-conversion.json"):
            document = json.loads(data.replace(str(source).encode(), b"SOURCE"))
            data = {key: own for key, own in document.items() if key not in ("xxh3", "fingerprint", "crc32")}
            if file.name == "ucp-conversion.json":
                data["files"] = list(data["files"])  # without lengths: that of `ucp.json` goes with the source's name
        found[str(file.relative_to(folder))] = data
    return found


def command(*words, code=0):
    """What a command prints, run as users run it; no secret is in it."""
    done = subprocess.run(
        [sys.executable, "-m", "ucp", *map(str, words)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == code, done.stderr
    for secret in SECRETS:
        assert secret not in done.stdout + done.stderr
    return done.stdout


def test_inspect_and_plan(both):
    disk, store = (json.loads(command("inspect", own, "--json").replace(str(own), "SOURCE")) for own in both)
    for own in (*disk["files"], *store["files"]):
        own.pop("mtime_ns")
        own.pop("version", None)
    assert disk == store
    plans = [re.sub(r"[\d.,]+ [KMG]i?B", "N", command("plan", own).replace(str(own), "SOURCE")) for own in both]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("both", ["megatron", "megatron-legacy", "huggingface"], indirect=True)
def test_stream(both):
    disk, store = both
    check_layers(disk, store)


def test_convert_verify_and_diff(both, tmp_path, monkeypatch):
    shrink(monkeypatch, block=1024, task=4096)  # many tasks, over forked processes that each read the bucket
    for name, source in zip(("disk", "store"), both, strict=True):
        ucp.convert(source, tmp_path / name, workers=3, fsync=False, verify=True)
    assert tree(tmp_path / "disk", both[0]) == tree(tmp_path / "store", both[1])
    written = b"".join(own.read_bytes() for own in (tmp_path / "store").rglob("*") if own.is_file())
    assert not any(secret.encode() in written for secret in SECRETS)
    assert ucp.verify(both[1]).ok
    assert ucp.verify(tmp_path / "store", against=both[1]).ok
    assert ucp.diff(*both, extras=True).equal


def test_atoms_in_a_bucket(both, tmp_path, bucket):
    ucp.convert(both[0], tmp_path / "atoms", fsync=False)
    url = bucket.put(tmp_path / "atoms", f"atoms/{both[0].parent.name}")
    command("convert", url, tmp_path / "again")
    assert ucp.diff(tmp_path / "again", both[0], extras=True).equal


def test_references_into_a_bucket(both, tmp_path, bucket):
    command("convert", both[1], tmp_path / "virtual", "--virtual")
    text = (tmp_path / "virtual/ucp.json").read_text()
    assert both[1] in text
    assert not any(secret in text for secret in SECRETS)
    assert ucp.diff(tmp_path / "virtual", both[0], extras=True).equal
    file = next(own["path"] for own in json.loads(text)["files"])
    bucket.change(file)
    with pytest.raises(ucp.errors.ChangedError, match=re.escape(file)):
        ucp.inspect(tmp_path / "virtual")


def test_read_and_load_into(bucket, proxy):
    folder = FIXTURES / SOURCES["huggingface"]
    url = bucket.put(folder, "runs/load")
    disk, store = ucp.open(folder), ucp.open(url)
    for name, atom in disk.atoms.items():
        region = (slice(1, 3),) * min(1, len(atom.global_shape))
        assert torch.equal(disk.read(name, "weight", region), store.read(name, "weight", region))
    models = [
        torch.nn.ModuleDict({"head": torch.nn.Linear(*disk.atoms[NAME].global_shape[::-1], bias=False)}) for _ in "ab"
    ]
    for model, source in zip(models, (folder, url), strict=True):
        ucp.load_into(model, checkpoint=source, strict=False, rename=lambda name: NAME)
    assert torch.equal(models[0]["head"].weight, models[1]["head"].weight)
    assert models[0]["head"].weight.any()


NAME = "lm_head.weight"


def test_children_do_not_take_up_connections_of_their_parent(bucket, proxy, tmp_path, monkeypatch):
    """The parent reads before, while and after its children do; none hangs, none answers another."""
    from ucp.io.remote import connections

    folder = FIXTURES / SOURCES["megatron"]
    url = bucket.put(folder, "runs/fork")
    shrink(monkeypatch, block=1024, task=2048)
    ucp.inspect(url)
    mine = connections.connect(url)
    ucp.convert(url, tmp_path / "one", workers=4, fsync=False)
    assert connections.connect(url) is not mine, "the parent hung up before it forked"
    assert mine._loop.is_closed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads are there is the point
        child = os.fork()
    if not child:  # a fork that nobody told us of, with connections open
        os._exit(0 if ucp.inspect(url).atoms else 1)
    assert os.waitpid(child, 0)[1] == 0
    ucp.convert(url, tmp_path / "two", workers=4, fsync=False)
    assert tree(tmp_path / "one", url) == tree(tmp_path / "two", url)
