"""A driver whose workers are slow: SOURCE DESTINATION ADDRESS FOLDER [command].

Workers leave their numbers in FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import ucp
from tests.unit.conftest import shrink
from ucp.transfer.engines.ray import engine


def main(source: str, destination: str, address: str, folder: str, how: str = "") -> None:
    """Convert, by the library or by the command."""
    Path(folder).mkdir()

    def carry_out(run, tasks):
        from ucp.transfer.engines.ray.worker import carry_out as real

        for report in real(run, tasks):
            mark = Path(folder) / str(os.getpid())
            time.sleep(60 if how and mark.exists() else 0.2)
            mark.touch()
            yield report

    engine.carry_out = carry_out
    shrink(pytest.MonkeyPatch(), block=256, task=256)
    if how:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in the background ignore it
        from ucp_cli.main import main as command

        sys.argv = ["ucp", "convert", source, destination, "--engine", "ray", "--set", f"address={address}"]
        command()
    else:
        ucp.convert(source, destination, engine="ray", settings={"address": address})


if __name__ == "__main__":
    main(*sys.argv[1:])
