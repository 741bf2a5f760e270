"""The format of docs/how-to/add-a-format.md, as it stands there: the contract, and commands that find it installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from safetensors.numpy import load_file

from ucp.testing import FormatContract

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-format.md").read_text()
MODULE = dedent(PAGE.split("`npy_format.py`, whole:\n")[1].split("\n## ")[0])
POINT = re.search(r'npy = "(.*)"', PAGE)[1]
WEIGHTS = {
    "embed.weight": np.arange(24, dtype="float32").reshape(6, 4),
    "head.bias": np.arange(5, dtype="float16"),
}


def save_run(run: Path) -> Path:
    """A run of two ranks that saved one step."""
    step = run / "step-100"
    for rank in range(2):
        (step / f"rank-{rank}").mkdir(parents=True)
        for name, array in WEIGHTS.items():
            np.save(step / f"rank-{rank}" / f"{name}.npy", np.array_split(array, 2)[rank])
    params = {name: {"dim": 0} for name in WEIGHTS}
    (step / "index.json").write_text(json.dumps({"step": 100, "ranks": 2, "params": params}))
    (run / "latest").write_text("step-100")
    return run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "npy_format.py").write_text(MODULE)
    info = site / "npy_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy_format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ucp.formats]\nnpy = {POINT}\n")
    return site


class TestNpyFormat(FormatContract):
    @pytest.fixture(autouse=True)
    def _module(self, site):
        spec = spec_from_file_location("npy_format", site / "npy_format.py")
        self.module = module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def make(self):
        return self.module.NpyFormat()

    def paths(self, folder):
        return [save_run(folder)]


def test_commands_read_it(site: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "run")

    def ucp(*words: str) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
        command = [sys.executable, "-m", "ucp", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for line in PAGE.split("Once it is installed:")[1].split("\n## ")[0].splitlines():
        if "ucp inspect" in line:
            assert all(text in ucp(*line.split()[1:]) for text in ("npy", "latest -> step-100"))
        elif line.strip():
            ucp(*line.split()[1:])
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert all(np.array_equal(weights[name], array) for name, array in WEIGHTS.items())
