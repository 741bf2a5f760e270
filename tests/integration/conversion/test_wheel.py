"""The distribution as users get it, in empty environments, with the newest and the oldest dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_the_index_accepts_the_metadata(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_source_has_the_code_and_no_checkpoints(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    assert path.stat().st_size < 4 << 20
    assert {"pyproject.toml", "LICENSE", "ucp/py.typed", "SECURITY.md"} <= set(names)
    assert not [name for name in names if name.startswith("fixtures/")]


def test_the_wheel_has_every_package_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "ucp", "ucp_cli", "formats/ucp_formats", "patterns/ucp_patterns")
    expected = {name.removeprefix("formats/").removeprefix("patterns/") for name in tracked.split()}
    assert not expected - names


@pytest.mark.parametrize("version", PYTHONS)
def test_the_demo_runs_from_the_wheel(version: str, wheel: Path, tmp_path: Path) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], check=False, capture_output=True).returncode:
        pytest.skip(f"no Python {version} on this machine")
    bin_folder = make_environment(tmp_path, python, wheel)
    assert run_demo(bin_folder, tmp_path)


def test_the_demo_runs_with_the_oldest_dependencies(wheel: Path, tmp_path: Path) -> None:
    pins = tmp_path / "oldest.txt"
    uv("pip", "compile", "--quiet", ROOT / "pyproject.toml", "--resolution", "lowest-direct", "--output-file", pins)
    assert "numpy==1.26" in pins.read_text()
    bin_folder = make_environment(tmp_path, sys.executable, wheel, "--requirements", pins)
    assert run_demo(bin_folder, tmp_path)


def make_environment(folder: Path, python: str, *arguments: object) -> Path:
    """The `bin` of a new virtual environment with nothing but what `arguments` of `uv pip install` name."""
    uv("venv", "--quiet", "--python", python, folder / "venv")
    uv("pip", "install", "--quiet", "--python", folder / "venv/bin/python", *arguments)
    return folder / "venv/bin"


def run_demo(bin_folder: Path, folder: Path) -> bool:
    """Whether the commands of the demo end with equal checkpoints, run by an installed `ucp` far from its source."""
    shutil.copytree(ROOT / "fixtures/deepspeed/z3-dp4-bf16", folder / "fixtures/deepspeed/z3-dp4-bf16")
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    text = run("sh", ROOT / "docs/tutorial/demo.sh", cwd=folder, env=environment)
    return "equal; 52 states" in text


def uv(*arguments: object) -> None:
    run(sys.executable, "-m", "uv", *arguments)


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    environment = env or {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=environment, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout
