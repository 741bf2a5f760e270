"""Shapes of parameters in the order of their model, from what a user points to.

    shapes.json     {"emb.weight": [11, 8], ...} in the order of `model.named_parameters()`
    anything else   a checkpoint of the same model; its order is that of the model

Safetensors keeps names sorted: a flat parameter cannot be taken apart by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

from ucp.contract.registry import recognise
from ucp.core.index import Kind
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.io.json_text import read_object
from ucp_formats.torch.files.flat.lengths import Shapes

__all__ = ["shapes_from"]


def shapes_from(path: Path) -> Shapes:
    """The shapes. Raises MissingFileError, MalformedError, UnsupportedError, and SourceError for a checkpoint."""
    if path.suffix != ".json":
        if path.suffix == ".safetensors" or any(path.glob("*.safetensors")):
            raise UnsupportedError(
                f"{path} holds safetensors, which keeps names sorted; FSDP1 needs them in the order in which the model "
                "registers its parameters. Pass a file of torch.save (pytorch_model.bin), another checkpoint of the "
                "run, or json.dump({name: list(own.shape) for name, own in model.named_parameters()}, file)"
            )
        fmt, _ = recognise(path)
        atoms = fmt.read(path).atoms.values()
        return {atom.name: atom.global_shape for atom in atoms if atom.kind is not Kind.BUFFER}
    said = read_object(str(path))
    wrong = [name for name, own in said.items() if not _is_shape(own)]
    if not said or wrong:
        raise MalformedError(
            f'{path}: expected name to shape, such as {{"emb.weight": [11, 8]}}; got another for\n'
            f"{listed(wrong or ['the document'])}"
        )
    return {name: tuple(own) for name, own in said.items() if _is_shape(own)}


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(own) is int and own >= 0 for own in value)
