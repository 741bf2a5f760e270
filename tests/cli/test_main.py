"""The group: help, exit codes, no traceback for a user's mistake, no torch."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import FIXTURES, Run
from ucp import api
from ucp.errors import UcpError, UsageError
from ucp_cli.verbs import SUMMARIES, cli

LIGHT = ("backend", "locate", "names", "read", "read.source", "read.universal", "read.universal.source", "source")
"""Modules of a format that tell whether a folder is of it."""
HEAVY = ("torch", "numpy", "rich.progress", "deepspeed", "multiprocess")


def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    command = [sys.executable, "-m", "ucp_cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def imported(*commands: Sequence[object]) -> set[str]:
    """Modules that commands import, one after another in a process of their own."""
    asked = [[str(word) for word in words] for words in commands]
    code = f"import sys; from ucp_cli.verbs import cli; [cli(own, standalone_mode=False) for own in {asked!r}]"
    code += "; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("verb", [[], *([verb] for verb in SUMMARIES)])
def test_help_ends_with_an_example(ucp: Run, verb: list[str]) -> None:
    text = ucp(*verb, "--help").stdout
    _, example, tail = text.partition("Example")
    assert example
    assert all(line.startswith(("s:", ":", "    ucp ")) for line in tail.splitlines())


def test_summaries_are_those_of_the_verbs() -> None:
    for verb, summary in SUMMARIES.items():
        command = cli.get_command(None, verb)  # type: ignore[arg-type]
        assert command.help.splitlines()[0] == summary


def test_version(ucp: Run) -> None:
    assert ucp("--version").stdout.startswith("ucp ")


def test_an_unknown_verb_is_wrong_usage_with_the_nearest(ucp: Run) -> None:
    assert "did you mean 'inspect'" in ucp("inspct", code=2).stderr
    assert "inspect, plan" in ucp("frobnicate", code=2).stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UcpError("it is so"), 1, "Error: it is so\n"),
        (UsageError("not so"), 2, "Error: not so\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), 1, "Error: /there: Permission denied\n"),
        (OSError(errno.EIO, "Input/output error"), 1, "Error: Input/output error\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
    ],
)
def test_expected_failures_are_one_message(
    ucp: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(path: Path, **_: object) -> None:
        raise error

    monkeypatch.setattr(api, "inspect", fail)
    result = ucp("inspect", "x", code=code)
    assert result.stderr == said
    assert result.stdout == ""


def test_debug_shows_the_traceback_and_keeps_the_exit_code(ucp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in ucp("--debug", "inspect", "/nowhere", code=1).stderr
    monkeypatch.setenv("UCP_DEBUG", "1")
    assert "Traceback" in ucp("inspect", "/nowhere", code=1).stderr


def test_a_mistake_of_the_program_is_not_hidden(ucp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api, "inspect", fail)
    assert isinstance(ucp("inspect", "x", code=1).exception, ZeroDivisionError)


def test_help_imports_next_to_nothing() -> None:
    modules = imported(["--help"])
    assert not modules & {"ucp", "rich", *HEAVY}


def test_reading_commands_import_no_torch(zero3: Path) -> None:
    assert not imported(["inspect", zero3], ["plan", zero3], ["inspect", zero3, "--json"]) & set(HEAVY)


@pytest.mark.parametrize(
    ("folder", "own", "read_by", "idle"),
    [
        (
            "deepspeed/z3-dp4-fp32/checkpoint",
            "ucp_formats.deepspeed",
            "read.index",
            {"ucp.families", "tomllib", "ucp_formats.deepspeed.read.ranks.parallel"},
        ),
        ("deepspeed/z1-dp4-fp32/universal", "ucp_formats.deepspeed", "read.universal.index", set()),
        ("megatron/llama-tp2-dp2-dp/checkpoint", "ucp_formats.megatron", "torch_dist.source", set()),
        ("megatron/gpt-tp2-pp2-torch/checkpoint", "ucp_formats.megatron", "legacy.source", set()),
    ],
)
def test_formats_that_a_checkpoint_is_not_of_are_known_by_names_alone(
    folder: str, own: str, read_by: str, idle: set[str]
) -> None:
    """All formats are asked whether it is theirs; readers are imported for the one that it is.

    `idle`: what a run of data parallelism has no use for, such as model families.
    """
    modules = imported(["inspect", FIXTURES.parent / folder])
    assert f"{own}.{read_by}" in modules
    for package in {"ucp_formats.deepspeed", "ucp_formats.megatron"} - {own}:
        light = {package, *(f"{package}.{name}" for name in LIGHT)}
        assert {name for name in modules if name.startswith(package)} <= light
    assert not modules & {"ucp.store.index", "ucp.store.interpret", "ucp.live.load", "ucp.live.match.items", *idle}


def test_convert_imports_no_torch(zero3: Path, tmp_path: Path) -> None:
    ways = ([], ["--to", "deepspeed", "--topology", "dp=2,zero=3"], ["--virtual"])
    commands = [["convert", zero3, tmp_path / str(number), *words] for number, words in enumerate(ways)]
    assert "torch" not in imported(*commands)


def test_a_reader_that_goes_away_is_no_error(zero3: Path) -> None:
    command = f"{sys.executable} -m ucp_cli.main inspect {zero3} --json --param '*' | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_any_locale_will_do(zero3: Path) -> None:
    done = run("inspect", zero3, env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0, done.stderr
