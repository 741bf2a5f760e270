"""Linters see every Python file of the project: what they leave out is listed here, with why."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.unit.project.source import PACKAGES, ROOT, source_modules, tracked_files

NOT_LINTED: frozenset[str] = frozenset()
"""Python files that ruff does not look at: none."""

NOT_TYPED = frozenset({"docs", "fixtures", "tests"})
"""What mypy does not check: examples of the docs (a test runs them), scripts that make fixtures, and tests."""


def test_ruff_sees_every_python_file() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    linted = {Path(line).relative_to(ROOT) for line in listing}
    python = {path for path in tracked_files() if path.suffix == ".py"}
    assert {str(path) for path in python - linted} == NOT_LINTED


def test_mypy_sees_every_package_that_is_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert sorted(settings["packages"]) == sorted(PACKAGES.values())
    assert "exclude" not in settings


def test_what_mypy_leaves_out_is_listed() -> None:
    shipped = set(source_modules().values())
    assert {path.parts[0] for path in tracked_files() if path.suffix == ".py" and path not in shipped} <= NOT_TYPED
