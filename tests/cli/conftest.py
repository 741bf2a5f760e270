"""A runner of `ucp ...`, and checkpoints to run it on: real ones out of fixtures/."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ucp_cli.verbs import cli

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"

Run = Callable[..., Result]


@pytest.fixture
def ucp() -> Run:
    """`ucp("inspect", path)` runs the command in this process."""
    runner = CliRunner()

    def run(*words: object, code: int = 0) -> Result:
        result = runner.invoke(cli, [str(word) for word in words], prog_name="ucp")
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def zero3() -> Path:
    """ZeRO-3 over 4 ranks, Adam, fp32; never written to."""
    return FIXTURES / "z3-dp4-fp32" / "checkpoint"


@pytest.fixture
def mixed() -> Path:
    """ZeRO-1 over 4 ranks, bf16 model with fp32 masters; never written to."""
    return FIXTURES / "z1-dp4-bf16" / "checkpoint"


@pytest.fixture
def atoms(ucp: Run, zero3: Path, tmp_path: Path) -> Path:
    """A store of atoms made from `zero3`."""
    ucp("convert", zero3, tmp_path / "atoms", "-q")
    return tmp_path / "atoms"


@pytest.fixture
def copy(zero3: Path, tmp_path: Path) -> Path:
    """`zero3`, to be damaged."""
    return Path(shutil.copytree(zero3, tmp_path / "copy"))


@pytest.fixture
def inject() -> Callable[[Path, bytes], None]:
    """`inject(file, instructions)` adds a key "extra" to the dict that a file of torch.save holds."""

    def add(file: Path, instructions: bytes) -> None:
        with zipfile.ZipFile(file) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in members:
                added = b"X\x05\0\0\0extra" + instructions + b"s."
                archive.writestr(name, data.removesuffix(b".") + added if name.endswith("/data.pkl") else data)

    return add
