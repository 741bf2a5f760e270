"""Weights in safetensors beside an optimizer of `torch.save` (Trainer, accelerate), and shapes that a user gives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from ucp.contract.model import read_config
from ucp.contract.registry import recognise
from ucp.core.index import Kind
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, format_list
from ucp.io.files import read_object
from ucp.io.safetensors import read_header, read_weight_map
from ucp_formats.torch.files.flat.lengths import Shapes
from ucp_formats.torch.files.locate import INDEX


@dataclass(frozen=True, slots=True)
class SafetensorsWeights:
    """Tensors of one or several safetensors files."""

    tensors: dict[str, TensorRef]
    """Name to tensor."""
    files: tuple[str, ...]
    """Absolute paths."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The `config.json` beside them."""
    is_in_order: bool = False
    """Whether they are in the order of the model: safetensors keeps names sorted."""

    def in_order_of(self, names: Sequence[str] | None) -> SafetensorsWeights:
        """The tensors in the order of `names`; unchanged if that is None."""
        if names is None:
            return self
        known = {name: self.tensors[name] for name in names if name in self.tensors}
        return replace(self, tensors={**known, **self.tensors}, is_in_order=len(known) == len(self.tensors))


def read_weights(folder: str, name: str) -> SafetensorsWeights:
    """The tensors of `name`, a file or an index of files. Raises MissingFileError, MalformedError."""
    path = os.path.join(folder, name)
    if name != INDEX:
        return SafetensorsWeights(read_header(path).tensors, (path,), read_config(folder))
    places = read_weight_map(path)
    files = {file: read_header(os.path.join(folder, file)).tensors for file in sorted(set(places.values()))}
    absent = sorted(key for key, file in places.items() if key not in files[file])
    if absent:
        raise MalformedError(f"{path} lists tensors that are not there: {', '.join(absent[:5])}. Copy the folder again")
    paths = (path, *(os.path.join(folder, file) for file in files))
    return SafetensorsWeights({key: files[file][key] for key, file in places.items()}, paths, read_config(folder))


def shapes_from(path: Path) -> Shapes:
    """Shapes of parameters in the order of the model, from the user's `--shapes-from`.

    `path`: JSON of name to shape, in the order of `model.named_parameters()`, or a checkpoint of the same model, except
    safetensors, which keeps names sorted. Raises SourceError.
    """
    if path.suffix != ".json":
        if path.suffix == ".safetensors" or any(path.glob("*.safetensors")):
            raise UnsupportedError(
                f"{path} holds safetensors, which keeps names sorted; FSDP1 needs them in the order in which the model "
                "registers its parameters. Pass a file of torch.save (pytorch_model.bin), another checkpoint of the "
                "run, or json.dump({name: list(param.shape) for name, param in model.named_parameters()}, file)"
            )
        fmt, _ = recognise(path)
        atoms = fmt.read(path).atoms.values()
        return {atom.name: atom.global_shape for atom in atoms if atom.kind is not Kind.BUFFER}
    document = read_object(str(path))
    wrong = [name for name, shape in document.items() if not _is_shape(shape)]
    if not document or wrong:
        raise MalformedError(
            f'{path}: expected name to shape, such as {{"emb.weight": [11, 8]}}; got something else for\n'
            f"{format_list(wrong or ['the document'])}"
        )
    return {name: tuple(shape) for name, shape in document.items() if _is_shape(shape)}


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
