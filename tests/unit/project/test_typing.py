"""A user's script, as type checkers see it: what is right passes, and each mistake is found where it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RIGHT = """
import torch
import ucp

ucp.convert("a", "b", to="deepspeed", topology={"dp": 4, "zero": 3}, dtypes={"weight": torch.bfloat16}, memory="2GiB")
ucp.plan("a", topology="dp=4,zero=3", dtypes={"weight": "bf16"}, drift="mean", accept=["equal-ranks"])
checkpoint = ucp.open("a")
weight: torch.Tensor = checkpoint.read("l1.weight", "weight", (slice(0, 4), ...))
same: bool = ucp.diff("a", "b", memory=1 << 30).equal
report: ucp.LoadReport = ucp.load_into(torch.nn.Linear(2, 2), checkpoint="a")
"""
WRONG = """
import ucp

ucp.convert("a", "b", drift="meen")
ucp.convert("a", "b", zero_moments="kept")
ucp.plan("a", companions="few")
ucp.convert("a", "b", accept=["equal"])
ucp.open(None)
"""
MISTAKES = [4, 5, 6, 7, 8]
"""Lines of `WRONG` with one."""


PLACES = [str(ROOT / folder) for folder in ("", "formats", "patterns")]


def mypy(folder: Path) -> set[tuple[str, int]]:
    """Files and lines with an error, by mypy in strict mode; as `make lint` runs it, whose cache it takes up."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *sorted(map(str, folder.glob("*.py")))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode < 2, done.stdout + done.stderr
    lines = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
    return {(Path(line[0]).stem, int(line[1])) for line in lines}


def pyright(folder: Path) -> set[tuple[str, int]]:
    """Files and lines with an error, by pyright."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard", "extraPaths": PLACES}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = [own for own in json.loads(done.stdout)["generalDiagnostics"] if own["severity"] == "error"]
    return {(Path(own["file"]).stem, own["range"]["start"]["line"] + 1) for own in found}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_script_is_checked(tmp_path: Path, checker) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    assert checker(tmp_path) == {("wrong", line) for line in MISTAKES}
