"""Everything wrong with the files of a checkpoint: see `ucp.io.problems`."""

from ucp.io.problems import Problems

__all__ = ["Problems"]
