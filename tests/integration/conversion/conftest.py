"""Fixtures of the unit suite, whose loops run on here."""

from tests.unit.conftest import quick_disk, small_blocks, source
from tests.unit.io.remote.conftest import memory

__all__ = ["memory", "quick_disk", "small_blocks", "source"]
