"""Which process is at work somewhere, noted so that others can name it."""

from __future__ import annotations

import json
import os
import socket

__all__ = ["describe_process", "this_process"]


def this_process() -> dict[str, str | int]:
    """Host and number of this process, for JSON."""
    return {"host": socket.gethostname(), "process": os.getpid()}


def describe_process(text: bytes) -> str:
    """The process that a JSON text names, for messages.

    >>> describe_process(b'{"host": "node7", "process": 1234}')
    'process 1234 on node7'
    >>> describe_process(b"")
    'a process that left no name'
    """
    try:
        noted = json.loads(text)
        return f"process {noted['process']} on {noted['host']}"
    except (ValueError, TypeError, KeyError):
        return "a process that left no name"
