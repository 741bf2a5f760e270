"""The commands of how-to pages run as they stand, one after another, on checkpoints of real frameworks."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ucp as package
from tests.cli.conftest import Run
from tests.cli.pages.how_to.small_gpt import CONFIG, SIZES, make_run, train
from ucp_cli.verbs import cli

ROOT = Path(__file__).resolve().parents[4]
COMMAND = re.compile(r"`(ucp [^`]+)`|^ {4}((?:ucp|mkdir|ln) .*)$", re.MULTILINE)
BLOCK = re.compile(r"^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"(?:`|^ {4}|^\$ )ucp ([^`\n#|]+)", re.MULTILINE)
ELSEWHERE = ("s3://", "ucp bench", "...", "rules.toml")
"""Lines that need a bucket, a minute, or words of the reader."""

TRAINER = "deepspeed/z2-dp2-hf-trainer/checkpoint-3"
FOLDERS = {
    "deepspeed": "deepspeed/z3-dp4-bf16/checkpoint",
    "fsdp": "torch/fsdp2-dp4/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "moe": "megatron/mixtral-ep4-dp4-full/checkpoint",
    "model": "huggingface/llama/model",
    "script.pt": "torch/ddp-dp2-nanogpt/checkpoint/ckpt.pt",
}
"""What the pages call a checkpoint, and the one that it is here."""


def read_page(page: str) -> str:
    return (ROOT / "docs" / "how-to" / page).read_text()


def run_commands(page: str, ucp: Run) -> int:
    """Run the commands of a page in the current folder. Returns how many there were."""
    found = [table or block for table, block in COMMAND.findall(read_page(page))]
    lines = [line for line in found if " " in line and not any(word in line for word in ELSEWHERE)]
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "ucp":
            if not words[1:]:
                continue
            if words[0] == "convert" and not {"--part", "--finalize"} & set(words):
                shutil.rmtree(words[2], ignore_errors=True)  # some pages write to one folder several times
            ucp(*words)
        else:
            subprocess.run(line, shell=True, check=True)
    return len(lines)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints under the names that the pages give them."""
    monkeypatch.chdir(tmp_path)
    for name, fixture in FOLDERS.items():
        (tmp_path / name).symlink_to(ROOT / "fixtures" / fixture)
    return tmp_path


def trained(steps: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of one layer, and its optimizer."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_which_command(folder: Path, ucp: Run) -> None:
    (folder / "loads.json").write_text(json.dumps([[40 - expert for expert in range(32)]]))
    for step, name in enumerate(("full", "later"), 1):
        package.save(*trained(step), None, name, step=step)
    assert run_commands("which-command.md", ucp) > 30


@pytest.mark.parametrize(
    ("page", "count", "checkpoints"),
    [
        ("resume-deepspeed.md", 4, {"ckpt": "deepspeed", "output/checkpoint-500": TRAINER}),
        ("megatron-and-deepspeed.md", 3, {"ckpt": "megatron"}),
        ("move-a-megatron-run.md", 3, {"ckpt": "megatron"}),
        (
            "resume-fsdp.md",
            6,
            {
                "ckpt": "fsdp",
                "state": "accelerate",
                "output/checkpoint-500": "accelerate",
                "fsdp/checkpoint-500": "accelerate",
                "zero2/checkpoint-500": TRAINER,
            },
        ),
    ],
)
def test_resume(
    page: str, count: int, checkpoints: dict[str, str], folder: Path, ucp: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ucp("convert", "fsdp", "accelerate", "--to", "dcp", "--set", "style=accelerate")
    for name, source in checkpoints.items():
        shutil.copytree(ROOT / "fixtures" / source if source == TRAINER else folder / source, folder / "runs" / name)
    monkeypatch.chdir(folder / "runs")
    assert run_commands(page, ucp) >= count


def test_start_from_a_hugging_face_model(ucp: Run) -> None:
    assert run_commands("start-from-a-hugging-face-model.md", ucp) == 4


def test_instead_of(folder: Path, ucp: Run) -> None:
    (folder / "other").symlink_to(folder / "megatron")
    shutil.copytree(ROOT / "fixtures" / "torch" / "verl-fsdp2-dp4" / "checkpoint", "actor")
    (folder / "actor" / "huggingface").mkdir()
    (folder / "actor" / "huggingface" / "config.json").write_text('{"model_type": "tiny"}')
    ucp("convert", "fsdp", "checkpoint", "--to", "dcp", "--set", "style=accelerate")
    assert run_commands("instead-of.md", ucp) > 15
    ucp("diff", "back", "model")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_split_folders(folder: Path, ucp: Run) -> None:
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id="weights", no_dist=True)
    dcp.save({"optim": states}, checkpoint_id="optim", no_dist=True)
    for name in ("a", "b", "exported"):
        (folder / name).mkdir()
    torch.save(model.state_dict(), "a/weights.pt")
    torch.save(optimizer.state_dict(), "b/state.pt")
    save_file(model.state_dict(), "exported/model.safetensors")
    assert run_commands("split-folders.md", ucp) > 10
    ucp("diff", "from-files", "from-mixed")
    assert package.inspect(folder / "from-mixed").atoms["weight"].states.keys() == {
        *("weight", "exp_avg", "exp_avg_sq", "step")
    }
    output = ucp("inspect", "optim", code=1).output
    assert "the optimizer has 2 parameters that the model lacks" in output
    assert "join this folder and that of the weights" in output


def test_resume_a_torch_save_script(folder: Path, ucp: Run) -> None:
    page = "resume-a-torch-save-script.md"
    save, load, add = BLOCK.findall(read_page(page))
    (folder / "out").mkdir()
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    model, optimizer = make_run(seed=0)
    train(model, optimizer, 0)
    names: dict[str, Any] = {"torch": torch, "ucp": package, "step": 3, "best": 1.5, "model_args": SIZES}
    exec(
        save.replace('"iter_num"', '"model_args": model_args, "iter_num"'),
        names | {"model": model, "optimizer": optimizer},
    )
    expected = train(model, optimizer, 3)

    model, optimizer = make_run(seed=1)
    names |= {"model": model, "optimizer": optimizer, "step": 0, "best": 0}
    exec(load, names)
    assert (names["step"], names["best"]) == (3, 1.5)
    assert train(model, optimizer, 3) == expected

    assert run_commands(page, ucp) == 6
    exec(add, names)
    state = torch.load("out/ckpt.pt")
    model, optimizer = make_run(seed=2)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, optimizer, state["iter_num"]) == expected


def unknown_options(line: str) -> list[str]:
    """Options in a line that its command does not have."""
    words = line.split()
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(click.Context(cli), words.pop(0))
    assert command is not None, line
    known = {"-h", "--help", *(option for param in command.params for option in param.opts)}
    given = (word.partition("=")[0].rstrip(".,;:)") for word in words if re.match(r"--?[a-z]", word))
    return [option for option in given if option not in known]


def test_every_option_on_a_page_exists() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "changes" not in page.parts]
    lines = [line for page in pages for line in LINE.findall(page.read_text())]
    assert len(lines) > 400
    assert [(line, unknown_options(line)) for line in lines if unknown_options(line)] == []
    assert unknown_options("convert run out --too dcp -q") == ["--too"]
