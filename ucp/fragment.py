"""A fragment: which part of a whole tensor some stored bytes are.

>>> from ucp.dtypes import DType
>>> ref = TensorRef(path="shard", offset=0, dtype=DType.FLOAT32, shape=(2, 4), strides=(4, 1))
>>> Fragment(box=Box((1, 0), (2, 4)), ref=ref).box.numel
8
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.region import Box
from ucp.tensor import Tensor, TensorRef

__all__ = ["Fragment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A piece of a source: a box of the whole, and where its elements lie."""

    box: Box
    """Elements of the global tensor."""
    ref: Tensor
    """Where they are stored; its shape is the size of the box."""
    replica: int = 0
    """0: the bytes to take. Above: a copy that must be equal (after a cast, where its dtype is narrower)."""
    term: int = 0
    """Which summand of a mean it is, where the state combines by MEAN."""
    derived: bool = False
    """Whether a rank computed it from what it stores as well (the model's own weight beside its master): compared like
    any copy, but no rank's word on the value."""

    def __post_init__(self) -> None:
        if self.ref.shape != self.box.sizes:
            raise ValueError(f"{self.ref.shape} elements stored for a box of {self.box.sizes}")

    @property
    def path(self) -> str | None:
        """File of the bytes, or None when they stand in the index itself."""
        return self.ref.path if isinstance(self.ref, TensorRef) else None
