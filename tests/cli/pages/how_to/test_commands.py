"""The commands on the pages that lead to others run as they stand, one after another, on checkpoints of real frameworks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from ucp import save

ROOT = Path(__file__).resolve().parents[4]
COMMAND = re.compile(r"`(ucp [^`]+)`|^ {4}(ucp .*)$", re.MULTILINE)
ELSEWHERE = ("s3://",)
"""What no test machine has."""

FOLDERS = {
    "deepspeed": "deepspeed/z3-dp4-bf16/checkpoint",
    "fsdp": "torch/fsdp2-dp4/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "moe": "megatron/mixtral-ep4-dp4-full/checkpoint",
    "model": "huggingface/llama/model",
    "script.pt": "torch/ddp-dp2-nanogpt/checkpoint/ckpt.pt",
}
"""What the pages call a checkpoint, and the one that it is here."""


def commands(page: str) -> list[list[str]]:
    found = [table or block for table, block in COMMAND.findall((ROOT / "docs" / "how-to" / page).read_text())]
    lines = [shlex.split(line, comments=True)[1:] for line in found if not any(word in line for word in ELSEWHERE)]
    return [words for words in lines if len(words) > 1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints under the names that the pages give them."""
    monkeypatch.chdir(tmp_path)
    for name, fixture in FOLDERS.items():
        (tmp_path / name).symlink_to(ROOT / "fixtures" / fixture)
    (tmp_path / "loads.json").write_text(json.dumps([[40 - expert for expert in range(32)]]))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, name in enumerate(("full", "later"), 1):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        save(model, optimizer, None, name, step=step)
    return tmp_path


@pytest.mark.parametrize(("page", "count"), [("which-command.md", 30)])
def test_the_commands_of_a_page_run(page: str, count: int, folder: Path, ucp: Run) -> None:
    lines = commands(page)
    assert len(lines) >= count
    for words in lines:
        ucp(*words)
