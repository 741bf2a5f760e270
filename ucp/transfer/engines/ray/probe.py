"""Probes a node before it gets work. Uses only the standard library, because ucp may not be installed there.

Ray sends the functions of this module by value.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def look(token: str, files: list[tuple[str, int, int]]) -> tuple[str, str, list[str]]:
    """`program`, `describe_fault` and `find_changed_files` on this node.

    `token`: see `describe_fault`. `files`: path, bytes and modification time in ns, as the driver sees them.
    """
    return program(), describe_fault(token), find_changed_files(files)


def program() -> str:
    """Version of ucp and digest of its code, for example "0.1.0 (code 1f0c29ab)"; empty if it is not installed."""
    spec = find_spec("ucp")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    try:
        number = version("universal-checkpoint")
    except PackageNotFoundError:
        number = "unknown version"
    return f"{number} (code {digest.hexdigest()[:8]})"


def describe_fault(token: str) -> str:
    """Why this node cannot write to the folder of `token`; empty if it can.

    `token`: a file that the driver wrote, whose contents are its name; another folder at the same path lacks it.
    """
    try:
        with open(token, "r+", encoding="ascii") as file:
            return "" if file.read() == os.path.basename(token) else "there is another folder at this path"
    except OSError as error:
        return error.strerror or str(error)


def find_changed_files(files: Iterable[tuple[str, int, int]]) -> list[str]:
    """Those of `files` that do not exist on this node, or differ in size or modification time."""
    changed = []
    for path, nbytes, mtime_ns in files:
        try:
            status = os.stat(path)
        except OSError:
            status = None
        if status is None or (status.st_size, status.st_mtime_ns) != (nbytes, mtime_ns):
            changed.append(path)
    return changed


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()
