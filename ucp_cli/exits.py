"""What a command's exit code means."""

from __future__ import annotations

__all__ = ["DIFFERENT", "DONE", "FAILED", "INTERRUPTED", "USAGE"]

DONE = 0
"""Everything asked for was done; checkpoints compared are equal."""

FAILED = 1
"""It could not be done; the message says why and what to do."""

USAGE = 2
"""An argument cannot mean anything."""

DIFFERENT = 3
"""Done, and differences or damage were found."""

INTERRUPTED = 130
"""Stopped from the keyboard."""
