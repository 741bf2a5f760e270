"""The atom store as a source, whole or virtual."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ucp.atom import Extra, Index
from ucp.errors import ChangedError, MalformedError, listed
from ucp.identity import identity_of
from ucp.protocols import Evidence
from ucp.store.extras import read_extra
from ucp.store.manifest import MANIFEST, interpret

__all__ = ["StoreFormat"]


class StoreFormat:
    """Reads atom stores."""

    name = "ucp"

    def detect(self, path: Path) -> Evidence | None:
        """A folder with a manifest, or the manifest itself."""
        root = path.parent if path.name == MANIFEST else path
        return Evidence(root, (MANIFEST,)) if (root / MANIFEST).is_file() else None

    def read(self, path: Path) -> Index:
        """Index of the store. Raises ChangedError when a file it refers to is not the one it was made from."""
        root = (path.parent if path.name == MANIFEST else path).absolute()
        try:
            document = json.loads((root / MANIFEST).read_bytes())
        except ValueError as error:
            raise MalformedError(f"{root / MANIFEST} is not JSON ({error}); it is damaged") from error
        index, extras, described = interpret(document, root)
        _check_unchanged(index, described, root)
        loaded = tuple(Extra(name=name, rank=rank, value=read_extra(str(root / file))) for name, rank, file in extras)
        return replace(index, extras=loaded)


def _check_unchanged(index: Index, described: list[dict[str, object]], root: Path) -> None:
    changed = []
    for file, recorded in zip(index.files, described, strict=True):
        if "identity" not in recorded:
            continue
        now = (file.nbytes, file.mtime_ns)
        if now != (recorded["nbytes"], recorded["mtime_ns"]) or identity_of(file.path) != recorded["identity"]:
            changed.append(f"{file.path}: {recorded['nbytes']} bytes then, {file.nbytes} now")
    if changed:
        raise ChangedError(
            f"{root} is a virtual store, and files that it refers to were changed since it was made:\n"
            f"{listed(changed)}\nmake it again with `ucp convert SRC {root} --virtual --overwrite`"
        )
