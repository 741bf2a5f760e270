"""Text: whole names everywhere, no colours outside a terminal, nothing of a checkpoint reaches the terminal raw."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ucp.core.text.page import facts, lines
from ucp_cli.pages.render import table, write

LONG = "model.layers.0." + "very_" * 60 + "long.weight"


def test_names_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    write(facts([("name", LONG)]), table("T", ("a", ">b"), [(LONG, LONG)]), lines("L", [LONG]))
    out = capsys.readouterr().out
    assert out.count(LONG) == 4
    assert "…" not in out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_brackets_are_text_and_control_characters_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    write(facts([("[bold]a", "\x1b[31mred\x07[/bold] :smile:")]), lines("L", ["\x1b]0;title\x07"]))
    out = capsys.readouterr().out
    assert r"\x1b[31mred\x07[/bold] :smile:" in out
    assert r"\x1b]0;title\x07" in out
    assert "\x1b" not in out


def test_empty_parts_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write(facts([("a", "1"), ("b", "")]), table("T", ("a",), []), lines("L", []), None)
    assert capsys.readouterr().out == "a  1\n"


def _on_a_terminal(words: list[str], columns: int, *, code: int = 0, **variables: str) -> str:
    """What a process prints on a terminal of so many columns, with these variables of the environment."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    environment |= variables
    with subprocess.Popen(words, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        data = b""
        try:
            while chunk := os.read(parent, 65536):
                data += chunk
        except OSError:  # Linux says so when the last writer has gone
            pass
        os.close(parent)
    assert process.returncode == code, data
    return data.decode()


def test_on_a_terminal_lines_are_folded_and_coloured(zero3: Path) -> None:
    code = f"from ucp.core.text.page import *; from ucp_cli.pages.render import *; write(facts([('name', {LONG!r})]))"
    out = _on_a_terminal([sys.executable, "-c", code], 60)
    assert "\x1b[" in out
    assert "…" not in out
    assert all(len(line) < 90 for line in out.splitlines())


@pytest.mark.parametrize(("words", "code"), [(["plan"], 0), (["inspect", "--param", "nothing"], 2)])
def test_without_colours_there_are_none(zero3: Path, words: list[str], code: int) -> None:
    """Bold type stays, on stdout and on stderr."""
    command = [sys.executable, "-m", "ucp_cli.main", *words, str(zero3)]
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert coloured.search(_on_a_terminal(command, 80, code=code))
    assert not coloured.search(_on_a_terminal(command, 80, code=code, NO_COLOR="1"))
