"""A cache of folder listings of stores.

One request lists a thousand entries with size, time and version, so there are no requests for single objects. When
several subfolders of a folder are listed, the next ones are listed with them, more and more of them; after hundreds,
everything below the folder. Above the folder that the user named there may be many other runs: there, objects such as
`latest` are requested one by one.

Listings are cached until `forget`: one run sees one state of a checkpoint, and compares with it what it reads later
(`ucp.io.remote.file`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from ucp.errors import AccessError
from ucp.io.remote.connections import connect, refresh
from ucp.io.remote.failures import CREDENTIALS
from ucp.io.remote.stores import version_of
from ucp.io.remote.url import bucket_of, scheme_of

_BATCH_AFTER = 4
"""Listed subfolders of a folder after which the next ones are listed at once."""
_RECURSE_AFTER = 256
"""Listed subfolders of a folder after which everything below the folder is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedObject:
    """An object, or a folder."""

    is_folder: bool
    """Whether it is a folder."""
    nbytes: int = 0
    """Bytes of an object."""
    mtime_ns: int = 0
    """Modification time in nanoseconds since 1970; 0 if unknown."""
    version: str = ""
    """ETag or generation, which changes with the bytes; empty if the store has none."""


_Folder = dict[str, ListedObject]


@dataclass(slots=True)
class _Listings:
    """The cache of all stores."""

    roots: set[str] = field(default_factory=set)
    """URLs that users named."""
    folders: dict[str, _Folder | None] = field(default_factory=dict)
    """URL of a folder to its entries; None if there is no such folder."""
    single: dict[str, ListedObject | None] = field(default_factory=dict)
    """Single objects that were asked for."""
    listed: dict[str, int] = field(default_factory=dict)
    """URL of a folder to how many of its subfolders were listed."""
    objects_below: dict[str, tuple[int, dict[str, ListedObject]]] = field(default_factory=dict)
    """URL of a folder to the known objects below it, and the number of folders that were known then."""
    lock: threading.RLock = field(default_factory=threading.RLock)


_listings = _Listings()


# a child has no thread that could release the lock
os.register_at_fork(after_in_child=lambda: setattr(_listings, "lock", threading.RLock()))


def refresh_root(url: str) -> None:
    """Forget what is known around the URL of a checkpoint, which the user named."""
    forget(url)
    with _listings.lock:
        _listings.roots.add(url)


def forget(url: str) -> None:
    """Forget what is known at, below and directly around a URL."""
    refresh(url)
    with _listings.lock:
        above, parent = [], url
        while (parent := _parent(parent)) and not parent.endswith(("/", ":")):
            above.append(parent)
        for known in (_listings.folders, _listings.single, _listings.listed):
            for known_url in [key for key in known if f"{key}/".startswith(f"{url}/") or key in above]:
                del known[known_url]
        for known_url in [key for key in _listings.single if _parent(key) in above]:
            del _listings.single[known_url]
        _listings.objects_below.clear()


def entry_of(url: str) -> ListedObject | None:
    """The object or folder at a URL; None if there is none. Raises SourceError."""
    with _listings.lock:
        parent, name = _parent(url), url.rpartition("/")[2]
        known = _listings.folders.get(parent)
        if known is not None:
            return known.get(name)
        if url in _listings.folders:
            return None if _listings.folders[url] is None else ListedObject(is_folder=True)
        if url in _listings.roots or _is_above_root(parent):
            return _look_up(url)
        inside = _list_folder(parent)
        return None if inside is None else inside.get(name)


def folder_of(url: str) -> Mapping[str, ListedObject] | None:
    """Entries of a folder, sorted by name; None if there is no such folder. Raises SourceError."""
    with _listings.lock:
        return _list_folder(url)


def known_objects_near(url: str) -> tuple[str, dict[str, ListedObject]]:
    """A folder around an object, and all cached objects in it; makes no request.

    The folder is the one that contains the object, or the one above that if several of its subfolders were listed.
    """
    with _listings.lock:

        def objects_in(folder: str) -> dict[str, ListedObject]:
            inside = _listings.folders.get(folder) or {}
            return {f"{folder}/{name}": entry for name, entry in inside.items() if not entry.is_folder}

        parent = _parent(url)
        root = _parent(parent)
        if _listings.listed.get(root, 0) <= _BATCH_AFTER:
            return parent, objects_in(parent)
        known, objects = _listings.objects_below.get(root, (0, {}))
        if known != len(_listings.folders):
            folders = [folder for folder in _listings.folders if f"{folder}/".startswith(f"{root}/")]
            objects = {name: entry for folder in folders for name, entry in objects_in(folder).items()}
            _listings.objects_below[root] = len(_listings.folders), objects
        return root, objects


def why_absent(url: str) -> str:
    """Why there may be nothing at a URL, and what to do."""
    scheme, bucket = scheme_of(url), bucket_of(url)
    if scheme == "hf":
        return f"nothing is there. Check the URL; a private model needs a token: {CREDENTIALS[scheme]}"
    if scheme in ("s3", "gs", "gcs") and connect(url).info(f"{scheme}://{bucket}") is None:
        return f"there is no bucket {bucket!r}"
    return "nothing is there. Check the URL: capitals matter in keys"


def _look_up(url: str) -> ListedObject | None:
    if url not in _listings.single:
        try:
            details = connect(url).info(url)
        except AccessError:
            if url in _listings.roots:
                raise
            details = None  # a sibling of the checkpoint that may not be read is not part of it
        _listings.single[url] = None if details is None else _to_entry(details)
    return _listings.single[url]


def _list_folder(url: str) -> _Folder | None:
    if url in _listings.folders:
        return _listings.folders[url]
    if (single := _listings.single.get(url)) is not None and not single.is_folder:
        return None
    if _is_known_absent(url):
        return None
    parent = _parent(url)
    known = _listings.folders.get(parent)
    count = _listings.listed[parent] = _listings.listed.get(parent, 0) + 1
    if count > _RECURSE_AFTER and known is not None:
        _list_below(parent)
        return _listings.folders.setdefault(url, None)
    connection, urls = connect(url), [url]
    if count > _BATCH_AFTER and known is not None:  # with the next folders of the parent
        folders = (f"{parent}/{name}" for name, entry in known.items() if entry.is_folder)
        urls += islice((folder for folder in folders if folder > url and folder not in _listings.folders), count)
        _listings.listed[parent] += len(urls) - 1
    for folder, listing in [(folder, connection.submit(connection.list, folder)) for folder in urls]:
        inside = listing.result()
        _listings.folders[folder] = inside and {name: _to_entry(details) for name, details in sorted(inside.items())}
    return _listings.folders[url]


def _is_known_absent(url: str) -> bool:
    """Whether a listing shows that there is no such folder."""
    parent = _parent(url)
    if parent.endswith(("/", ":")):
        return False
    if parent not in _listings.folders:
        return _is_known_absent(parent)
    entry = (_listings.folders[parent] or {}).get(url.rpartition("/")[2])
    return entry is None or not entry.is_folder


def _list_below(url: str) -> None:
    """List everything below a folder at once."""
    folders: dict[str, _Folder] = {url: {}}
    for relative, details in connect(url).find(url).items():
        *parts, name = relative.split("/")
        folder = url
        for part in parts:
            folders[folder].setdefault(part, ListedObject(is_folder=True))
            folder = f"{folder}/{part}"
            folders.setdefault(folder, {})
        if name:
            folders[folder][name] = _to_entry(details)
    for folder, inside in folders.items():
        _listings.folders[folder] = dict(sorted(inside.items()))


def _to_entry(details: Mapping[str, Any]) -> ListedObject:
    if details["type"] == "directory":
        return ListedObject(is_folder=True)
    version = version_of(details)
    return ListedObject(
        is_folder=False, nbytes=int(details["size"] or 0), mtime_ns=time_of(details, exact=not version), version=version
    )


def time_of(details: Mapping[str, Any], *, exact: bool = True) -> int:
    """Modification time in ns; unless `exact`, rounded to seconds, because a store's answers differ below that."""
    time = next((details[key] for key in ("LastModified", "mtime", "updated", "created") if details.get(key)), None)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        time = time.timestamp()
    if not isinstance(time, int | float):
        return 0
    return round(time * 10**6) * 1000 if exact else int(time) * 10**9


def _parent(url: str) -> str:
    return url.rpartition("/")[0]


def _is_above_root(url: str) -> bool:
    """Whether a folder contains a checkpoint that the user named."""
    if url.endswith(("/", ":")):
        return True
    return any(root.startswith(url + "/") for root in _listings.roots) and not any(
        url == root or url.startswith(root + "/") for root in _listings.roots
    )
