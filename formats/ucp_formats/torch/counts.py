"""States that are one number for a whole parameter, as torch's optimizers keep them: 0-d, and `step` in float32."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ucp.core.dtypes import DType
from ucp.core.index import Index
from ucp.core.names import STEP
from ucp.core.target import TargetPlan
from ucp.errors import UnsupportedError, counted
from ucp.transfer.probe import Prober

__all__ = ["Counts"]


class Counts:
    """Reads them, and remembers which were cast."""

    def __init__(self, index: Index, prober: Prober) -> None:
        self._index = index
        self._prober = prober
        self._casts: Counter[str] = Counter()

    def of(self, param: str, name: str) -> tuple[DType, bytes]:
        """Type and bytes of a parameter's state. Raises UnsupportedError for one with dims."""
        state = self._index.atoms[param].states[name]
        if state.global_shape:
            raise UnsupportedError(
                f"{self._index.path} keeps {name} as a tensor of shape {list(state.global_shape)}, torch's optimizers "
                "as one without dims. Leave the optimizer out (--include '*/weight'), or take another target"
            )
        ref = state.fragments[0].ref
        if name != STEP or state.dtype is DType.FLOAT32:
            return state.dtype, self._prober.window(ref, 0, 1)
        self._casts[f"{name}: {state.dtype} -> {DType.FLOAT32}"] += 1
        return DType.FLOAT32, self._prober.window(ref, 0, 1, dtype=DType.FLOAT32)

    def told(self, plan: TargetPlan) -> TargetPlan:
        """`plan`, which names their casts, too."""
        lines = (f"{change} in {counted(count, 'parameter')}" for change, count in self._casts.items())
        return replace(plan, casts=(*plan.casts, *lines))
