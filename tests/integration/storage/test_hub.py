"""Models of the Hugging Face Hub, read from a server that answers as the Hub does to huggingface_hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ucp
from tests.integration.storage.hub import Hub
from tests.integration.storage.test_faults import refused
from ucp.errors import ChangedError, UcpError, UsageError

pytestmark = pytest.mark.integration

MODEL = Path(__file__).parents[3] / "fixtures/huggingface/llama-sharded/model"
FILES = {str(own.relative_to(MODEL)): own.read_bytes() for own in MODEL.rglob("*") if own.is_file()}
TOKEN = "hf_neverprintedneverwritten"
URL = "hf://org/llama"


@pytest.fixture
def hub(monkeypatch):
    """The server, and a model on it; the library is told where it is before it is imported."""
    pytest.importorskip("huggingface_hub", reason="make integration installs it")
    from huggingface_hub import constants

    from ucp.io.files import close_connections

    own = Hub(TOKEN)
    own.commit("org/llama", FILES)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_HOME"):
        monkeypatch.setattr(constants, name, own.url, raising=False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", own.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_ENDPOINT", own.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    close_connections()
    yield own
    close_connections()
    own.close()


def command(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "ucp", *map(str, words)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == code, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_a_model_is_read_as_from_a_disk(hub, tmp_path):
    hub.private.add("org/llama")
    said = json.loads(command("inspect", URL, "--json"))
    assert {len(own["version"]) for own in said["files"]} == {40}
    command("convert", URL, tmp_path / "atoms", "--verify", "--workers", "2")
    assert ucp.diff(tmp_path / "atoms", MODEL, extras=True).equal
    assert not any(TOKEN.encode() in own.read_bytes() for own in (tmp_path / "atoms").rglob("*") if own.is_file())
    assert ucp.verify(tmp_path / "atoms", against=URL).ok
    assert any(TOKEN in headers.get("authorization", "") for _, headers in hub.seen), "it was sent"


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1"])
def test_a_revision(hub, revision):
    names = json.loads(FILES["model.safetensors.index.json"])
    hub.commit("org/llama", {"README.md": b"no model any more"})
    hub.commit("org/llama", FILES, revision=revision)
    index = ucp.inspect(f"{URL}@{revision}")
    assert index.atoms.keys() == names["weight_map"].keys()
    file = "model.safetensors.index.json"
    assert (ucp.io.folder.parse_path(f"{URL}@{revision}") / file).read_bytes() == FILES[file]


def test_one_commit_is_read_whatever_is_committed_meanwhile(hub):
    index = ucp.open(URL)
    (name, *_) = index.atoms
    wanted = ucp.open(MODEL).read(name, "weight")
    hub.commit("org/llama", {own: bytes(len(data)) for own, data in FILES.items()})
    assert (index.read(name, "weight") == wanted).all()
    with pytest.raises(UcpError):
        ucp.open(URL)  # looks again: that is no model


def test_references_notice_another_commit(hub, tmp_path):
    ucp.convert(URL, tmp_path / "virtual", virtual=True, fsync=False)
    assert ucp.diff(tmp_path / "virtual", MODEL).equal
    hub.commit("org/llama", {**FILES, "README.md": b"new"})
    assert ucp.diff(tmp_path / "virtual", MODEL).equal, "the files that are referred to are the same"
    name = next(own for own in FILES if own.endswith(".safetensors"))
    hub.commit("org/llama", {**FILES, name: FILES[name][:-1] + b"\x01"})
    with pytest.raises(ChangedError, match=name):
        ucp.inspect(tmp_path / "virtual")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://org/none", "nothing is there"),
        ("hf://org/llama@none", "nothing is there"),
        ("hf://gpt2", "namespace/name"),
        ("hf://org/private", "HF_TOKEN"),
    ],
)
def test_what_is_not_there(hub, url, said, monkeypatch):
    hub.commit("org/private", FILES)
    hub.private.add("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_another-one-never-printed")
    text = refused(lambda: ucp.inspect(url), UcpError)
    assert said in text
    assert "never-printed" not in text


def test_it_is_only_read(hub, tmp_path):
    assert "hf://org/new" in refused(lambda: ucp.convert(MODEL, "hf://org/new", scratch=tmp_path), UsageError)
    assert not hub.seen, "nothing was asked"
