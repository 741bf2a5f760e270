"""A `torch.save` file that holds a value of a source: tensors of the source become tensors of the new file.

Tensors that shared a place in the source (views of one buffer, tied weights) are each stored whole.
"""

from __future__ import annotations

from pathlib import PurePath

from ucp.core.pickle_values import rebuild
from ucp.core.target import OutputFile, RawCopy
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.io.torch_file.layout import NewStorage, NewTensor, layout_torch_zip

__all__ = ["grafted", "torch_file"]


def torch_file(path: str, value: object) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """The file, and the copies that bring its tensors over."""
    moved: dict[NewStorage, TensorRef] = {}
    layout = layout_torch_zip(grafted(value, moved), folder=PurePath(path).stem)
    raw = tuple(RawCopy(src=ref, path=path, offset=layout.storages[storage]) for storage, ref in moved.items())
    return OutputFile(path=path, nbytes=layout.nbytes, literals=layout.literals, crcs=layout.crcs), raw


def grafted(value: object, moved: dict[NewStorage, TensorRef]) -> object:
    """`value` with every tensor of the source replaced by a new one, noted in `moved` with where it came from.

    Lists, dicts and objects are copied; what was shared stays shared, cycles stay cycles.
    """
    tensors: dict[TensorRef, NewTensor] = {}

    def moved_tensor(leaf: object) -> object:
        if not isinstance(leaf, TensorRef):
            return leaf
        if leaf not in tensors:
            storage = NewStorage(leaf.dtype, leaf.numel)
            tensors[leaf] = NewTensor(storage=storage, shape=leaf.shape, strides=contiguous_strides(leaf.shape))
            if leaf.numel:
                moved[storage] = leaf
        return tensors[leaf]

    return rebuild(value, moved_tensor)
