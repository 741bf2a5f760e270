"""Connecting to a Ray cluster, and letting go of it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from ucp.errors import EngineError, MissingLibraryError, UsageError

__all__ = ["connected"]

_PATIENCE = 10.0
"""Seconds to wait for the head node to take a connection."""


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """A connection to the cluster at `address`; the one that the process has, if any.

    Raises MissingLibraryError, EngineError, UsageError.
    """
    if find_spec("ray") is None:
        raise MissingLibraryError(
            "--engine ray needs Ray, which is not installed: pip install 'universal-checkpoint[ray]', in the version "
            "that the cluster has"
        )
    import ray

    if ray.is_initialized():
        yield
        return
    _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")  # or they would be printed to stdout
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    _check_reachable(address)
    means = {"include_dashboard": False} if address == "local" else {}
    with _own_signals():
        try:
            ray.init(address, logging_level="WARNING", **means)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise EngineError(
                f"no Ray cluster took a connection at {address}: {error}\nRun ucp on a node of the cluster (ray start "
                "there), or name its head node: --set address=HOST:PORT. --set address=local starts Ray here for this "
                "run"
            ) from error


def _check_reachable(address: str) -> None:
    """Raise EngineError where nothing listens at HOST:PORT: Ray would try for minutes, and end the process."""
    if "://" in address:
        raise UsageError(
            f"expected address=auto, local or HOST:PORT of a head node, as the driver must be a node of the cluster; "
            f"got {address!r}. Run ucp on one of its nodes, or with `ray job submit`"
        )
    name, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((name.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(
            f"no Ray cluster at {address}: {error}. Expected HOST:PORT of its head node, as `ray start` tells it"
        ) from error


@contextmanager
def _own_signals() -> Generator[None, None, None]:
    """Keep what SIGTERM does: connecting, Ray would have it end the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
