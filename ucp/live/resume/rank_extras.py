"""What each rank of the saved run kept for itself (random states, places of data loaders), and which of it a rank gets.

>>> saved = {rank: Extra(name="dataloader", value=f"at {rank}") for rank in range(2)}
>>> RankExtras({"dataloader": saved}, ranks=2).of(1, of=4, policy=RankPolicy.REPLICATE)["dataloader"].value
'at 0'
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ucp.contract.registry import run_extras
from ucp.core.index import Extra, Index
from ucp.core.topology import Topology
from ucp.errors import LoadError
from ucp.live.run.mesh import RunMesh


class RankPolicy(StrEnum):
    """What to do with what each rank of the saved run kept for itself."""

    DROP = "drop"
    """Leave it."""
    CARRY = "carry"
    """Each rank gets what the rank of its number had; the run has to have as many."""
    REPLICATE = "replicate"
    """All get what rank 0 had."""


@dataclass(frozen=True, slots=True)
class RankExtras:
    """Extras of single ranks."""

    values: Mapping[str, Mapping[int, Extra]]
    """Name to rank to its own."""
    ranks: int
    """Ranks of the run that was saved."""

    def select(self, rank: int, *, of: int, policy: RankPolicy) -> dict[str, Extra]:
        """What a rank of a run of so many gets. Raises LoadError where it cannot be carried."""
        if policy is RankPolicy.DROP or not self.values:
            return {}
        if policy is RankPolicy.CARRY and of != self.ranks:
            raise LoadError(
                f"expected as many ranks as were saved, {self.ranks}, to carry what each kept for itself "
                f"({', '.join(self.values)}); got {of}. Pass rank_extras='replicate' for that of rank 0 on all, or "
                "'drop' for none"
            )
        source = rank if policy is RankPolicy.CARRY else 0
        return {name: own[source] for name, own in self.values.items() if source in own}


def collect_rank_extras(index: Index) -> RankExtras:
    """What each rank kept for itself, by the numbers of extras and by the places that the format knows."""
    found: dict[str, dict[int, Extra]] = {}
    for extra in index.extras:
        for name, rank, own in (*_numbered(extra, index), *_placed(extra, index)):
            found.setdefault(name, {})[rank] = own
    ranks = max((1 + rank for every in found.values() for rank in every), default=1)
    return RankExtras(found, max(ranks, index.topology.ranks))


def _numbered(extra: Extra, index: Index) -> Iterator[tuple[str, int, Extra]]:
    """By `Extra.rank`: what a rank has otherwise than all, with what it has like them."""
    if extra.is_sidecar:
        if extra.rank is not None:
            yield re.sub(rf"_{extra.rank}(?=\.)", "", extra.name), extra.rank, extra
        return
    alike = {other.rank: other.value for other in index.extras if other.name == extra.name}
    if extra.rank is not None and None not in alike:
        yield extra.name, extra.rank, extra
    elif extra.rank is None and len(alike) > 1:
        for rank in range(index.topology.ranks):
            value, common = alike.get(rank, extra.value), extra.value
            if isinstance(value, dict) and isinstance(common, dict):
                value = {**common, **value}
            yield extra.name, rank, replace(extra, value=value, rank=rank)


def _placed(extra: Extra, index: Index) -> Iterator[tuple[str, int, Extra]]:
    """By the place of ranks on the mesh, which is in the name or in a key of a dict."""
    pattern = run_extras(index).places
    inner = extra.value.items() if isinstance(extra.value, dict) else ()
    named = ((extra.name, extra.value), *((f"{extra.name}/{key}", own) for key, own in inner))
    for text, value in named if pattern is not None and extra.rank is None else ():
        match = pattern.fullmatch(text) if pattern is not None else None
        if match is not None:
            place = {axis: int(at) for axis, at in match.groupdict().items() if axis != "name" and at is not None}
            for rank, coords in _ranks(index.topology):
                if all(coords[axis] == at for axis, at in place.items()):
                    several = isinstance(value, list) and len(value) in (1, index.topology.dp)
                    entry = value[coords["dp"] % len(value)] if several and isinstance(value, list) else value
                    yield match["name"], rank, replace(extra, value=entry, rank=rank)


def _ranks(topology: Topology) -> Iterator[tuple[int, dict[str, int]]]:
    for rank in range(topology.ranks):
        coords = dict(RunMesh.from_topology(topology, rank=rank).coords)
        yield rank, {**coords, "ep": coords["dp"] % topology.ep}


_KEYS = {
    "python": ("python", "random", "random_state", "random_rng_state"),
    "numpy": ("numpy", "numpy_random_seed", "np_rng_state"),
    "torch": ("cpu", "torch", "torch_manual_seed", "torch_rng_state"),
    "cuda": ("cuda", "torch_cuda_manual_seed", "cuda_rng_state"),
}
"""Generator to what its state is called: by the Trainer, verl, accelerate, Megatron."""


def find_generators(value: object) -> dict[str, Callable[[], None]]:
    """Generator to what gives it the state in `value`; empty for what is not the random states of a rank."""
    if not isinstance(value, dict):
        return {}
    import numpy as np
    import torch

    states = {name: value[key] for name, keys in _KEYS.items() for key in keys if value.get(key) is not None}
    found: dict[str, Callable[[], None]] = {}
    match states.get("python"):
        case (int(), tuple(), _) as state:
            found["python"] = lambda: random.setstate(state)
    match states.get("numpy"):
        case (str() as kind, np.ndarray() as keys, int() as at, int() as has, float() as cached):
            found["numpy"] = lambda: np.random.set_state((kind, keys, at, has, cached))
    held = states.get("torch")
    if isinstance(held, torch.Tensor) and held.dtype is torch.uint8:
        found["torch"] = lambda: torch.set_rng_state(held)
    if found and torch.cuda.is_available():
        match states.get("cuda"):
            case torch.Tensor() as one:
                found["cuda"] = lambda: torch.cuda.set_rng_state(one)
            case list() as every if len(every) == torch.cuda.device_count():
                found["cuda"] = lambda: torch.cuda.set_rng_state_all(every)
    return found
