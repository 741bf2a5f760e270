"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage: no search for cycles has to go through it again."""
    gc.collect()
    gc.freeze()
