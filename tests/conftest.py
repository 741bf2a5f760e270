"""What all tests share."""

import gc
import os

import pytest

collect_ignore_glob = ["bench/*/worker.py"]
"""Runs in an environment with transformers and accelerate."""


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage: no search for cycles has to go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def lone_worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small conversion stays in this process: tests of several workers ask for them."""
    if request.node.get_closest_marker("integration") is None:
        monkeypatch.setattr("ucp.conversion.prepare.count_cores", lambda: 1)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the disk: tests of what is fsynced count the calls themselves."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
