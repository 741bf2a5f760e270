"""What a source holds beside tensors of parameters, found again by the names that DeepSpeed's files give it.

A source of another framework may lack any of it; then DeepSpeed's own defaults stand.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.atom import Index

__all__ = ["CarriedExtras"]

_PLACED = (
    "engine",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "ds_config",
    "client_state",
    "loss_scaler",
    "optimizer",
    "module_metadata",
)
"""Extras that have a place in DeepSpeed's files."""


class CarriedExtras:
    """Extras of an index, by name and rank.

    `ranks`: how many ranks the target has. The values that ranks of the source had for themselves are given back only
    when the target has as many.
    """

    def __init__(self, index: Index, *, ranks: int) -> None:
        self._common: dict[str, object] = {}
        self._own: dict[tuple[str, int], object] = {}
        for extra in index.extras:
            if extra.rank is None:
                self._common[extra.name] = extra.value
            else:
                self._own[extra.name, extra.rank] = extra.value
        self._same_ranks = ranks == index.topology.dp

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

    def client_state(self, rank: int = 0) -> dict[str, object]:
        """What the training script saved of its own, by key."""
        prefix = "client_state/"
        names = dict.fromkeys([*self._common, *(name for name, _ in self._own)])
        single = {name.removeprefix(prefix): self.get(name, rank) for name in names if name.startswith(prefix)}
        return {**self.mapping("client_state", rank), **single}

    def notes(self) -> tuple[str, ...]:
        """What of the extras does not go into the target, one line per reason."""
        lines = []
        several = sorted({name for name, rank in self._own if rank > 0})
        if several and not self._same_ranks:
            kept = "the values common to all are kept, rank 0's where there are none"
            lines.append(f"{', '.join(several)} of single ranks are left out, as the number of ranks changes: {kept}")
        names = {*self._common, *(name for name, _ in self._own)}
        foreign = sorted(name for name in names if name not in _PLACED and not name.startswith("client_state/"))
        if foreign:
            lines.append(f"DeepSpeed's files have no place for these extras, left out: {', '.join(foreign)}")
        return tuple(lines)
