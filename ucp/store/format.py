"""Format `ucp`: atom stores, told by their manifest; what is in one is for `ucp.store.index` to say."""

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
        """A folder with a manifest, or the manifest itself; or one that lost it, so that reading says what to copy."""
        root = path.parent if path.name == MANIFEST else path
        is_store = (root / MANIFEST).is_file() or ((root / "packs").is_dir() and (root / MARK).is_file())
        return Evidence(root, (MANIFEST,)) if is_store else None

    def read(self, path: Path) -> Index:
        """Index of the store. Raises ChangedError when a file it refers to is not the one it was made from."""
        from ucp.store.index import read_store

        return read_store((path.parent if path.name == MANIFEST else path).absolute())
