"""Client state that lies in itself, lies deep or is shared without end: every verb comes to an end with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import FIXTURES, Run

PUT, GET = b"r\xb8\x0b\x00\x00", b"j\xb8\x0b\x00\x00"
"""Memo entry 3,000, which the pickles of the fixtures have no use for."""
LETTERS = b"X\0\0\x10\0" + b"x" * (1 << 20)
SHARED = b"N" + PUT + (b"0" + GET + GET + b"\x86" + PUT) * 200
DEPTH = 1500


ODD = {
    "a list in itself": b"]" + PUT + GET + b"a",
    "an object in its own state": b"cm\nC\n)\x81" + PUT + GET + b"b",
    "a tuple in a list in it": b"]" + PUT + GET + b"\x85a",
    "lists in one another": b"]" * DEPTH + b"a" * (DEPTH - 1),
    "dicts in one another": b"}K\x01" * DEPTH + b"N" + b"s" * DEPTH,
    "tuples in one another": b")" + b"\x85" * DEPTH,
    "objects in one another": b"cm\nC\n" * DEPTH + b")" + b"\x85R" * DEPTH,
    "tuples of one another twice": SHARED,
    "one text a thousand times": LETTERS + PUT + b"0](" + GET * 1000 + b"e",
    "a number of 40,000 bits": b"\x8b\x88\x13\0\0" + b"\x11" * 5000,
}


@pytest.mark.parametrize("case", ODD)
def test_every_verb_comes_to_an_end(case: str, ucp: Run, inject: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "z3-dp2-fp16" / "checkpoint", tmp_path / "source")
    for file in source.glob("*/*_model_states.pt"):
        inject(file, ODD[case])
    ucp("inspect", source)
    told = {own["name"]: own for own in json.loads(ucp("inspect", source, "--json").stdout)["extras"]}
    assert told["client_state"]["rank"] is None
    ucp("convert", source, tmp_path / "atoms", "-q", "--workers", 1)
    assert sum(file.stat().st_size for file in (tmp_path / "atoms" / "extra").iterdir()) < 2 << 20
    ucp(
        "convert",
        tmp_path / "atoms",
        tmp_path / "dst",
        "-q",
        "--workers",
        1,
        "--to",
        "deepspeed",
        "--topology",
        "dp=3,zero=3",
    )
    ucp("verify", tmp_path / "dst", "-q", "--against", source)


def test_what_unpickling_would_call_is_named_and_can_be_left_out(
    ucp: Run, inject: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    source = shutil.copytree(FIXTURES / "z2-dp2-client-state" / "checkpoint", tmp_path / "source")
    assert "calls" not in ucp("inspect", source).output
    inject(next(source.glob("*/mp_rank_00_model_states.pt")), b"cos\nsystem\nX\x04\0\0\0true\x85R")
    to = ("--to", "deepspeed", "--topology", "dp=4,zero=3", "--workers", 1)
    drop = ("--set", "drop=client_state")
    for shown in (ucp("inspect", source), ucp("plan", source, *to), ucp("convert", source, tmp_path / "kept", *to)):
        assert "calls os.system (in client_state)" in " ".join(shown.output.split())
    assert "calls" not in ucp("plan", source, *to, *drop).output
    ucp("convert", source, tmp_path / "dropped", *to, *drop, "--verify", "-q")
    ucp("convert", source, tmp_path / "atoms", "--workers", 1, "-q")
    ucp("convert", tmp_path / "atoms", tmp_path / "again", *to, *drop, "-q")
    for name, kept in (("kept", True), ("dropped", False), ("again", False)):
        files = [file.read_bytes() for file in (tmp_path / name).rglob("*.pt")]
        assert any(b"cos\nsystem\n" in data for data in files) is kept
    assert "no rng, only client_state" in ucp("plan", source, *to, "--set", "drop=rng", code=2).output
