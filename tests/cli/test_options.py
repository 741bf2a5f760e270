"""What option values mean, and what is refused as wrong usage."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path

import click
import pytest

from tests.cli.conftest import Run
from ucp import api
from ucp.conversion.options import OPTIONS
from ucp_cli.commands import convert, verify
from ucp_cli.options import parse_memory_option


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("512MB", 512_000_000),
        ("1g", 1 << 30),
        ("1.5 GiB", 3 << 29),
        ("2kb", 2000),
        ("1TiB", 1 << 40),
    ],
)
def test_memory(text: str, nbytes: int) -> None:
    assert parse_memory_option(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1GiBB", "1,5G", "nan"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(click.BadParameter, match="512M"):
        parse_memory_option(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "many"], "512M"),
        (["--memory", "0"], "512M"),
        (["--workers", "-1"], "workers, 1 or more"),
        (["--workers", "0"], "workers, 1 or more"),
        (["--workers", "two"], "workers, 1 or more"),
        (["--topology", "dp=x"], "expected axis=degree"),
        (["--topology", "dp=2"], "atoms are rank-independent"),
        (["--dtype", "weight"], "expected STATE=DTYPE"),
        (["--dtype", "weight=int3"], "weight=int3"),
        (["--dtype", "weight=bf16", "--dtype", "weight=fp16"], "given twice for weight"),
        (["--layout", "round"], "packed, per-parameter, virtual"),
        (["--to", "nothing"], "targets dcp, deepspeed"),
        (["--virtual", "--layout", "packed"], "--virtual"),
        (["--include", "nothing.at.all"], "'nothing.at.all'"),
        (["--include", "l1"], "'*l1*' matches l1."),
        (["--bogus"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_cure(ucp: Run, zero3: Path, words: list[str], said: str) -> None:
    result = ucp("plan", zero3, *words, code=2)
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_too_little_memory_is_told_in_its_own_unit(ucp: Run, zero3: Path) -> None:
    assert "got 1 KiB. Raise --memory" in ucp("plan", zero3, "--memory", "1K", code=2).stderr


@pytest.mark.parametrize(
    "words",
    [["inspect", ""], ["plan", ""], ["convert", "", "x"], ["convert", "x", ""], ["verify", "x", "--against", ""]],
)
def test_an_empty_path_is_wrong_usage(ucp: Run, words: list[str]) -> None:
    assert "a path; got ''" in ucp(*words, code=2).stderr


@pytest.mark.parametrize(("verb", "called"), [(convert.command, api.convert), (verify.command, api.verify)])
def test_an_option_is_passed_as_the_argument_it_is(verb: click.Command, called: Callable[..., object]) -> None:
    accepted = signature(called).parameters
    options = {param.opts[0]: param.name for param in verb.params if isinstance(param, click.Option)}
    declared = {option.flag: option.name for option in OPTIONS.values() if option.name in accepted}
    assert declared.items() <= options.items()
