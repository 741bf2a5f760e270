"""Which checkpoints of real DeepSpeed are resumed, and as what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures" / "deepspeed"


@dataclass(frozen=True, slots=True)
class Target:
    """The run that is to load a destination."""

    stage: int
    ranks: int

    @property
    def label(self) -> str:
        return f"z{self.stage} DP{self.ranks}"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that real DeepSpeed wrote, kept in fixtures/."""

    name: str
    label: str
    dtype: str
    targets: tuple[Target, ...]
    config: Mapping[str, object] | None = None
    """Configuration of the target in place of the source's own additions."""
    unseen: str = ""
    """A state that the truth cannot gather from every target, as its layout depends on the ranks."""
    universal: tuple[Target, ...] = ()
    """Targets that load it as a universal checkpoint; for sources of the matrix it is all of theirs."""
    universal_fails: tuple[Target, ...] = ()
    """Targets that DeepSpeed cannot load it into as a universal checkpoint."""

    @property
    def folder(self) -> Path:
        return FIXTURES / self.name

    @property
    def truth(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "truth.json").read_text())
        return found

    @property
    def scheduled(self) -> bool:
        return self.truth["lr_scheduler"] is not None


TARGETS = (Target(0, 2), Target(1, 1), Target(1, 2), Target(2, 2), Target(3, 2), Target(3, 4))

SOURCES = (
    Source("z0-fp32", "z0 fp32", "fp32", TARGETS),
    Source("z0-bf16", "z0 bf16", "bf16", TARGETS),
    Source("z1-dp4-fp32", "z1 DP4 fp32", "fp32", TARGETS),
    Source("z1-dp4-bf16", "z1 DP4 bf16 (BF16_Optimizer)", "bf16", TARGETS),
    Source("z2-dp4-bf16", "z2 DP4 bf16", "bf16", TARGETS),
    Source("z3-dp4-fp32", "z3 DP4 fp32", "fp32", TARGETS),
    Source("z3-dp3-uneven", "z3 DP3 uneven fp32", "fp32", TARGETS),
)

SAME = {"z0-fp32": Target(0, 2), "z3-dp4-fp32": Target(3, 4)}
"""Sources of which DeepSpeed also resumes its own files, as the stage and ranks that wrote them: processors round
differently, so that losses are compared exactly only with those of the same machine."""

_WHOLE_GRADIENTS = {"zero_optimization": {"reduce_scatter": False}}
"""Needed by Muon under stage 3."""

OTHERS = (
    Source("z0-fp16", "z0 DP2 fp16, FusedAdam (FP16_Optimizer)", "fp16", (Target(0, 1), Target(1, 2), Target(3, 4))),
    Source("z0-fp16-unfused", "z0 DP2 fp16 (FP16_UnfusedOptimizer)", "fp16", (Target(0, 1), Target(2, 4))),
    Source(
        "z1-dp2-fp16",
        "z1 DP2 fp16, a loss scale that moved",
        "fp16",
        (Target(0, 2), Target(1, 4), Target(3, 2)),
        universal=(Target(2, 4), Target(3, 2)),
    ),
    Source("z3-dp2-fp16", "z3 DP2 fp16, a loss scale that moved", "fp16", (Target(0, 2), Target(2, 4))),
    Source(
        "z1-dp2-sgd",
        "z1 DP2, SGD with momentum",
        "fp32",
        (Target(0, 2), Target(2, 4), Target(3, 2)),
        universal=(Target(1, 4), Target(2, 1)),
        universal_fails=(Target(3, 2),),
    ),
    Source(
        "z0-bf16-unstepped",
        "z0 DP2 bf16, saved before the first step",
        "bf16",
        (Target(0, 2), Target(1, 4), Target(3, 2)),
        universal=(Target(2, 2),),
    ),
    Source(
        "z1-dp2-counting",
        "z1 DP2, counts in a tensor of one element",
        "fp32",
        (Target(0, 2), Target(1, 4), Target(2, 1), Target(3, 2)),
    ),
    Source("z1-dp2-client-adamw", "z1 DP2, an optimizer made by the script", "fp32", (Target(2, 4), Target(3, 1))),
    Source(
        "z2-dp2-fused-adam",
        "z2 DP2, FusedAdam",
        "fp32",
        (Target(0, 1), Target(1, 4), Target(3, 2)),
        universal=(Target(1, 4), Target(3, 2)),
    ),
    Source(
        "z2-dp2-cpu-adam", "z2 DP2, CPUAdam offloaded", "fp32", (Target(1, 1), Target(3, 4)), universal=(Target(3, 4),)
    ),
    Source(
        "z2-dp2-lion",
        "z2 DP2, CPULion offloaded",
        "fp32",
        (Target(2, 1), Target(3, 4)),
        universal=(Target(1, 4), Target(3, 2)),
    ),
    Source("z3-dp2-lion", "z3 DP2, CPULion offloaded", "fp32", (Target(2, 4), Target(3, 1))),
    Source(
        "z2-dp2-muon",
        "z2 DP2, Muon",
        "fp32",
        (Target(1, 4), Target(3, 2)),
        _WHOLE_GRADIENTS,
        "momentum_buffer",
        universal=(Target(2, 1),),
        universal_fails=(Target(1, 4), Target(3, 2)),
    ),
    Source("z3-dp2-muon", "z3 DP2, Muon", "fp32", (Target(2, 2), Target(3, 4)), _WHOLE_GRADIENTS),
    Source(
        "z1-dp2-bf16-muon",
        "z1 DP2 bf16, Muon in BF16_Optimizer",
        "bf16",
        (Target(1, 1), Target(1, 4)),
        universal=(Target(1, 4),),
    ),
    Source(
        "z2-dp4-fp32-roundrobin",
        "z2 DP4, round robin",
        "fp32",
        (Target(1, 4), Target(2, 2), Target(3, 2)),
        universal=(Target(3, 4),),
        universal_fails=(Target(2, 2),),
    ),
    Source("z2-dp4-alignment", "z2 DP4, aligned parameters", "fp32", (Target(2, 2), Target(3, 4))),
    Source("z2-dp4-roundrobin-alignment", "z2 DP4, both", "fp32", (Target(1, 2), Target(3, 1))),
    Source(
        "z2-dp2-bf16-masters",
        "z2 DP2, bf16 masters and moments",
        "bf16",
        (Target(2, 4), Target(3, 2)),
        universal=(Target(2, 4),),
    ),
    Source(
        "z2-dp2-client-state",
        "z2 DP2, client state and schedule",
        "fp32",
        (Target(0, 2), Target(3, 4)),
        universal=(Target(3, 2),),
    ),
    Source("z2-dp2-fp32", "z2 DP2, a single group", "fp32", (Target(1, 4), Target(3, 2)), universal=(Target(3, 4),)),
    Source("z2-dp2-legacy-pickle", "z2 DP2, files without a zip container", "fp32", (Target(1, 4), Target(3, 2))),
    Source("z2-dp2-exclude-frozen", "z2 DP2, saved without frozen parameters", "fp32", (Target(1, 1), Target(3, 4))),
    Source(
        "z3-dp4-subgroups",
        "z3 DP4, several sub-groups",
        "fp32",
        (Target(2, 4), Target(3, 2)),
        universal=(Target(3, 2), Target(1, 4)),
    ),
    Source("z1-dp2-scalar", "z1 DP2, a 0-d parameter", "fp32", (Target(2, 4), Target(3, 2)), universal=(Target(2, 4),)),
    Source("z3-dp2-scalar", "z3 DP2, a 0-d parameter", "fp32", (Target(1, 2), Target(3, 4))),
)
"""Runs of every other kind."""
