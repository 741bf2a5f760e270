"""Millions of small values are built without looking for cycles in them again and again.

CPython walks all containers whenever enough new ones were made; while an index is built none of them is garbage, and
the walks take as long as the work itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_cycle_collection"]


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Pause the search for cycles; what is not in a cycle is freed as ever.

    >>> with no_cycle_collection():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
