"""What no format reads is named, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from ucp.errors import DestinationError, UnknownFormatError


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["config.json", "tf_model.h5"], "a Hugging Face model for TensorFlow or JAX"),
        (["a.safetensors", "b.safetensors"], "a folder of safetensors files"),
        (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter"),
        (["_CHECKPOINT_METADATA"], "an orbax checkpoint"),
        (["llama.gguf"], "a GGUF model"),
        (["model.nemo"], "a NeMo archive"),
        (["step100.ckpt", "step200.ckpt"], "a file of torch.save"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, entries, said):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    for entry in entries:
        (folder / entry).touch()
    with pytest.raises(UnknownFormatError, match=f"It looks like .*{said}.*, which is not read. [A-Z]"):
        ucp.inspect(folder)


def test_a_single_file_is_named(tmp_path):
    (tmp_path / "distrib_optim.pt").touch()
    with pytest.raises(UnknownFormatError, match=r"a file of torch.save, which is not read\. Pass the folder"):
        ucp.inspect(tmp_path / "distrib_optim.pt")


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", Path("hf://owner/model")])
def test_a_url_is_no_local_path(path, source, tmp_path):
    with pytest.raises(UnknownFormatError, match=r"(s3|gs|hf):// is remote storage, and only local files are read"):
        ucp.inspect(path)
    with pytest.raises(UnknownFormatError, match="is remote storage"):
        ucp.convert(path, tmp_path / "out")
    with pytest.raises(DestinationError, match=r"(s3|gs|hf):// is no local folder"):
        ucp.convert(source, path)
    with pytest.raises(UnknownFormatError, match="pass the path alone"):
        ucp.inspect("file:///tmp/run")


def test_a_checkpoint_nearby_comes_first(tmp_path, source):
    (source.parent / "model.gguf").touch()
    with pytest.raises(UnknownFormatError, match=f"Did you mean {source}"):
        ucp.inspect(source.parent)
