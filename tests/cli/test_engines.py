"""`--engine`: those there are, their settings beside the target's, and one that another package brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.unit.conftest import tree
from ucp.contract import plugins, registry
from ucp.transfer.engines.ray import cluster

THIRD_PARTY = '''\
import sys

from ucp.contract.protocols import Engine
from ucp.errors import UsageError
from ucp.transfer.engines.serial import SerialEngine


class LoudEngine(Engine):
    """The serial engine, which says that it works."""

    name = "loud"
    summary = "this process, aloud"
    settings = {"word": "what it says"}

    def __init__(self, word="working"):
        self.word = word

    def configured(self, settings):
        if settings.get("word") == "":
            raise UsageError("expected a word")
        return LoudEngine(**settings)

    def run(self, job, root, tasks, *, workers, threads):
        for report in SerialEngine().run(job, root, tasks, workers=workers, threads=threads):
            print(self.word, file=sys.stderr)
            yield report
'''


@pytest.fixture
def loud(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which another package with an engine is installed."""
    site = tmp_path / "site"
    (site / "loud-1.0.dist-info").mkdir(parents=True)
    (site / "loud.py").write_text(THIRD_PARTY)
    (site / "loud-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (site / "loud-1.0.dist-info" / "entry_points.txt").write_text("[ucp.engines]\nloud = loud:LoudEngine\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}


def shell(env: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ucp", *map(str, words)], env=env, capture_output=True, text=True, check=False
    )


def test_help_explains_each(ucp: Run) -> None:
    told = " ".join(ucp("convert", "--help").stdout.split())
    for name in plugins.names("ucp.engines"):
        assert f"{name} ({registry.engine(name).summary})" in told


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_the_one_that_is_named(ucp: Run, zero3: Path, tmp_path: Path, engine: str) -> None:
    ucp("convert", zero3, tmp_path / "usual", "-q")
    ucp("convert", zero3, tmp_path / "out", "--engine", engine, "-q")
    assert tree(tmp_path / "out") == tree(tmp_path / "usual")


def test_one_that_is_not_there(ucp: Run, zero3: Path) -> None:
    said = ucp("plan", zero3, "--engine", "serail", code=2).stderr
    assert "got 'serail'; did you mean 'serial'?" in said


def test_a_setting_of_an_engine_that_is_not_named(ucp: Run, zero3: Path) -> None:
    said = ucp("plan", zero3, "--set", "address=auto", code=2).stderr
    assert "address: a setting of --engine ray" in said


def test_ray_is_not_installed(ucp: Run, zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    said = ucp("convert", zero3, tmp_path / "out", "--engine", "ray", code=1).stderr
    assert "pip install 'universal-checkpoint[ray]'" in said
    assert not list(tmp_path.iterdir())


class TestOfAnotherPackage:
    def test_it_does_the_work(self, loud: dict[str, str], ucp: Run, zero3: Path, tmp_path: Path) -> None:
        done = shell(loud, "convert", zero3, tmp_path / "out", "--engine", "loud", "--set", "word=oh", "--json")
        assert set(done.stderr.split()) == {"oh"}
        assert json.loads(done.stdout)["nbytes_written"]
        ucp("convert", zero3, tmp_path / "usual", "-q")
        assert tree(tmp_path / "out") == tree(tmp_path / "usual")

    def test_another_engine_and_other_settings_go_on_with_the_same_conversion(
        self, loud: dict[str, str], ucp: Run, zero3: Path, tmp_path: Path
    ) -> None:
        shell(loud, "convert", zero3, tmp_path / "out", "--engine", "loud", "--set", "word=oh")
        assert "nothing was written" in ucp("convert", zero3, tmp_path / "out", "--resume", "--engine", "serial").stdout

    def test_an_unknown_setting_lists_those_of_both(self, loud: dict[str, str], zero3: Path) -> None:
        words = ("plan", zero3, "--to", "deepspeed-universal", "--engine", "loud", "--set", "wrd=oh")
        done = shell(loud, *words)
        assert done.returncode == 2
        assert "wrd: did you mean word?" in done.stderr
        assert "It takes optimizer, scheduler, step, drop, frozen; the engine loud takes word" in done.stderr

    def test_a_value_that_makes_no_sense(self, loud: dict[str, str], zero3: Path) -> None:
        done = shell(loud, "plan", zero3, "--engine", "loud", "--set", "word=")
        assert (done.returncode, done.stdout) == (2, "")
        assert "expected a word" in done.stderr
