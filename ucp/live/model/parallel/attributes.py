"""What a parameter says of itself, as Megatron marks parameters (megatron-core 0.16.1, tensor_parallel/layers.py)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attributes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Marks on a parameter."""

    dim: int | None = None
    """Dim that tensor-parallel ranks cut, none below 0 but such as are none of its dims; None where it does not say."""
    blocks: int = 1
    """Blocks of that dim, each cut on its own (Megatron's stride: gate and up)."""
    is_expert: bool = False
    """Whether it is not reduced over all data-parallel ranks, as experts are not."""

    @classmethod
    def of(cls, param: object) -> Attributes:
        """The marks of a tensor; those that are not there mean what Megatron takes them for."""
        dim, dims = getattr(param, "partition_dim", None), getattr(param, "ndim", 0)
        is_cut = getattr(param, "tensor_model_parallel", False) is True and isinstance(dim, int)
        if isinstance(dim, int) and -dims <= dim < 0:
            dim += dims
        return cls(
            dim=dim if is_cut else None,
            blocks=max(int(getattr(param, "partition_stride", 1) or 1), 1),
            is_expert=getattr(param, "allreduce", True) is False,
        )
