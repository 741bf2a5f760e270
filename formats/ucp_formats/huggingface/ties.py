"""Tied weights of torch files: two names of one storage."""

from __future__ import annotations

from collections.abc import Mapping

from ucp_formats.huggingface.weights import SavedTensor

__all__ = ["second_names"]


def second_names(tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Names of tensors that lie where another lies, with the name of that: torch files keep a storage once."""
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, own in tensors.items():
        if len(own.fragments) != 1 or not own.fragments[0].box.numel:
            continue
        other = first.setdefault(own.fragments[0].ref, name)
        if other != name:
            found[name] = other
    return found
