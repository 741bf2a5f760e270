"""Types are learned by one thread at a time: msgspec 0.22 crashes the process otherwise."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
from threading import Barrier, Thread
from msgspec import defstruct
from ucp.core.text.typed import convert, decode_json

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = defstruct(f"Inner{number}", [("x", int), ("y", list[int])])
    outer = defstruct(f"Outer{number}", [(f"f{k}", list[inner] | None, None) for k in range(40)])
    ready, values = Barrier(8), []

    def work():
        ready.wait()
        values.append(convert({"f1": [{"x": 1, "y": [1]}]}, outer))
        values.append(decode_json(b'{"f2": [{"x": 1, "y": [1]}]}', outer))

    threads = [Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(values) == 16
"""


def test_threads_that_are_the_first_to_use_a_type() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
