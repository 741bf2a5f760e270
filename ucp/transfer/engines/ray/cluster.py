"""Connects to a Ray cluster, and disconnects from it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from types import FrameType
from typing import Any

from ucp.errors import EngineError, MissingLibraryError, UsageError

_LISTENS = 10.0
"""Seconds to wait for the head node to accept a connection."""

_JOINS = 60.0
"""Seconds to wait until a process has connected to the cluster as a driver."""

_STOPPING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run, apart from SIGINT, whose handler Ray does not replace."""

_TRIAL = """\
import sys, ray
try:
    ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
except Exception as error:
    sys.exit(str(error))
"""
"""Program of a process that only connects."""

_REMEDY = (
    "Run ucp on a node of the cluster (where `ray start` ran), in the same environment, or name its head node: --set "
    "address=HOST:PORT. --set address=local starts Ray on this machine, for this run"
)

_TOKEN = (
    "This cluster accepts only clients with its token (in ~/.ray/auth_token of its head node, or in RAY_AUTH_TOKEN "
    "when it was started): set RAY_AUTH_MODE=token here, or use --set address=auto on a node of the cluster"
)

_LOGGED = re.compile(r"^\[[^]]*\] \S+: ")
"""Prefix of a line that Ray logs, for example `[2026-11-23 23:51:20 W 20414] gcs_client.cc:210: `."""


def check_installed() -> None:
    """Raise MissingLibraryError if Ray is not installed."""
    if find_spec("ray") is None:
        raise MissingLibraryError(
            "--engine ray needs Ray, which is not installed: pip install 'universal-checkpoint[ray]', with the same "
            "version of Ray as on the cluster"
        )


def check_address(address: str) -> None:
    """Raise UsageError for an address to which a driver cannot connect."""
    name, colon, port = address.rpartition(":")
    if "://" in address or (colon and not (name and port.isdigit())) or not address:
        raise UsageError(
            f"expected address=auto, local or HOST:PORT of a head node, because ucp must run on a node of the "
            f"cluster; got {address!r}. Run ucp on one of its nodes, or with `ray job submit`"
        )


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """Connect to the cluster at `address`, unless this process is connected already. Raises EngineError."""
    import ray

    if ray.is_initialized():
        yield
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
        check_address(address)
    with _divert_ray_output(), _keep_signal_handlers() as keep:
        _connect(address)
        keep()
        try:
            yield
        finally:
            with redirect_stdout(sys.stderr):  # Ray now prints log lines that it held back to merge repeated ones
                ray.shutdown()


def _connect(address: str) -> None:
    import ray

    means = {"include_dashboard": False} if address == "local" else {}
    if address != "local":
        _check_listens(address)
        _check_joins(address)
    try:
        ray.init(address, logging_level="WARNING", **means)
    except Exception as error:  # Ray raises exceptions of many classes
        raise EngineError(f"Ray cannot be used at address {address}: {error}\n{_REMEDY}") from error


def _check_listens(address: str) -> None:
    """Raise EngineError if nothing listens at HOST:PORT."""
    name, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((name.strip("[]"), int(port)), _LISTENS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster at {address}: {error}\n{_REMEDY}") from error


def _check_joins(address: str) -> None:
    """Raise EngineError if a test process cannot connect: in this process, Ray would retry for minutes, or end it."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    trial = [sys.executable, "-c", _TRIAL, address]
    try:
        trial_run = subprocess.run(
            trial, env={**os.environ, **paths}, capture_output=True, text=True, timeout=_JOINS, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"no Ray cluster at {address}: no answer of a cluster within {_JOINS:.0f} seconds. Is it the port of the "
            f"head node (6379 by default), and not that of its dashboard?\n{_REMEDY}"
        ) from None
    if trial_run.returncode:
        lines = dict.fromkeys(_LOGGED.sub("", line) for line in trial_run.stderr.strip().splitlines())
        remedy = _TOKEN if "InvalidAuthToken" in trial_run.stderr else _REMEDY
        raise EngineError(f"no Ray cluster accepted a connection at {address}: {'; '.join(lines)}\n{remedy}")


class _StdoutSplitter:
    """stdout, except for Ray's threads, which get stderr: logs of workers and nodes must not mix with results."""

    def __init__(self, stdout: object) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr if threading.current_thread().name.startswith("ray_") else self._stdout, name)


@contextmanager
def _divert_ray_output() -> Generator[None, None, None]:
    """Send what Ray prints to stderr instead of stdout."""
    before, ours = sys.stdout, _StdoutSplitter(sys.stdout)
    sys.stdout = ours
    try:
        yield
    finally:
        if sys.stdout is ours:  # otherwise a progress bar, started earlier, has replaced it already
            sys.stdout = before


@contextmanager
def _keep_signal_handlers() -> Generator[Callable[[], None], None, None]:
    """Yield a function that restores the handlers of `_STOPPING`, to be called after Ray has installed its own.

    If a handler raises while Ray waits, Ray turns the exception into a plain KeyboardInterrupt; here the original
    exception is raised instead.
    """
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    raised: list[BaseException] = []

    def hear(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        try:
            if callable(handler):
                handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        yield lambda: _handle(
            {number: hear if callable(previous) else previous for number, previous in handlers.items()}
        )
    except KeyboardInterrupt:
        if raised:
            raise raised[0] from None
        raise
    finally:
        _handle(handlers)


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install signal handlers, if this is the main thread, which alone can."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
