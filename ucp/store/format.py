"""Format `ucp`: atom stores, told by their manifest; what is in one is for `ucp.store.index` to say."""

from __future__ import annotations

from pathlib import Path

from ucp.contract.protocols import Evidence, Format
from ucp.core.index import Index
from ucp.store.manifest import MANIFEST

__all__ = ["StoreFormat"]


class StoreFormat(Format):
    """Reads atom stores."""

    name = "ucp"

    def detect(self, path: Path) -> Evidence | None:
        """A folder with a manifest, or the manifest itself."""
        root = path.parent if path.name == MANIFEST else path
        return Evidence(root, (MANIFEST,)) if (root / MANIFEST).is_file() else None

    def read(self, path: Path) -> Index:
        """Index of the store. Raises ChangedError when a file it refers to is not the one it was made from."""
        from ucp.store.index import read_store

        return read_store((path.parent if path.name == MANIFEST else path).absolute())
