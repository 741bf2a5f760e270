"""A conversion ends at every single call that changes something: the unit suite visits some of them.

No framework runs here; these are the loops of test_crash.py, test_parts.py and test_bucket.py, all of their steps.
"""

from __future__ import annotations

import pytest

import ucp
from tests.unit.conftest import tree
from tests.unit.conversion.destination import test_bucket as bucket
from tests.unit.conversion.parts import test_parts as parts
from tests.unit.conversion.test_crash import OPTIONS, check_killed

pytestmark = pytest.mark.integration

EVERY = 1 << 30


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_is_killed(source, tmp_path, small_blocks, options):
    assert check_killed(source, tmp_path, dense=EVERY, **options) > 20


@pytest.mark.parametrize("options", [{"part": "2/3"}, {"finalize": True}], ids=["part", "finalize"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_part_is_killed(source, tmp_path, small_blocks, options, compress):
    assert parts.check_part_killed(source, tmp_path, tmp_path / "out", compress=compress, dense=EVERY, **options) > 20


def test_the_first_part_of_all_is_killed(source, tmp_path, small_blocks):
    ucp.convert(source, tmp_path / "whole", workers=1)
    parts.check_first_killed(source, tmp_path / "out", tree(tmp_path / "whole"), steps=range(60))


@pytest.mark.parametrize("target", ["ucp", "dcp", "deepspeed"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_run_to_a_bucket_is_killed(memory, tmp_path, monkeypatch, target, done):
    bucket.shrink_rounds(monkeypatch)
    source = bucket.FIXTURES / bucket.SOURCES["deepspeed"]
    bucket.check_killed(memory, source, tmp_path, target, replaces=target == "deepspeed", done=done, stride=1)
