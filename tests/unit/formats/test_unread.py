"""What no format reads is named, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ucp
from ucp.errors import DestinationError, MissingLibraryError, UnknownFormatError, UsageError


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        (["config.json", "tf_model.h5"], "TensorFlow"),
        (["a.safetensors", "b.safetensors"], "safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA"),
        (["_CHECKPOINT_METADATA"], "orbax"),
        (["llama.gguf"], "GGUF"),
        (["model.nemo"], "NeMo"),
        (["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"], "LoRA"),
        (["optimizer.pt"], "optimizer"),
        (["_CHECKPOINT_METADATA", "default/manifest.ocdbt"], "orbax"),
    ],
)
@pytest.mark.parametrize("beside", ["", "base.pt", "model.safetensors"])
def test_what_is_not_read_is_named(tmp_path, entries, kind, beside):
    folder = tmp_path / "a" / "b"
    for entry in entries:
        (folder / entry).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry).touch()
    if beside:
        (folder.parent / beside).touch()
    with pytest.raises(UnknownFormatError, match=rf"looks like .*\b{kind}\b.*\. [A-Z]"):
        ucp.inspect(folder)


@pytest.mark.parametrize(("beside", "advice"), [("", "Pass the folder"), ("model.safetensors", "Did you mean {}[?]")])
def test_a_part_of_a_checkpoint_leads_to_its_folder(tmp_path, beside, advice):
    (tmp_path / "rng_state_0.pth").touch()
    (tmp_path / (beside or "README.md")).touch()
    with pytest.raises(UnknownFormatError, match=advice.format(tmp_path)):
        ucp.inspect(tmp_path / "rng_state_0.pth")


def test_a_file_of_torch_above_says_nothing_of_an_empty_folder(tmp_path):
    (tmp_path / "base.pt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownFormatError, match="Pass the folder"):
        ucp.inspect(tmp_path / "empty")


def test_a_checkpoint_around_an_empty_folder_is_not_proposed(source):
    (source / "empty").mkdir()
    with pytest.raises(UnknownFormatError, match="Pass the folder"):
        ucp.inspect(source / "empty")


@pytest.mark.parametrize(
    ("path", "library", "extra"),
    [
        ("s3://bucket/run", "s3fs", "s3"),
        ("gs://bucket/run", "gcsfs", "gcs"),
        (Path("hf://owner/model"), "huggingface_hub", "hf"),
    ],
)
def test_a_url_is_no_local_path(path, library, extra, source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)  # not installed, so that nobody is asked
    facts = rf"{library}, .*universal-checkpoint\[{extra}\]"
    with pytest.raises(MissingLibraryError, match=facts):
        ucp.inspect(path)
    with pytest.raises(MissingLibraryError, match=facts):
        ucp.convert(path, tmp_path / "out")
    error, facts = (UsageError, "got hf://.*read-only") if extra == "hf" else (MissingLibraryError, facts)
    with pytest.raises(error, match=facts):
        ucp.convert(source, path)


def test_urls_of_other_schemes(source):
    with pytest.raises(UsageError, match=r"s3://.*; got ftp://host/run"):
        ucp.inspect("ftp://host/run")
    with pytest.raises(DestinationError, match=r"s3://.*; got file:/tmp/run\b"):
        ucp.convert(source, "file:///tmp/run")
    with pytest.raises(UnknownFormatError, match="without file://"):
        ucp.inspect("file:///tmp/run")


def test_a_checkpoint_nearby_comes_first(tmp_path, source):
    (source.parent / "model.gguf").touch()
    with pytest.raises(UnknownFormatError, match=f"Did you mean {source}"):
        ucp.inspect(source.parent)
