"""What lies where in a store, asked once.

A folder is listed by one request for every thousand entries, which also says bytes, time and version of each: nothing
is asked of an object by itself. Where several folders side by side are looked into, the next ones are listed with them,
ever more of these; and where hundreds are, all that lies below their parent is. Above the folder that the user named
(where `latest` lies), which may hold many other runs, single objects are asked for.

What was seen is kept until `forget`: one run sees one state of a checkpoint, and what it then reads is compared with
that (`ucp.io.remote.file`).
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
from ucp.io.remote.failures import CREDENTIALS
from ucp.io.remote.link import link_of, see_afresh
from ucp.io.remote.stores import version_of
from ucp.io.remote.url import bucket_of, scheme_of

_SIDE_BY_SIDE = 4
"""Folders of one parent after which others are listed with each that is asked for."""
_WHOLE = 256
"""Folders of one parent after which all that is below the parent is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object, or a folder."""

    is_folder: bool
    """Whether it is a folder."""
    nbytes: int = 0
    """Bytes of an object."""
    mtime_ns: int = 0
    """Time of its last change, nanoseconds since 1970; 0 where the store does not say."""
    version: str = ""
    """What changes whenever its bytes do (ETag, generation), as far as the store has such a thing."""


_Folder = dict[str, Entry]


@dataclass(slots=True)
class _Seen:
    """What was seen of all stores."""

    roots: set[str] = field(default_factory=set)
    """URLs that users named."""
    folders: dict[str, _Folder | None] = field(default_factory=dict)
    """URL of a folder to what lies in it; None where there is none."""
    single: dict[str, Entry | None] = field(default_factory=dict)
    """What was asked for by itself."""
    asked: dict[str, int] = field(default_factory=dict)
    """URL to how many folders in it were listed."""
    around: dict[str, tuple[int, dict[str, Entry]]] = field(default_factory=dict)
    """URL of a folder to every object below it that is known, and how many folders were known then."""
    lock: threading.RLock = field(default_factory=threading.RLock)


_seen = _Seen()


# in a child of a fork: whoever held it is not there
os.register_at_fork(after_in_child=lambda: setattr(_seen, "lock", threading.RLock()))


def named(url: str) -> None:
    """See everything afresh at and around a URL, which a user named as that of a checkpoint."""
    forget(url)
    with _seen.lock:
        _seen.roots.add(url)


def forget(url: str) -> None:
    """See everything afresh at and around a URL."""
    see_afresh(url)
    with _seen.lock:
        above, at = [], url
        while (at := _parent(at)) and not at.endswith(("/", ":")):
            above.append(at)
        for known in (_seen.folders, _seen.single, _seen.asked):
            for seen in [seen for seen in known if f"{seen}/".startswith(f"{url}/") or seen in above]:
                del known[seen]
        for seen in [seen for seen in _seen.single if _parent(seen) in above]:
            del _seen.single[seen]
        _seen.around.clear()


def entry_of(url: str) -> Entry | None:
    """What lies at a URL; None for nothing. Raises SourceError where the store does not answer."""
    with _seen.lock:
        parent, name = _parent(url), url.rpartition("/")[2]
        known = _seen.folders.get(parent)
        if known is not None:
            return known.get(name)
        if url in _seen.folders:
            return None if _seen.folders[url] is None else Entry(is_folder=True)
        if url in _seen.roots or _is_above(parent):
            return _alone(url)
        inside = _listed(parent)
        return None if inside is None else inside.get(name)


def folder_of(url: str) -> Mapping[str, Entry] | None:
    """Names in a folder, sorted, and what they are; None where there is no such folder. Raises SourceError."""
    with _seen.lock:
        return _listed(url)


def siblings(url: str) -> tuple[str, dict[str, Entry]]:
    """What is known without asking of the objects around one: the folder they are in, and each with what it is.

    That is the folder of the object; or the one above, where several folders in it were listed.
    """
    with _seen.lock:

        def objects_in(folder: str) -> dict[str, Entry]:
            inside = _seen.folders.get(folder) or {}
            return {f"{folder}/{name}": entry for name, entry in inside.items() if not entry.is_folder}

        parent = _parent(url)
        root = _parent(parent)
        if _seen.asked.get(root, 0) <= _SIDE_BY_SIDE:
            return parent, objects_in(parent)
        known, objects = _seen.around.get(root, (0, {}))
        if known != len(_seen.folders):
            folders = [folder for folder in _seen.folders if f"{folder}/".startswith(f"{root}/")]
            objects = {name: entry for folder in folders for name, entry in objects_in(folder).items()}
            _seen.around[root] = len(_seen.folders), objects
        return root, objects


def why_absent(url: str) -> str:
    """What may be the reason that nothing is at a URL, and what to do."""
    scheme, bucket = scheme_of(url), bucket_of(url)
    if scheme == "hf":
        return f"nothing is there. Check the URL; a private model needs a token: {CREDENTIALS[scheme]}"
    if scheme in ("s3", "gs", "gcs") and link_of(url).info(f"{scheme}://{bucket}") is None:
        return f"there is no bucket {bucket!r}"
    return "nothing is there. Check the URL: capitals matter in keys"


def _alone(url: str) -> Entry | None:
    if url not in _seen.single:
        try:
            found = link_of(url).info(url)
        except AccessError:
            if url in _seen.roots:
                raise
            found = None  # what a run may not see beside its checkpoint is no part of it
        _seen.single[url] = None if found is None else _entry(found)
    return _seen.single[url]


def _listed(url: str) -> _Folder | None:
    if url in _seen.folders:
        return _seen.folders[url]
    if (own := _seen.single.get(url)) is not None and not own.is_folder:
        return None
    if _is_no_folder(url):
        return None
    parent = _parent(url)
    known = _seen.folders.get(parent)
    count = _seen.asked[parent] = _seen.asked.get(parent, 0) + 1
    if count > _WHOLE and known is not None:
        _list_below(parent)
        return _seen.folders.setdefault(url, None)
    link, urls = link_of(url), [url]
    if count > _SIDE_BY_SIDE and known is not None:  # with the next folders of the parent, in order
        folders = (f"{parent}/{name}" for name, entry in known.items() if entry.is_folder)
        urls += islice((folder for folder in folders if folder > url and folder not in _seen.folders), count)
        _seen.asked[parent] += len(urls) - 1
    for folder, listing in [(folder, link.submit(link.list, folder)) for folder in urls]:
        inside = listing.result()
        _seen.folders[folder] = inside and {name: _entry(details) for name, details in sorted(inside.items())}
    return _seen.folders[url]


def _is_no_folder(url: str) -> bool:
    """Whether a listing has shown that there is no folder: perhaps that what it would lie in is an object."""
    parent = _parent(url)
    if parent.endswith(("/", ":")):
        return False
    if parent not in _seen.folders:
        return _is_no_folder(parent)
    own = (_seen.folders[parent] or {}).get(url.rpartition("/")[2])
    return own is None or not own.is_folder


def _list_below(url: str) -> None:
    """Everything below a folder, by one listing."""
    folders: dict[str, _Folder] = {url: {}}
    for relative, own in link_of(url).find(url).items():
        *parts, name = relative.split("/")
        at = url
        for part in parts:
            folders[at].setdefault(part, Entry(is_folder=True))
            at = f"{at}/{part}"
            folders.setdefault(at, {})
        if name:
            folders[at][name] = _entry(own)
    for at, inside in folders.items():
        _seen.folders[at] = dict(sorted(inside.items()))


def _entry(own: Mapping[str, Any]) -> Entry:
    if own["type"] == "directory":
        return Entry(is_folder=True)
    version = version_of(own)
    return Entry(
        is_folder=False, nbytes=int(own["size"] or 0), mtime_ns=time_of(own, exact=not version), version=version
    )


def time_of(own: Mapping[str, Any], *, exact: bool = True) -> int:
    """Nanoseconds; whole seconds, in which all answers of a store agree, unless nothing else tells versions apart."""
    found = next((own[key] for key in ("LastModified", "mtime", "updated", "created") if own.get(key)), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        found = found.timestamp()
    if not isinstance(found, int | float):
        return 0
    return round(found * 10**6) * 1000 if exact else int(found) * 10**9


def _parent(url: str) -> str:
    return url.rpartition("/")[0]


def _is_above(url: str) -> bool:
    """Whether a folder holds a checkpoint that a user named."""
    if url.endswith(("/", ":")):
        return True
    return any(root.startswith(url + "/") for root in _seen.roots) and not any(
        url == root or url.startswith(root + "/") for root in _seen.roots
    )
