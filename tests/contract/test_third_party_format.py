"""docs/examples/ucp-format-example: its tests, commands that find it installed, and the page that explains it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to/add-a-format.md").read_text()
PACKAGE = DOCS / "examples/ucp-format-example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says that the package is installed, with the entry points that it declares."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    (point,) = project["entry-points"]["ucp.formats"].items()
    info = tmp_path_factory.mktemp("site") / "ucp_format_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("[ucp.formats]\n{} = {}\n".format(*point))
    return info.parent


def import_tests() -> ModuleType:
    """The package's test module."""
    spec = spec_from_file_location("example_tests", PACKAGE / "tests/test_npy_format.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        spec.loader.exec_module(module)
    return module


EXAMPLE = import_tests()


class TestItsTests(EXAMPLE.TestNpyFormat):  # type: ignore[misc,name-defined]  # imported by its path
    """The tests that the package brings."""


RUN = """
import sys
from ucp_cli.verbs import cli

for line in sys.argv[1:]:
    assert not cli(line.split()[1:], standalone_mode=False), line
    print(end="\\f")
"""


def run(site: Path, folder: Path, lines: list[str]) -> list[str]:
    """What commands print, one after another in a process that finds the package."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(PACKAGE), *sys.path])}
    command = [sys.executable, "-c", RUN, *lines]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\f")


def test_commands_read_it(site: Path, tmp_path: Path) -> None:
    EXAMPLE.save_run(tmp_path / "run")
    lines = PAGE.split("Once it is installed:")[1].split("\n## ")[0].split("\n")
    inspected, *_ = run(site, tmp_path, [line for line in lines if line.strip()])
    assert all(text in inspected for text in ("npy", "latest -> step-100"))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert all(np.array_equal(weights[name], array) for name, array in EXAMPLE.WEIGHTS.items())


def test_the_page_shows_the_package() -> None:
    shown = dedent(PAGE.split("`npy_format.py`, in full:\n")[1].split("\n## ")[0]).strip()
    assert shown == (PACKAGE / "npy_format.py").read_text().strip()
    assert 'npy = "npy_format:NpyFormat"' in PAGE
