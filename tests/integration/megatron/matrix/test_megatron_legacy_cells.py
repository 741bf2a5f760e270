"""Made legacy checkpoints of every layout with every optimizer; the unit suite reads a third of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.formats.megatron.conftest import FakeLegacy
from tests.unit.formats.megatron.legacy.test_source import CELLS, SOME, check_what_was_cut, shown

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("layout", "optimizer"), [own for own in CELLS if own not in SOME], ids=shown)
def test_every_state_is_what_was_cut(tmp_path: Path, layout, optimizer) -> None:
    check_what_was_cut(FakeLegacy(**layout, **optimizer), tmp_path)
