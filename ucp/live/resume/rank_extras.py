"""State that each rank saved for itself (RNG states, positions of data loaders), and which of it a rank gets.

>>> saved = {rank: Extra(name="dataloader", value=f"at {rank}") for rank in range(2)}
>>> RankExtras({"dataloader": saved}, ranks=2).select(1, ranks=4, policy=RankPolicy.REPLICATE)["dataloader"].value
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
from ucp.errors import LoadError
from ucp.live.run.mesh import RunMesh


class RankPolicy(StrEnum):
    """What to do with the state that each rank saved for itself."""

    DROP = "drop"
    """Ignore it."""
    CARRY = "carry"
    """Each rank gets that of the saved rank with its number; the run must have as many ranks."""
    REPLICATE = "replicate"
    """All ranks get that of rank 0."""


@dataclass(frozen=True, slots=True)
class RankExtras:
    """Extras of single ranks."""

    values: Mapping[str, Mapping[int, Extra]]
    """Name to rank to its extra."""
    ranks: int
    """Ranks of the run that was saved."""

    def select(self, rank: int, *, ranks: int, policy: RankPolicy) -> dict[str, Extra]:
        """What `rank`, in a run of `ranks`, gets. Raises LoadError if it cannot be carried."""
        if policy is RankPolicy.DROP or not self.values:
            return {}
        if policy is RankPolicy.CARRY and ranks != self.ranks:
            raise LoadError(
                f"expected as many ranks as the saved run had, {self.ranks}, to give each rank what it saved for "
                f"itself ({', '.join(self.values)}); got {ranks}. Pass rank_extras='replicate' to give that of rank 0 "
                "to all ranks, or 'drop' to ignore it"
            )
        source = rank if policy is RankPolicy.CARRY else 0
        return {name: by_rank[source] for name, by_rank in self.values.items() if source in by_rank}


def collect_rank_extras(index: Index) -> RankExtras:
    """What each rank saved for itself: extras of one rank, and those whose names contain coordinates of a rank."""
    values: dict[str, dict[int, Extra]] = {}
    for extra in index.extras:
        for name, rank, value in (*_find_by_rank(extra, index), *_find_by_coords(extra, index)):
            values.setdefault(name, {})[rank] = value
    ranks = max((1 + rank for by_rank in values.values() for rank in by_rank), default=1)
    return RankExtras(values, max(ranks, index.topology.ranks))


def _find_by_rank(extra: Extra, index: Index) -> Iterator[tuple[str, int, Extra]]:
    """Extras by rank: values that a rank saved for itself, merged into the value that all ranks share."""
    if extra.is_sidecar:
        if extra.rank is not None:
            yield re.sub(rf"_{extra.rank}(?=\.)", "", extra.name), extra.rank, extra
        return
    by_rank = {other.rank: other.value for other in index.extras if other.name == extra.name}
    if extra.rank is not None and None not in by_rank:
        yield extra.name, extra.rank, extra
    elif extra.rank is None and len(by_rank) > 1:
        for rank in range(index.topology.ranks):
            value, common = by_rank.get(rank, extra.value), extra.value
            if isinstance(value, dict) and isinstance(common, dict):
                value = {**common, **value}
            yield extra.name, rank, replace(extra, value=value, rank=rank)


def _find_by_coords(extra: Extra, index: Index) -> Iterator[tuple[str, int, Extra]]:
    """By coordinates of ranks on the mesh, which are in the name of the extra or in a key of its dict."""
    pattern, topology = run_extras(index).places, index.topology
    if pattern is None or extra.rank is not None:
        return
    inner = extra.value.items() if isinstance(extra.value, dict) else ()
    for name, value in ((extra.name, extra.value), *((f"{extra.name}/{key}", item) for key, item in inner)):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        wanted = {axis: int(text) for axis, text in match.groupdict().items() if axis != "name" and text is not None}
        for rank in range(topology.ranks):
            coords = {**RunMesh.from_topology(topology, rank=rank).coords}
            coords["ep"] = coords["dp"] % topology.ep
            if all(coords[axis] == number for axis, number in wanted.items()):
                is_per_rank = isinstance(value, list) and len(value) in (1, topology.dp)
                entry = value[coords["dp"] % len(value)] if is_per_rank else value
                yield match["name"], rank, replace(extra, value=entry, rank=rank)


_KEYS = {
    "python": ("python", "random", "random_state", "random_rng_state"),
    "numpy": ("numpy", "numpy_random_seed", "np_rng_state"),
    "torch": ("cpu", "torch", "torch_cpu", "torch_manual_seed", "torch_rng_state"),
    "cuda": ("cuda", "torch_cuda_manual_seed", "cuda_rng_state"),
}
"""Generator to the keys under which its state is saved by the Trainer, verl, accelerate, Megatron, MoEvement."""


def find_generators(value: object) -> dict[str, Callable[[], None]]:
    """Generator to a function that sets the state in `value`; empty if `value` is not the RNG states of a rank."""
    if not isinstance(value, dict):
        return {}
    import numpy as np
    import torch

    states = {name: value[key] for name, keys in _KEYS.items() for key in keys if value.get(key) is not None}
    setters: dict[str, Callable[[], None]] = {}
    match states.get("python"):
        case (int(), tuple(), _) as state:
            setters["python"] = lambda: random.setstate(state)
    match states.get("numpy"):
        case (str() as kind, np.ndarray() as keys, int() as position, int() as has, float() as cached):
            setters["numpy"] = lambda: np.random.set_state((kind, keys, position, has, cached))
    cpu_state = states.get("torch")
    if isinstance(cpu_state, torch.Tensor) and cpu_state.dtype is torch.uint8:
        setters["torch"] = lambda: torch.set_rng_state(cpu_state)
    if setters and torch.cuda.is_available():
        match states.get("cuda"):
            case torch.Tensor() as cuda_state:
                setters["cuda"] = lambda: torch.cuda.set_rng_state(cuda_state)
            case list() as cuda_states if len(cuda_states) == torch.cuda.device_count():
                setters["cuda"] = lambda: torch.cuda.set_rng_state_all(cuda_states)
    return setters
