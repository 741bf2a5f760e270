"""Whether a conversion may write to a destination: nothing is replaced but what ucp wrote there itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucp.errors import DestinationError, OverlapError, format_count, format_list
from ucp.io.folder import MARK, PARTIAL, files_below, path_of, url_scheme
from ucp.io.provenance import read_mark


@dataclass(frozen=True, slots=True)
class ConversionId:
    """What tells one conversion from another."""

    fingerprint: str
    """Equal for conversions that write the same bytes."""
    facts: Mapping[str, str]
    """Source, target, topology and options, by name, for messages."""

    def differences(self, recorded: object) -> str:
        """How the conversion with the `recorded` facts differs, a line for each fact; a full stop if nothing is known.

        The text goes into a message, before the advice.
        """
        if not isinstance(recorded, dict) or not recorded:
            return ". "
        options_of_files = "--rename, --patterns, --shapes-from or --set config"
        lines = [
            f"{name}: {recorded.get(name) or 'by default'} then, {self.facts.get(name) or 'by default'} now"
            for name in dict.fromkeys((*self.facts, *recorded))
            if self.facts.get(name) != recorded.get(name)
        ]
        if not lines:
            lines = [
                f"files of the source: others than then, or changed since; or a file of {options_of_files} was changed"
            ]
        return f":\n{format_list(lines)}\n"


def check_destination(src: Path, dst: Path) -> None:
    """Raise OverlapError if writing `dst` could change the source `src`, DestinationError if it cannot exist."""
    check_distinct(src, dst)
    resolved = dst.resolve()
    if os.path.ismount(resolved):
        raise DestinationError(f"{dst} is a mount point: it cannot be put in place by a rename. Name a folder in it")
    if resolved.name.endswith(PARTIAL):
        raise DestinationError(
            f"{dst} has the name of the unfinished folder of {resolved.name.removesuffix(PARTIAL)!r}, which "
            f"--overwrite would discard; choose a name that does not end in {PARTIAL}"
        )
    if dst.exists() and not dst.is_dir():
        raise DestinationError(f"expected a folder, or nothing, at {dst}; a file is there")
    try:
        current = Path.cwd()
    except FileNotFoundError:  # somebody removed it
        current = Path("/")
    if resolved == current or resolved in current.parents:
        raise DestinationError(
            f"expected a folder of its own for the result, which a rename puts in place; {dst} is, or holds, the "
            f"current folder: name a folder in it, such as {dst / 'converted'}"
        )
    scheme = url_scheme(dst)
    if scheme:
        raise DestinationError(
            f"expected a folder, or the URL of a bucket such as s3://bucket/run; got {dst}, a {scheme}:// URL"
        )
    if not resolved.parent.is_dir():
        raise DestinationError(f"parent directory {resolved.parent} does not exist; create it first")


def check_distinct(src: Path, dst: Path) -> None:
    """Raise OverlapError if `dst` is the source `src`, or one is inside the other."""
    resolved_src, resolved_dst = src.resolve(), dst.resolve()
    if resolved_dst == resolved_src or resolved_src in resolved_dst.parents:
        raise OverlapError(f"the destination {dst} is the source {src} or lies inside it; choose another folder")
    if resolved_dst in resolved_src.parents:
        raise OverlapError(f"the source {src} lies inside the destination {dst}; choose another folder")


def check_apart(dst: Path, root: str, paths: Iterable[str]) -> None:
    """Raise OverlapError if `dst` lies inside the checkpoint at `root`, or holds one of its files `paths`.

    `root`: what the source was resolved to (the tag folder that `latest` names, the folder of a manifest). Readers take
    everything inside it for a part of the checkpoint; `dst` may be beside it, in the folder that a run saves to.
    """
    resolved_dst, checkpoint = dst.resolve(), path_of(root).resolve()
    if checkpoint.is_dir() and checkpoint in resolved_dst.parents:
        raise OverlapError(
            f"the destination {dst} lies inside the source {checkpoint}, whose readers would take it for a part of the "
            "checkpoint; choose a folder beside it"
        )
    inside = [path for path in paths if resolved_dst in path_of(path).resolve().parents]
    if inside:
        raise OverlapError(
            f"the source refers to {format_count(len(inside), 'file')} in the destination {dst}, such as {inside[0]}; "
            "choose another folder"
        )


def check_replaceable(dst: Path, conversion: ConversionId, *, resume: bool, overwrite: bool) -> None:
    """Raise DestinationError if what is at `dst` may not be replaced, or not by this conversion."""
    if not dst.exists() or not any(dst.iterdir()):
        return
    if not (dst / MARK).exists():
        raise DestinationError(
            f"{dst} is not empty, and was not written by ucp (it has no {MARK}); choose another folder, or "
            "remove it yourself"
        )
    if not overwrite and resume:
        raise DestinationError(
            f"{dst} is a finished conversion, made differently{conversion.differences(read_mark(dst).made)}"
            "--resume continues only a conversion of the same source with the same options. Choose another folder, "
            "or replace this one with --overwrite"
        )
    if not overwrite:
        raise DestinationError(f"{dst} is not empty; choose another folder, or pass --overwrite")
    check_foreign(dst, {str(file.relative_to(dst)) for file in files_below(dst)} - set(read_mark(dst).files))


def check_foreign(dst: Path | str, foreign: Collection[str]) -> None:
    """Raise DestinationError if there are `foreign` files at `dst`: files that no conversion wrote or replaces."""
    if foreign:
        raise DestinationError(
            f"{dst} holds {format_count(len(foreign), 'file')} that ucp did not write there; move them away "
            f"first:\n{format_list(sorted(foreign))}"
        )


def other_conversion(
    place: Path | str,
    conversion: ConversionId,
    recorded: Mapping[str, Any],
    *,
    advice: str = "Start over with --overwrite, without --resume",
) -> DestinationError:
    """The error for an unfinished conversion at `place` that is not the one asked for."""
    return DestinationError(
        f"{place} was begun from another source, another version of it, or with other options"
        f"{conversion.differences(recorded.get('made'))}{advice}"
    )
