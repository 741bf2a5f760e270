"""The numbers of a run that decide how often to save.

>>> Range.parse("2-4"), Range.parse("25GB")
(Range(low=2.0, high=4.0), Range(low=25000000000.0, high=25000000000.0))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from math import inf, prod

from ucp.core.index import Index, Kind
from ucp.errors import UsageError
from ucp.moe.layers import find_layers

_NUMBER = re.compile(r"(?P<digits>\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(?P<prefix>[kKMGT]?)(?P<unit>i?B)?")
"""A number with an optional prefix and unit. Examples: 2.5, 1e9, 14G, 25GB, 4GiB."""


_MOST = 1e18
"""No number of a run is larger."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number that is not known exactly: it is between two."""

    low: float
    """The least that it may be."""
    high: float
    """The most."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < inf:
            raise UsageError(f"expected a number of 0 or more, or a range such as 2-4; got {self.low} to {self.high}")

    @classmethod
    def parse(cls, value: Range | float | str) -> Range:
        """The range of a number, or of text such as "2-4" or "2..4". Raises UsageError."""
        if isinstance(value, Range):
            return value
        ends = re.split(r"\.\.|(?<![eE])-", value) if isinstance(value, str) else [value]
        try:
            low, *high = map(_to_number, ends)
            if len(high) > 1:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"expected a number such as 14e9 or 25GB, or a range such as 2-4; got {value!r}") from None
        return cls(low, high[0] if high else low)


def _to_number(value: str | float) -> float:
    """The number that `value` is. Raises ValueError."""
    match = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return float(value)
    base = 1024 if match["unit"] == "iB" else 1000
    return float(match["digits"]) * float(base ** "_KMGT".index(match["prefix"].upper() or "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, and the machine that it is on. All ranks together, if a field says nothing else."""

    iter_time: float
    """Seconds of an iteration."""
    mtbf: float
    """Seconds between failures, the mean."""
    params_dense: float
    """Parameters outside experts."""
    params_expert: float = 0
    """Parameters of all experts of all layers."""
    experts: int = 1
    """Experts of a layer."""
    moe_layers: int = 1
    """Layers with experts."""
    bandwidth: float
    """Bytes that go to storage per second."""
    copy_bandwidth: float = 0
    """Bytes that are copied from GPUs to hosts per second; 0: the copy takes no time."""
    peer_bandwidth: float = 0
    """Bytes that are copied to the memory of other hosts per second; 0: nothing is."""
    overlap: float = 0.5
    """Share of an iteration in which copies run beside the computation without slowing it down: forward, backward."""
    restart: float = 0
    """Seconds from a failure until states are loaded, without loading."""
    weight_nbytes: float = 2
    """Bytes of a parameter with which the model computes."""
    state_nbytes: float = 12
    """Bytes of its optimizer states: an fp32 master and two moments."""
    iterations: float = 100_000
    """Iterations of the whole run, over which lost tokens are counted."""
    max_plt: float = 0.0375
    """Proportion of tokens that experts may lose (MoC-System: 3.75 %)."""

    def __post_init__(self) -> None:
        positive = ("iter_time", "mtbf", "bandwidth", "experts", "moe_layers", "state_nbytes", "iterations")
        wrong = [name for name in positive if getattr(self, name) <= 0]
        wrong += [field.name for field in fields(self) if (n := getattr(self, field.name)) and not 1e-9 <= n <= _MOST]
        wrong += ["params_expert"] if 0 < self.params_expert < self.experts * self.moe_layers else []
        if wrong or not 0 <= self.overlap <= 1 or self.params_dense + self.params_expert <= 0:
            named = wrong or (["overlap"] if not 0 <= self.overlap <= 1 else ["params_dense"])
            shown = ", ".join(f"{name} {getattr(self, name):g}" for name in dict.fromkeys(named))
            raise UsageError(
                f"expected positive numbers that describe a run, 1e-9 to 1e18, and an overlap of 0 to 1; got {shown}"
            )

    @property
    def params(self) -> float:
        """All parameters."""
        return self.params_dense + self.params_expert

    @property
    def nbytes(self) -> float:
        """Bytes of a full save: compute weights and optimizer states (MoC-System eq. 5)."""
        return self.params * (self.weight_nbytes + self.state_nbytes)

    def copy_time(self, nbytes: float) -> float:
        """Seconds to copy bytes from GPUs to hosts."""
        return nbytes / self.copy_bandwidth if self.copy_bandwidth else 0.0


def corners(values: Mapping[str, Range]) -> Iterator[dict[str, float]]:
    """Every combination of the ends of ranges: what is monotone in each is least and most at two of them."""
    ends = [sorted({value.low, value.high}) for value in values.values()]
    for chosen in product(*ends):
        yield dict(zip(values, chosen, strict=True))


def count_params(index: Index) -> dict[str, float]:
    """`params_dense`, `params_expert`, `experts` and `moe_layers` of a checkpoint; buffers are not counted."""
    layers = find_layers(index.shapes)
    experts = {tensor.param for layer in layers for tensors in layer.experts.values() for tensor in tensors.values()}
    counts = {name: prod(atom.global_shape) for name, atom in index.atoms.items() if atom.kind is not Kind.BUFFER}
    in_experts = sum(count for name, count in counts.items() if name in experts)
    return {
        "params_dense": sum(counts.values()) - in_experts,
        "params_expert": in_experts,
        "experts": max((layer.num_experts for layer in layers), default=1),
        "moe_layers": max(len(layers), 1),
    }
