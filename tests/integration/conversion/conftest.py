"""Fixtures of the unit suite, whose loops run on here."""

from tests.unit.conftest import small_blocks, source  # noqa: F401
from tests.unit.io.remote.conftest import memory  # noqa: F401
