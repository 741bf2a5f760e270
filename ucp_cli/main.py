"""The program: `ucp VERB ...`.

Signal handlers are set before anything is imported, so that a signal during the imports, too, ends the program with a
message and its exit code.
"""

from __future__ import annotations

import gc
import io
import sys

from ucp_cli.stopping import heed_termination

_OBJECTS_BETWEEN_COLLECTIONS = 10_000_000
"""An index is millions of objects without reference cycles: with Python's default threshold (700), or a collection
right after planning, the search for cycles takes a tenth of the time."""


def main() -> None:
    """Run the command line of this process."""
    heed_termination()
    try:
        from ucp_cli.verbs import cli

        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # any name can be printed in any locale
        cli(prog_name="ucp")
    except KeyboardInterrupt as stop:  # before or after the verb, which reports its own
        from ucp_cli.failures import make_stopped

        failure = make_stopped(stop)
        failure.show()
        sys.exit(failure.exit_code)
    finally:
        if "ucp.io.remote.connections" in sys.modules:
            from ucp.io.files import close_connections

            close_connections()  # or the interpreter would wait for requests that nobody needs any more
        gc.freeze()  # or the interpreter would search all objects for cycles before it ends


if __name__ == "__main__":
    main()
