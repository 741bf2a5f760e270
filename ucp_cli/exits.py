"""What a command's exit code means."""

from __future__ import annotations

__all__ = ["DIFFERENT", "DONE", "FAILED", "HUNG_UP", "INTERRUPTED", "TERMINATED", "USAGE"]

DONE = 0
"""Everything asked for was done; checkpoints compared are equal."""

FAILED = 1
"""It could not be done, and the message says why and what to do; or `verify` found damage."""

USAGE = 2
"""An argument cannot mean anything, or what it asks for cannot be had of this source or target."""

DIFFERENT = 3
"""Done, and differences were found."""

INTERRUPTED = 130
"""Stopped from the keyboard."""

HUNG_UP = 129
"""Stopped by SIGHUP (128 + 1), as when a terminal goes away."""

TERMINATED = 143
"""Stopped by SIGTERM (128 + 15), as a scheduler does before it kills."""
