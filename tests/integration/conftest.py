"""Scripts that run inside training processes are no test modules: they import frameworks that may not be there."""

from pathlib import Path

import pytest

collect_ignore_glob = ["*_worker.py", "*_run.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without integration tests, only the docstrings of the references are of use; importing the rest takes seconds."""
    is_left_out = config.option.markexpr == "not integration"
    is_test = collection_path.name.startswith("test_") or "matrix" in collection_path.name
    return True if is_left_out and is_test else None
