"""What README shows is what the tool prints: its commands are run, and their pages compared line by line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[3]
SPENT = re.compile(r"in [\d.]+ s \([\d.]+ \w+/s\)|(?<=index: )2 files of [\d.]+ \w+")
"""What is not the same twice: durations, and the file that holds the name of the folder."""


def sessions() -> Iterator[tuple[str, list[str]]]:
    """Commands of README with the lines that they print."""
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for session in block.split("$ ")[1:]:
        command, *printed = session.strip("\n").split("\n")
        yield command, printed


def test_the_pages_of_readme_are_what_is_printed(ucp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fixtures").symlink_to(ROOT / "fixtures")
    Path("demo-out").mkdir()
    found = list(sessions())
    assert [command.split()[1] for command, _ in found] == ["inspect", "convert", "diff"]
    for command, shown in found:
        page = ucp(*shlex.split(command)[1:]).stdout.replace(str(tmp_path), "/path/to/ucp")
        printed = [SPENT.sub("...", line) for line in page.splitlines()]
        wanted = [SPENT.sub("...", line) for line in shown]
        if wanted[-1] == "...":
            del wanted[-1]
            printed = printed[: len(wanted)]
        assert printed == wanted, command
