"""What a source holds beside tensors of parameters, found again by the names that DeepSpeed's files give it.

A source of another framework may lack any of it; then DeepSpeed's own defaults stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.contract.companions import is_companion
from ucp.contract.run_extras import MODULE_STATE
from ucp.core.index import TAG, Index
from ucp_formats.deepspeed.read.extras import UNSTEPPED

__all__ = ["CarriedExtras"]

_PER_OPTIMIZER_FILE = frozenset({"loss_scaler", "optimizer"})
"""Extras that each rank keeps in its own file under stages 1 to 3; the others, under stage 3 only."""
_PLACED = _PER_OPTIMIZER_FILE | {
    "engine",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
    "num_experts",
    "pipeline",
    "ds_config",
    "client_state",
    "module_metadata",
    TAG,
    UNSTEPPED,
}
"""Extras that have a place in DeepSpeed's files."""
_PLACED_BELOW = ("client_state/", MODULE_STATE, "buffer/")
"""Prefixes of more of them."""


class CarriedExtras:
    """Extras of an index, by name and rank.

    `ranks`, `stage`: of the target. The values that ranks of the source had for themselves are given back only when the
    target has as many ranks.
    """

    def __init__(self, index: Index, *, ranks: int, stage: int) -> None:
        self._common: dict[str, object] = {}
        self._own: dict[tuple[str, int], object] = {}
        for extra in index.extras:
            if is_companion(extra):
                continue
            if extra.rank is None:
                self._common[extra.name] = extra.value
            else:
                self._own[extra.name, extra.rank] = extra.value
        self._same_ranks = ranks == index.topology.dp
        self._stage = stage

    def get(self, name: str, rank: int = 0) -> object:
        """Value of `name` for `rank`: its own where it may have one, over the common one; None if there is none."""
        common = self._common.get(name)
        own = self._own.get((name, rank if self._same_ranks else 0))
        if own is None or (common is not None and not self._same_ranks):
            return common
        return {**common, **own} if isinstance(common, dict) and isinstance(own, dict) else own

    def mapping(self, name: str, rank: int = 0) -> Mapping[str, object]:
        """Value of `name` as a mapping; empty if it is none."""
        found = self.get(name, rank)
        return found if isinstance(found, dict) else {}

    def below(self, prefix: str, rank: int = 0) -> Iterator[tuple[str, object]]:
        """Extras whose name starts with `prefix`, by the rest of the name; those that `rank` has a value of."""
        for name in self._names():
            if name.startswith(prefix) and (value := self.get(name, rank)) is not None:
                yield name.removeprefix(prefix), value

    def client_state(self, rank: int = 0) -> dict[str, object]:
        """What the training script saved of its own, by key."""
        return {**self.mapping("client_state", rank), **dict(self.below("client_state/", rank))}

    def left_behind(self) -> tuple[str, ...]:
        """What of the extras does not go into the target, one line per reason."""
        lines = []
        lost = sorted({name for name, rank in self._own if rank > 0 and not self._keeps_own(name)})
        if lost:
            why = "one file holds them for all" if self._same_ranks else "the number of ranks changes"
            lines.append(f"values of single ranks are left out, as {why} (rank 0's are kept): {', '.join(lost)}")
        foreign = sorted(name for name in self._names() if name not in _PLACED and not name.startswith(_PLACED_BELOW))
        if foreign:
            lines.append(f"DeepSpeed's files have no place for these extras: {', '.join(foreign)}")
        return tuple(lines)

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._common, *(name for name, _ in self._own)]))

    def _keeps_own(self, name: str) -> bool:
        """Whether the files of the target have room for a value of each rank."""
        return self._same_ranks and self._stage >= (1 if name in _PER_OPTIMIZER_FILE else 3)
