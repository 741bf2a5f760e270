"""That a conversion waits for another process, told to its observer as a stage of no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ucp.contract.protocols import WAITING, Observer

__all__ = ["waiting_for"]


@contextmanager
def waiting_for(observer: Observer, holder: str) -> Iterator[None]:
    """Say that `holder` is waited for, and that it no longer is."""
    observer.begin(title=f"{WAITING} {holder}", nbytes=0)
    try:
        yield
    finally:
        observer.end()
