from __future__ import annotations

import pytest

import ucp
from tests.unit.conftest import tree


@pytest.fixture
def dst(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def wanted(source, tmp_path, small_blocks):
    """Files of a run without parts."""
    ucp.convert(source, tmp_path / "whole", workers=1)
    return tree(tmp_path / "whole")
