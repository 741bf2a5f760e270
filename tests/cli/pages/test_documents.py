"""The page about JSON documents names every key of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cli.conftest import Run

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"

FREE = {"hyper", "aliases", "value", "patterns"}
"""Keys whose value has keys of the checkpoint's own."""


def keys(document: object, *, named: bool = False) -> Iterator[str]:
    """Keys of the schema in a document. `named`: the keys of this object are names in the checkpoint."""
    if isinstance(document, list):
        for item in document:
            yield from keys(item)
    elif isinstance(document, dict):
        for key, value in document.items():
            if not named:
                yield key
            if key not in FREE:
                yield from keys(value, named=not named and key in {"atoms", "states"} and isinstance(value, dict))


def test_every_key_is_described(ucp: Run, zero3: Path, mixed: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    words = set(re.findall(r"\w+", PAGE.read_text()))
    documents = [
        ucp("inspect", mixed, "--json", "--param", "*").stdout,
        ucp("plan", mixed, "--json").stdout,
        ucp("convert", mixed, tmp_path / "out", "--json").stdout,
        ucp("verify", tmp_path / "out", "--json").stdout,
        ucp("diff", zero3, mixed, "--json", code=3).stdout,
        ucp("inspect", copy, "--json", code=1).stdout,
    ]
    for text in documents:
        assert set(keys(json.loads(text))) <= words
