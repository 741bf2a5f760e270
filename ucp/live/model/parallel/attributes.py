"""What a parameter says of itself, as Megatron marks parameters (megatron-core 0.16.1, tensor_parallel/layers.py)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attributes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Marks on a parameter."""

    dim: int | None = None
    """Dim that tensor-parallel ranks cut; None where it does not say, or is whole."""
    blocks: int = 1
    """Blocks of that dim, each cut on its own (Megatron's stride: gate and up)."""
    is_expert: bool = False
    """Whether it is not reduced over all data-parallel ranks, as experts are not."""

    @classmethod
    def of(cls, param: object) -> Attributes:
        """The marks of a tensor; those that are not there mean what Megatron takes them for."""
        dim = getattr(param, "partition_dim", -1)
        is_cut = getattr(param, "tensor_model_parallel", False) is True and isinstance(dim, int) and dim >= 0
        return cls(
            dim=dim if is_cut else None,
            blocks=max(int(getattr(param, "partition_stride", 1) or 1), 1),
            is_expert=getattr(param, "allreduce", True) is False,
        )
