"""Weights in safetensors beside an optimizer of `torch.save`, as the Trainer and accelerate save them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError
from ucp.io.json_text import NotJson, parsed
from ucp.io.safetensors import read_header
from ucp_formats.torch.files.names import INDEX

__all__ = ["Weights", "read_weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of one or several files of safetensors."""

    tensors: dict[str, TensorRef]
    """Name to tensor"""
    files: tuple[str, ...]
    """Absolute paths."""
    config: Mapping[str, object] = field(default_factory=dict)
    """What `config.json` beside them says of the model"""
    is_in_order: bool = False
    """Whether they stand in the order of the model: safetensors keeps names sorted"""

    def in_order_of(self, names: Sequence[str] | None) -> Weights:
        """The tensors in the order of `names`; as they are where it is not known."""
        if names is None:
            return self
        known = {name: self.tensors[name] for name in names if name in self.tensors}
        return replace(self, tensors={**known, **self.tensors}, is_in_order=len(known) == len(self.tensors))


def read_weights(folder: str, name: str) -> Weights:
    """The tensors of `name`, a file or an index of files. Raises MissingFileError, MalformedError."""
    path = os.path.join(folder, name)
    if name != INDEX:
        return Weights(read_header(path).tensors, (path,), _config(folder))
    places = _weight_map(path)
    files = {own: read_header(os.path.join(folder, own)).tensors for own in sorted(set(places.values()))}
    absent = sorted(key for key, own in places.items() if key not in files[own])
    if absent:
        raise MalformedError(f"{path} names {', '.join(absent[:5])} in files that lack it. Copy the folder again")
    paths = (path, *(os.path.join(folder, own) for own in files))
    return Weights({key: files[own][key] for key, own in places.items()}, paths, _config(folder))


def _config(folder: str) -> Mapping[str, object]:
    """What `config.json` says; nothing where there is none."""
    path = os.path.join(folder, "config.json")
    return _document(path) if os.path.exists(path) else {}


def _document(path: str) -> dict[str, object]:
    try:
        document = parsed(Path(path).read_bytes())
    except NotJson as error:
        raise MalformedError(f"{path}: expected JSON; {error}. Copy it again") from error
    if not isinstance(document, dict):
        raise MalformedError(f"{path}: expected a JSON object; got a {type(document).__name__}. Copy it again")
    return document


def _weight_map(path: str) -> dict[str, str]:
    """Tensor to the file that holds it, as the index says."""
    places = _document(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(own, str) and "/" not in own for own in places.values()):
        raise MalformedError(f"{path}: expected a weight_map from tensor to the file that holds it. Copy it again")
    return places
