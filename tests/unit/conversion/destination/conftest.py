"""Fixtures of the tests of stores, which run here too."""

from tests.unit.io.remote.conftest import memory  # noqa: F401
