"""A lone file of torch.save yields to the markers of a framework, and is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucp
from ucp.contract.registry import recognise
from ucp.errors import UnknownFormatError, UsageError

FIXTURES = Path(__file__).parents[3] / "fixtures"
MARKED = {
    "deepspeed": "deepspeed/z3-dp4-fp32/checkpoint",
    "dcp": "torch/fsdp2-dp4/checkpoint",
    "huggingface": "huggingface/gpt2/model",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
}


def add_file(folder: Path, name: str) -> None:
    torch.save({"a.weight": torch.ones(3, 3)}, folder / name)


@pytest.fixture(params=MARKED)
def marked(request, tmp_path):
    """A checkpoint of each framework, with its format."""
    shutil.copytree(FIXTURES / MARKED[request.param], tmp_path / "run")
    return tmp_path / "run", request.param


@pytest.mark.parametrize("names", [("voice.pt",), ("last.ckpt",), ("consolidated.00.pth",), ("ckpt_1.pt", "ckpt_2.pt")])
def test_markers_win_over_files_that_only_have_a_suffix(marked, names):
    folder, name = marked
    atoms = list(ucp.inspect(folder).atoms)
    for own in names:
        add_file(folder, own)
    index = ucp.inspect(folder)
    assert (index.format, list(index.atoms)) == (name, atoms)
    assert any(all(own in note for own in names) and "not read" in note for note in index.notes)
    assert ucp.open(folder).index.notes[-1] in index.notes


def test_a_checkpoint_with_nothing_beside_it_has_no_such_note(marked):
    folder, _ = marked
    assert not any("not read, as" in note for note in ucp.inspect(folder).notes)


def test_weights_beside_an_optimizer_stay_one_checkpoint(tmp_path):
    shutil.copytree(FIXTURES / "huggingface" / "llama" / "model", tmp_path / "checkpoint-2")
    add_file(tmp_path / "checkpoint-2", "optimizer.pt")
    add_file(tmp_path / "checkpoint-2", "value_head.pt")
    fmt, evidence = recognise(tmp_path / "checkpoint-2")
    assert (fmt.name, evidence.reasons) == ("torch", ("model.safetensors", "optimizer.pt"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("deepspeed", target) for target in ("deepspeed", "deepspeed-universal", "dcp", "torch")),
        *(("huggingface", target) for target in ("huggingface", "megatron")),
    ],
)
def test_what_we_write_is_not_ambiguous_to_us(tmp_path, source, target):
    shutil.copytree(FIXTURES / MARKED[source], tmp_path / "in")
    for own in ("model.pt", "second.pt"):
        add_file(tmp_path / "in", own)
        out = tmp_path / f"out-{own}"
        ucp.convert(tmp_path / "in", out, to=target, verify=True)
        index = ucp.inspect(out)
        assert index.format == target
        assert "a.weight" not in index.atoms


def test_one_file_that_we_wrote_is_read_beside_weights_that_were_carried_along(tmp_path):
    shutil.copytree(FIXTURES / "deepspeed" / "z3-dp4-fp32" / "checkpoint", tmp_path / "in")
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "in" / "model.safetensors")
    ucp.convert(tmp_path / "in", tmp_path / "out", to="torch", verify=True)
    (tmp_path / "out" / "README.md").write_text("added since")
    index = ucp.inspect(tmp_path / "out")
    assert (index.format, bool(index.groups)) == ("torch", True)


def test_several_files_are_listed(tmp_path):
    for own in ("ckpt_1.pt", "ckpt_2.pt"):
        add_file(tmp_path, own)
    with pytest.raises(UsageError) as caught:
        ucp.inspect(tmp_path)
    assert all(str(tmp_path / own) in str(caught.value) for own in ("ckpt_1.pt", "ckpt_2.pt"))


def test_a_file_beside_the_folder_of_a_checkpoint_is_not_decided_here(tmp_path):
    shutil.copytree(FIXTURES / "torch" / "fsdp2-dp4" / "checkpoint", tmp_path / "step-3")
    add_file(tmp_path, "best.pt")
    with pytest.raises(UnknownFormatError) as caught:
        recognise(tmp_path)
    assert f"{tmp_path / 'step-3'}: dcp" in str(caught.value)
    assert "best.pt" in str(caught.value)
