"""Tensors that are to be written: views of storages whose bytes come later.

>>> storage = NewStorage(DType.FLOAT32, 6)
>>> NewTensor(storage=storage, shape=(2, 3), strides=(3, 1)).storage.nbytes
24
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.dtypes import DType

__all__ = ["NewStorage", "NewTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """Elements to be written, shared by the tensors that view them; two storages are never equal."""

    dtype: DType
    """Element type."""
    numel: int
    """Elements."""

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"expected a number of elements >= 0; got {self.numel}")

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTensor:
    """A tensor to be written: a view of a new storage."""

    storage: NewStorage
    """Where its elements will lie."""
    offset: int = 0
    """Element of the storage that is [0, ..., 0]."""
    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the storage per dim."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or min((self.offset, *self.shape, *self.strides)) < 0:
            raise ValueError(f"not a tensor: shape {self.shape}, strides {self.strides}, offset {self.offset}")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and last >= self.storage.numel:
            raise ValueError(f"a tensor of shape {self.shape} lies past the end of {self.storage}")
