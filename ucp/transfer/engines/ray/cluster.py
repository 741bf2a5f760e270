"""Connects to a Ray cluster, and disconnects."""

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
"""Seconds to wait for the head node to take a connection."""

_JOINS = 60.0
"""Seconds to wait until a process is a driver of the cluster."""

_STOPPING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run, beside that of the keyboard, which Ray leaves alone."""

_TRIAL = """\
import sys, ray
try:
    ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
except Exception as error:
    sys.exit(str(error))
"""
"""A process that does nothing but connect."""

_REMEDY = (
    "Run ucp on a node of the cluster (one of `ray start`), in the same environment, or name its head node: --set "
    "address=HOST:PORT. --set address=local starts Ray on this machine, for this run"
)

_TOKEN = (
    "This cluster takes only who has its token (~/.ray/auth_token of its head node, or what RAY_AUTH_TOKEN was there): "
    "set RAY_AUTH_MODE=token here, or on a node of the cluster use --set address=auto"
)

_LOGGED = re.compile(r"^\[[^]]*\] \S+: ")
"""What Ray writes before each line that it logs, such as `[2026-11-23 23:51:20 W 20414] gcs_client.cc:210: `."""


def check_installed() -> None:
    """Raise MissingLibraryError where there is no Ray."""
    if find_spec("ray") is None:
        raise MissingLibraryError(
            "--engine ray needs Ray, which is not installed: pip install 'universal-checkpoint[ray]', with Ray in the "
            "version that the cluster has"
        )


def check_address(address: str) -> None:
    """Raise UsageError for an address that can be none of a cluster for drivers."""
    name, colon, port = address.rpartition(":")
    if "://" in address or (colon and not (name and port.isdigit())) or not address:
        raise UsageError(
            f"expected address=auto, local or HOST:PORT of a head node, as the driver must run on a node of the "
            f"cluster; got {address!r}. Run ucp on one of its nodes, or with `ray job submit`"
        )


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """A connection to the cluster at `address`; the one that the process has, if any. Raises EngineError."""
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
            with redirect_stdout(sys.stderr):  # lines that it held back, as they might have been repeated
                ray.shutdown()


def _connect(address: str) -> None:
    import ray

    means = {"include_dashboard": False} if address == "local" else {}
    if address != "local":
        _check_listens(address)
        _check_joins(address)
    try:
        ray.init(address, logging_level="WARNING", **means)
    except Exception as error:  # Ray raises all kinds
        raise EngineError(f"Ray cannot be used at address {address}: {error}\n{_REMEDY}") from error


def _check_listens(address: str) -> None:
    """Raise EngineError where nothing listens at HOST:PORT."""
    name, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((name.strip("[]"), int(port)), _LISTENS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster at {address}: {error}\n{_REMEDY}") from error


def _check_joins(address: str) -> None:
    """Raise EngineError where another process cannot connect: Ray goes on trying for minutes, or ends the process."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    trial = [sys.executable, "-c", _TRIAL, address]
    try:
        trial_run = subprocess.run(
            trial, env={**os.environ, **paths}, capture_output=True, text=True, timeout=_JOINS, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"no Ray cluster at {address}: what listens there does not answer as one within {_JOINS:.0f} seconds. Is "
            f"it the port of the head node (6379 unless told otherwise), and not of its dashboard?\n{_REMEDY}"
        ) from None
    if trial_run.returncode:
        lines = dict.fromkeys(_LOGGED.sub("", line) for line in trial_run.stderr.strip().splitlines())
        remedy = _TOKEN if "InvalidAuthToken" in trial_run.stderr else _REMEDY
        raise EngineError(f"no Ray cluster took a connection at {address}: {'; '.join(lines)}\n{remedy}")


class _StdoutSplitter:
    """stdout for all threads but Ray's, which get stderr: logs of workers and nodes must not mix with results."""

    def __init__(self, stdout: object) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr if threading.current_thread().name.startswith("ray_") else self._stdout, name)


@contextmanager
def _divert_ray_output() -> Generator[None, None, None]:
    """Keep what Ray prints from stdout."""
    before, ours = sys.stdout, _StdoutSplitter(sys.stdout)
    sys.stdout = ours
    try:
        yield
    finally:
        if sys.stdout is ours:  # else a progress bar, begun before, has put back its own
            sys.stdout = before


@contextmanager
def _keep_signal_handlers() -> Generator[Callable[[], None], None, None]:
    """A function that puts back what signals did that end a run; to be called once Ray has put its own in place.

    What a handler raises while Ray waits, Ray makes a plain KeyboardInterrupt of: here it is raised as it was.
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
    """Have signals handled so; only the main thread can."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
