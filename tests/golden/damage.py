"""Damage to copies of kept checkpoints, and the one error that it has to be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ucp
from ucp.core.tensor import TensorRef
from ucp.errors import UcpError

Errors = type[UcpError] | tuple[type[UcpError], ...]


class Gadget:
    """What an attacker pickles: loading it would call a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def copy_to(folder: Path, source: Path) -> Path:
    return Path(shutil.copytree(source, folder / "copy"))


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-nbytes])


def flip(ref: Any) -> None:
    """One bit of the first element of a stored tensor."""
    assert isinstance(ref, TensorRef)
    data = bytearray(Path(ref.path).read_bytes())
    data[ref.offset] ^= 1
    Path(ref.path).write_bytes(data)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def check_refused(checkpoint: Path, error: Errors, said: str) -> None:
    """Nothing is written, and one error says `said`, a pattern of what is wrong and where."""
    with pytest.raises(error, match=said):
        ucp.convert(checkpoint, checkpoint.parent / "atoms")
    assert not (checkpoint.parent / "atoms").exists()
