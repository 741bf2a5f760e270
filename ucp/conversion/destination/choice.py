"""Which kind of place a destination is."""

from __future__ import annotations

from pathlib import Path

from ucp.conversion.destination.disk import OnDisk
from ucp.conversion.destination.place import Destination
from ucp.conversion.options import ConvertOptions
from ucp.errors import UsageError
from ucp.io.folder import is_url

__all__ = ["destination_at"]


def destination_at(dst: Path, options: ConvertOptions) -> Destination:
    """The place at a path or a URL. Raises UsageError."""
    if is_url(str(dst)):
        from ucp.conversion.destination.bucket import InBucket  # with fsspec

        return InBucket(str(dst), options)
    if options.scratch is not None:
        raise UsageError(f"a scratch folder is for destinations in a bucket, and {dst} is none: drop --scratch")
    if options.part is not None or options.finalize:
        return OnDisk(dst, again=f"run {'this part' if options.part else '--finalize'} again")
    return OnDisk(dst)
