"""The shape of a training run: how many ranks along each axis of the device mesh.

>>> Topology.parse("dp=4,zero=3")
Topology(dp=4, tp=1, pp=1, ep=1, cp=1, zero=3, vpp=1, etp=None, dp_replicate=None, dp_shard=None)
>>> str(Topology(dp=2, tp=4, ep=2, etp=1))
'dp=2,tp=4,ep=2,etp=1'
>>> Topology.parse("dp_replicate=2,dp_shard=4").dp
8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ucp.errors import TopologyError, format_count

AXES = ("dp", "tp", "pp", "ep", "cp")
"""Axes of the device mesh: data, tensor, pipeline, expert and context parallel."""


_SPLIT = ("dp_replicate", "dp_shard")

MOST_RANKS = 100_000
"""Most ranks along one axis; a larger number is taken for a typing error."""


ExpertsByRank: TypeAlias = tuple[tuple[int, ...], ...]
"""Experts of each expert-parallel rank, in its order."""


@runtime_checkable
class PlacesExperts(Protocol):
    """What says which experts each expert-parallel rank holds: a `ucp.Placement`."""

    @property
    def experts_by_rank(self) -> Mapping[int, ExpertsByRank]:
        """Number of a layer to the experts of each rank."""


def list_experts(placement: PlacesExperts, ep: int) -> Mapping[int, ExpertsByRank]:
    """`experts_by_rank` of a placement. Raises TopologyError if it is not for `ep` ranks."""
    layers = placement.experts_by_rank
    wrong = next((ranks for ranks in layers.values() if len(ranks) != ep), None)
    if wrong is not None:
        raise TopologyError(
            f"expected a placement on {format_count(ep, 'GPU')}, one for each expert-parallel rank (ep={ep} in the "
            f"topology); got one on {len(wrong)}"
        )
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Degrees of parallelism, and how far ZeRO partitions over `dp`."""

    dp: int = 1
    """Ranks that hold the same model, or partition its states (ZeRO, FSDP)."""
    tp: int = 1
    """Ranks a tensor is cut over."""
    pp: int = 1
    """Ranks the layers are cut over."""
    ep: int = 1
    """Ranks the experts are cut over."""
    cp: int = 1
    """Ranks a sequence is cut over."""
    zero: int | None = None
    """ZeRO stage, 0 to 3; None for a framework without ZeRO."""
    vpp: int = 1
    """Model chunks (consecutive layers) that every pipeline stage holds (Megatron's virtual pipeline)."""
    etp: int | None = None
    """Ranks an expert's tensor is cut over (Megatron's expert tensor parallel); None: as many as `tp`."""
    dp_replicate: int | None = None
    """Factor of `dp`: number of replicas of the shards (HSDP); None if `dp` is not split."""
    dp_shard: int | None = None
    """Factor of `dp`: ranks that partition the states of one replica; None if `dp` is not split."""
    placement: PlacesExperts | None = field(default=None, repr=False, hash=False)
    """Which experts each of `ep` ranks holds; None: the first ones on rank 0, and so on. `parse` does not read it."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "vpp", "etp", *_SPLIT):
            degree = getattr(self, axis)
            if axis in ("etp", *_SPLIT) and degree is None:
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise TopologyError(f"expected a whole number >= 1 for {axis}; got {degree!r}")
            if degree > MOST_RANKS:
                raise TopologyError(f"expected at most {MOST_RANKS:,} ranks along {axis}; got {degree:,}")
        if self.zero is not None and self.zero not in (0, 1, 2, 3):
            raise TopologyError(f"expected a ZeRO stage of 0, 1, 2 or 3; got zero={self.zero!r}")
        if self.vpp > 1 and self.pp == 1:
            raise TopologyError(f"expected pp above 1 with a virtual pipeline; got vpp={self.vpp}, pp=1")
        if self.placement is not None:
            list_experts(self.placement, self.ep)
        if not self.is_split:
            return
        known_degree = self.dp_replicate or self.dp_shard or 1  # one of the two factors may be left out
        other = 1 if self.dp == 1 else self.dp // known_degree
        replicas, shards = self.dp_replicate or other, self.dp_shard or other
        if self.dp not in (1, replicas * shards):
            raise TopologyError(
                f"expected dp to be dp_replicate x dp_shard; got dp={self.dp} and "
                f"{self.dp_replicate or '?'} x {self.dp_shard or '?'}. Leave dp out"
            )
        for name, value in (("dp", replicas * shards), ("dp_replicate", replicas), ("dp_shard", shards)):
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Topology written as `axis=degree` pairs with commas between. Raises TopologyError."""
        known = [axis.name for axis in fields(cls) if axis.name != "placement"]
        degrees: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            axis, equals, degree = (piece.strip() for piece in part.partition("="))
            if axis not in known or not equals or not degree.isascii() or not degree.isdigit():
                raise TopologyError(
                    f"expected axis=degree with one of {', '.join(known)}; got {part!r} in {text!r}. "
                    "Write it like dp=4,zero=3"
                )
            if axis in degrees:
                raise TopologyError(f"{axis} is given twice in {text!r}")
            degrees[axis] = int(degree)
        if not degrees:
            raise TopologyError(f"expected axis=degree pairs such as dp=4,zero=3; got {text!r}")
        return cls(**degrees)

    @property
    def is_split(self) -> bool:
        """Whether `dp` is given as replicas times shards (HSDP)."""
        return self.dp_replicate is not None or self.dp_shard is not None

    @property
    def replicas(self) -> int:
        """Replicas of the shards along `dp`, in FSDP's terms; 1 if `dp` is not split."""
        return self.dp_replicate or 1

    @property
    def shards(self) -> int:
        """Ranks along `dp` that FSDP partitions over."""
        return self.dp_shard or self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks an expert's tensor is cut over."""
        return self.tp if self.etp is None else self.etp

    @property
    def ranks(self) -> int:
        """Ranks of the run; `ep` and `etp` only group the same ranks in another way."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        """The text that `parse` reads: always `dp` or its two factors, other axes if they differ from their default."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in (_SPLIT if self.is_split else ("dp",))]
        parts += [f"{axis}={getattr(self, axis)}" for axis in (*AXES[1:], "vpp") if getattr(self, axis) > 1]
        if self.etp is not None:
            parts.append(f"etp={self.etp}")
        if self.zero is not None:
            parts.append(f"zero={self.zero}")
        return ",".join(parts)
