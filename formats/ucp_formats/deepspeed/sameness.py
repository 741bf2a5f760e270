"""Whether values of several ranks are the same: see `ucp.io.sameness`."""

from ucp.io.sameness import Checksums, per_rank_extras

__all__ = ["Checksums", "per_rank_extras"]
