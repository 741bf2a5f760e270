"""Every tensor of the kept checkpoints lies over every axis as a declared pattern places it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry import checkpoints, count
from ucp.contract import registry


@pytest.mark.parametrize("path", [*checkpoints()], ids=lambda path: path.parent.name)
def test_patterns_place_what_is_read(path: Path) -> None:
    format_, evidence = registry.recognise(path)
    pairs = count(format_.read(evidence.root))
    assert {axis: dict(own) for axis, own in pairs.items() if set(own) != {"placed"}} == {}
