"""Format `ucp`: detects atom stores by their manifest; `ucp.store.index` reads them."""

from __future__ import annotations

from pathlib import Path

from ucp.contract.locating import Evidence
from ucp.contract.protocols import Format
from ucp.core.index import Index
from ucp.io.folder import MARK
from ucp.store.manifest import MANIFEST


class StoreFormat(Format):
    """Reads atom stores."""

    name = "ucp"

    def detect(self, path: Path) -> Evidence | None:
        """Detect a folder with a manifest, the manifest itself, or a store that lost it, which `read` then reports."""
        root = path.parent if path.name == MANIFEST else path
        is_store = (root / MANIFEST).is_file() or ((root / "packs").is_dir() and (root / MARK).is_file())
        return Evidence(root, (MANIFEST,)) if is_store else None

    def read(self, path: Path) -> Index:
        """Index of the store. Raises ChangedError if a file that it refers to has changed since the store was made."""
        from ucp.store.index import read_store

        return read_store((path.parent if path.name == MANIFEST else path).absolute())
