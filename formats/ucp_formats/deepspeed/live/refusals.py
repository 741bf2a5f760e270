"""Engines that are recognised, named, and not loaded into, each with the reason and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from ucp.errors import UnsupportedError, listed
from ucp_formats.deepspeed.live.handles import Engine

__all__ = ["refuse"]


def refuse(engine: Engine) -> None:
    """Raise UnsupportedError for everything about an engine that is not known here."""
    found = list(_reasons(engine))
    if found:
        raise UnsupportedError(
            f"expected an engine whose tensors lie in memory, each in one place; got\n{listed(found)}\n"
            "or write files for its own load_checkpoint: ucp convert SRC DST --to deepspeed"
        )


def _reasons(engine: Engine) -> Iterator[str]:
    optimizer = engine.optimizer
    if getattr(optimizer, "swap_optimizer", False):
        yield "offload_optimizer to NVMe: its states lie in swap files; set device cpu, or none"
    if getattr(optimizer, "params_in_nvme_and_cpu", False):
        yield "offload_param to NVMe: weights lie in swap files; set device cpu, or none"
    if getattr(optimizer, "zero_hpz_partition_size", 1) > 1:
        yield "zero_hpz_partition_size (secondary copies of weights): set it to 1 while resuming"
    if getattr(optimizer, "zenflow", False):
        yield "ZenFlow: it keeps states of its own on the CPU"
    if getattr(optimizer, "partial_offload", 1.0) < 1.0:
        yield "offload_optimizer.ratio below 1 (Twin-Flow): some states belong to a second optimizer; set it to 1"
    if getattr(optimizer, "offloaded_states", ()):
        yield "states that engine.offload_states moved away: call engine.reload_states() first"
