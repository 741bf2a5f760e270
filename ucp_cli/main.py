"""The program: `ucp VERB ...`.

Nothing is imported before signals are heeded, so that one that comes while the verbs are still being imported ends the
program as any other does.
"""

from __future__ import annotations

import gc
import io
import sys

from ucp_cli.stopping import heed_termination

_OBJECTS_BETWEEN_COLLECTIONS = 10_000_000
"""An index is millions of objects without cycles: with Python's default threshold (700), or a collection right after
planning, the search for them takes a tenth of the time."""


def main() -> None:
    """Run the command line of this process."""
    heed_termination()
    try:
        from ucp_cli.verbs import cli

        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # whatever a name holds, and whatever the locale
        cli(prog_name="ucp")
    except KeyboardInterrupt as stop:  # before or after the verbs, which tell it themselves
        from ucp_cli.failures import make_stopped

        failure = make_stopped(stop)
        failure.show()
        sys.exit(failure.exit_code)
    finally:
        if "ucp.io.remote.connections" in sys.modules:
            from ucp.io.files import close_connections

            close_connections()  # or the interpreter would wait for requests that nobody needs any more
        gc.freeze()  # or the interpreter would look for cycles in all there is, only to end


if __name__ == "__main__":
    main()
