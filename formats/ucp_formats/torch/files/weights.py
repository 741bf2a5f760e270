"""Weights in safetensors beside an optimizer of `torch.save`, as the Trainer and accelerate save them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.contract.model.arguments import config_in
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError
from ucp.io.safetensors import read_header, read_weight_map
from ucp_formats.torch.files.locate import INDEX

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
        return Weights(read_header(path).tensors, (path,), config_in(folder))
    places = read_weight_map(path)
    files = {own: read_header(os.path.join(folder, own)).tensors for own in sorted(set(places.values()))}
    absent = sorted(key for key, own in places.items() if key not in files[own])
    if absent:
        raise MalformedError(f"{path} names {', '.join(absent[:5])} in files that lack it. Copy the folder again")
    paths = (path, *(os.path.join(folder, own) for own in files))
    return Weights({key: files[own][key] for key, own in places.items()}, paths, config_in(folder))
