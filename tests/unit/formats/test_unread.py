"""What no format reads is named, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ucp
from ucp.errors import DestinationError, MissingLibraryError, UnknownFormatError, UsageError


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["config.json", "tf_model.h5"], "a Hugging Face model for TensorFlow or JAX"),
        (["a.safetensors", "b.safetensors"], "a folder of safetensors files"),
        (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter"),
        (["_CHECKPOINT_METADATA"], "an orbax checkpoint"),
        (["llama.gguf"], "a GGUF model"),
        (["model.nemo"], "a NeMo archive"),
        (["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"], "a LoRA adapter"),
        (["optimizer.pt"], "an optimizer without its model"),
        (["_CHECKPOINT_METADATA", "default/manifest.ocdbt"], "an orbax checkpoint"),
    ],
)
@pytest.mark.parametrize("beside", ["", "base.pt", "model.safetensors"])
def test_what_is_not_read_is_named(tmp_path, entries, said, beside):
    folder = tmp_path / "a" / "b"
    for entry in entries:
        (folder / entry).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry).touch()
    if beside:
        (folder.parent / beside).touch()
    with pytest.raises(UnknownFormatError, match=f"It looks like .*{said}.*, which is not read. [A-Z]"):
        ucp.inspect(folder)


@pytest.mark.parametrize(
    ("beside", "advice"), [("", "Pass the folder that the"), ("model.safetensors", "Did you mean")]
)
def test_a_part_of_a_checkpoint_leads_to_its_folder(tmp_path, beside, advice):
    (tmp_path / "rng_state_0.pth").touch()
    (tmp_path / (beside or "README.md")).touch()
    with pytest.raises(UnknownFormatError, match=advice):
        ucp.inspect(tmp_path / "rng_state_0.pth")


def test_a_file_of_torch_above_says_nothing_of_an_empty_folder(tmp_path):
    (tmp_path / "base.pt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownFormatError, match="Pass the folder that the framework saved to"):
        ucp.inspect(tmp_path / "empty")


def test_a_checkpoint_around_an_empty_folder_is_not_proposed(source):
    (source / "empty").mkdir()
    with pytest.raises(UnknownFormatError, match="Pass the folder that the framework saved to"):
        ucp.inspect(source / "empty")


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", Path("hf://owner/model")])
def test_a_url_is_no_local_path(path, source, tmp_path, monkeypatch):
    for library in ("s3fs", "gcsfs", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, library, None)  # not installed, so that nobody is asked
    with pytest.raises(MissingLibraryError, match=r"(s3|gs|hf):// is read by \w+, which is not installed"):
        ucp.inspect(path)
    with pytest.raises(MissingLibraryError, match=r"universal-checkpoint\[(s3|gcs|hf)\]"):
        ucp.convert(path, tmp_path / "out")
    with pytest.raises(UsageError, match="expected a path, or a URL of s3://"):
        ucp.inspect("ftp://host/run")
    with pytest.raises((MissingLibraryError, UsageError), match=r"which is not installed|which is read-only"):
        ucp.convert(source, path)
    with pytest.raises(DestinationError, match=r"expected a folder, or the URL of a bucket"):
        ucp.convert(source, "file:///tmp/run")
    with pytest.raises(UnknownFormatError, match="pass the path alone"):
        ucp.inspect("file:///tmp/run")


def test_a_checkpoint_nearby_comes_first(tmp_path, source):
    (source.parent / "model.gguf").touch()
    with pytest.raises(UnknownFormatError, match=f"Did you mean {source}"):
        ucp.inspect(source.parent)
